"""The roomiest option of many, by a heap, against a look at all of them; groups without rivals, against the walk."""

from __future__ import annotations

import random

import pytest

from manager.assembly import build_core
from manager.core.scheduling_pass import RoomiestFirst, SchedulingPass, Selector, StartOption, _Contender
from manager.events import Submitted
from manager.resources.pools import Headroom
from tests.manager.conftest import action, node, spec


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


@pytest.mark.parametrize("seed", range(12))
def test_a_group_without_rivals_gets_what_a_walk_among_others_would_give_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    core = build_core(spec(*(node(f"n{number}", cores=chance.randint(1, 6)) for number in range(3))))
    core.pause()
    alike = seed % 2 == 0
    for number in range(60):
        submitted = action(
            f"a{number}",
            {"cpu": 1 if alike else chance.choice((1, 2))},
            trajectory=f"t{number}",
            memory_bytes=1,
            task="a" if alike else chance.choice("ab"),
        )
        core.step([Submitted(action=submitted)], 0.0)

    def found() -> tuple[dict[str, list[str]], dict[str, tuple[int, int]]]:
        selection = SchedulingPass(core.state).select(core.state.queue.groups())
        of: dict[str, list[str]] = {}
        for candidate in selection.candidates:
            of.setdefault(candidate.pool, []).append(candidate.waiting.id)
        return of, {name: (room.free, room.awaited) for name, room in selection.headrooms.items()}

    taken: list[str] = []
    take_all = Selector._take_all

    def noted(self: Selector, contender: _Contender) -> None:
        taken.append(contender.group.signature.node)
        take_all(self, contender)

    monkeypatch.setattr(Selector, "_take_all", noted)
    quickly = found()
    assert taken or not alike, "no group was without rivals"
    monkeypatch.setattr(Selector, "_is_unrivalled", lambda self, contender: False)
    assert quickly == found()
