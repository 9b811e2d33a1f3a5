"""The pytest runtime: a test suite as a reward."""
