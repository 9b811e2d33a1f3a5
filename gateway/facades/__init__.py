"""Facades: servers of other protocols, each a module, over the calls that all of them make."""
