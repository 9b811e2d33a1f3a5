"""Messages: records, log rows and calls between the gateway's nouns and protobuf; errors as gRPC statuses."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from gateway import serialization
from gateway.errors import REASON_STATUSES, error_status, problem
from gateway.grpc.generated import tangram_pb2 as pb
from gateway.invocations.invocations import InvocationRequest
from gateway.invocations.record import Mode, Record
from gateway.store.store import LogRow
from manager.errors import CodedError, InvalidInput
from tangram import types
from tangram.types import StepPath, TrajectoryOpening

#: Seconds that are no bound any more: ten years.
SECONDS_END = 10 * 365 * 86400
#: Largest particulars of an error that go with it: clients bound all metadata, by 8 KiB at the least.
ERRORS_MAX_BYTES = 2048

Received = TypeVar("Received")


# --- what comes in


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


def given(message: Message, *names: str) -> dict[str, object]:
    """Return the fields that say something: an empty one leaves the choice to whoever reads them."""
    return {name: value for name in names if (value := getattr(message, name))}


def read_call(message: pb.InvokeRequest, mode: Mode) -> InvocationRequest:
    """Return the request of one invocation; raises InvalidInput."""
    step = None
    if message.HasField("step"):
        step = serialization.read({"task": message.task or "default", "step": message.step}, StepPath).step
    return InvocationRequest(
        function=serialization.name(message.function, "function"),
        input=serialization.loads_object(message.input_json),
        body=message.input_json or b"{}",
        mode=mode,
        task=serialization.name(message.task, "task") if message.task else "default",
        step=step,
        trajectory=serialization.name(message.trajectory, "trajectory") if message.trajectory else None,
        parent=serialization.name(message.parent, "parent") if message.parent else None,
        timeout_s=seconds(message.timeout_s, "timeout_s"),
        max_age_s=seconds(message.max_age_s, "max_age_s"),
        key=_key(message.idempotency_key),
        callback_url=message.callback_url or None,
        living=message.living,
        detached=message.detached,
        **serialization.trace(message.traceparent, message.tracestate),
    )


def read_opening(message: pb.OpenTrajectoryRequest) -> TrajectoryOpening:
    """Return the opening of a trajectory; raises InvalidInput."""
    request: dict[str, object] = {"function": message.function, "task": message.task or "default"}
    request |= given(message, "snapshot")
    request |= {name: getattr(message, name) for name in ("step", "lease_s") if message.HasField(name)}
    if message.HasField("sandbox"):
        chosen = given(message.sandbox, "image", "workdir", "user", "memory", "network", "idle_ttl")
        if message.sandbox.env:
            chosen["env"] = dict(message.sandbox.env)
        request["sandbox"] = chosen
    return serialization.read(request, TrajectoryOpening, "$")


def seconds(value: float, what: str) -> float | None:
    """Return a bound in seconds; 0 is none. Raises InvalidInput for what is no duration."""
    if value == 0:
        return None
    if not 0 < value < SECONDS_END:
        raise InvalidInput(
            f"{what} is {value:g}, not more than 0 s and less than {SECONDS_END} s", detail={"path": what}
        )
    return value


def _key(text: str) -> str | None:
    if text and not types.is_key(text):
        raise InvalidInput(
            "idempotency_key must be 1 to 255 visible ASCII characters", detail={"path": "idempotency_key"}
        )
    return text or None


# --- what goes out


def invocation_message(record: Record) -> pb.Invocation:
    """Return the record as a message."""
    return pb.Invocation(
        id=record.id,
        function=record.function,
        task=record.task,
        trajectory=record.trajectory or "",
        state=record.state.value,
        reason="" if record.reason is None else record.reason.value,
        message=record.message,
        component=record.component,
        result_json=record.result or b"",
        queue_ms=(record.queue_s or 0.0) * 1000,
        overhead_ms=(record.overhead_s or 0.0) * 1000,
        execution_ms=(record.execution_s or 0.0) * 1000,
        units=record.units,
        node=record.node or "",
        attempt=record.attempt,
        record_json=serialization.encode(record.as_wire(payload=False)),
    )


def problem_message(error: CodedError) -> pb.BatchProblem:
    """Return why a call of a batch was refused."""
    return pb.BatchProblem(
        status=Status[error_status(error).grpc].value,
        code=error.code,
        message=error.message,
        component=error.component,
        retry_after_s=error.retry_after_s or 0.0,
        json=serialization.encode(problem(error)),
    )


def log_messages(page: list[LogRow]) -> list[pb.LogRecord]:
    """Return a page of a log; an empty one is a heartbeat."""
    if not page:
        return [pb.LogRecord(stream="heartbeat")]
    return [pb.LogRecord(offset=row.position, time_s=row.time_s, stream=row.stream, data=row.data) for row in page]


# --- what is refused or failed


def status_error(error: CodedError) -> GRPCError:
    """Return the status of a refused request; its message begins with the code."""
    return GRPCError(Status[error_status(error).grpc], f"{error.code}: {error.message}")


def ended_badly(record: Record) -> GRPCError | None:
    """Return the status of an invocation that failed by no fault of the user's own work; None for an answer."""
    if record.reason is None or (shown := REASON_STATUSES[record.reason]).grpc == "OK":
        return None
    return GRPCError(Status[shown.grpc], f"{record.reason}: {record.message}")


def trailers(error: CodedError) -> dict[str, str]:
    """Return the metadata that goes with an error."""
    result = {"tangram-code": error.code, "tangram-component": error.component}
    if error.invocation_id is not None:
        result["tangram-invocation-id"] = error.invocation_id
    if error.retry_after_s is not None:
        result["retry-after-s"] = f"{error.retry_after_s:g}"
    if error.detail:
        errors = json.dumps(dict(error.detail), default=str)  # ASCII, as metadata must be
        if len(errors) <= ERRORS_MAX_BYTES:
            result["tangram-errors"] = errors
    return result


def end_trailers(record: Record) -> dict[str, str]:
    """Return the metadata of an invocation that ended badly."""
    result = {"tangram-code": str(record.reason), "tangram-component": record.component}
    result |= {"tangram-invocation-id": record.id, **time_trailers(record)}
    if record.retry_after_s is not None:
        result["retry-after-s"] = f"{record.retry_after_s:g}"
    return result


def time_trailers(record: Record) -> dict[str, str]:
    """Return the metadata that says how its time divides, in milliseconds."""
    parts = {"queue": record.queue_s, "overhead": record.overhead_s, "execution": record.execution_s}
    return {f"tangram-{name}-ms": f"{1000 * (part_s or 0.0):.3f}" for name, part_s in parts.items()}
