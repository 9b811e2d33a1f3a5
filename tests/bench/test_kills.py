"""The judge of the kills: a good history breaks no promise, and each made-up bad one breaks its own and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.kills.history import KilledCall, KillHistory
from bench.kills.judge import CHECKS, FRAIL, KINDS, LIMIT, OVER, PERIOD_S


def record(number: int = 1, **changes: Any) -> dict[str, Any]:
    """A record of a call that waited 100 ms, was prepared 200 ms and ran 700 ms."""
    made: dict[str, Any] = {
        "id": f"i{number}",
        "state": "succeeded",
        "reason": None,
        "message": "",
        "attempt": 1,
        "accepted_at": "2026-01-01T00:00:00.000Z",
        "ended_at": "2026-01-01T00:00:01.000Z",
        "queue_ms": 100.0,
        "overhead_ms": 200.0,
        "execution_ms": 700.0,
        "act_ms": 1000.0,
        "result": {"stdout": "a\nb\n", "reward": 0.5},
    }
    return made | changes


def call(number: int, function: str, **about: Any) -> KilledCall:
    made = KilledCall(name=f"c{number}", function=function, keyed=True, durable=True, **about)
    made.ids.add(f"i{number}")
    made.told.append(record(number))
    made.last = record(number)
    return made


def history() -> KillHistory:
    """A run in which every promise was held: a call with a callback, two of a trajectory, and a reward."""
    made = KillHistory()
    made.calls = [
        call(0, "once", calls_back=True),
        call(1, "shell", trajectory="t"),
        call(2, "shell", trajectory="t"),
        call(3, "suite"),
    ]
    reading = [(0, "stdout", "a\n"), (1, "stdout", "b\n")]
    made.calls[1].logs = [reading[:1], reading, reading]
    made.done.update({"c0": 1, "c1": 1, "c2": 1})
    made.callbacks["i0"] += [record(0), record(0)]
    made.calls.append(call(4, "shell", trajectory="t", cut="cancelled"))
    made.calls[4].last = record(4, state="cancelled", reason="cancelled")
    made.calls[4].told = [made.calls[4].last]
    made.files["t"] = ["c1", "c1" + OVER, "c2", "c2" + OVER, "c4"]
    made.arrivals = [PERIOD_S * number for number in range(2 * LIMIT)]
    made.exits = [0]
    made.left = {"processes": 0}
    return made


def cut_log(made: KillHistory) -> None:
    made.calls[1].logs[-1] = made.calls[1].logs[-1][:1]


def hole_in_log(made: KillHistory) -> None:
    made.calls[1].logs[0] = [(0, "stdout", "a\n"), (2, "stdout", "b\n")]


def other_log(made: KillHistory) -> None:
    made.calls[1].logs[0] = [(0, "stdout", "x\n")]


def log_beside_result(made: KillHistory) -> None:
    made.calls[1].logs = [[(0, "stdout", "a\n")]] * 2


def last(number: int, **changes: Any) -> Callable[[KillHistory], None]:
    """The record of one call is another one, and so is all that was told of it."""

    def change(made: KillHistory) -> None:
        made.calls[number].last = record(number, **changes)
        made.calls[number].told = []
        made.callbacks.pop(f"i{number}", None)
        made.calls[number].calls_back = False

    return change


def told(made: KillHistory) -> None:
    made.calls[3].told.append(record(3, state="lost", reason="gateway_restart"))


def called_back(made: KillHistory) -> None:
    made.callbacks["i0"].append(record(0, state="lost", reason="gateway_restart"))


BAD: list[tuple[str, Callable[[KillHistory], object]]] = [
    ("accepted_lost", lambda made: setattr(made.calls[3], "last", None)),
    ("accepted_lost", last(3, state="running", ended_at=None)),
    ("run_twice_non_idempotent", lambda made: made.done.update(["c0"])),
    ("done_not_told", lambda made: made.done.pop("c0")),
    ("ended_twice", told),
    ("keyed_run_twice", lambda made: made.calls[3].ids.add("i9")),
    ("callback_told_twice_differently", called_back),
    ("callback_untold", lambda made: made.callbacks.clear()),
    ("logs_differ", cut_log),
    ("logs_differ", hole_in_log),
    ("logs_differ", other_log),
    ("logs_differ", log_beside_result),
    ("times_do_not_sum", last(3, act_ms=900.0)),
    ("times_do_not_sum", last(3, queue_ms=0.0, execution_ms=500.0, act_ms=700.0)),
    ("times_do_not_sum", last(3, ended_at="2026-01-01T00:00:09.000Z")),
    ("quota_exceeded_windows", lambda made: made.arrivals.extend([0.1] * LIMIT)),
    ("lost_for_nothing", last(2, state="lost", reason="node_lost", result=None)),
    ("ended_otherwise", last(4, state="failed", reason="timeout")),
    ("ended_otherwise", lambda made: made.files.update(t=["c4", "c4" + OVER])),
    ("trajectory_out_of_order", lambda made: made.files.update(t=["c2", "c1"])),
    ("trajectory_out_of_order", lambda made: made.files.update(t=["c1", "c2", "c1" + OVER])),
    ("trajectory_out_of_order", lambda made: made.files.update(t=None)),
    ("reward_wrong", last(3, result={"reward": 0.0})),
    ("untyped_ends", last(3, state="failed", reason="internal")),
    ("refused_wrongly", lambda made: made.refused.append("500")),
    ("refused_wrongly", lambda made: made.unhelpful.append("503")),
    ("unbalanced", lambda made: made.unbalanced.append("{'accepted': 2}")),
    ("bad_exits", lambda made: made.exits.append(1)),
    ("leftovers", lambda made: made.left.update(processes=1)),
]


def broken(made: KillHistory) -> set[str]:
    return {name for name, check in CHECKS.items() if check(made)}


def test_a_good_history_breaks_no_promise() -> None:
    assert broken(history()) == set()


@pytest.mark.parametrize(("name", "spoil"), BAD)
def test_a_bad_history_breaks_its_promise_and_no_other(name: str, spoil: Callable[[KillHistory], object]) -> None:
    made = history()
    spoil(made)
    assert broken(made) == {name}


def test_every_check_is_seen_to_fail() -> None:
    assert {name for name, _ in BAD} == set(CHECKS)
    assert sum(map(len, KINDS.values())) == len(CHECKS)


def test_a_trajectory_whose_runner_is_killed_may_lose_its_sandbox() -> None:
    made = history()
    made.calls.append(call(5, "shell", trajectory=FRAIL))
    made.calls[5].told = []
    made.calls[5].last = record(5, state="lost", reason="environment_lost")
    made.files[FRAIL] = None
    assert broken(made) == set()


def test_what_may_be_repeated_may_be_done_twice_and_what_was_cut_off_keeps_no_promise() -> None:
    made = history()
    made.calls[0].idempotent = True
    made.done["c0"] = 3
    made.calls[3].durable = False
    made.calls[3].last = None
    assert broken(made) == set()
