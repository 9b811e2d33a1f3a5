"""The handler runtime: Python functions in warm instances."""
