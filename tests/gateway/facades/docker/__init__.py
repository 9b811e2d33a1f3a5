"""Tests of the door that speaks the Docker Engine API."""
