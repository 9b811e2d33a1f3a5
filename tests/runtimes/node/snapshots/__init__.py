"""Tests of snapshots on nodes."""
