"""The door: what callers see of the gateway, and where it is put together."""
