"""Thousands of seeded worlds keep every promise; SIM_SEEDS asks for more, SIM_FIRST for others."""

from __future__ import annotations

import os

import pytest

from tests.sim.world import World

SEEDS = int(os.environ.get("SIM_SEEDS", "2000"))
FIRST = int(os.environ.get("SIM_FIRST", "0"))
SLICES = 20


@pytest.mark.parametrize("slice_", range(SLICES))
def test_every_promise_holds_in_every_world(slice_: int) -> None:
    for seed in range(FIRST + slice_, FIRST + SEEDS, SLICES):
        try:
            World(seed).run()
        except AssertionError as error:
            raise AssertionError(f"{error}\nreplay with: python -m tests.sim.replay {seed}") from error


def test_the_same_seed_gives_the_same_history_byte_for_byte() -> None:
    for seed in range(20):
        assert World(seed).run().digest() == World(seed).run().digest()
