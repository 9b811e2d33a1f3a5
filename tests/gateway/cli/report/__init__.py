"""Tests of `tangram report`."""
