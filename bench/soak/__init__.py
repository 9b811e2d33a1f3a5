"""The soak: traffic, faults and a census of what is left."""
