"""External engines behind the same actions, and inputs that are checked before anything is done with them."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.model.engines import STAND_IN, processes_of
from manager.action import Chunk
from manager.errors import ActionFailed, InvalidConfig, InvalidInput, Reason
from manager.function import EngineSpec, FunctionSpec, ModelAction, ModelSpec
from runtimes.model.engine_process import EngineProcess
from runtimes.model.request import ModelSettings, parse_input
from runtimes.model.runtime import ModelRuntime
from tests.listening import Answering, ThreadedServer
from tests.runtimes.model.conftest import execution, function


class Server(ThreadedServer):
    """Answers like vLLM's server in development mode, and notes the calls; refuses to compute while it sleeps."""

    def __init__(self) -> None:
        super().__init__(Handler)
        self.calls: list[str] = []
        self.asleep = False
        #: What it does wrong: "sleep" answers 500, "wake" answers 200 and sleeps on.
        self.fault = ""
        self.lock = threading.Lock()


class Handler(Answering):
    server: Server

    def asked(self) -> None:
        server = self.server
        if self.command == "GET":
            return self.tell(200, {"is_sleeping": server.asleep} if self.path == "/is_sleeping" else {"data": []})
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body: dict[str, Any] = json.loads(raw) if raw else {}
        with server.lock:
            server.calls.append(self.path)
            if self.path in ("/sleep?level=1", "/wake_up"):
                if server.fault == "sleep" and self.path != "/wake_up":
                    return self.tell(500, {"error": "no"})
                server.asleep = self.path != "/wake_up" or server.fault == "wake"
                return self.tell(200, {"status": "sleeping" if server.asleep else "awake"})
            if server.asleep:
                return self.tell(503, {"error": "asleep"})
        if body["model"] != "served-name":
            return self.tell(404, {"error": "no such model"})
        return self.tell(*reply(self.path, body))

    def tell(self, status: int, value: object) -> None:
        self.answer(status, json.dumps(value).encode())


#: What the last of three tokens is told to be.
LAST = {"3": {"logprob": -1.5, "rank": 4}}


def reply(path: str, body: dict[str, Any]) -> tuple[int, object]:
    if path == "/classify":
        values = [len(text) / 100 for text in body["input"]]
        if body.get("use_activation", True):
            values = [1 / (1 + math.exp(-value)) for value in values]  # what an engine tells unless it is asked not to
        rows = [{"index": i, "probs": [value]} for i, value in enumerate(values)]
        return 200, {"data": rows[::-1]}  # out of order, as a server may
    if path == "/v1/embeddings":
        return 200, {"data": [{"index": i, "embedding": [0.6, 0.8]} for i, _ in enumerate(body["input"])]}
    if path == "/v1/chat/completions":
        return 200, {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}
    if "prompt_logprobs" in body:
        told = [None, {"2": {"logprob": -0.5, "rank": 1}}, {"9": {"logprob": -0.1, "rank": 1}, **LAST}]
        choices = [
            {"index": i, "prompt_logprobs": told, "prompt_token_ids": [1, 2, 3]} for i in range(len(body["prompt"]))
        ]
        return 200, {"choices": choices}
    if body["prompt"] == ["too long"]:
        return 400, {"error": "maximum context length"}
    reason = "abort" if body["prompt"] == ["cut"] else "length"
    texts = [{"index": i, "text": f"{prompt}!", "finish_reason": reason} for i, prompt in enumerate(body["prompt"])]
    return 200, {"choices": texts}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        yield made


def served(server: Server, action: ModelAction) -> FunctionSpec:
    engine = EngineSpec(url=server.url, sleep="/sleep?level=1", wake="/wake_up")
    return function(Path("served-name"), action, engine=engine)


@pytest.mark.parametrize(
    ("action", "given", "expected"),
    [
        (ModelAction.SCORE, {"texts": ["abc", "a"]}, {"scores": [0.03, 0.01]}),
        (ModelAction.EMBED, {"texts": ["abc"]}, {"embeddings": [[0.6, 0.8]]}),
        (ModelAction.LOGPROBS, {"token_ids": [[1, 2, 3]]}, {"logprobs": [[-0.5, -1.5]], "sums": [-2.0]}),
        (
            ModelAction.LOGPROBS,
            {"token_ids": [[1, 2, 3]], "top_logprobs": 1},
            {
                "logprobs": [[-0.5, -1.5]],
                "sums": [-2.0],
                "token_ids": [[1, 2, 3]],
                "ranks": [[1, 4]],
                "top_logprobs": [[[[2, -0.5]], [[9, -0.1]]]],
            },
        ),
        (
            ModelAction.GENERATE,
            {"texts": ["abc"], "seed": 1},
            {"texts": ["abc!"], "finish_reasons": ["length"], "seed": 1},
        ),
        (
            ModelAction.GENERATE,
            {"messages": [{"role": "user", "content": "well?"}], "seed": 1},
            {"texts": ["yes"], "finish_reasons": ["stop"], "seed": 1},
        ),
    ],
)
async def test_every_action_has_its_route(
    server: Server, settings: ModelSettings, action: ModelAction, given: dict[str, object], expected: dict[str, object]
) -> None:
    runtime = ModelRuntime(settings)
    asked = served(server, action)
    await runtime.prepare(asked)
    begun = execution(asked, given)
    assert (await runtime.execute(begun)).value == expected
    assert begun.execution_s > 0
    await runtime.close()


async def test_it_is_woken_when_it_is_needed_and_put_to_sleep_when_it_is_evicted(
    server: Server, settings: ModelSettings
) -> None:
    runtime = ModelRuntime(settings)
    first, second = served(server, ModelAction.SCORE), served(server, ModelAction.EMBED)
    assert first.model is not None
    await runtime.prepare(first)
    assert [call for call in server.calls if call != "/classify"] == ["/sleep?level=1"], (
        "it is asleep until it has devices"
    )
    usages = [(await runtime.execute(execution(first, {"texts": ["a"]}))).usage for _ in range(2)]
    assert [usage["restored"] for usage in usages] == [1.0, 0.0]
    assert runtime.residency() == {first.model.service: ((0, 1),)}
    await runtime._external.evict(first.model.service, Chunk(0, 1))
    assert server.asleep
    assert runtime.residency() == {}
    assert second.model is not None
    assert second.model.service != first.model.service
    await runtime.close()


async def test_a_generation_that_was_cut_is_no_answer(server: Server, settings: ModelSettings) -> None:
    runtime = ModelRuntime(settings)
    with pytest.raises(ActionFailed, match="ended a generation by 'abort'") as caught:
        await runtime.execute(execution(served(server, ModelAction.GENERATE), {"texts": ["cut"]}))
    assert caught.value.reason is Reason.UPSTREAM
    await runtime.close()


async def test_a_sleep_that_failed_frees_nothing_and_the_next_action_wakes_it_again(
    server: Server, settings: ModelSettings
) -> None:
    runtime = ModelRuntime(settings)
    asked = served(server, ModelAction.SCORE)
    assert asked.model is not None
    await runtime.execute(execution(asked, {"texts": ["a"]}))
    server.fault = "sleep"
    await runtime._external.evict(asked.model.service, Chunk(0, 1))
    assert asked.model.service in runtime.residency(), "it may hold its memory still"
    server.asleep = True  # the sleep took effect after all
    assert (await runtime.execute(execution(asked, {"texts": ["a"]}))).value == {"scores": [0.01]}
    await runtime.close()


async def test_a_wake_that_woke_nothing_is_a_failure(server: Server, settings: ModelSettings) -> None:
    runtime = ModelRuntime(settings)
    server.asleep, server.fault = True, "wake"
    with pytest.raises(ActionFailed, match="still sleeps"):
        await runtime.execute(execution(served(server, ModelAction.SCORE), {"texts": ["a"]}))
    await runtime.close()


async def test_what_the_server_blames_on_the_input_is_an_invalid_input(server: Server, settings: ModelSettings) -> None:
    runtime = ModelRuntime(settings)
    with pytest.raises(ActionFailed, match="maximum context length") as caught:
        await runtime.execute(execution(served(server, ModelAction.GENERATE), {"texts": ["too long"]}))
    assert caught.value.reason is Reason.INVALID_INPUT
    await runtime.close()


async def test_a_server_that_is_not_there_is_refused_at_registration_and_fails_as_upstream(
    settings: ModelSettings,
) -> None:
    runtime = ModelRuntime(settings)
    asked = function(Path("served-name"), ModelAction.SCORE, engine=EngineSpec(url="http://127.0.0.1:9"))
    with pytest.raises(InvalidConfig, match="start the server first"):
        await runtime.prepare(asked)
    with pytest.raises(ActionFailed) as caught:
        await runtime.execute(execution(asked, {"texts": ["a"]}))
    assert caught.value.reason is Reason.UPSTREAM
    await runtime.close()


SCORE = function(Path("m"), ModelAction.SCORE)
GENERATE = function(Path("m"), ModelAction.GENERATE, max_new_tokens=8)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({}, "$"),
        ({"texts": ["a"], "token_ids": [[1]]}, "$"),
        ({"texts": "a"}, "$.texts"),
        ({"texts": []}, "$.texts"),
        ({"texts": ["a"] * 5}, "$.texts"),
        ({"texts": ["a", 1]}, "$.texts[1]"),
        ({"token_ids": [[1], []]}, "$.token_ids[1]"),
        ({"token_ids": [[-1]]}, "$.token_ids[0][0]"),
        ({"token_ids": [[True]]}, "$.token_ids[0][0]"),
        ({"messages": [[{"role": "user"}]]}, "$.messages[0][0]"),
        ({"texts": ["a"], "temperature": 1}, "$.temperature"),
    ],
)
def test_a_wrong_input_is_refused_at_its_path(given: dict[str, object], path: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_input(SCORE, given, sequences_max=4)
    assert caught.value.detail["path"] == path


@pytest.mark.parametrize("option", [{"max_new_tokens": 9}, {"temperature": -1}, {"top_p": 0}, {"seed": "x"}])
def test_a_sampling_option_out_of_bounds_is_refused(option: dict[str, object]) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_input(GENERATE, {"texts": ["a"], **option}, sequences_max=4)
    assert caught.value.detail["path"] == f"$.{next(iter(option))}"


def test_one_conversation_may_come_without_its_list() -> None:
    message = {"role": "user", "content": "hello"}
    parsed = parse_input(SCORE, {"messages": [message]}, sequences_max=4)
    assert parsed.conversations == ((message,),)


def test_an_unseeded_draw_gets_a_seed_that_a_retry_will_share() -> None:
    assert parse_input(GENERATE, {"texts": ["a"], "seed": 7}, sequences_max=4).sampling.seed == 7
    assert parse_input(GENERATE, {"texts": ["a"]}, sequences_max=4).sampling.seed >= 0


class StandInWorld:
    """Engines that are started by command, and what became of them."""

    def __init__(self, runtime: ModelRuntime, directory: Path) -> None:
        self.runtime, self.directory = runtime, directory
        #: Set when nothing is resident any more.
        self.gone = asyncio.Event()
        runtime.on_residency = lambda resident: None if resident else self.gone.set()

    def function(self, name: str, *, sleeps: bool = True) -> FunctionSpec:
        command = (sys.executable, "-S", str(STAND_IN), "{socket}", str(self.directory), name)
        sleep, wake = ("/sleep?level=1&mode=wait", "/wake_up") if sleeps else ("", "")
        engine = EngineSpec(command=command, start_s=30.0, sleep=sleep, wake=wake)
        return function(Path(name), ModelAction.SCORE, engine=engine)

    async def score(self, asked: FunctionSpec, *evict: FunctionSpec) -> object:
        for other in evict:
            assert other.model is not None
            await self.runtime._external.evict(other.model.service, Chunk(0, 1))
        return (await self.runtime.execute(execution(asked, {"texts": ["abc"]}))).value

    def fault(self, *words: str) -> None:
        (self.directory / "faults").write_text("\n".join(words))

    def posts(self, name: str) -> list[str]:
        lines = (self.directory / "calls").read_text().splitlines()
        return [line.split()[1].partition("?")[0] for line in lines if line.startswith(f"{name} ")]


@pytest.fixture
async def engines(settings: ModelSettings, tmp_path: Path) -> AsyncIterator[StandInWorld]:
    world = StandInWorld(ModelRuntime(replace(settings, devices=1)), tmp_path)
    yield world
    await world.runtime.close()
    assert processes_of(tmp_path) == {}, "nothing of an engine is left"
    assert not (tmp_path / "together").exists(), (tmp_path / "together").read_text()


async def test_an_engine_is_started_sleeps_and_wakes_as_it_was(engines: StandInWorld) -> None:
    one, two = engines.function("one"), engines.function("two")
    await engines.runtime.prepare(one)
    await engines.runtime.prepare(two)
    for asked, other in ((one, two), (two, one), (one, two)):
        assert await engines.score(asked, other) == {"scores": [0.03]}
    posts = engines.posts("one")
    assert (posts.count("/sleep"), posts.count("/wake_up")) == (1, 1), "it was started once, and woken since"


async def test_an_engine_without_sleep_is_ended_to_evict_it_and_started_for_the_next(engines: StandInWorld) -> None:
    one, two = engines.function("one", sleeps=False), engines.function("two", sleeps=False)
    await engines.score(one)
    assert await engines.score(two, one) == {"scores": [0.03]}
    assert await engines.score(one, two) == {"scores": [0.03]}


@pytest.mark.parametrize("fault", ["drift", "wake"])
async def test_an_engine_that_does_not_wake_as_it_was_is_started_anew(engines: StandInWorld, fault: str) -> None:
    asked = engines.function("one")
    await engines.score(asked)
    engines.fault(fault)
    assert await engines.score(asked, asked) == {"scores": [0.03]}, "never another number"


async def test_an_engine_is_moved_to_another_device_when_its_calls_have_ended(
    engines: StandInWorld,
) -> None:
    asked = engines.function("one")
    await engines.score(asked)
    engines.fault("slow")
    first = asyncio.create_task(engines.score(asked))
    await asyncio.to_thread(appears, engines.directory / "slow")
    moved = engines.runtime.execute(execution(asked, {"texts": ["abc"]}, (1, 1)))
    assert (await moved).value == {"scores": [0.03]}
    assert await first == {"scores": [0.03]}


async def test_an_engine_that_cannot_be_put_to_sleep_is_ended(engines: StandInWorld) -> None:
    one, two = engines.function("one"), engines.function("two")
    await engines.score(one)
    engines.fault("sleep")
    assert await engines.score(two, one) == {"scores": [0.03]}


async def test_an_engine_that_dies_fails_its_calls_and_serves_the_next(engines: StandInWorld) -> None:
    asked = engines.function("one")
    await engines.score(asked)
    engines.fault("die")
    engines.gone.clear()
    with pytest.raises(ActionFailed) as caught:
        await engines.score(asked)
    assert caught.value.reason is Reason.UPSTREAM
    engines.fault()
    await asyncio.wait_for(engines.gone.wait(), 30)
    assert await engines.score(asked) == {"scores": [0.03]}


NOWHERE = EngineSpec(command=("no-such-program", "{socket}"))


async def test_an_engine_that_cannot_start_is_refused_with_the_reason_from_its_log(engines: StandInWorld) -> None:
    engines.fault("start")
    with pytest.raises(ActionFailed, match="ended while it started: ValueError: no such model"):
        await engines.score(engines.function("one"))
    asked = replace(engines.function("one"), model=ModelSpec(path=Path("m"), action=ModelAction.SCORE, engine=NOWHERE))
    with pytest.raises(InvalidConfig, match="no-such-program is no program of this machine"):
        await engines.runtime.prepare(asked)


def appears(path: Path) -> None:
    """Wait for a file."""
    ends_s = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < ends_s, f"{path} never came"
        time.sleep(0.01)


async def test_nothing_of_an_engine_outlives_a_gateway_that_is_killed(tmp_path: Path) -> None:
    """The keeper sees the pipe close, as it does when the process that holds it is killed."""
    model = StandInWorld(ModelRuntime(ModelSettings(device="cpu")), tmp_path).function("one").model
    assert model is not None
    process = EngineProcess(model, Chunk(0, 1), {})
    await process.start()
    keeper = process._keeper
    assert keeper is not None and keeper.stdin is not None
    await asyncio.to_thread(appears, tmp_path / "awake")
    keeper.stdin.close()
    await asyncio.wait_for(process.wait(), 30)
    assert processes_of(tmp_path) == {}
    assert not process._directory.exists()
    await process.end()
