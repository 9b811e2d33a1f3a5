"""The gateway: what callers see, and where it is put together."""
