"""The HTTP door: one table of operations, served by Starlette on Hypercorn."""
