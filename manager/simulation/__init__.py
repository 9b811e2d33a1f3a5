"""The simulator: the same core under a virtual clock, with workloads, baselines and bounds."""
