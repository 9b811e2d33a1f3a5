"""Many calls at once: bounded, in order, told about, and no failure loses what the others came to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from tangram import (
    AsyncClient,
    Client,
    ConnectionFailed,
    InvalidInputError,
    InvocationFailed,
    MapFailed,
    MapProgress,
    Retries,
    TangramError,
)
from tangram.testing import ScriptedCall, ScriptedFailure, ScriptedGateway, broken
from tests.tangram.sockets import DEADLINE_S

ONCE = Retries(max_attempts=1)
INPUTS = [{"n": n} for n in range(20)]


def double(call: ScriptedCall) -> object:
    if call.input["n"] == 7:
        raise ScriptedFailure("handler_error", "seven")
    return 2 * call.input["n"]


async def test_results_come_in_the_order_of_the_inputs() -> None:
    async with AsyncClient(transport=ScriptedGateway({"double": double})) as client:
        results = await client.map("double", INPUTS, task="t", concurrency=3)
    assert [each.result for each in results] == [None if n == 7 else 2 * n for n in range(20)]
    assert [n for n, each in enumerate(results) if not each.ok] == [7]
    assert {each.task for each in results} == {"t"}


def test_threads_do_the_same() -> None:
    with Client(transport=ScriptedGateway({"double": double})) as client:
        results = client.map("double", iter(INPUTS), concurrency=4)
        assert client.map("double", []) == []
    assert [each.result for each in results] == [None if n == 7 else 2 * n for n in range(20)]


class Gauge:
    """A function that notes how many of its calls are under way at once, and ends them all at a full house."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._under_way = 0
        self.most = 0
        self._turn = asyncio.Event()

    async def __call__(self, call: ScriptedCall) -> object:
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        if self._under_way == self._bound:
            self._turn.set()
        await asyncio.wait_for(self._turn.wait(), DEADLINE_S)
        self._under_way -= 1
        return {}


async def test_no_more_than_the_bound_run_at_once_and_inputs_are_taken_as_there_is_room() -> None:
    taken = 0

    def inputs() -> Iterator[Mapping[str, Any]]:
        nonlocal taken
        for _ in range(30):
            taken += 1
            assert taken <= len(gateway.calls) + 5
            yield {}

    gauge = Gauge(5)
    gateway = ScriptedGateway({"f": gauge})
    async with AsyncClient(transport=gateway) as client:
        assert len(await client.map("f", inputs(), concurrency=5)) == 30
    assert gauge.most == 5


def test_threads_are_bounded_too() -> None:
    lock, under_way, most = threading.Lock(), 0, 0
    full = threading.Event()

    def f(call: ScriptedCall) -> object:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
            if most == 4:
                full.set()
        assert full.wait(DEADLINE_S)
        with lock:
            under_way -= 1
        return {}

    with Client(transport=ScriptedGateway({"f": f})) as client:
        assert len(client.map("f", [{}] * 20, concurrency=4)) == 20
    assert most == 4


@pytest.mark.parametrize("inputs", [INPUTS, iter(INPUTS)], ids=["counted", "uncounted"])
def test_progress_is_told_after_each_end(inputs: Any) -> None:
    told: list[MapProgress] = []
    with Client(transport=ScriptedGateway({"double": double}), raise_failures=True) as client:
        client.map("double", inputs, concurrency=3, progress=told.append, return_failures=True)
    assert [each.done for each in told] == list(range(1, 21))
    assert {each.total for each in told} == ({20} if inputs is INPUTS else {None})
    assert sorted(each.index for each in told) == list(range(20))
    assert told[-1].failed == 1
    assert [type(each.result) for each in told if each.index == 7] == [InvocationFailed]


async def test_a_failure_loses_nothing_of_the_others() -> None:
    gateway = ScriptedGateway({"f": lambda call: call.input["n"]})
    gateway.trouble(broken(httpx.ReadError))
    async with AsyncClient(transport=gateway, retries=ONCE) as client:
        with pytest.raises(MapFailed, match="1 of 20 calls failed, the first with connection_failed") as caught:
            await client.map("f", INPUTS, concurrency=1)
    results = caught.value.results
    assert isinstance(results[0], ConnectionFailed)
    assert [each.result for each in results[1:] if not isinstance(each, TangramError)] == list(range(1, 20))
    assert list(caught.value.failures) == [0]


async def test_failures_are_returned_in_their_places_where_that_is_wanted() -> None:
    async with AsyncClient(transport=ScriptedGateway({"double": double}), raise_failures=True) as client:
        results = await client.map("double", INPUTS, return_failures=True)
    assert [type(each) is InvocationFailed for each in results] == [n == 7 for n in range(20)]


def test_a_map_with_a_key_runs_nothing_twice() -> None:
    gateway = ScriptedGateway({"double": double})
    with Client(transport=gateway) as client:
        first = client.map("double", INPUTS, key="epoch-3")
        again = client.map("double", INPUTS, key="epoch-3")
    assert [each.id for each in first] == [each.id for each in again]
    assert sorted(str(call.key) for call in gateway.calls) == sorted(f"epoch-3-{n}" for n in range(20))


async def test_a_cancelled_map_cancels_its_calls() -> None:
    begun, ended = asyncio.Event(), 0

    async def hang(call: ScriptedCall) -> object:
        nonlocal ended
        begun.set()
        try:
            return await asyncio.Event().wait()
        finally:
            ended += 1

    async with AsyncClient(transport=ScriptedGateway({"f": hang})) as client:
        task = asyncio.create_task(client.map("f", INPUTS, concurrency=3))
        await asyncio.wait_for(begun.wait(), DEADLINE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert ended == 3


def test_an_error_of_the_callers_own_is_raised_and_nothing_more_is_begun() -> None:
    def progress(told: MapProgress) -> None:
        raise ZeroDivisionError

    gateway = ScriptedGateway({"double": double})
    with Client(transport=gateway) as client, pytest.raises(ZeroDivisionError):
        client.map("double", INPUTS, concurrency=2, progress=progress)
    assert len(gateway.calls) <= 2


def test_a_bound_must_be_one() -> None:
    with Client(transport=ScriptedGateway()) as client, pytest.raises(InvalidInputError, match="at least 1"):
        client.map("f", INPUTS, concurrency=0)
