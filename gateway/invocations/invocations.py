"""Accept, run, cancel and end invocations."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import structlog
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import extend

from gateway import serialization
from gateway.config.schema import ServerConfig
from gateway.invocations.logs import InvocationLog, Logs
from gateway.invocations.record import NOTHING, Mode, Record, action_id_of, new_id, nothing, seq_of
from gateway.registry import Registry
from gateway.store.store import Filter, Store, require
from manager.action import Action, Lease, Outcome, Settlement, State, noun
from manager.config import TaskSpec, share_of
from manager.core.outside import OutsideQueue, OutsideWait
from manager.core.state import Cause
from manager.engine import Engine, Submission
from manager.errors import (
    CANCEL_ASKED,
    FILES_LOST,
    NOT_BEGUN,
    ActionFailed,
    CapacityExceeded,
    CodedError,
    Conflict,
    Draining,
    InvalidInput,
    KeyReused,
    NotFound,
    QuotaExceeded,
    Reason,
    StorageUnavailable,
)
from manager.executor import Call
from manager.formulation import formulate
from manager.function import FunctionSpec
from manager.learning import History
from runtimes import runtime
from runtimes.kinds import input_schema, kind_of
from tangram.types import Attempt, backoff_s

logger = structlog.get_logger("gateway.invocations")


@noun
class InvocationRequest:
    """What a caller asks for."""

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

    def options(self, function: FunctionSpec) -> Mapping[str, object]:
        """What a restart must know of it, and the function's bound where a longer one was asked for."""
        names = ("step", "timeout_s", "max_age_s", "callback_url", "traceparent", "tracestate", "redrive_of")
        options: dict[str, object] = {}
        for name in names:
            value = getattr(self, name)
            if value is not None:
                options[name] = value
        if self.timeout_s is not None and self.timeout_s > function.timeout_s:
            options["timeout_capped_s"] = function.timeout_s
        return options or NOTHING


class EndSignal:
    """That something has ended. An `asyncio.Event` that tells whoever asked, and holds nothing while nobody has."""

    __slots__ = ("_is_set", "_told")

    def __init__(self) -> None:
        self._is_set = False
        #: Most often one asks, so a tuple takes less than a list.
        self._told: tuple[Callable[[], object], ...] = ()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """It has ended; idempotent."""
        self._is_set = True
        told, self._told = self._told, ()
        for tell in told:
            tell()

    def then(self, tell: Callable[[], object]) -> None:
        """Call ``tell`` at the end, at once if it has come; it must neither block nor raise."""
        if self._is_set:
            tell()
        else:
            self._told += (tell,)

    def forget(self, tell: Callable[[], object]) -> None:
        """Do not call it any more; idempotent."""
        if self._told:
            self._told = tuple([one for one in self._told if one != tell])

    async def wait(self) -> None:
        """Return when it has ended."""
        if not self._is_set:
            woken = asyncio.Event()
            self._told += (woken.set,)
            try:
                await woken.wait()
            finally:
                self.forget(woken.set)


@dataclass(eq=False, slots=True, kw_only=True)
class LiveInvocation:
    """A living invocation, or the record of an ended one with the same face."""

    record: Record
    function: FunctionSpec | None = None
    input: Mapping[str, object] = field(default_factory=nothing)
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
    ended: EndSignal = field(default_factory=EndSignal)
    #: The end of its waiting for a function that is not ready.
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

    def leave_behind(self, refusal: CodedError) -> None:
        """End it here without a result; who waits for an answer gets the ``refusal``."""
        self.refusal = refusal
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


def _closed() -> ActionFailed:
    return ActionFailed(Reason.GATEWAY_RESTART, "the gateway shuts down", component="gateway")


def unless_refused(verdict: LiveInvocation | CodedError) -> LiveInvocation | CodedError:
    """What the disk did not take was not accepted, nor is whoever latched on to it meanwhile."""
    if isinstance(verdict, LiveInvocation) and isinstance(verdict.refusal, StorageUnavailable):
        return verdict.refusal
    return verdict


RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0
#: Weight of the newest interval between two starts in the smoothed one.
SMOOTHING = 0.1


class HeldInputs:
    """Bytes of inputs that are held at once: of those that arrive, and of invocations that have not ended."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._share_bytes = limit_bytes, share_of(limit_bytes)
        self._by_task: Counter[str] = Counter()
        self.bytes = 0

    def check(self, size_bytes: int, task: str = "") -> None:
        """Raise CapacityExceeded when so much more, of a ``task`` where one is known, may not be held."""
        own, share = self._by_task[task], self._share_bytes
        if self.bytes + size_bytes > self._limit_bytes or (task and own + size_bytes > share):
            raise CapacityExceeded(
                f"{self.bytes} bytes of inputs are held already, {own} of task {task!r}, whose share is {share}; "
                f"server.inputs_max is {self._limit_bytes}",
                component="admission",
                retry_after_s=RETRY_MIN_S,
            )

    def take(self, size_bytes: int, task: str = "") -> None:
        """Hold so much more, of no ``task`` as it arrives; who may be refused asks `check` first."""
        self.bytes += size_bytes
        self._by_task[task] += size_bytes

    def give(self, size_bytes: int, task: str = "") -> None:
        """So much is held no more."""
        self.bytes -= size_bytes
        self._by_task[task] -= size_bytes
        if not self._by_task[task]:
            del self._by_task[task]


class Admission:
    """Counts what waits. ``now`` is a monotonic clock in seconds; ``task`` finds a task's bounds."""

    def __init__(self, now: Callable[[], float], *, total_max: int, task: Callable[[str], TaskSpec]) -> None:
        self._now = now
        self._total_max = total_max
        self._task = task
        self._by_function: Counter[str] = Counter()
        self._by_task: Counter[str] = Counter()
        self._interval_s: float | None = None
        self._last_start_s = now()
        self.queued = 0
        self.draining = False
        #: Called with the function of each that no longer waits.
        self.on_leave: list[Callable[[str], None]] = []

    def check(self, function: FunctionSpec, task: str) -> None:
        """Raise Draining, CapacityExceeded or QuotaExceeded when one more may not wait."""
        if self.draining:
            raise Draining("the gateway is shutting down and takes no new work", retry_after_s=RETRY_MIN_S)
        if self.queued >= self._total_max:
            raise CapacityExceeded(
                f"{self.queued} invocations wait already, which is scheduler.max_queued",
                component="admission",
                retry_after_s=self._retry_after_s(self.queued - self._total_max + 1),
            )
        waiting, limit = self._by_function[function.name], function.max_queued
        if waiting >= limit:
            raise self._full("function", function.name, waiting, limit)
        waiting, limit = self._by_task[task], min(self._task(task).max_queued, share_of(self._total_max))
        if waiting >= limit:
            raise self._full("task", task, waiting, limit)

    def enter(self, function: str, task: str) -> None:
        """One more waits."""
        self.queued += 1
        self._by_function[function] += 1
        self._by_task[task] += 1

    def leave(self, function: str, task: str) -> None:
        """One that waited was started, or has ended."""
        self.queued -= 1
        self._take(self._by_function, function)
        self._take(self._by_task, task)
        now_s = self._now()
        interval_s = now_s - self._last_start_s
        self._last_start_s = now_s
        past_s = interval_s if self._interval_s is None else self._interval_s
        self._interval_s = past_s + SMOOTHING * (interval_s - past_s)
        for on_leave in self.on_leave:
            on_leave(function)

    def waiting(self, function: str) -> int:
        """Invocations of the function that wait now."""
        return self._by_function[function]

    def _full(self, kind: str, name: str, waiting: int, limit: int) -> QuotaExceeded:
        return QuotaExceeded(
            f"{waiting} invocations of {kind} {name!r} wait already ({kind}s.{name}.max_queued)",
            component="admission",
            retry_after_s=self._retry_after_s(waiting - limit + 1),
        )

    def _retry_after_s(self, places: int) -> float:
        """Seconds until so many places are free at the present pace, within bounds."""
        pace_s = RETRY_MIN_S if self._interval_s is None else self._interval_s
        return min(RETRY_MAX_S, max(RETRY_MIN_S, places * pace_s))

    @staticmethod
    def _take(counter: Counter[str], name: str) -> None:
        counter[name] -= 1
        if counter[name] <= 0:
            del counter[name]


class PendingFunctions:
    """Queued invocations that the scheduler does not know of yet; ``expire`` ends one at its queue_timeout."""

    def __init__(
        self,
        functions: Registry,
        outside: OutsideQueue,
        expire: Callable[[LiveInvocation, str], None],
        now: Callable[[], float],
    ) -> None:
        self._functions = functions
        self._outside = outside
        self._expire = expire
        self._now = now
        #: Each with what is shown of it.
        self._held: dict[int, tuple[LiveInvocation, OutsideWait]] = {}
        #: Since when each has waited, also after it was let go, until it is asked for.
        self._since_s: dict[int, float] = {}
        #: Their trajectories, whose later actions wait behind them.
        self._trajectories: Counter[str | None] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def take(self, invocation: LiveInvocation) -> bool:
        """Hold it back if it may not start yet; whether it does."""
        record, function, action = invocation.record, invocation.function, invocation.action
        ready = self._functions.preparation.of(record.function).status == "ready"
        if function is None or (ready and not (record.trajectory and self._trajectories[record.trajectory])):
            return False
        since_s = self._since_s.setdefault(record.seq, self._now() if action is None else action.submitted_s)
        timeout_s = function.queue_timeout_s if action is None else action.queue_timeout_s
        left_s = max(0.0, since_s + timeout_s - self._now())
        wait = OutsideWait(
            id=record.id,
            function=record.function,
            task=record.task,
            trajectory=record.trajectory,
            since_s=since_s,
            what=("trajectory", record.trajectory) if ready else ("function", record.function),
            why=partial(self._missing, function, record.trajectory),
        )
        self._outside.enter(wait)
        self._held[record.seq] = invocation, wait
        self._trajectories[record.trajectory] += 1
        invocation.retry = asyncio.get_running_loop().call_later(left_s, self._late, invocation, timeout_s)
        return True

    def _missing(self, function: FunctionSpec, trajectory: str | None) -> Cause:
        if self._functions.preparation.of(function.name).status == "ready":
            return Cause(kind="trajectory", text=f"the earlier actions of trajectory {trajectory}")
        return self._functions.missing(function)

    def leave(self, invocation: LiveInvocation) -> float | None:
        """It starts or has ended; since when it waited, if it was held back."""
        seq = invocation.record.seq
        if (held := self._held.pop(seq, None)) is not None:
            self._outside.leave(held[1])
            self._trajectories[invocation.record.trajectory] -= 1
        return self._since_s.pop(seq, None)

    def let_go(self) -> list[LiveInvocation]:
        """Take all of them out, in order; who may not start yet is to be held back again.

        What waited for a function that has changed meanwhile is of the new one.
        """
        held = [invocation for invocation, _ in self._held.values()]
        for _, wait in self._held.values():
            self._outside.leave(wait)
        self._held.clear()
        self._trajectories.clear()
        for invocation in held:
            assert invocation.retry is not None
            invocation.retry.cancel()
            invocation.retry = None
            with suppress(NotFound):
                current = self._functions.get(invocation.record.function)
                if current != invocation.function:
                    invocation.function, invocation.action = current, None
                    invocation.record.revision = current.revision
        return held

    def _late(self, invocation: LiveInvocation, timeout_s: float) -> None:
        result = self._functions.preparation.of(invocation.record.function)
        why = f"{result.status}: {result.problem}" if result.problem else result.status
        self._expire(invocation, f"waited longer than queue_timeout, {timeout_s:g} s: its function is {why}")


class LostSandboxes:
    """Which trajectories have lost their sandbox while nobody was told yet."""

    def __init__(
        self, living: Callable[[], Sequence[LiveInvocation]], stop: Callable[[LiveInvocation, str], object]
    ) -> None:
        self._living = living
        self._stop = stop
        #: By trajectory: with whose end its loss is told, and what is told to the others.
        self._losses: dict[str, tuple[LiveInvocation, str]] = {}

    def observe(self, invocation: LiveInvocation, outcome: Outcome) -> Outcome:
        """Return the end of a try as it is to be told; if it tells a loss, stop all that was to run in that sandbox."""
        trajectory = invocation.record.trajectory
        if invocation.loss is not None and (outcome.state is State.CANCELLED or CANCEL_ASKED in outcome.detail):
            lost = replace(outcome, state=State.FAILED, reason=Reason.ENVIRONMENT_LOST, detail={FILES_LOST: True})
            return replace(lost, message=invocation.loss, component="sandbox")
        if trajectory is not None and invocation.loss is None and FILES_LOST in outcome.detail:
            self._losses[trajectory] = (invocation, f"the sandbox that it was to run in was lost: {outcome.message}")
            self.check(self._living())
        return outcome

    def check(self, invocations: Sequence[LiveInvocation]) -> None:
        """Stop those whose sandbox was lost before they began in it."""
        for invocation in invocations if self._losses else ():
            record = invocation.record
            first, message = self._losses.get(record.trajectory or "", (invocation, ""))
            under_way = record.terminal or (record.state is State.RUNNING and record.begun)
            if first is not invocation and invocation.inside and not under_way:
                invocation.loss = message
                self._stop(invocation, message)

    def ended(self, invocation: LiveInvocation) -> None:
        """Tell its end to whoever waits for it: what is accepted from now on may begin anew."""
        invocation.ended.set()
        trajectory = invocation.record.trajectory or ""
        if self._losses.get(trajectory, (None, ""))[0] is invocation:
            del self._losses[trajectory]


#: Compiled schemas that are kept: one for each living revision.
COMPILED_MAX = 4096


#: Bytes of an input up to which it is checked at once: jsonschema takes a microsecond for each, and others wait.
INLINE_MAX_BYTES = 16 * 2**10


class InputVerdict(NamedTuple):
    """Whether an input fits this form of its function."""

    function: FunctionSpec
    error: InvalidInput | None


class Inputs:
    """Checks inputs against the schemas of their functions."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[str, str], Any] = {}
        #: One is checked aside at a time: more would only take the interpreter from the loop.
        self._aside = asyncio.Lock()

    async def checked_aside(self, function: FunctionSpec, input: Mapping[str, object]) -> InputVerdict:
        """Check a large input in a thread, while others are served."""
        async with self._aside:
            try:
                await asyncio.to_thread(self.check, function, input)
            except InvalidInput as error:
                return InputVerdict(function, error)
        return InputVerdict(function, None)

    def check(self, function: FunctionSpec, input: Mapping[str, object]) -> None:
        """Raise InvalidInput with the JSON path of the first thing that does not fit."""
        validator = self._validator(function)
        if function.input_schema is not None:
            added = kind_of(function).added_fields
            input = {name: value for name, value in input.items() if name not in added}
        error = None if validator is None else best_match(validator.iter_errors(input))
        if error is not None:
            raise InvalidInput(
                f"{error.json_path}: {_message(error)}; tangram functions show {function.name} says what it takes",
                component="gateway",
                detail={"path": error.json_path},
            )

    def _validator(self, function: FunctionSpec) -> Any:
        """Any: jsonschema's validators have no common type. None where any object will do."""
        key = (function.name, function.revision)
        if key not in self._compiled:
            if len(self._compiled) >= COMPILED_MAX:
                self._compiled.clear()
            schema = input_schema(function)
            self._compiled[key] = None if schema is None else InputValidator(schema)
        return self._compiled[key]


#: The types of plain items, by their name in a schema, and the keywords beside which only their size is looked at.
PLAIN: dict[str, set[type]] = {"string": {str}, "integer": {int}, "number": {int, float}}
PLAIN_KEYWORDS = frozenset({"type", "description", "title", "examples", "minimum", "maximum"})


def _items(validator: Any, items: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Check items as jsonschema does, plain ones together: there may be millions, at microseconds each.

    The first that does not fit is enough to tell. Any: jsonschema's own signature.
    """
    if not isinstance(instance, list) or "prefixItems" in schema:
        yield from KEYWORDS["items"](validator, items, instance, schema)
        return
    if _are_plain(items, instance):
        return
    for index, each in enumerate(instance):
        errors = list(validator.descend(each, items, path=index))
        if errors:
            yield from errors
            return


def _are_plain(schema: Any, values: Collection[Any]) -> bool:
    """Return whether a schema asks for a plain type alone, and all values are of it and within its bounds."""
    plain: set[type] = set()
    if isinstance(schema, dict) and schema.keys() <= PLAIN_KEYWORDS:
        plain = PLAIN.get(schema.get("type", ""), plain)
    if not (plain and values and set(map(type, values)) <= plain):
        return False
    low, high = schema.get("minimum"), schema.get("maximum")
    return (low is None or low <= min(values)) and (high is None or max(values) <= high)


def _additional(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Check fields that are not declared as jsonschema does; the first that is refused is enough to tell."""
    if allowed is False and isinstance(instance, dict) and "patternProperties" not in schema:
        declared = schema.get("properties", {})
        instance = dict(islice(((name, value) for name, value in instance.items() if name not in declared), 1))
    elif (
        isinstance(instance, dict)
        and not schema.keys() & {"properties", "patternProperties"}
        and _are_plain(allowed, instance.values())
    ):
        return
    yield from KEYWORDS["additionalProperties"](validator, allowed, instance, schema)


KEYWORDS = Draft202012Validator.VALIDATORS
InputValidator: Any = extend(  # type: ignore[no-untyped-call]
    Draft202012Validator, {"items": _items, "additionalProperties": _additional}
)


def _message(error: ValidationError) -> str:
    """Return what does not fit; for an unknown field the nearest, and where one of some is needed, which they are."""
    if error.validator == "additionalProperties" and error.validator_value is False:
        schema: Any = error.schema
        known = sorted(schema.get("properties", {}))
        needed = [name for each in (schema, *schema.get("oneOf", ())) for name in each.get("required", ())]
        unknown = next(name for name in error.instance if name not in known)  # type: ignore[union-attr]
        near = [*get_close_matches(unknown, needed, n=1, cutoff=0.5), *get_close_matches(unknown, known, n=1)]
        hint = f"did you mean {near[0]!r}? It takes " if near else "it takes "
        return f"no field is called {unknown[:100]!r}; {hint}{', '.join(known)}"[:500]
    choices: Any = error.validator_value if error.validator == "oneOf" else ()
    if choices and all(each.keys() == {"required"} and len(each["required"]) == 1 for each in choices):
        return f"needs exactly one of {', '.join(each['required'][0] for each in choices)}"
    return error.message[:500]


class Keys:
    """The keys of living invocations, before those of the store."""

    def __init__(self, store: Store, ttl_s: float, wall: Callable[[], float]) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._wall = wall
        self._living: dict[str, tuple[bytes, LiveInvocation]] = {}

    async def latch(self, request: InvocationRequest, living: Mapping[int, LiveInvocation]) -> LiveInvocation | None:
        """The invocation that has this key already; raises KeyReused when its body was another."""
        key = request.scoped_key
        claim = self._living.get(key)
        if claim is None:
            stored = await self._store.key(key)
            claim = self._living.get(key)  # somebody may have claimed it while the store was read
            if claim is None and stored is not None:
                digest, seq = stored
                known = living.get(seq)  # looked for first: what ends while it is read was read as it was before
                if known is None and (record := await self._store.get(seq)) is not None:
                    known = ended(record)
                claim = None if known is None else (digest, known)
        if claim is None:
            return None
        digest, invocation = claim
        if digest != request.digest:
            raise KeyReused(
                f"Idempotency-Key {request.key!r} was used with another body, or in another trajectory",
                invocation_id=invocation.record.id,
            )
        return invocation

    def claim(self, request: InvocationRequest, invocation: LiveInvocation) -> None:
        """Give a fresh invocation its key."""
        invocation.key = request.scoped_key
        self._living[invocation.key] = (request.digest, invocation)
        self._store.save_key(invocation.key, request.digest, invocation.record.seq, self._wall() + self._ttl_s)

    def refuse(self, invocation: LiveInvocation) -> None:
        """It was not accepted after all: nobody latches on to it any more."""
        if invocation.key is not None:
            self._store.drop_key(invocation.key, invocation.record.seq)

    def leave(self, key: str) -> None:
        """Its invocation has ended: from now on the store tells."""
        self._living.pop(key, None)


#: Reasons that are the machinery's fault: an idempotent function is tried again without being asked to.
INFRASTRUCTURE = frozenset({Reason.ENVIRONMENT_LOST, Reason.NODE_LOST, Reason.GATEWAY_RESTART})
INFRASTRUCTURE_ATTEMPTS = 3


def next_try_s(
    function: FunctionSpec,
    attempt: int,
    outcome: Outcome,
    chance: float,
    left_s: float | None = None,
    *,
    alone: bool = True,
    patience_s: float = 0.0,
) -> float | None:
    """Seconds until try ``attempt + 1``, or None when it is over.

    One that is not ``alone``, but was to go on from the files of a trajectory's lost sandbox, is not tried unasked. One
    that has not begun, as a machine ran short, is tried for ``patience_s`` more, whatever the function says of tries.

    Exponential backoff with full jitter (``chance`` is uniform in [0, 1)), never sooner than the Retry-After
    of an upstream, and never as late as ``left_s``, the age that is left. Without one an upstream may ask for no
    longer than the function waits anyway.
    """
    reason = outcome.reason
    if reason is None or reason is Reason.CANCELLED or CANCEL_ASKED in outcome.detail:
        return None
    spec = function.retry
    by_function = reason in spec.on and attempt < spec.max_attempts
    bereft = not alone and FILES_LOST in outcome.detail
    part = chance if spec.jitter == "full" else 1.0
    wait_s = max(backoff_s(attempt, spec.backoff_s, spec.backoff_max_s, part), outcome.retry_after_s or 0.0)
    if NOT_BEGUN in outcome.detail and wait_s < patience_s:
        return wait_s
    again = reason in INFRASTRUCTURE and not bereft
    by_machinery = again and function.idempotent and attempt < INFRASTRUCTURE_ATTEMPTS
    if not by_function and not by_machinery:
        return None
    bound_s = max(spec.backoff_max_s, function.queue_timeout_s) if left_s is None else left_s
    return wait_s if wait_s < bound_s else None


# Invocations: the sequence accept, formulate, record, submit, settle. It neither decides nor formats.
#
# An asynchronous call, and every call with an Idempotency-Key, is durable before it is submitted. A synchronous one
# without a key dies with its connection anyway: its record follows with the next transaction.

GONE, CANCELLED = "its caller went away", "cancelled by request"
#: Of the kernel: numbers of the process itself may be somebody's who wants them again, and are alike after a fork.
CHANCE = random.SystemRandom()
#: Calls of a batch that are accepted in one turn of the event loop.
YIELD_EVERY = 64


class Invocations:
    """All invocations. Use from one event loop; `bind` it to its engine before the first call."""

    def __init__(
        self,
        *,
        server: ServerConfig,
        functions: Registry,
        history: History,
        store: Store,
        logs: Logs,
        admission: Admission,
        held: HeldInputs,
        outside: OutsideQueue,
        now: Callable[[], float],
        wall: Callable[[], float] = time.time,
        chance: Callable[[], float] = CHANCE.random,
    ) -> None:
        self._server = server
        self._functions = functions
        self._history = history
        self._store, self._logs = store, logs
        self._admission = admission
        self._held = held
        self._inputs = Inputs()
        self._now = now
        self._wall = wall
        self._chance = chance
        #: Set by `bind`.
        self.engine: Engine
        self._living: dict[int, LiveInvocation] = {}
        self._by_action: dict[str, LiveInvocation] = {}
        #: Actions that begin once the disk has taken that they do.
        self._beginning: set[str] = set()
        self._keys = Keys(store, server.idempotency_ttl_s, wall)
        self.pending_functions = PendingFunctions(functions, outside, self._late, now)
        #: What is accepted now: the loop holds tasks weakly.
        self._accepting: set[asyncio.Future[list[LiveInvocation | CodedError]]] = set()
        self._closing = False
        self._losses = LostSandboxes(lambda: self.living, self.stop)
        #: Called with each record that is accepted or recovered, that starts, and that has ended.
        self.on_accept: list[Callable[[Record], None]] = []
        self.on_start: list[Callable[[Record], None]] = []
        self.on_end: list[Callable[[Record], None]] = []
        #: Called when one goes on without its caller, and when no later gateway can want the end of such a one.
        self.on_detach: list[Callable[[LiveInvocation], None]] = []
        self.on_settled: list[Callable[[LiveInvocation], None]] = []

    def bind(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def living(self) -> tuple[LiveInvocation, ...]:
        """Invocations that have not ended, in order of acceptance."""
        return tuple(self._living.values())

    def detach_scheduler(self) -> None:
        """From now on what the scheduler ends has not ended for the record: the next gateway decides."""
        self._closing = True

    # Accept

    async def invoke(self, request: InvocationRequest) -> LiveInvocation:
        """Accept and submit one; the caller attends until `leave`. Raises TangramError when it is refused."""
        (verdict,) = await self.invoke_all([request])
        if isinstance(verdict, CodedError):
            raise verdict
        return verdict

    async def invoke_all(self, requests: Sequence[InvocationRequest]) -> list[LiveInvocation | CodedError]:
        """Accept and submit many with one commit and one scheduling pass; each has its own verdict.

        What is on its way to the disk is submitted once it is there, also if whoever asked is gone by then.
        """
        if len(requests) == 1 and not requests[0].durable:
            return await self._accept_all(requests)
        accepting = asyncio.ensure_future(self._accept_all(requests))
        self._accepting.add(accepting)
        accepting.add_done_callback(self._accepting.discard)
        return await asyncio.shield(accepting)

    async def _accept_all(self, requests: Sequence[InvocationRequest]) -> list[LiveInvocation | CodedError]:
        verdicts: list[LiveInvocation | CodedError] = []
        fresh: list[LiveInvocation] = []
        durable = False
        for index, request in enumerate(requests, 1):
            if index % YIELD_EVERY == 0:
                await asyncio.sleep(0)
            try:
                checked = await self._checked(request)
                invocation = await self._keys.latch(request, self._living) if request.key is not None else None
                if invocation is None:
                    invocation = self._accept(request, checked)
                    fresh.append(invocation)
                invocation.callers += 1
                verdicts.append(invocation)
            except Exception as error:  # noqa: BLE001  # a fault in one leaves no other without its scheduler
                verdicts.append(as_refusal(error))
            durable = durable or request.durable
        if durable:
            await self._make_durable(fresh)
            verdicts = [unless_refused(verdict) for verdict in verdicts]
            await self._write_ends(verdicts)
        if durable or len(fresh) > 1:  # there was time for some to end
            fresh = [invocation for invocation in fresh if not invocation.record.terminal]
        self.submit(fresh)
        return verdicts

    async def _checked(self, request: InvocationRequest) -> InputVerdict | None:
        function = self._functions.config.functions.get(request.function)
        if function is None or len(request.body) <= INLINE_MAX_BYTES:
            return None
        return await self._inputs.checked_aside(function, request.input)

    def _accept(self, request: InvocationRequest, checked: InputVerdict | None) -> LiveInvocation:
        """Everything that can refuse happens here, before any work; ``checked`` is what is known of its input."""
        self._store.check()
        function = self._functions.get(request.function)
        self._functions.preparation.of(function.name).check(function, asyncio.get_running_loop().time())
        self._admission.check(function, request.task)
        self._held.check(len(request.body), request.task)
        if request.trajectory is not None:
            self.engine.check_trajectory(request.trajectory, request.task, living=request.living)
        if checked is None or checked.function is not function:
            self._inputs.check(function, request.input)
        elif checked.error is not None:
            raise checked.error
        seq = self._store.next_seq()
        record = Record(
            seq=seq,
            id=new_id(seq),
            function=function.name,
            revision=function.revision,
            task=request.task,
            trajectory=request.trajectory,
            parent=self._parent(request),
            mode=request.mode,
            accepted_s=self._wall(),
            input=request.body,
            detached=request.detached or request.durable,
            options=request.options(function),
            callback="pending" if request.callback_url is not None else None,
        )
        action = self._formulate(record, function, request.input)
        log = self._logs.open(seq, function.log_limit_bytes)
        invocation = LiveInvocation(
            record=record, function=function, input=request.input, log=log, action=action, made_by=request.call
        )
        self.enter(invocation)
        if request.key is not None:
            self._keys.claim(request, invocation)
        self._store.create(record)
        return invocation

    def enter(self, invocation: LiveInvocation) -> None:
        """It lives from now on."""
        record = invocation.record
        self._living[record.seq] = invocation
        self._held.take(len(record.input or b""), record.task)
        if record.state is State.QUEUED:
            self._admission.enter(record.function, record.task)
        for on_accept in self.on_accept:
            on_accept(record)

    def _parent(self, request: InvocationRequest) -> str | None:
        """Return the parent, on whose units it runs; raises InvalidInput for one of another trajectory and task."""
        if request.parent is None:
            return None
        living = self._living.get(seq_of(request.parent))
        record = None if living is None else living.record
        if record is None or (
            record.task != request.task and (record.trajectory is None or record.trajectory != request.trajectory)
        ):
            message = f"parent {request.parent!r} is no living invocation of this trajectory or task"
            raise InvalidInput(message, detail={"path": "parent"})
        return request.parent

    async def _write_ends(self, verdicts: list[LiveInvocation | CodedError]) -> None:
        """Wait for the ends of what was asked for before to be on disk: until then a restart could tell another."""
        for place, verdict in enumerate(verdicts):
            if isinstance(verdict, LiveInvocation) and verdict.record.terminal and not verdict.ended.is_set():
                try:
                    await self._store.commit()
                except StorageUnavailable as error:
                    verdicts[place] = error

    async def _make_durable(self, fresh: Sequence[LiveInvocation]) -> None:
        """Commit, or end all of them: part of a refused batch may be on disk already, where it must not wait."""
        try:
            await self._store.commit()
        except StorageUnavailable as error:
            for invocation in fresh:
                invocation.refusal, invocation.record.callback = error, None
                self._keys.refuse(invocation)
                if not invocation.record.terminal:
                    invocation.record.end(State.FAILED, Reason.INTERNAL, error.message, self._wall())
                    self.finish(invocation, waited=True)

    # Submit

    def _formulate(self, record: Record, function: FunctionSpec, input: Mapping[str, object]) -> Action:
        """The action of the record's present try; raises InvalidInput or Unsatisfiable."""
        timeout_s = record.options.get("timeout_s")
        parent = self._living.get(seq_of(record.parent)) if record.parent is not None else None
        action = formulate(
            function,
            id=action_id_of(record.id, record.attempt),
            input=input,
            trajectory=record.trajectory,
            task=record.task,
            history=self._history,
            now_s=self._now(),
            timeout_s=timeout_s if isinstance(timeout_s, float) else None,
            parent=None if parent is None else parent.action_id,
            attempt=record.attempt,
        )
        if record.mode is not Mode.ASYNC:
            return action
        left_s = record.age_left_s(self._wall(), self._server.max_age_s)
        return action if left_s is None else replace(action, queue_timeout_s=min(action.queue_timeout_s, left_s))

    def submit(self, invocations: Sequence[LiveInvocation]) -> None:
        """Hand the present tries to the scheduler in one pass."""
        ready: list[LiveInvocation] = []
        submissions: list[Submission] = []
        for invocation in invocations:
            if self.pending_functions.take(invocation):
                continue
            try:
                submissions.append(self._submission(invocation, self.pending_functions.leave(invocation)))
                ready.append(invocation)
            except CodedError as error:
                self._refuse(invocation, error)
        self._hand_over(ready, submissions)

    def _hand_over(self, ready: Sequence[LiveInvocation], submissions: Sequence[Submission]) -> None:
        if not ready:
            return
        for invocation, settled in zip(ready, self.engine.submit(submissions), strict=True):
            kept = invocation.record.detached and self.engine.fault is not None  # for the next gateway
            if settled.done() and not kept and self._answered(invocation.action_id) is not None:
                self._refuse(invocation, settled.exception())
        self._losses.check(ready)

    def _late(self, invocation: LiveInvocation, message: str) -> None:
        invocation.record.end(State.TIMED_OUT, Reason.QUEUE_TIMEOUT, message, self._wall())
        invocation.record.dead = invocation.record.mode is Mode.ASYNC
        self.finish(invocation, waited=True)

    def resume(self, invocation: LiveInvocation) -> bool:
        """Take up the present try, which an earlier gateway began; False where that cannot be."""
        record = invocation.record
        assert record.started_s is not None
        began_s = self._now() - max(0.0, self._wall() - record.started_s)
        invocation.resumed = True
        settled = None
        with suppress(CodedError):
            submission = self._submission(invocation, submitted_s=began_s - (record.queue_s or 0.0))
            settled = self.engine.resume(submission, units=record.units, node=record.node or "", started_s=began_s)
        if settled is None:
            self._answered(action_id_of(record.id, record.attempt))
            invocation.resumed = False
        return settled is not None

    def _submission(self, invocation: LiveInvocation, submitted_s: float | None = None) -> Submission:
        record, function = invocation.record, invocation.function
        assert function is not None
        assert invocation.log is not None
        action = invocation.action or self._formulate(record, function, invocation.input)
        if submitted_s is not None:
            action = replace(action, submitted_s=submitted_s)
        invocation.action = None
        invocation.action_id = action.id
        self._by_action[action.id] = invocation
        call = Call(
            function=function,
            input=invocation.input,
            log=invocation.log,
            **record.trace,
            invocation_id=record.id,
            resumed=invocation.resumed,
        )
        return Submission(action=action, call=call)

    # The scheduler's answers (a `manager.engine.Listener`)

    def started(self, action: Action, lease: Lease, queue_s: float) -> None:
        """The action was leased and goes to its runtime."""
        invocation = self._by_action.get(action.id)
        if invocation is None:
            return
        record = invocation.record
        if record.state is State.QUEUED:
            self._admission.leave(record.function, record.task)
        if not invocation.resumed:
            record.start(self._wall(), begun=not invocation.inside)
        record.grant(lease)
        self._store.save(record)
        for on_start in self.on_start:
            on_start(record)

    def begin(self, action_id: str) -> None:
        """The work of a started action begins; raises ActionFailed where the next gateway is to begin it."""
        if self._closing:
            raise _closed()
        record = self._by_action[action_id].record
        record.begin(self._wall())
        self._store.save(record)

    async def begin_written(self, action_id: str) -> None:
        """Wait until it is on disk that an action begins, however long the disk refuses.

        Raises ActionFailed if it has not begun until the gateway has left it to the next one.
        """
        self._beginning.add(action_id)
        try:
            await self._store.durable()
        finally:
            self._beginning.discard(action_id)
        invocation = self._by_action.get(action_id)
        if invocation is None or invocation.record.state is State.QUEUED:
            raise _closed()

    def has_begun(self, invocation: LiveInvocation) -> bool:
        """Whether the work of a started one may be under way."""
        return invocation.record.begun and invocation.action_id not in self._beginning

    def work_began(self, action_id: str) -> None:
        """Note that the runtime is ready for a started action: until now it was overhead, for whoever asks."""
        invocation = self._by_action.get(action_id)
        if invocation is not None and not invocation.resumed and invocation.record.state is State.RUNNING:
            invocation.record.begin(self._wall())

    def settled(self, settlement: Settlement) -> None:
        """The action has ended: so has its invocation, or it waits for another try."""
        invocation = self._answered(settlement.action.id)
        if invocation is None:
            return
        try:
            self._end(invocation, settlement)
        except Exception as error:  # whatever is wrong with us, nobody waits for ever
            logger.exception("an end was not recorded as it was", invocation=invocation.record.id, error=str(error))
            if not invocation.record.terminal:
                self._refuse(invocation, CodedError(f"its end could not be recorded: {error!r}"))

    def _end(self, invocation: LiveInvocation, settlement: Settlement) -> None:
        """Try again, or take the end of the last try."""
        assert invocation.function is not None
        record, now_s = invocation.record, self._wall()
        outcome = self._losses.observe(invocation, settlement.outcome)
        if outcome is not settlement.outcome:
            settlement = replace(settlement, outcome=outcome)
        wait_s = None
        if outcome.reason is not None:
            wait_s = next_try_s(
                invocation.function,
                record.attempt,
                outcome,
                self._chance(),
                record.age_left_s(now_s, self._server.max_age_s),
                alone=record.trajectory is None,
                patience_s=record.patience_s(now_s, invocation.function.queue_timeout_s),
            )
        if wait_s is not None and (record.detached or not self._admission.draining):
            self._try_again(invocation, settlement, wait_s)
            return
        waited = record.state is State.QUEUED
        record.settle(settlement, now_s)
        failed = record.state in (State.FAILED, State.TIMED_OUT, State.LOST) and CANCEL_ASKED not in outcome.detail
        record.dead = record.dead or (failed and record.mode is Mode.ASYNC)
        self.finish(invocation, waited=waited)

    def _answered(self, action_id: str | None) -> LiveInvocation | None:
        """Whose action it was; None where the answer comes too late for the record."""
        invocation = None if action_id is None else self._by_action.pop(action_id, None)
        if invocation is None:
            return None
        invocation.action_id = None
        return None if self._closing or invocation.record.terminal else invocation

    def _try_again(self, invocation: LiveInvocation, settlement: Settlement, wait_s: float) -> None:
        record, outcome = invocation.record, settlement.outcome
        attempt = record.tried(outcome, self._wall(), settlement.execution_s)
        self.requeue(invocation, attempt)
        invocation.resumed = False
        if invocation.log is not None:
            invocation.log.write("system", f"try {attempt.attempt} ended: {outcome.reason}; next in {wait_s:.3f} s")
        # At once, while nobody has its trajectory's turn: what is behind it runs after its last try. Its function was
        # ready for this one, so it is not held back.
        try:
            next_s = self._now() + wait_s
            submission = replace(self._submission(invocation, submitted_s=next_s), not_before_s=next_s)
        except CodedError as error:
            self._refuse(invocation, error)
        else:
            self._hand_over([invocation], [submission])

    def requeue(self, invocation: LiveInvocation, attempt: Attempt) -> None:
        """Put a finished try on record and let it wait for the next."""
        record = invocation.record
        record.attempts = (*record.attempts, attempt)
        record.attempt += 1
        if record.state is State.RUNNING:
            self.take_back(invocation)
        self._store.save(record)

    def take_back(self, invocation: LiveInvocation) -> None:
        """A started one waits again."""
        record = invocation.record
        record.take_back()
        self._admission.enter(record.function, record.task)
        self._store.save(record)

    def _refuse(self, invocation: LiveInvocation, error: BaseException | None) -> None:
        """The scheduler did not take it."""
        refusal = error if isinstance(error, CodedError) else CodedError(str(error or "it was dropped"))
        reasons = {"quota_exceeded": Reason.QUOTA, "capacity_exceeded": Reason.QUOTA, "internal": Reason.INTERNAL}
        invocation.refusal = refusal
        refusal.invocation_id = invocation.record.id
        waited = invocation.record.state is State.QUEUED
        reason = reasons.get(refusal.code, Reason.INVALID_INPUT)
        invocation.record.end(State.FAILED, reason, refusal.message, self._wall(), ran=True)
        self.finish(invocation, waited=waited)

    def finish(self, invocation: LiveInvocation, *, waited: bool) -> None:
        """The one end of every invocation; ``waited`` tells that it never left the queue."""
        record = invocation.record
        if waited:
            self._admission.leave(record.function, record.task)
        self._store.save(record)
        logger.info("settled", **record.summary())
        for on_end in self.on_end:
            on_end(record)
        self._drop(invocation)

    def _drop(self, invocation: LiveInvocation) -> None:
        if self._living.pop(invocation.record.seq, None) is not None:
            self._held.give(len(invocation.record.input or b""), invocation.record.task)
        self.pending_functions.leave(invocation)
        if invocation.key is not None:
            self._keys.leave(invocation.key)
        self._logs.close(invocation.record.seq)
        if not invocation.record.detached:
            self._settle(invocation)
            return
        self._report_written(invocation)

    def _report_written(self, invocation: LiveInvocation) -> None:
        """Tell who waits for durable work, and who keeps its tries, once a restart could not tell another end."""
        self._store.committed().add_done_callback(lambda done: self._report_end(done, invocation))

    def _report_end(self, done: asyncio.Future[None], invocation: LiveInvocation) -> None:
        if not done.cancelled() and done.exception() is None:
            self._settle(invocation)
        elif not self._closing:  # the store tells of a failing disk itself, and keeps the record for another try
            self._losses.ended(invocation)
            asyncio.get_running_loop().call_later(RETRY_MIN_S, self._report_written, invocation)

    def _settle(self, invocation: LiveInvocation) -> None:
        """No gateway asks for its end again: whoever holds its tries, a node above all, may forget them."""
        for on_settled in self.on_settled:
            on_settled(invocation)
        self._losses.ended(invocation)

    # Look up, wait, cancel

    def outlives_caller(self, action_id: str) -> bool:
        """Whether the submitted action belongs to an invocation that goes on without its caller."""
        invocation = self._by_action.get(action_id)
        return invocation is not None and invocation.record.detached

    async def get(self, invocation_id: str) -> LiveInvocation:
        """The invocation with this id, living or ended; raises NotFound or InvalidInput."""
        seq = seq_of(invocation_id)
        living = self._living.get(seq)
        if living is not None:
            require(living.record, invocation_id)
            return living
        return ended(require(await self._store.get(seq), invocation_id))

    def shown(self, record: Record) -> Record:
        """The record as it is told: with its times as they stand, if it has not ended."""
        living = self._living.get(record.seq)
        if living is not None and living.record.state is record.state:
            record = living.record
        return record.as_of(self._wall())

    async def cancel(self, invocation_id: str, message: str = CANCELLED) -> LiveInvocation:
        """Ask for the end of an invocation; raises Conflict when it has ended already."""
        invocation = await self.get(invocation_id)
        if not self.stop(invocation, message):
            state = invocation.record.state.value
            raise Conflict(f"invocation {invocation_id} is {state} already", invocation_id=invocation_id)
        return invocation

    def leave(self, invocation: LiveInvocation) -> None:
        """A caller no longer attends: the last one takes an attached invocation with it."""
        invocation.callers -= 1
        if invocation.callers <= 0 and not invocation.record.detached and not invocation.record.terminal:
            self.stop(invocation, GONE)

    async def detach(self, invocation: LiveInvocation) -> None:
        """Let it go on without its caller, durably from now on."""
        invocation.record.detached = True
        self._store.save(invocation.record)
        for on_detach in self.on_detach:
            on_detach(invocation)
        await self._store.commit()

    def stop(self, invocation: LiveInvocation, message: str = CANCELLED) -> bool:
        """Ask for the end of a living invocation; False if it has ended."""
        record = invocation.record
        if record.terminal:
            return False
        if invocation.action_id is not None:
            return self.engine.cancel(invocation.action_id, message)
        if invocation.retry is not None:
            invocation.retry.cancel()
        lost = invocation.loss is not None
        state, reason = (State.FAILED, Reason.ENVIRONMENT_LOST) if lost else (State.CANCELLED, Reason.CANCELLED)
        record.end(state, reason, message, self._wall())
        record.dead = lost and record.mode is Mode.ASYNC
        self.finish(invocation, waited=True)
        return True


#: Records that one purge reads at a time.
PAGE = 500


class DeadLetters:
    """List by `Store.find` with ``dead``; here they are sent again or let go of."""

    def __init__(self, invocations: Invocations, store: Store) -> None:
        self._invocations = invocations
        self._store = store
        #: Redrives under way, by the id of the dead letter.
        self._redrives: dict[str, asyncio.Task[LiveInvocation]] = {}

    async def redrive(self, invocation_id: str) -> LiveInvocation:
        """Submit the same call anew, as an invocation of its own that names the old one, which leaves the list.

        Two that do so at once get the same invocation. Raises NotFound, Conflict if it is no dead letter, and
        whatever refuses a submission.
        """
        task = self._redrives.get(invocation_id)
        if task is None:
            task = self._redrives[invocation_id] = asyncio.create_task(self._redrive(invocation_id))
            task.add_done_callback(lambda _: self._redrives.pop(invocation_id))
        return await asyncio.shield(task)

    async def _redrive(self, invocation_id: str) -> LiveInvocation:
        record = await self._dead(invocation_id)
        body = record.input or b"{}"
        timeout_s = record.options.get("timeout_s")
        request = InvocationRequest(
            function=record.function,
            input=serialization.loads_object(body),
            body=body,
            mode=Mode.ASYNC,
            task=record.task,
            trajectory=record.trajectory,
            timeout_s=timeout_s if isinstance(timeout_s, float) else None,
            **record.trace,
            redrive_of=record.id,
            key=f"redrive-of:{record.id}",
        )
        invocation = await self._invocations.invoke(request)
        self._let_go(record)
        return invocation

    async def purge(self, invocation_id: str) -> None:
        """Take one off the list; its record stays. Raises NotFound or Conflict."""
        self._let_go(await self._dead(invocation_id))
        await self._store.commit()

    async def purge_all(self, function: str | None) -> int:
        """Take all (of one function) off the list; returns how many."""
        count, before = 0, None
        while True:
            page = await self._store.find(Filter(dead=True, function=function, before=before, limit=PAGE))
            for record in page.records:
                self._let_go(record)
            await self._store.commit()
            count += len(page.records)
            before = page.before
            if before is None:
                return count

    async def _dead(self, invocation_id: str) -> Record:
        record = (await self._invocations.get(invocation_id)).record
        if not record.dead:
            raise Conflict(f"invocation {invocation_id} is no dead letter", invocation_id=invocation_id)
        return record

    def _let_go(self, record: Record) -> None:
        record.dead = False
        self._store.note("let_go", record.seq)
