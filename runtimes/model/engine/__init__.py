"""Model engines: what computes on a chunk of devices, in this house or behind another server's API."""
