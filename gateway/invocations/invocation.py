"""The invocation: what a door asks for, and what lives of it between acceptance and its end."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from gateway.invocations.logs import InvocationLog
from gateway.invocations.record import Mode, Record
from gateway.preparation import Readiness
from manager.action import Action
from manager.errors import CodedError, StorageUnavailable
from manager.function import FunctionSpec
from runtimes import runtime
from runtimes.kinds import kind_of

logger = structlog.get_logger("gateway.invocations")


@dataclass(frozen=True, slots=True, kw_only=True)
class InvocationRequest:
    """What a door asks for."""

    function: str
    input: Mapping[str, object]
    #: The input as the caller sent it: kept in the record, and digested for its key.
    body: bytes
    mode: Mode = Mode.SYNC
    task: str = "default"
    #: The step of the task, if the caller named one.
    step: int | None = None
    trajectory: str | None = None
    #: Only in a trajectory that lives already: to be refused where it has ended, and not to begin a new one.
    living: bool = False
    parent: str | None = None
    #: Bounds in seconds, each at most the function's own: the execution, and the whole of an asynchronous call.
    timeout_s: float | None = None
    max_age_s: float | None = None
    #: Idempotency-Key.
    key: str | None = None
    #: Go on when the caller goes away.
    detached: bool = False
    callback_url: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    redrive_of: str | None = None
    #: This very call, as none other is: what it made knows it again.
    call: object = field(default_factory=object, compare=False)

    @property
    def durable(self) -> bool:
        return self.mode is Mode.ASYNC or self.key is not None

    @property
    def digest(self) -> bytes:
        """Of what a key comes with: the body's value, however it was written, and whose sandbox it is for."""
        try:
            value = runtime.dumps(runtime.loads(self.body), sort_keys=True)
        except (ValueError, TypeError, RecursionError):  # no JSON, or none that can be written
            value = self.body
        return hashlib.sha256(value + b"\0" + (self.trajectory or "").encode()).digest()

    @property
    def scoped_key(self) -> str:
        """The key as the store knows it: each function has its own."""
        return f"{self.function}\n{self.key}"

    def options(self, function: FunctionSpec) -> dict[str, object]:
        """What a restart must know of it, and the function's bound where a longer one was asked for."""
        names = ("step", "timeout_s", "max_age_s", "callback_url", "traceparent", "tracestate", "redrive_of")
        given = {name: getattr(self, name) for name in names}
        if self.timeout_s is not None and self.timeout_s > function.timeout_s:
            given["timeout_capped_s"] = function.timeout_s
        return {name: value for name, value in given.items() if value is not None}


class FunctionLookup(Protocol):
    """Where registered functions are looked up: `gateway.registry.Registry`."""

    def get(self, name: str) -> FunctionSpec:
        """The function as it is now; raises NotFound."""
        ...

    def readiness(self, name: str) -> Readiness:
        """Whether the function's actions may start."""
        ...


class Observer(Protocol):
    """Who counts: `gateway.metrics.Metrics`."""

    def accepted(self, record: Record) -> None: ...

    def moved(self, record: Record) -> None: ...

    def settled(self, record: Record) -> None: ...


@dataclass(eq=False, slots=True, kw_only=True)
class LiveInvocation:
    """A living invocation, or the record of an ended one with the same face."""

    record: Record
    function: FunctionSpec | None = None
    input: Mapping[str, object] = field(default_factory=dict)
    log: InvocationLog | None = None
    #: The first try's action, from acceptance until it is submitted.
    action: Action | None = None
    #: The submitted try's action; None before and between two tries.
    action_id: str | None = None
    #: Its Idempotency-Key as the store knows it.
    key: str | None = None
    #: Callers that attend; when the last one leaves, an attached invocation is cancelled.
    callers: int = 0
    #: Why the scheduler refused it before any work, or that the next gateway goes on with it; None otherwise.
    refusal: CodedError | None = None
    #: Set at its end, or when all that is still to come of it comes in the next gateway.
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    #: Its next try, or the end of its waiting for a function that is not ready.
    retry: asyncio.TimerHandle | None = None
    #: The call that made it; another one with the same key latched on.
    made_by: object = field(default_factory=object)
    #: What it is told of the sandbox that it was to run in, and that was lost before; None otherwise.
    loss: str | None = None
    #: Whether its present try was begun by an earlier gateway.
    resumed: bool = False

    def replays(self, request: InvocationRequest) -> bool:
        """Whether an earlier call with the same key made it, and not this one."""
        return self.made_by is not request.call

    @property
    def inside(self) -> bool:
        """Whether its work is done in a sandbox, which takes its time to be ready and may outlast the gateway."""
        return self.function is not None and kind_of(self.function).works_in_sandbox

    def leave_behind(self, told: CodedError) -> None:
        """Nothing more becomes of it here: whoever waits for it as for an answer is ``told``, the others see it."""
        self.refusal = told
        self.ended.set()

    async def has_ended(self, timeout_s: float | None) -> bool:
        """Wait for the end, at most ``timeout_s``; whether it has ended."""
        try:
            async with asyncio.timeout(None if self.ended.is_set() else timeout_s):
                await self.ended.wait()
        except TimeoutError:
            return False
        return True


def ended(record: Record) -> LiveInvocation:
    """The face of an invocation that is only a record by now."""
    invocation = LiveInvocation(record=record)
    invocation.ended.set()
    return invocation


def as_refusal(error: Exception) -> CodedError:
    """Return why a call was not accepted, without the traceback, which would hold its input and be held by it.

    What is no CodedError is a fault of the gateway, and told to its log.
    """
    if not isinstance(error, CodedError):
        logger.error("a call could not be accepted", exc_info=error)
        error = CodedError(f"a fault of the gateway: {error!r}", component="invocations")
    return error.with_traceback(None)


def unless_refused(verdict: LiveInvocation | CodedError) -> LiveInvocation | CodedError:
    """What the disk did not take was not accepted, nor is whoever latched on to it meanwhile."""
    if isinstance(verdict, LiveInvocation) and isinstance(verdict.refusal, StorageUnavailable):
        return verdict.refusal
    return verdict
