"""The HTTP server: one table of operations, served by Starlette on Hypercorn."""
