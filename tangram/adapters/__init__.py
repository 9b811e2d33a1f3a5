"""Plugs of other frameworks: each adapter is a module of its own that imports its framework when it is imported."""
