"""Tests of the sessions between a gateway and a node."""
