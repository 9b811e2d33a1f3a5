"""The protocol of nodes: messages, errors, and the link that carries them."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from gateway.config.load import load
from manager.action import Action, Chunk, Grant, Lease, Outcome, State, UnitSet
from manager.errors import ActionFailed, CodedError, InvalidConfig, Reason, Unsupported
from manager.function import FunctionSpec
from runtimes.kinds import KINDS
from runtimes.node import protocol
from runtimes.node.protocol import (
    HANDED_BYTES,
    READ_BYTES,
    LinkClosed,
    LinkSettings,
    Message,
    NodeLink,
    as_failure,
    error_of,
    facts_of,
    failed,
)
from runtimes.sandbox.runner.runner import FrameDecoder
from tangram.frames import HEADER
from tests.runtimes.node.memory_stream import CALM, MemoryTransport, pair
from tests.runtimes.node.session import STUCK_S, hello
from tests.virtual_clock import VirtualClock

WITHIN_S = 30.0

ROOT = Path(__file__).parent.parent.parent.parent

ACTION = Action(id="a", function="f", cost={"cpu": UnitSet.of((1, 2, 4))}, trajectory="t", key="cpu", malleable=True)

LEASE = Lease(
    action_id="a",
    node="n1",
    grants={
        "cpu": Grant(pool="cpu:n1", units=2, cores=(0, 3), workers=4),
        "gpu": Grant(pool="gpu:n1", units=2, chunk=Chunk(2, 2), restore=True, evict=("m",)),
    },
)

EXECUTE = protocol.ExecuteAttempt("a.1/", ACTION, LEASE, b"{}", protocol.pack({"command": "true"}), None, None, "i")

OUTCOME = Outcome(
    state=State.FAILED,
    reason=Reason.UPSTREAM,
    message="no",
    result={"partial": [1, None, "ü"]},
    usage={"cpu_s": 0.25},
    detail={"status": 502},
    retry_after_s=2.0,
)


@pytest.mark.parametrize("piece_bytes", [1, 3, 64, 10**6])
def test_messages_come_out_whole_whatever_the_pieces(piece_bytes: int) -> None:
    sent = [
        EXECUTE,
        protocol.Beat(),
        protocol.end_of("a.1/", OUTCOME, 7),
        protocol.AttemptLog("a.1/", 3, b"\x00\xff" * 50),
    ]
    data = b"".join(protocol.encode(message) for message in sent)
    frames = FrameDecoder(HEADER)
    pieces = [data[start:][:piece_bytes] for start in range(0, len(data), piece_bytes)]
    assert [message for piece in pieces for message in protocol.messages(frames, piece)] == sent


@pytest.mark.parametrize("figure", [math.inf, -math.inf, math.nan, -1.0, 1e300])
def test_figures_that_cannot_be_are_left_out_of_an_end(figure: float) -> None:
    told = replace(OUTCOME, execution_s=figure, retry_after_s=figure, usage={"mean_units": figure, "cpu_s": 0.25})
    heard = protocol.outcome_of(protocol.end_of("a.1/", told, 0))
    assert heard == replace(OUTCOME, execution_s=0.0, retry_after_s=None, usage={"cpu_s": 0.25})


@pytest.mark.parametrize("value", [{"deep": [{"x": "\ud800 alone"}]}, {"large": 2**80}, {}, {"f": 1e300, "n": None}])
def test_any_json_value_travels(value: dict[str, object]) -> None:
    assert protocol.unpack_object(protocol.pack(value)) == value


def test_a_function_travels_with_all_that_its_schemas_say() -> None:
    said = {"type": "object", "oneOf": [{"required": ["a"]}, {"minimum": 1, "const": None, "deep": {"x": [True]}}]}
    function = FunctionSpec(name="f", runtime="exec", input_schema=said, result_schema=said)
    assert protocol.read_function(protocol.function_bytes(function), FunctionSpec) == function


def test_every_function_of_this_repository_travels() -> None:
    functions = load([ROOT / "functions"], {}, look=False).functions.values()
    assert any(function.input_schema for function in functions)
    for function in functions:
        kind = KINDS[function.runtime]
        there = protocol.read_function(protocol.function_bytes(function), kind.function)
        assert there == replace(function, elasticity=None)


@pytest.mark.parametrize(
    "data",
    [
        HEADER.pack(2**30, 5),
        HEADER.pack(0, 250),
        HEADER.pack(1, 7) + b"\xc1",
        HEADER.pack(2, 7) + b"\x91\x01",
        protocol.encode(protocol.end_of("a.1/", OUTCOME, 0)).replace(b"failed", b"queued"),
    ],
    ids=["too large", "unknown kind", "no msgpack", "too few fields", "an end that is none"],
)
def test_what_does_not_fit_is_refused(data: bytes) -> None:
    with pytest.raises(protocol.ChannelError):
        list(protocol.messages(FrameDecoder(HEADER), data))


@pytest.mark.parametrize(
    "error",
    [
        Unsupported("not here", component="sandbox", detail={"image": "x"}),
        InvalidConfig("no such image", component="docker", retry_after_s=3.0),
        ActionFailed(Reason.TIMEOUT, "too long", component="executor", result={"x": 1}, detail={"y": 2}),
    ],
)
def test_an_error_is_the_same_error_on_the_other_side(error: ActionFailed | Unsupported | InvalidConfig) -> None:
    there = error_of(facts_of(error))
    assert type(there) is type(error)
    assert (there.message, there.component, there.detail) == (error.message, error.component, error.detail)
    assert there.retry_after_s == error.retry_after_s
    if isinstance(error, ActionFailed) and isinstance(there, ActionFailed):
        assert (there.reason, there.result) == (error.reason, error.result)


def test_what_keeps_an_attempt_from_running_is_its_end_by_the_reason_that_it_has() -> None:
    own = ActionFailed(Reason.TIMEOUT, "too long", component="executor")
    assert as_failure(own) is own
    strange = as_failure(CodedError("a bug", component="node", retry_after_s=2.0))
    assert (strange.reason, strange.message, strange.retry_after_s) == (Reason.INTERNAL, "a bug", 2.0)
    ends = [
        failed(error) for error in (own, Unsupported("not here", component="x"), CodedError("a bug", component="x"))
    ]
    assert [end.state for end in ends] == [State.FAILED] * 3
    assert [end.reason for end in ends] == [Reason.TIMEOUT, Reason.INVALID_INPUT, Reason.INTERNAL]


def transport_of(link: NodeLink) -> MemoryTransport:
    return cast(MemoryTransport, link._transport)


async def test_each_side_beats_at_every_tick_whatever_else_it_says() -> None:
    kinds: list[int] = []

    def see(kind: int) -> bool:
        kinds.append(kind)
        return True

    near, _ = pair(see)
    beat = protocol.encode(protocol.Beat())[HEADER.size - 1]
    for tick in range(1, 11):
        near.tick()
        if tick % 3 == 0:
            near.send(protocol.AttemptReady("a.1/"))
            await asyncio.sleep(0)
        assert kinds.count(beat) == tick


@pytest.mark.parametrize("seed", range(40))
async def test_no_sleep_of_one_side_is_taken_for_the_silence_of_the_other(seed: int) -> None:
    """Both beat but for sleeps of up to twice the other's patience; only one that is dead is cut, and soon."""
    chance, clock = random.Random(seed), VirtualClock()
    settings = LinkSettings(beat_s=1.0, silent_s=3.0)
    near, far = pair(settings=settings, clock=clock)
    running = [asyncio.create_task(end.run(lambda message: None)) for end in (near, far)]
    await asyncio.sleep(0)
    due_s = {near: 0.0, far: chance.random()}

    async def until(end_s: float, beating: tuple[NodeLink, ...]) -> None:
        while min(due_s[each] for each in beating) < end_s:
            link = min(beating, key=lambda each: due_s[each])
            clock.advance_to(max(clock.now(), due_s[link]))
            link.tick()
            due_s[link] = clock.now() + (1 / 16 if link._in_doubt else 1.0)
            if link.closed.is_set():
                return
            for _ in range(3):
                await asyncio.sleep(0)

    for _ in range(25):
        await until(clock.now() + chance.uniform(0.0, 8.0), (near, far))
        sleeper = chance.choice((near, far))
        # Nobody can tell a longer sleep of the other side from its death; of one's own one knows.
        slept_s = chance.uniform(0.0, 1.9)
        due_s[sleeper] = max(due_s[sleeper], clock.now() + slept_s)
        if chance.random() < 0.3:  # the machine of both
            slept_s = chance.uniform(0.0, 6.0)
            due_s = {each: max(due_s[each], clock.now() + slept_s) for each in due_s}
        assert not near.closed.is_set() and not far.closed.is_set(), (near.why, far.why)
    await until(clock.now() + 10.0, (near, far))
    died_s = clock.now()
    await until(died_s + 60.0, (near,))
    assert "nothing was heard" in near.why
    assert clock.now() - died_s <= settings.silent_s + settings.beat_s + 1 / 16
    await asyncio.gather(*running)


async def test_a_slow_reader_is_cut_when_it_leaves_too_much_unread() -> None:
    near, _ = pair(settings=LinkSettings(unsent_max_bytes=10_000))
    transport_of(near).stuck = True
    for _ in range(9):
        near.send(protocol.AttemptLog("a.1/", 0, b"x" * 1000))
        await asyncio.sleep(0)
    assert not near.closed.is_set()
    near.send(protocol.AttemptLog("a.1/", 0, b"x" * 1000))
    assert near.closed.is_set()
    assert "unread" in near.why
    near.send(protocol.Beat())  # says nothing, and raises nothing


async def test_a_transport_is_handed_a_bounded_part_and_the_rest_follows_in_order_as_the_peer_reads() -> None:
    """A transport that holds much moves all of it whenever it grows: a turn of the loop would last as long."""
    near, far = pair()
    heard: list[int] = []
    near_transport = transport_of(near)
    near_transport.stuck = True
    number, piece = 64, bytes(64 * 2**10)
    for each in range(number):
        near.send(protocol.AttemptLog("a.1/", each, piece))
    await asyncio.sleep(0)
    assert near_transport.get_write_buffer_size() <= HANDED_BYTES + 2 * len(piece)
    assert near.unsent_bytes > number * len(piece), "all of it counts as unsent"
    listening = asyncio.create_task(far.run(lambda message: heard.append(message.offset)))  # type: ignore[attr-defined]
    near_transport.release()
    near.send(protocol.AttemptLog("a.1/", number, b"last"))
    await asyncio.wait_for(near.drained(), 60)
    assert near.unsent_bytes == 0
    async with asyncio.timeout(60):
        while len(heard) <= number:  # noqa: ASYNC110  # what is waited for has no event, and every turn may bring it
            await asyncio.sleep(0)
    assert heard == [*range(number), number]
    near.close("done")
    await listening


async def test_another_protocol_is_refused_with_the_remedy() -> None:
    near, far = pair()
    far.send(hello(protocol=99))
    with pytest.raises(protocol.ChannelError, match="protocol 99"):
        await near.receive(protocol.NodeHello, WITHIN_S)
    told = await far.receive(protocol.NodeRefused, WITHIN_S)
    assert "upgrade" in told.message


async def test_somebody_who_says_something_else_than_hello_is_refused() -> None:
    near, far = pair()
    far.send(protocol.AttemptReady("a.1/"))
    with pytest.raises(protocol.ChannelError, match="where a NodeHello was expected"):
        await near.receive(protocol.NodeHello, WITHIN_S)
    assert near.closed.is_set()


async def test_one_who_says_nothing_is_cut() -> None:
    near, _ = pair()
    with pytest.raises(LinkClosed, match="nothing was said"):
        await near.receive(protocol.NodeHello, 0.0)
    assert near.closed.is_set()


async def test_a_frame_that_does_not_fit_cuts_a_running_link() -> None:
    near, far = pair(settings=CALM)
    running = asyncio.create_task(near.run(lambda message: None))
    transport_of(far).write(HEADER.pack(2**31, 1))
    transport_of(far).write(b"")
    transport_of(near).protocol.data_received(HEADER.pack(2**31, 1))
    async with asyncio.timeout(WITHIN_S):
        assert "more than" in await running


async def test_the_first_message_and_what_follows_it_at_once_are_both_heard() -> None:
    near, far = pair()
    far.send(hello())
    far.send(protocol.AttemptReady("a.1/"))
    await near.receive(protocol.NodeHello, WITHIN_S)
    heard = asyncio.Event()
    running = asyncio.create_task(near.run(lambda message: heard.set()))
    async with asyncio.timeout(WITHIN_S):
        await heard.wait()
    near.close("done")
    await running


async def test_a_silent_side_is_cut_when_its_time_is_over_and_not_only_at_the_next_beat() -> None:
    near, _ = pair(settings=LinkSettings(beat_s=3600.0, silent_s=0.01))
    async with asyncio.timeout(STUCK_S):
        assert "nothing was heard" in await near.run(lambda message: None)


async def test_what_is_in_no_hurry_leaves_with_what_is_said_next() -> None:
    near, far = pair()
    near.send(protocol.AcknowledgeEnd("a.1/"), in_no_hurry=True)
    for _ in range(3):
        await asyncio.sleep(0)
    assert near.unsent_bytes > 0, "it waits"
    near.send(protocol.AttemptReady("b.1/"))
    assert isinstance(await far.receive(protocol.AcknowledgeEnd, WITHIN_S), protocol.AcknowledgeEnd)
    assert near.unsent_bytes == 0
    await far.receive(protocol.AttemptReady, WITHIN_S)


async def test_a_peer_is_not_read_while_what_it_said_waits_for_a_greeting_to_be_asked_for() -> None:
    near, far = pair()
    paused: list[bool] = []
    transport = transport_of(near)
    transport.pause_reading = lambda: paused.append(True)  # type: ignore[method-assign]
    transport.resume_reading = lambda: paused.append(False)  # type: ignore[method-assign]
    for number in range(3):
        far.send(protocol.AttemptLog("a.1/", number, bytes(READ_BYTES // 2)))
    for _ in range(5):
        await asyncio.sleep(0)
    assert paused == [True]
    with pytest.raises(protocol.ChannelError, match="more than"):
        await near.receive(protocol.NodeHello, WITHIN_S)
    assert paused == [True, False]


async def test_an_error_of_who_hears_ends_the_link_and_is_raised() -> None:
    near, far = pair()

    def hear(message: Message) -> None:
        raise ZeroDivisionError

    running = asyncio.create_task(near.run(hear))
    await asyncio.sleep(0)
    far.send(protocol.AttemptReady("a.1/"))
    far.send(protocol.AttemptReady("b.1/"))
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(ZeroDivisionError):
            await running
    assert near.closed.is_set()
