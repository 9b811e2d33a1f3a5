"""What was learned from runs: durations, elasticity and the cost of a batch."""
