"""Policies by name."""

from __future__ import annotations

import pytest

from manager.errors import InvalidConfig
from manager.scheduler.policy import PolicySpec
from manager.scheduler.registry import POLICIES, make_policy


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_is_made_by_its_name_and_bears_it(name: str) -> None:
    assert make_policy(PolicySpec(name=name)).name == name


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidConfig, match=r"'prize'.*known are .*did you mean price\?"):
        make_policy(PolicySpec(name="prize"))


def test_an_unknown_option_is_refused_with_its_policy() -> None:
    with pytest.raises(InvalidConfig, match=r"policy fixed.*dops"):
        make_policy(PolicySpec(name="fixed", options={"dops": 2}))


def test_options_of_the_core_are_none_of_the_policys() -> None:
    policy = make_policy(PolicySpec(name="fixed", options={"dop": 2, "worker_cost_s": 0.1, "resize_interval_s": 1.0}))
    assert policy == make_policy(PolicySpec(name="fixed", options={"dop": 2}))
