"""Messages: records, log rows and calls between the gateway's nouns and protobuf; errors as gRPC statuses."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from gateway import wire
from gateway.errors import face, problem, reason_face
from gateway.grpc.generated import tangram_pb2 as pb
from gateway.invocations.invocation import InvocationRequest, LiveInvocation
from gateway.invocations.record import Mode, Record
from gateway.operations.batches import ReadCall
from gateway.store.store import LogRow
from manager.errors import CodedError, InvalidInput
from tangram.types import (
    ForkRequest,
    FunctionInfo,
    FunctionUpload,
    SnapshotInfo,
    StepExpectation,
    StepInfo,
    TrajectoryInfo,
    TrajectoryOpening,
)
from tangram.types.nodes import NodeStatus
from tangram.types.requests import InvocationQuery
from tangram.types.steps import StepPath
from tangram.types.values import quantities

#: Seconds that are no bound any more: ten years.
SECONDS_END = 10 * 365 * 86400
#: Largest piece of a file in one message of an upload.
PIECE_MAX_BYTES = 2**20
#: Largest particulars of an error that go with it: clients bound all metadata, by 8 KiB at the least.
ERRORS_MAX_BYTES = 2048

Received = TypeVar("Received")


async def read_message(stream: Stream[Received, Any]) -> Received | None:
    """Return the next message, None after the last; raises InvalidInput for one that cannot be read."""
    try:
        return await stream.recv_message()
    except DecodeError as error:
        raise InvalidInput(f"the message cannot be read: {error}", component="grpc") from None


async def read_request(stream: Stream[Received, Any]) -> Received:
    """Return the first message of a call; raises InvalidInput when there is none, or none that can be read."""
    message = await read_message(stream)
    if message is None:
        raise InvalidInput("the request holds no message", component="grpc")
    return message


async def tell_replay(stream: Stream[Any, Any], started: LiveInvocation, call: InvocationRequest) -> None:
    """Say at once that a call with a known key ran nothing."""
    if started.replays(call):
        await stream.send_initial_metadata(metadata={"tangram-idempotent-replay": "true"})


def given(message: Message, *names: str) -> dict[str, object]:
    """Return the fields that say something: an empty one leaves the choice to whoever reads them."""
    return {name: value for name in names if (value := getattr(message, name))}


def read_listing(message: pb.ListInvocationsRequest) -> InvocationQuery:
    """Which records are to be listed; raises InvalidInput."""
    chosen = given(message, "function", "task", "trajectory", "parent", "state", "reason", "since", "until", "order")
    page = given(message, "cursor", "limit") | ({"dead": message.dead} if message.HasField("dead") else {})
    return wire.read(chosen | page, InvocationQuery)


def read_upload(message: pb.PutFunctionRequest) -> FunctionUpload:
    """One function with its files; raises InvalidInput."""
    definition = wire.loads_object(message.definition_json)
    return wire.read({"definition": definition, "sources": dict(message.sources)}, FunctionUpload)


def read_opening(message: pb.OpenTrajectoryRequest) -> TrajectoryOpening:
    """The opening of a trajectory; raises InvalidInput."""
    asked: dict[str, object] = {"function": message.function, "task": message.task or "default", **_given(message)}
    if message.snapshot:
        asked["snapshot"] = message.snapshot
    if message.HasField("sandbox"):
        chosen = message.sandbox
        texts = {name: getattr(chosen, name) for name in ("image", "workdir", "user", "memory", "network", "idle_ttl")}
        given: dict[str, object] = {name: text for name, text in texts.items() if text}
        asked["sandbox"] = given | ({"env": dict(chosen.env)} if chosen.env else {})
    return wire.read(asked, TrajectoryOpening, "$")


def read_fork(message: pb.ForkTrajectoryRequest) -> ForkRequest:
    """What is to be forked; raises InvalidInput."""
    asked = {"function": message.function, "to": list(message.to), "task": message.task or None, **_given(message)}
    return wire.read(asked, ForkRequest, "$")


def read_step(message: pb.TellStepRequest | pb.InvokeRequest) -> StepPath:
    """Which step is meant; raises InvalidInput."""
    return wire.read({"task": message.task or "default", "step": message.step}, StepPath)


def read_expectation(message: pb.TellStepRequest) -> StepExpectation:
    """What is told of a step; raises InvalidInput."""
    return wire.read({"expected": message.expected}, StepExpectation)


def _given(message: pb.OpenTrajectoryRequest | pb.ForkTrajectoryRequest) -> dict[str, object]:
    return {name: getattr(message, name) for name in ("step", "lease_s") if message.HasField(name)}


def step_message(told: StepInfo) -> pb.Step:
    """A step as it is told."""
    return pb.Step(task=told.task, step=told.step, json=wire.encode(told))


def snapshot_message(told: SnapshotInfo) -> pb.Snapshot:
    """A snapshot as it is told."""
    return pb.Snapshot(snapshot=told.snapshot, json=wire.encode(told))


def trajectory_message(told: TrajectoryInfo) -> pb.Trajectory:
    """A trajectory as it is told."""
    return pb.Trajectory(trajectory=told.trajectory, json=wire.encode(told))


def read_call(message: pb.InvokeRequest, mode: Mode) -> InvocationRequest:
    """The request of one invocation; raises InvalidInput."""
    return InvocationRequest(
        function=wire.name(message.function, "function"),
        input=wire.loads_object(message.input_json),
        body=message.input_json or b"{}",
        mode=mode,
        task=wire.name(message.task, "task") if message.task else "default",
        step=read_step(message).step if message.HasField("step") else None,
        trajectory=wire.name(message.trajectory, "trajectory") if message.trajectory else None,
        parent=wire.name(message.parent, "parent") if message.parent else None,
        timeout_s=seconds(message.timeout_s, "timeout_s"),
        max_age_s=seconds(message.max_age_s, "max_age_s"),
        key=_key(message.idempotency_key),
        callback_url=message.callback_url or None,
        living=message.living,
        detached=message.detached,
        **wire.trace(message.traceparent, message.tracestate),
    )


def seconds(value: float, what: str) -> float | None:
    """A bound in seconds; 0 is none. Raises InvalidInput for what is no duration."""
    if value == 0:
        return None
    if not 0 < value < SECONDS_END:
        raise InvalidInput(
            f"{what} is {value:g}, not more than 0 s and less than {SECONDS_END} s", detail={"path": what}
        )
    return value


def invocation(record: Record, *, payload: bool = True) -> pb.Invocation:
    """The record as a message, without its result where there is to be no ``payload``."""
    return pb.Invocation(
        id=record.id,
        function=record.function,
        task=record.task,
        trajectory=record.trajectory or "",
        state=record.state.value,
        reason="" if record.reason is None else record.reason.value,
        message=record.message,
        component=record.component,
        result_json=(record.result or b"") if payload else b"",
        queue_ms=(record.queue_s or 0.0) * 1000,
        overhead_ms=(record.overhead_s or 0.0) * 1000,
        execution_ms=(record.execution_s or 0.0) * 1000,
        units=record.units,
        node=record.node or "",
        attempt=record.attempt,
        record_json=wire.encode(record.as_wire(payload=False)),
    )


def verdict(index: int, told: LiveInvocation | CodedError, call: ReadCall, shown: Record | None) -> pb.BatchVerdict:
    """What became of one call of a batch; ``shown`` is its record as it is told, if it was accepted."""
    if shown is not None:
        replayed = isinstance(told, LiveInvocation) and isinstance(call, InvocationRequest) and told.replays(call)
        return pb.BatchVerdict(index=index, invocation=invocation(shown), replayed=replayed)
    assert isinstance(told, CodedError)
    refusal = pb.BatchProblem(
        status=Status[face(told).grpc].value,
        code=told.code,
        message=told.message,
        component=told.component,
        retry_after_s=told.retry_after_s or 0.0,
        json=wire.encode(problem(told)),
    )
    return pb.BatchVerdict(index=index, problem=refusal)


def function_message(told: FunctionInfo) -> pb.Function:
    """A function as it is told."""
    return pb.Function(
        name=told.name,
        runtime=told.runtime,
        revision=told.revision,
        description=told.description,
        json=wire.encode(told),
    )


def node_message(told: NodeStatus) -> pb.Node:
    """A machine as it is told."""
    return pb.Node(node=told.node, state=told.state, json=wire.encode(told))


def log_record(row: LogRow) -> pb.LogRecord:
    return pb.LogRecord(offset=row.position, time_s=row.time_s, stream=row.stream, data=row.data)


def status_error(error: CodedError) -> GRPCError:
    """The status of a refused request; its message begins with the code."""
    return GRPCError(Status[face(error).grpc], f"{error.code}: {error.message}")


def ended_badly(record: Record) -> GRPCError | None:
    """The status of an invocation that failed by no fault of the user's own work; None for an answer."""
    shown = reason_face(record.reason)
    if shown.grpc == "OK":
        return None
    return GRPCError(Status[shown.grpc], f"{record.reason}: {record.message}")


def trailers(error: CodedError) -> dict[str, str]:
    """Metadata that goes with an error."""
    found = {"tangram-code": error.code, "tangram-component": error.component}
    if error.invocation_id is not None:
        found["tangram-invocation-id"] = error.invocation_id
    if error.retry_after_s is not None:
        found["retry-after-s"] = f"{error.retry_after_s:g}"
    if error.detail:
        errors = json.dumps(dict(error.detail), default=str)  # ASCII, as metadata must be
        if len(errors) <= ERRORS_MAX_BYTES:
            found["tangram-errors"] = errors
    return found


def _key(text: str) -> str | None:
    if text and not quantities.is_key(text):
        raise InvalidInput(
            "idempotency_key must be 1 to 255 visible ASCII characters", detail={"path": "idempotency_key"}
        )
    return text or None
