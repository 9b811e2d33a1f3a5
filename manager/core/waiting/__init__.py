"""What waits: the queue, its fair order, and what a trajectory's turn changes of it."""
