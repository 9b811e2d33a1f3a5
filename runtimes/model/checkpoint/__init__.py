"""Checkpoints: read once into a host image that serves every degree of parallelism."""
