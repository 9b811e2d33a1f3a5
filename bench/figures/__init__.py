"""The figures of the scheduler: simulations against baselines and bounds."""
