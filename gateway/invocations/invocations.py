"""Invocations: the sequence accept, formulate, record, submit, settle. It neither decides nor formats.

An asynchronous call, and every call with an Idempotency-Key, is durable before it is submitted. A synchronous one
without a key dies with its connection anyway: its record follows with the next transaction.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import structlog

from gateway.config.sections import ServerConfig
from gateway.invocations.admission import Admission, HeldInputs
from gateway.invocations.held_back import HeldBack
from gateway.invocations.idempotency import Keys
from gateway.invocations.inputs import Inputs
from gateway.invocations.invocation import (
    FunctionLookup,
    InvocationRequest,
    LiveInvocation,
    Observer,
    as_refusal,
    ended,
    unless_refused,
)
from gateway.invocations.logs import Logs
from gateway.invocations.losses import EnvironmentLosses
from gateway.invocations.record import Mode, Record, new_id, seq_of
from gateway.invocations.retries import next_try_s
from gateway.store.listing import Filter, Page
from gateway.store.store import Store, require
from manager.action import Action, Lease, Settlement, State
from manager.engine import Engine, Submission
from manager.errors import CANCEL_ASKED, ActionFailed, CodedError, Conflict, InvalidInput, Reason, StorageUnavailable
from manager.executor import Call
from manager.formulation import formulate
from manager.function import FunctionSpec
from manager.learning import History
from tangram.types import Attempt

logger = structlog.get_logger("gateway.invocations")
GONE = "its caller went away"
#: Of the kernel: numbers of the process itself may be somebody's who wants them again, and are alike after a fork.
CHANCE = random.SystemRandom()
#: Calls of a batch that are accepted in one turn of the event loop.
BREATH = 64


class Invocations:
    """All invocations. Use from one event loop; `bind` it to its engine before the first call."""

    def __init__(
        self,
        *,
        server: ServerConfig,
        functions: FunctionLookup,
        history: History,
        store: Store,
        logs: Logs,
        admission: Admission,
        held: HeldInputs,
        observer: Observer,
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
        self._observer = observer
        self._inputs = Inputs()
        self._now = now
        self._wall = wall
        self._chance = chance
        self._engine: Engine | None = None
        self._living: dict[int, LiveInvocation] = {}
        self._by_action: dict[str, LiveInvocation] = {}
        self._keys = Keys(store, server.idempotency_ttl_s, wall)
        self.held_back = HeldBack(functions, self._late, now)
        self._closing = False
        self._losses = EnvironmentLosses(lambda: self.living, self._stop)
        #: Called with each ended record (callbacks).
        self.on_end: list[Callable[[Record], None]] = []
        #: Called when one goes on without its caller, and when no later gateway can want its end (takeover).
        self.on_detach: list[Callable[[LiveInvocation], None]] = []
        self.on_settled: list[Callable[[LiveInvocation], None]] = []

    def bind(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "bind an engine first"
        return self._engine

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
        """Accept and submit many with one commit and one scheduling pass; each has its own verdict."""
        verdicts: list[LiveInvocation | CodedError] = []
        fresh: list[LiveInvocation] = []
        for index, request in enumerate(requests, 1):
            if index % BREATH == 0:
                await asyncio.sleep(0)
            try:
                invocation = await self._keys.latch(request, self._living) if request.key is not None else None
                if invocation is None:
                    invocation = self._accept(request)
                    fresh.append(invocation)
                invocation.callers += 1
                verdicts.append(invocation)
            except Exception as error:  # noqa: BLE001  # a fault in one leaves no other without its scheduler
                verdicts.append(as_refusal(error))
        if any(request.durable for request in requests):
            await self._make_durable(fresh)
            verdicts = [unless_refused(verdict) for verdict in verdicts]
        self.submit([invocation for invocation in fresh if not invocation.record.terminal])
        return verdicts

    def _accept(self, request: InvocationRequest) -> LiveInvocation:
        """Everything that can refuse happens here, before any work."""
        self._store.check()
        function = self._functions.get(request.function)
        self._functions.readiness(function.name).check(function, asyncio.get_running_loop().time())
        self._admission.check(function, request.task)
        self._held.check(len(request.body))
        if request.trajectory is not None:
            self.engine.check_trajectory(request.trajectory, living=request.living)
        self._inputs.check(function, request.input)
        seq = self._store.next_seq()
        record = Record(
            seq=seq,
            id=new_id(seq),
            function=function.name,
            revision=function.revision,
            task=request.task,
            trajectory=request.trajectory,
            parent=self._parent(request.parent),
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
        self._held.take(len(record.input or b""))
        if record.state is State.QUEUED:
            self._admission.enter(record.function, record.task)
        self._observer.accepted(record)

    def _parent(self, parent: str | None) -> str | None:
        if parent is not None and seq_of(parent) not in self._living:
            raise InvalidInput(f"parent {parent!r} is no living invocation", detail={"path": "parent"})
        return parent

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
            id=record.action_id,
            input=input,
            trajectory=record.trajectory,
            task=record.task,
            history=self._history,
            now_s=self._now(),
            timeout_s=timeout_s if isinstance(timeout_s, float) else None,
            parent=None if parent is None else parent.action_id,
            attempt=record.attempt,
        )
        left_s = record.age_left_s(self._wall(), self._server.max_age_s)
        return action if left_s is None else replace(action, queue_timeout_s=min(action.queue_timeout_s, left_s))

    def submit(self, invocations: Sequence[LiveInvocation]) -> None:
        """Hand the present tries to the scheduler in one pass."""
        ready: list[LiveInvocation] = []
        submissions: list[Submission] = []
        for invocation in (each for each in invocations if not self.held_back.take(each)):
            try:
                submissions.append(self._submission(invocation, self.held_back.leave(invocation)))
                ready.append(invocation)
            except CodedError as error:
                self._refuse(invocation, error)
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
            self._answered(record.action_id)
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
        began = partial(self._work_began, record, record.attempt)
        call = Call(
            function=function,
            input=invocation.input,
            log=invocation.log,
            **record.trace,
            context={"invocation_id": record.id},
            begun=None if invocation.inside or invocation.resumed else began,
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
        self._observer.moved(record)

    def begin(self, action_id: str) -> None:
        """The work of a started action begins; raises ActionFailed where the next gateway is to begin it."""
        if self._closing:
            raise ActionFailed(Reason.GATEWAY_RESTART, "the gateway shuts down", component="gateway")
        record = self._by_action[action_id].record
        record.begin(self._wall())
        self._store.save(record)

    def _work_began(self, record: Record, attempt: int) -> None:
        """Its runtime is ready for it: until now it was overhead, for whoever asks while it runs."""
        if record.attempt == attempt and record.state is State.RUNNING:
            record.begin(self._wall())

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
        record = invocation.record
        left_s = record.age_left_s(self._wall(), self._server.max_age_s)
        patience_s = record.patience_s(self._wall(), invocation.function.queue_timeout_s)
        settlement = replace(settlement, outcome=self._losses.see(invocation, settlement.outcome))
        alone, outcome = record.trajectory is None, settlement.outcome
        tried = (invocation.function, record.attempt, outcome, self._chance(), left_s)
        wait_s = next_try_s(*tried, alone=alone, patience_s=patience_s)
        if wait_s is not None and (record.detached or not self._admission.draining):
            self._try_again(invocation, settlement, wait_s)
            return
        waited = record.state is State.QUEUED
        record.settle(settlement, self._wall())
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
        if not self._admission.draining:  # else the next gateway tries
            invocation.retry = asyncio.get_running_loop().call_later(wait_s, self.submit, [invocation])

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
        self._observer.moved(record)
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
        self._observer.settled(record)
        logger.info("settled", **record.summary())
        for on_end in self.on_end:
            on_end(record)
        self._drop(invocation)

    def _drop(self, invocation: LiveInvocation) -> None:
        if self._living.pop(invocation.record.seq, None) is not None:
            self._held.give(len(invocation.record.input or b""))
        self.held_back.leave(invocation)
        self._keys.leave(invocation)
        self._logs.close(invocation.record.seq)
        if not invocation.record.detached:
            self._tell(None, invocation)
            return
        # Who waits for durable work is told its end only when a restart could not tell another.
        self._store.committed().add_done_callback(lambda done: self._tell(done, invocation))

    def _tell(self, done: asyncio.Future[None] | None, invocation: LiveInvocation) -> None:
        # The store tells of a failing disk itself, and keeps the record for another try.
        if done is None or (not done.cancelled() and done.exception() is None):
            for on_settled in self.on_settled:
                on_settled(invocation)
        self._losses.tell(invocation)

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

    async def find(self, chosen: Filter) -> Page:
        """Records by filter, newest first."""
        return await self._store.find(chosen)

    def shown(self, record: Record) -> Record:
        """The record as it is told: with its times as they stand, if it has not ended."""
        living = self._living.get(record.seq)
        if living is not None and living.record.state is record.state:
            record = living.record
        return record.as_of(self._wall())

    async def wait(self, invocation: LiveInvocation, timeout_s: float | None = None) -> bool:
        """Wait for the end, at most ``timeout_s``; whether it has ended."""
        return await invocation.has_ended(timeout_s)

    async def cancel(self, invocation_id: str, message: str = "cancelled by request") -> LiveInvocation:
        """Ask for the end of an invocation; raises Conflict when it has ended already."""
        invocation = await self.get(invocation_id)
        if not self._stop(invocation, message):
            state = invocation.record.state.value
            raise Conflict(f"invocation {invocation_id} is {state} already", invocation_id=invocation_id)
        return invocation

    def leave(self, invocation: LiveInvocation) -> None:
        """A caller no longer attends: the last one takes an attached invocation with it."""
        invocation.callers -= 1
        if invocation.callers <= 0 and not invocation.record.detached and not invocation.record.terminal:
            self._stop(invocation, GONE)

    async def detach(self, invocation: LiveInvocation) -> None:
        """Let it go on without its caller, durably from now on."""
        invocation.record.detached = True
        self._store.save(invocation.record)
        for on_detach in self.on_detach:
            on_detach(invocation)
        await self._store.commit()

    def _stop(self, invocation: LiveInvocation, message: str) -> bool:
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
