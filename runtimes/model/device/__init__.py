"""Devices: their processes, their memory, and what crosses the pipes between them and the gateway."""
