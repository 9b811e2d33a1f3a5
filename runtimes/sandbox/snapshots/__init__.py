"""Snapshots: the files of a trajectory's sandbox as they were at a moment, for other sandboxes to begin with."""
