"""What the page costs: `python -m bench.dashboard`."""
