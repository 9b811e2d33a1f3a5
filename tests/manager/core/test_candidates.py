"""The roomiest option of many, by a heap, against a look at all of them."""

from __future__ import annotations

import random

import pytest

from manager.core.candidates import RoomiestFirst, StartOption
from manager.resources.pool import Headroom


@pytest.mark.parametrize("seed", range(20))
def test_the_roomiest_option_that_fits_and_is_allowed_comes_first(seed: int) -> None:
    chance = random.Random(seed)
    rooms = [(Headroom(chance.randint(0, 5)), Headroom(chance.randint(0, 20))) for _ in range(8)]
    options = [
        StartOption(f"n{number}", (), 4, ((units, 1), (memory, 4))) for number, (units, memory) in enumerate(rooms)
    ]
    roomiest = RoomiestFirst(options)
    found = 0
    for _ in range(60):
        barred = chance.choice(options) if chance.random() < 0.5 else None
        fitting = [option for option in options if option.fits() and option is not barred]
        best = min(fitting, key=lambda option: option.shortage, default=None)
        assert roomiest.first(lambda option, barred=barred: option is not barred) is best  # type: ignore[misc]
        found += best is not None
        if best is not None and chance.random() < 0.7:
            best.take()
        else:
            chance.choice(options).reserve()
    assert 0 < found < 60
