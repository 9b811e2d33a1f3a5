"""Model engines: what computes on a chunk of devices, in processes of our own or behind another server's API."""
