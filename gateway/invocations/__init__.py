"""Invocations: accepted, recorded, scheduled, settled; their logs, retries, keys and callbacks."""
