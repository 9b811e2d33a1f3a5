"""Tests of the transfers of files between a gateway and a node."""
