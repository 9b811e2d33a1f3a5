"""Tangram for those who call it: wire types and client; it imports nothing of the server."""
