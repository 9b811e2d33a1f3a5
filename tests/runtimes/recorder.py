"""Executions made by hand, and a log sink that keeps what it is given: what a runtime's test needs of its caller."""

from __future__ import annotations

from collections.abc import Mapping

from jsonschema import Draft202012Validator

from manager.action import Action, Grant, Lease
from manager.executor import Call
from manager.function import FunctionSpec
from runtimes.kinds import result_schema
from runtimes.runtime import Execution


class RecordingLog:
    """Keeps (stream, data) in order."""

    def __init__(self) -> None:
        self.records: list[tuple[str, str]] = []
        self.omitted_bytes = 0

    def write(self, stream: str, data: str) -> None:
        self.records.append((stream, data))

    def omit(self, size_bytes: int) -> None:
        self.omitted_bytes += size_bytes

    def text(self, *streams: str) -> str:
        return "".join(data for stream, data in self.records if not streams or stream in streams)


def execution_of(
    function: FunctionSpec,
    input: Mapping[str, object],
    *,
    id: str = "a1",
    trajectory: str | None = None,
    cores: tuple[int, ...] = (0,),
    trace: tuple[str, str] | tuple[None, None] = (None, None),
) -> tuple[Execution, RecordingLog]:
    """An execution of ``function`` with ``cores`` granted, and its log."""
    log = RecordingLog()
    action = Action(id=id, function=function.name, trajectory=trajectory, timeout_s=function.timeout_s)
    grants = {"cpu": Grant(pool="cpu:local", units=len(cores), cores=cores)} if cores else {}
    call = Call(function=function, input=input, log=log, traceparent=trace[0], tracestate=trace[1])
    return Execution(action=action, lease=Lease(action_id=id, node="local", grants=grants), call=call), log


def assert_as_declared(function: FunctionSpec, value: object) -> None:
    """Fail unless the value is what the function's kind says that it returns, without a key that it does not name."""
    schema = result_schema(function)
    assert schema is not None
    Draft202012Validator({**schema, "additionalProperties": False}).validate(value)
