"""The client against a real gateway on real sockets: many calls, many loops, and handlers beside a script."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from scripts.make_sync_client import generated
from tangram import (
    AsyncClient,
    BatchCall,
    Client,
    ConflictError,
    ConnectionFailed,
    InvalidInputError,
    InvocationFailed,
    InvocationResult,
    MapFailed,
    MapProgress,
    NotFoundError,
    Retries,
    TangramError,
)
from tangram.client.handlers import MARK, captured, definition_of
from tangram.testing import ScriptedCall, ScriptedFailure, ScriptedGateway, broken
from tests.gateway.conftest import DEADLINE_S, RunningGateway
from tests.tangram.sockets import served

SCRIPT = '''
"""A training script."""
from __future__ import annotations

import json
import re as regex
from pathlib import Path

import tangram
from tangram import handler

LIMIT = 3
TABLE = {"a": LIMIT}
trained = Path("/nonexistent/model").exists()
unrelated = open(__file__).close()


class Grader:
    """Grades."""

    def grade(self, text):
        return len(regex.findall("a", text)) + LIMIT


def helper(text):  # kept with its comment
    client = text.upper()
    return client


@handler(cost={"cpu": 1}, timeout="30s")
def reward(event, context):
    """Grade an answer."""
    def inner():
        return TABLE["a"]
    return {"score": Grader().grade(event["text"]), "upper": helper("x"), "inner": inner()}


@tangram.handler()
def plain(event, context):
    return json.loads(event["text"])


def closing():
    bound = 1
    def inside(event, context):
        return bound
    return inside


def lost(event, context):
    return not_there(event)


client = None
if __name__ == "__main__":
    not_there = 1
'''


@asynccontextmanager
async def client_of(running: RunningGateway, **options: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"http://127.0.0.1:{running.app.http_port}", **options) as client:
        yield client


@pytest.mark.promise("A response to a known key shows that nothing ran.")
async def test_a_call_with_a_known_key_says_that_it_ran_nothing(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        for reason in (None, "upstream"):  # a record, and one within a problem
            ends = [await client.invoke("echo", {"reason": reason}, key=f"k-{reason}") for _ in range(2)]
            assert ([each.replayed for each in ends], ends[0].id) == ([False, True], ends[1].id)
        call = BatchCall(function="echo", key="in a batch".replace(" ", "-"))
        verdicts = [await client.submit_all([call, BatchCall(function="echo")]) for _ in range(2)]
        told = [[isinstance(each, InvocationResult) and each.replayed for each in verdict] for verdict in verdicts]
        assert told == [[False, False], [True, False]]


async def test_a_failure_is_returned_and_raised_where_that_is_wanted(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        result = await client.invoke("echo", {"reason": "handler_error"})
        assert result.state == "failed"
        with pytest.raises(InvocationFailed, match="handler_error") as caught:
            result.raise_for_failure()
        assert caught.value.invocation is result
    async with client_of(gateway, raise_failures=True) as client:
        with pytest.raises(InvocationFailed):
            await client.invoke("echo", {"reason": "upstream"})


async def test_a_refusal_is_the_error_of_its_code(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        with pytest.raises(NotFoundError, match="nobody"):
            await client.invoke("nobody", {})
        with pytest.raises(InvalidInputError) as caught:
            await client.invoke("strict", {"n": "x"})
        assert caught.value.detail["path"] == "$.n"
        done = await client.invoke("echo", {})
        with pytest.raises(ConflictError):
            await client.cancel(done.id)


async def test_work_is_submitted_waited_for_listed_and_cancelled(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        held = await client.submit("echo", {"held": True})
        assert not held.ended
        with pytest.raises(TimeoutError):
            await client.wait(held.id, 0.0)
        await gateway.executing(held.id)
        cancelled = await client.cancel(held.id)
        assert cancelled.state == "cancelled"
        for _ in range(3):
            await client.invoke("echo", {})
        assert [each.state async for each in client.list(limit=3)] == ["succeeded"] * 3
        assert [each.id async for each in client.list(state="cancelled")] == [held.id]


async def test_a_handles_workdir_is_where_commands_run_and_files_lie(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client, client.trajectory("w", function="shell") as whole:
        home = (await whole.exec("mkdir -p repo/src; pwd")).result["stdout"].strip()
        inside = client.trajectory("w", function="shell", workdir=f"{home}/repo")
        await inside.upload("a.txt", "of the handle's directory")
        assert (await inside.exec("pwd -P; cat a.txt")).result["stdout"] == f"{home}/repo\nof the handle's directory"
        assert (await inside.exec("pwd -P", cwd="src")).result["stdout"] == f"{home}/repo/src\n"
        assert (await inside.exec("pwd -P", cwd=home)).result["stdout"] == f"{home}\n"
        await inside.close()


async def test_the_synchronous_client_does_the_same(gateway: RunningGateway) -> None:
    def use() -> list[str]:
        with Client(f"http://127.0.0.1:{gateway.app.http_port}") as client:
            result = client.invoke("echo", {"log": "one\ntwo\n"}, logs=True).raise_for_failure()
            with client.trajectory("s") as trajectory:
                assert trajectory.exec("echo hi").result["stdout"] == "hi\n"
            with pytest.raises(NotFoundError):
                client.end_trajectory("s")
            assert [each.id for each in client.list(function="echo", limit=1)] == [result.id]
            return [line.text for line in client.logs(result.id) if line.stream != "system"]

    assert "".join(await asyncio.to_thread(use)) == "one\ntwo\n"


async def test_a_batch_comes_back_as_one_verdict_for_each_call(gateway: RunningGateway) -> None:
    calls = [
        BatchCall(function="echo", input={"n": 1}, task="t"),
        BatchCall(function="nobody"),
        BatchCall(function="echo", input={"reason": "handler_error"}),
    ]
    async with client_of(gateway) as client:
        done, refused, failed = await client.submit_all(calls, wait="all", timeout_s=5.0)
        assert isinstance(done, InvocationResult) and (done.state, done.task) == ("succeeded", "t")
        assert isinstance(refused, NotFoundError)
        assert isinstance(failed, InvocationResult) and failed.state == "failed"
        held = [BatchCall(function="echo", input={"held": True}), BatchCall(function="echo", key="once")]
        first, second = await client.submit_all(held, wait="any", timeout_s=5.0)
        assert isinstance(first, InvocationResult) and isinstance(second, InvocationResult)
        assert second.ok and not first.ended
        assert [each.id async for each in client.list(dead=True)] == [failed.id]
        again = await client.wait((await client.redrive(failed.id)).id)
        assert await client.purge(again.id) == 1
        assert await client.purge_all() == 0


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


@pytest.mark.promise("A `map` with a key runs nothing twice.")
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


# A loop that has ended cannot close its sockets any more; the garbage collector does, and says so.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_client_goes_on_in_the_next_loop() -> None:
    with served(ScriptedGateway({"f": {}})) as server:
        client = AsyncClient(server.address)

        async def use() -> bool:
            return (await client.invoke("f", {})).ok and (await client.invoke("f", {})).ok

        assert asyncio.run(use()) and asyncio.run(use())
        assert server.opened == 2
        asyncio.run(client.close())
        gc.collect()


async def test_a_closed_client_says_so() -> None:
    client = AsyncClient(transport=ScriptedGateway())
    async with client:
        assert await client.functions() == ()
    with pytest.raises(RuntimeError, match="the client is closed"):
        await client.functions()
    await client.close()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Import a script that lies in a directory of its own, which is on the path."""
    loaded: list[str] = []
    sys.path.insert(0, str(tmp_path))

    def load(text: str, name: str = "a_training_script") -> ModuleType:
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        loaded.append(name)
        spec.loader.exec_module(module)
        return module

    yield load
    sys.path.remove(str(tmp_path))
    for name in loaded:
        del sys.modules[name]


def ran(function: Any) -> dict[str, Any]:
    """Return what the sent module defines, run where nothing of the script is."""
    sent = captured(function)
    ((path, text),) = sent.sources.items()
    assert path == "registered.py" and sent.place == f"registered:{function.__name__}"
    space: dict[str, Any] = {"__name__": "registered"}
    exec(compile(text, path, "exec"), space)
    return space


def test_a_handler_is_sent_with_what_it_names_and_nothing_else(script: Callable[[str], ModuleType]) -> None:
    module = script(SCRIPT)
    space = ran(module.reward)
    assert space["reward"]({"text": "banana"}, None) == {"score": 6, "upper": "X", "inner": 3}
    assert not {"trained", "unrelated", "plain", "json", "client", "tangram", "handler"} & space.keys()
    (text,) = captured(module.reward).sources.values()
    assert "# kept with its comment" in text and "@handler" not in text
    assert ran(module.plain)["plain"]({"text": "[1]"}, None) == [1]


def test_a_decorated_function_stays_what_it_was(script: Callable[[str], ModuleType]) -> None:
    module = script(SCRIPT)
    assert module.reward({"text": "a"}, None)["score"] == 4
    assert getattr(module.reward, MARK) == {"cost": {"cpu": 1}, "timeout": "30s"}
    assert definition_of(module.reward, {"timeout": "1m"}) == {"cost": {"cpu": 1}, "timeout": "1m"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import beside\ndef f(event, context):\n    return beside.x", "imports beside, a file of yours"),
        ("from beside import x\ndef f(event, context):\n    return x", "imports beside, a file of yours"),
        ("from json import *\ndef f(event, context):\n    return loads(event)", "imports *"),
        ("def f(event, context):\n    return nowhere", "needs 'nowhere'"),
        ("f = lambda event, context: 1", "no method, lambda or inner function"),
        ("class C:\n    def m(self, event, context): ...\nf = C.m", "no method, lambda or inner function"),
        ("def g():\n    def f(event, context): ...\n    return f\nf = g()", "no method, lambda or inner function"),
        ("f = len", "top level of a module"),
        ("import functools\nf = functools.partial(print)", "top level of a module"),
    ],
)
def test_what_cannot_stand_by_itself_is_refused_with_the_reason(
    script: Callable[..., ModuleType], text: str, told: str
) -> None:
    script("x = 1", "beside")
    module = script(text)
    with pytest.raises(InvalidInputError, match="cannot be sent") as refused:
        captured(module.f)
    assert told in refused.value.message and "stand by itself" in refused.value.message


def test_a_function_without_a_file_is_refused() -> None:
    space: dict[str, Any] = {"__name__": "nowhere_at_all"}
    exec("def f(event, context): ...", space)
    with pytest.raises(InvalidInputError, match="source of its module"):
        captured(space["f"])


def test_the_committed_synchronous_client_is_current() -> None:
    stale = [path.name for path, text in generated() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run: python -m scripts.make_sync_client"
