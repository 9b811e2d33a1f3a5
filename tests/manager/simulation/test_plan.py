"""One decision, explained: the snapshot of the documentation and wrong ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from manager.errors import InvalidConfig, InvalidInput
from manager.simulation.plan import plan

SNAPSHOT: dict[str, Any] = {
    "now": 10.0,
    "resources": {
        "cpu:node0": {"total": 256, "free": 40, "running": [{"units": 4, "ends_in": 12.5}]},
        "gpu:node0": {
            "gpus": 8,
            "busy": [[0, 2, 3.1]],
            "resident": {"svc": [[4, 4]]},
            "restore_s": {"svc": 0.4},
        },
        "search": {"kind": "quota", "free": 1, "next_s": 0.2},
    },
    "queue": [
        {
            "id": "a1",
            "cost": {"cpu": {"min": 1, "max": 32}, "search": 1},
            "key": "cpu",
            "t_ori_s": 80.0,
            "serial_fraction": 0.05,
            "age_s": 1.2,
        },
        {"id": "s1", "cost": {"search": 1}, "t_ori_s": 1.0},
        {"id": "c1", "cost": {"cpu": 1}, "t_ori_s": 0.2},
        {
            "id": "g1",
            "cost": {"gpu": {"choices": [1, 2, 4, 8]}},
            "key": "gpu",
            "t_ori_s": 3.0,
            "efficiency": {"1": 1.0, "8": 0.6},
            "service": "svc",
        },
    ],
}


@pytest.mark.parametrize("policy", [None, "paper", "price", "adaptive", "fixed:8"])
def test_every_action_is_started_or_explained(policy: str | None) -> None:
    answer: Any = plan(SNAPSHOT, policy)
    started = {start["id"]: start for start in answer["started"]}
    waiting = {wait["id"]: wait for wait in answer["waiting"]}
    assert started.keys() | waiting.keys() == {"a1", "s1", "c1", "g1"} and not started.keys() & waiting.keys()
    assert waiting["s1"]["until_s"] == pytest.approx(10.2) and "search" in waiting["s1"]["for"]
    assert started["g1"]["chunk"] == [4, 4]
    assert started["a1"]["units"]["search"] == 1
    assert started["a1"]["units"]["cpu"] + started["c1"]["units"]["cpu"] <= 40
    assert answer["decision_ms"] >= 0


def test_a_blocked_call_does_not_hold_a_core_back() -> None:
    snapshot = copy.deepcopy(SNAPSHOT)
    snapshot["resources"]["search"]["free"] = 0
    answer: Any = plan(snapshot)
    assert {start["id"] for start in answer["started"]} == {"c1", "g1"}
    assert {wait["id"] for wait in answer["waiting"]} == {"a1", "s1"}


@pytest.mark.parametrize(
    ("path", "value", "story"),
    [
        (("queue", 1, "cost"), {"tpu": 1}, "nothing provides 1 of tpu"),
        (("queue", 0, "id"), None, "id: a text"),
        (("queue", 1, "id"), "a1", "same id"),
        (("queue", 0, "colour"), "red", "unknown key 'colour'"),
        (("resources", "cpu:node0", "free"), 300, "300 free of 256"),
        (("resources", "gpu:node0", "busy"), [[1, 2, 3.0]], "aligned power of two"),
        (("resources", "gpu:node0", "busy"), [[0, 2, 3.0], [0, 1, 3.0]], "no free chunk"),
        (("now",), "noon", "now"),
        (("nodes",), [], "unknown key 'nodes'"),
    ],
)
def test_a_wrong_snapshot_names_its_place(path: tuple[Any, ...], value: object, story: str) -> None:
    snapshot: Any = copy.deepcopy(SNAPSHOT)
    place = snapshot
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(InvalidInput) as caught:
        plan(snapshot)
    assert story in caught.value.message


@pytest.mark.parametrize("snapshot", [{}, {"now": 0}, {"resources": {}}, {"queue": []}, {"version": 99, "nodes": []}])
def test_what_is_no_snapshot_is_not_decided_on(snapshot: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=r"(resources|queue) is needed"):
        plan(snapshot)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="no policy"):
        plan(SNAPSHOT, "best")
