"""Deterministic simulation of the core: a seed makes a world, separate checkers watch it."""
