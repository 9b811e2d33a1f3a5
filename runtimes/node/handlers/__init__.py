"""Handlers on nodes: their files travel once, under the digest of all of them."""
