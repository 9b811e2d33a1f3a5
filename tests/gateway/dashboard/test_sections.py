"""Sections: the verdict says for what most wait, and names stay bounded."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.dashboard.sections import Names, verdict


def seen(**given: object) -> dict[str, Any]:
    pools = {"cpu:n0": {"total": 4, "free": 0}, "search": {"total": 10, "free": 0}}
    return {"running": 4, "waiting": 0, "causes": [], "pools": pools} | given


def cause(kind: str, count: int, pool: str = "") -> dict[str, object]:
    return {"kind": kind, "pool": pool, "count": count}


@pytest.mark.parametrize(
    ("given", "code", "told"),
    [
        ({"running": 0}, "idle", "nothing runs"),
        ({}, "ok", "4 running"),
        ({"waiting": 9, "causes": [cause("units", 7, "cpu:n0"), cause("trajectory", 2)]}, "units", "7 of 9"),
        ({"waiting": 9, "causes": [cause("units", 7, "cpu:n0")]}, "units", "cpu:n0; 4 of 4 are in use"),
        ({"waiting": 5, "causes": [cause("quota", 5, "search")]}, "quota", "for search; 10 of 10"),
        ({"waiting": 5, "causes": [cause("memory", 5, "node:n0")]}, "memory", "wait for memory"),
        ({"waiting": 5, "causes": [cause("trajectory", 5)]}, "waiting", "earlier actions"),
        ({"waiting": 1}, "waiting", "0 of 1"),
    ],
)
def test_the_verdict_names_what_most_wait_for(given: dict[str, object], code: str, told: str) -> None:
    found, text = verdict(seen(**given), None, {"f": ("ready", "")})
    assert found == code and told in text


def test_what_stops_the_gateway_comes_before_everything_else() -> None:
    functions = {"f": ("unavailable", "image missing")}
    assert verdict(seen(), "draining", functions) == ("draining", "draining")
    assert verdict(seen(), "the disk is full", functions) == ("stopped", "the disk is full")
    assert verdict(seen(), None, functions) == ("unavailable", "f: image missing")


def test_names_beyond_the_bound_share_a_number() -> None:
    names = Names(most=3)
    assert [names.of(name) for name in ("a", "b", "c", "a", "d")] == [1, 2, 0, 1, 0]
    assert names.listed == ["other", "a", "b"]
