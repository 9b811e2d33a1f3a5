"""Frames: what goes in comes out, in whatever pieces it travels, and what does not fit is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.config.load import load
from manager.action import Action, Amdahl, Chunk, Grant, Lease, Outcome, State, UnitSet
from manager.errors import Reason
from manager.function import FunctionSpec, PytestSpec, SandboxSpec
from runtimes.kinds import KINDS
from runtimes.node import protocol

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
EXECUTE = protocol.ExecuteAttempt(
    "a.1/", ACTION, LEASE, "d", protocol.pack({"command": "true"}), None, None, {"k": "v"}
)
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
    messages = [
        EXECUTE,
        protocol.Beat(),
        protocol.end_of("a.1/", OUTCOME, 7),
        protocol.AttemptLog("a.1/", 3, b"\x00\xff" * 50),
    ]
    data = b"".join(protocol.encode(message) for message in messages)
    reader = protocol.FrameReader(2**20)
    out = [message for start in range(0, len(data), piece_bytes) for message in reader.feed(data[start:][:piece_bytes])]
    assert out == messages


def test_an_outcome_comes_out_as_it_was() -> None:
    assert protocol.outcome_of(protocol.end_of("a.1/", OUTCOME, 0)) == OUTCOME


@pytest.mark.parametrize("figure", [math.inf, -math.inf, math.nan, -1.0, 1e300])
def test_figures_that_cannot_be_are_left_out_of_an_end(figure: float) -> None:
    told = replace(OUTCOME, execution_s=figure, retry_after_s=figure, usage={"mean_units": figure, "cpu_s": 0.25})
    heard = protocol.outcome_of(protocol.end_of("a.1/", told, 0))
    assert heard == replace(OUTCOME, execution_s=0.0, retry_after_s=None, usage={"cpu_s": 0.25})


@pytest.mark.parametrize("value", [{"deep": [{"x": "\ud800 alone"}]}, {"large": 2**80}, {}, {"f": 1e300, "n": None}])
def test_any_json_value_travels(value: dict[str, object]) -> None:
    assert protocol.unpack_object(protocol.pack(value)) == value


def test_a_function_travels_without_what_only_the_scheduler_reads() -> None:
    function = FunctionSpec(
        name="f",
        runtime="pytest",
        elasticity=Amdahl(0.1),
        cost={"cpu": UnitSet.span(1, 4)},
        sandbox=SandboxSpec(image="i", env={"A": "b"}, allow=("10.0.0.1:80",)),
        pytest=PytestSpec(grade="fresh"),
    )
    there = protocol.read_function(protocol.function_bytes(function), FunctionSpec)
    assert (there.sandbox, there.pytest, there.cost) == (function.sandbox, function.pytest, function.cost)
    assert there.elasticity is None


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
        protocol.HEADER.pack(2**30, 5),
        protocol.HEADER.pack(0, 250),
        protocol.HEADER.pack(1, 7) + b"\xc1",
        protocol.HEADER.pack(2, 7) + b"\x91\x01",
        protocol.encode(protocol.end_of("a.1/", OUTCOME, 0)).replace(b"failed", b"queued"),
    ],
    ids=["too large", "unknown kind", "no msgpack", "too few fields", "an end that is none"],
)
def test_what_does_not_fit_is_refused(data: bytes) -> None:
    with pytest.raises(protocol.ChannelError):
        list(protocol.FrameReader(2**20).feed(data))
