"""Traces: spans of invocations, and how they reach a collector."""
