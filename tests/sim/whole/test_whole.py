"""The whole world keeps its promises in every seed, and finds the faults that are known when they are put back."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from gateway.invocations.logs import Logs
from gateway.invocations.restart import Reattachment
from tests.sim.whole.__main__ import WITHIN, first_found, judged, quietly, story
from tests.sim.whole.history import DATABASE, Plan, SimHistory, SimOperation
from tests.sim.whole.judge import verdict
from tests.sim.whole.known_faults import FAULTS, put_back
from tests.sim.whole.system import SimSetting

SEEDS = int(os.environ.get("SIM_SEEDS", "60"))
FIRST = int(os.environ.get("SIM_FIRST", "0"))
SLICES = 5


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with quietly():
        yield


@pytest.mark.promise("Whatever is killed, cut off or full, accepted work ends once, in order, and leaves nothing.")
@pytest.mark.parametrize("slice_", range(SLICES))
def test_every_promise_holds_in_every_history(slice_: int) -> None:
    seed = first_found(range(FIRST + slice_, FIRST + SEEDS, SLICES))
    assert seed is None, story(seed)


def test_the_same_seed_gives_the_same_history() -> None:
    for seed in range(5):
        assert SimHistory(seed).run().digest() == SimHistory(seed).run().digest()


@pytest.mark.parametrize(
    ("owner", "name", "leaks"),
    [
        (Logs, "close", lambda *_: None),
        (Reattachment, "settled", lambda *_: asyncio.ensure_future(asyncio.Event().wait())),
        (Reattachment, "settled", lambda *_: sqlite3.connect(DATABASE)),
    ],
)
def test_what_is_kept_after_its_end_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, leaks: Callable[..., object]
) -> None:
    plan = Plan(SimSetting(nodes=()), (call(0, 0.5, 0.2, "t0", "shell"), call(1, 3.0, 0.2, None, "again")))
    assert not judged(0, plan)
    monkeypatch.setattr(owner, name, leaks)
    assert " keeps " in judged(0, plan)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_known_fault_that_is_put_back_is_found(fault: str) -> None:
    with put_back(fault):
        seed = first_found(range(WITHIN), FAULTS[fault][1])
    assert seed is not None, f"not within {WITHIN} seeds"
    assert not judged(seed), "it is found in what holds without it"


def call(
    number: int,
    at_s: float,
    runs_s: float,
    trajectory: str | None = None,
    function: str = "there",
    gone: int | None = None,
    say: int = 0,
) -> SimOperation:
    about = {"function": function, "trajectory": trajectory, "key": f"k{number}", "mode": "async", "gone": gone}
    return SimOperation(at_s, "call", {"number": number, "script": {"s": runs_s, "say": say}, **about})


kill = partial(SimOperation, name="kill", about={"fuse": 0, "down_s": 0.2})
kill_node = partial(SimOperation, name="kill node", about={"node": "n1", "node_fuse": 0, "node_down_s": 0.2})
#: Plans of what was found here, by what was wrong.
FOUND = {
    "a command that outlives its gateway keeps cores that are another's by now": (
        call(0, 0.5, 1.0),
        call(1, 0.6, 7.0),
        kill(3.0),
        *(call(number, 5.0, 3.0) for number in (2, 3, 4)),
    ),
    "a node's full disk fails a call that has not begun": (
        SimOperation(1.0, "disk", {"where": "n1", "for_s": 2.0}),
        call(0, 1.5, 1.0, "n0"),
    ),
    "what ends while its gateway leaves is told as lost": (
        *(call(number, 0.5 + 0.03 * number, 1.0, f"n{number}") for number in range(4)),
        SimOperation(1.7, "stop", {"node": "n1", "down_s": 0.1}),
    ),
    "what a node's full disk does not forget begins once more under the next daemon": (
        call(0, 0.5, 3.0, "n0"),
        SimOperation(2.5, "disk", {"where": "n1", "for_s": 3.6}),
        kill_node(6.0),
    ),
    "a node that starts on a full disk begins its journal anew": (
        call(0, 0.5, 5.0, "n0"),
        call(1, 0.6, 1.0),
        SimOperation(2.9, "disk", {"where": "n1", "for_s": 3.0}),
        kill_node(3.0),
    ),
    "what a caller has asked for waits for ever, as it is gone before that is on disk": tuple(
        call(number, 0.5 + number, 0.2, f"n{number}", gone=number) for number in range(8)
    ),
    "a command goes on, and its end is told, as nobody can speak to its runner": (
        call(0, 0.5, 5.0, "n0"),
        SimOperation(2.5, "runner", {"where": "n1", "fuse": 0}),
    ),
    "what is cancelled as its daemon dies is told as succeeded, by a signal": (
        call(0, 0.5, 5.0, "n0"),
        SimOperation(2.0, "cancel", {"call": 0}),
        SimOperation(2.0, "kill node", {"node": "n1", "node_fuse": 8, "node_down_s": 0.5}),
    ),
    "a node's full disk cuts a log without a word": (
        call(0, 0.5, 4.0, "n0", say=2),
        SimOperation(3.5, "disk", {"where": "n1", "for_s": 6.0}),
    ),
    "what ended runs again after what came behind it": (
        call(0, 0.5, 2.0, "t0", "again"),
        call(1, 0.6, 0.0, "t0", "again"),
        call(2, 0.7, 0.0, "t0", "again"),
        call(3, 0.8, 5.0, "t0", "again"),
        kill(2.6),
    ),
    "a node keeps what is left of a sandbox that broke while the gateway was away": (
        call(0, 0.5, 0.2, "n0"),
        SimOperation(4.0, "stop", {"node": "n1", "down_s": 2.0}),
        SimOperation(5.0, "runner", {"where": "n1", "fuse": 0}),
    ),
    "a try in a sandbox of its own is lost with a gateway that leaves on a full disk": (
        call(0, 0.5, 3.0, None, "flaky"),
        SimOperation(2.0, "disk", {"where": "gw", "for_s": 5.0}),
        SimOperation(3.4, "stop", {"node": "n1", "down_s": 2.0}),
    ),
    "a command goes on that is cancelled as nobody can speak to its runner": (
        call(0, 0.5, 5.0, "n0"),
        SimOperation(2.5, "cancel", {"call": 0}),
        SimOperation(2.5, "runner", {"where": "n1", "fuse": 0}),
    ),
    "an idempotent command runs again in an empty sandbox, which stays": (
        call(0, 0.5, 3.0, "t0", "again"),
        SimOperation(2.9, "leave", {"node": "n1", "down_s": 5.0}),
        SimOperation(5.2, "box", {"where": "n1"}),
    ),
    "a command that waits for the disk to begin is told as lost by a gateway that leaves": (
        call(0, 0.5, 2.0, "t0", "shell"),
        call(1, 0.6, 1.0, "t0", "shell"),
        SimOperation(2.4, "disk", {"where": "gw", "for_s": 0.5}),
        SimOperation(3.2, "stop", {"node": "n1", "down_s": 2.0}),
    ),
    "a node that counted as lost keeps in mind what it had": (
        call(0, 0.5, 6.0, "n0"),
        SimOperation(2.0, "cut", {"node": "n1", "for_s": 8.0, "silent": False}),
    ),
    "the sandbox of a command whose end the next daemon knows is left behind": (
        call(0, 0.5, 1.0),
        SimOperation(1.0, "kill", {"fuse": 0, "down_s": 5.0}),
        kill_node(3.0),
    ),
}


@pytest.mark.parametrize("found", FOUND)
def test_what_was_found_is_mended(found: str) -> None:
    plan = Plan(SimSetting(nodes=("n1",), cores=4, drain_grace_s=0.0), FOUND[found])
    for seed in range(25):
        assert not judged(seed, plan)


def test_a_request_that_waits_for_the_disk_is_made_by_the_next_gateway() -> None:
    calls = [call(number, 0.5 + 0.1 * number, 0.2, None, "search") for number in range(3)]
    disk = SimOperation(3.2, "disk", {"where": "gw", "for_s": 1.0})
    stop = SimOperation(4.4, "stop", {"node": "n1", "down_s": 2.0})
    for seed in range(5):
        history = SimHistory(seed, Plan(SimSetting(nodes=(), drain_grace_s=0.0), (*calls, disk, stop)))
        assert not verdict(seed, history)
        ends = [each.record.state for each in history.calls.values() if each.record is not None]
        assert ends == ["succeeded"] * len(history.calls)
