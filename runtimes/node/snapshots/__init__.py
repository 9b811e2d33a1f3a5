"""Snapshots of trajectories on nodes: taken and kept there, on record at the gateway."""
