"""Tests of the screen of `tangram top`."""
