"""Model slots: one host image for each checkpoint, one process for each device, swaps at the speed of the bus."""
