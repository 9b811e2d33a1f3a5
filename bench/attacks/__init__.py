"""Attacks on sandboxes and on rewards: the cases, how they are played, and what must hold of each."""
