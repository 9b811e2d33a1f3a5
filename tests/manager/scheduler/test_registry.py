"""Policies by name."""

from __future__ import annotations

import pytest

from manager.errors import InvalidConfig
from manager.function import settings_of
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


@pytest.mark.parametrize(
    ("policy", "option", "value", "wish"),
    [
        ("paper", "depth", 2.5, "a whole number"),
        ("paper", "depth", 0, "at least 1"),
        ("paper", "estimate_window", float("inf"), "a finite number"),
        ("price", "c", 0, "more than 0"),
        ("adaptive", "join_share", 1.5, "at most 1"),
        ("fixed", "resize_interval_s", -1.0, "at least 0"),
    ],
)
def test_an_option_out_of_its_range_is_refused_with_what_is_needed(
    policy: str, option: str, value: float, wish: str
) -> None:
    with pytest.raises(InvalidConfig, match=rf"policy {policy}: option {option} is .* where {wish} is needed"):
        make_policy(PolicySpec(name=policy, options={option: value}))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_default_may_be_written_down_as_the_yaml_reads_it(name: str) -> None:
    policy = make_policy(PolicySpec(name=name))
    written = {option: float(getattr(policy, option)) for option, _, _ in settings_of(type(policy))}
    again = make_policy(PolicySpec(name=name, options=written))
    assert again == policy
    assert repr(again) == repr(policy), "a whole number has become a float"


def test_options_of_the_core_are_none_of_the_policys() -> None:
    policy = make_policy(PolicySpec(name="fixed", options={"dop": 2, "worker_cost_s": 0.1, "resize_interval_s": 1.0}))
    assert policy == make_policy(PolicySpec(name="fixed", options={"dop": 2}))
