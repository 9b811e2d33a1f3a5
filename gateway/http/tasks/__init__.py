"""HTTP operations on RL tasks and their steps."""
