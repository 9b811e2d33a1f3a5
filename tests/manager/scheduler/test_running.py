"""What is kept of running actions, against a look at all of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from manager.action import Action, UnitSet
from manager.scheduler.policy import RunningSet, RunningView
from tests.manager.scheduler.world import running


def drawn(name: str, chance: random.Random) -> RunningView:
    elastic, malleable = chance.random() < 0.6, chance.random() < 0.7
    units = UnitSet.span(2, 9) if elastic else UnitSet.fixed(2)
    action = Action(
        id=name, function="f", cost={"cpu": units}, key="cpu" if elastic else None, malleable=malleable, t_ori_s=1.0
    )
    return running(action, chance.randint(2, 9) if elastic else 2)


@pytest.mark.parametrize("seed", range(10))
def test_what_is_kept_is_what_a_look_at_all_of_them_finds(seed: int) -> None:
    chance = random.Random(seed)
    there: dict[str, RunningView] = {}
    kept = RunningSet("cpu", there.__getitem__)
    for number in range(100):
        name = f"a{number}"
        if there and chance.random() < 0.4:
            kept.remove(gone := chance.choice(list(there)))
            del there[gone]
        elif there and chance.random() < 0.3:
            name = chance.choice(list(there))
            if there[name].action.malleable_in("cpu"):
                there[name] = replace(there[name], units=chance.randint(2, 9))
                kept.note_units(name, there[name].units)
        else:
            there[name] = drawn(name, chance)
            if chance.random() < 0.5:
                kept.add(name, there[name])
            else:
                kept.enter(name, there[name].action)
        malleable = [one for one in there.values() if one.action.malleable_in("cpu")]
        assert len(kept) == len(there)
        assert kept.rigid == sum(one.action.key is None for one in there.values())
        if chance.random() < 0.5:
            continue  # nobody looks at the views
        assert [one.action for one in kept] == [one.action for one in there.values()]
        assert [one.action for one in kept.malleable] == [one.action for one in malleable]
        assert kept.slack == sum(one.units - 2 for one in malleable)
        assert RunningSet.of(there.values(), "cpu").slack == kept.slack and RunningSet.of(kept, "cpu") is kept
        assert [one.action for one in kept[1:4]] == [one.action for one in list(there.values())[1:4]]
