"""Facades: doors that speak somebody else's protocol, each a module, on top of the calls that every door makes."""
