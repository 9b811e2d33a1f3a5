"""Benches: each is ``python -m bench.NAME [--quick] [--json]`` and reports through `bench.report`."""
