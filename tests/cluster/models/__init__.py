"""Model functions on nodes that have joined, on ``cpu`` devices and tiny checkpoints."""
