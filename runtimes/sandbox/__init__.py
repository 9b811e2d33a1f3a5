"""Sandboxes: one environment for each trajectory, and the runtimes that work in them."""
