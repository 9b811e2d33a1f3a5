"""Restart: what is taken over from an earlier gateway, and what is left for the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import structlog

from gateway import wire
from gateway.invocations.admission import Admission
from gateway.invocations.invocation import FunctionLookup, LiveInvocation
from gateway.invocations.invocations import GONE, Invocations
from gateway.invocations.logs import Logs
from gateway.invocations.reattach import Reattachment
from gateway.invocations.record import Mode, Record
from gateway.store.store import Store
from manager.errors import NotFound, Reason, StorageUnavailable
from manager.function import FunctionSpec
from manager.outcome import Outcome, State
from tangram.types import Attempt

RESTARTED = "the gateway was restarted"


class Restart:
    """Takes over at the start (`recover`) and leaves behind at the end (`drain`)."""

    def __init__(
        self,
        *,
        invocations: Invocations,
        functions: FunctionLookup,
        store: Store,
        logs: Logs,
        admission: Admission,
        takeover: Reattachment,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._invocations = invocations
        self._functions = functions
        self._store = store
        self._logs = logs
        self._admission = admission
        self._takeover = takeover
        self._wall = wall
        self._log = structlog.get_logger("gateway.restart")

    async def recover(self) -> Mapping[str, int]:
        """Decide on what an earlier gateway left unfinished, in order; returns how many went which way.

        One whose command its sandbox still holds goes on; else what was queued, or was being made ready, runs, and what
        ran runs again when its function is idempotent, else it is ``lost``; one whose caller went down with its
        connection is cancelled.
        """
        again: list[LiveInvocation] = []
        counts = {"queued": 0, "resumed": 0, "rerun": 0, "lost": 0, "cancelled": 0}
        self._takeover.look()
        for record in await self._store.unfinished():
            counts[await self._take_over(record, again)] += 1
        await self._takeover.end_unclaimed()
        self._invocations.submit(again)
        return counts

    async def _take_over(self, record: Record, again: list[LiveInvocation]) -> str:
        function = self._function(record.function)
        limit_bytes = 0 if function is None else function.log_limit_bytes
        log = await self._logs.resume(record.seq, limit_bytes, record.started_s or record.accepted_s)
        given = wire.loads_object(record.input or b"{}")
        invocation = LiveInvocation(record=record, function=function, input=given, log=log)
        was_queued = record.state is State.QUEUED
        self._invocations.enter(invocation)
        if self._takeover.holds(invocation) and self._invocations.resume(invocation):
            self._takeover.take(invocation)
            return "resumed"
        log.pass_over_nothing()
        if record.detached and function is not None and not was_queued and self._takeover.never_started(invocation):
            self._invocations.take_back(invocation)
            was_queued = True
        if not record.detached:
            record.end(State.CANCELLED, Reason.CANCELLED, f"{RESTARTED} and {GONE}", self._wall())
        elif function is None:
            record.end(State.LOST, Reason.GATEWAY_RESTART, f"{RESTARTED} without its function", self._wall())
        elif not was_queued and not function.idempotent:
            record.end(State.LOST, Reason.GATEWAY_RESTART, f"{RESTARTED} while it ran", self._wall())
        if record.terminal:
            record.dead = record.mode is Mode.ASYNC and record.state is State.LOST
            self._invocations.finish(invocation, waited=was_queued)
            return "lost" if record.state is State.LOST else "cancelled"
        if not was_queued:
            self._invocations.requeue(invocation, self._lost_try(record))
        again.append(invocation)
        return "queued" if was_queued else "rerun"

    def _function(self, name: str) -> FunctionSpec | None:
        try:
            return self._functions.get(name)
        except NotFound:
            return None

    def _lost_try(self, record: Record) -> Attempt:
        lost = Outcome(state=State.LOST, reason=Reason.GATEWAY_RESTART, message=RESTARTED)
        return record.tried(lost, self._wall())

    async def drain(self, grace_s: float) -> int:
        """Refuse new work and wait for what runs; returns how many are left for the next gateway."""
        self._admission.draining = True
        await self._invocations.engine.drain(grace_s)
        self._invocations.detach_scheduler()
        with suppress(StorageUnavailable):
            await self._store.commit()  # what was about to begin has begun: nothing else will
        for invocation in self._invocations.living:
            await self._leave_behind(invocation)
        try:
            await self._store.commit()
        except StorageUnavailable as error:
            self._log.error("the next gateway finds the record as it was", reason=error.message)
        return len(self._invocations.living)

    async def _leave_behind(self, invocation: LiveInvocation) -> None:
        """What is detached stays as it is, or runs on, for the next gateway; else what may not run again ends here."""
        record = invocation.record
        assert invocation.function is not None
        waited = record.state is State.QUEUED
        if record.detached:
            self._logs.leave(record.seq)  # what its command says from now on is the next gateway's
            if not waited and not record.begun:
                self._invocations.take_back(invocation)
                waited = True
            if waited or await self._takeover.leave(invocation) or invocation.function.idempotent:
                return
        fault = self._invocations.engine.fault
        if fault is not None:
            record.end(State.FAILED, Reason.INTERNAL, fault, self._wall(), ran=True)
            record.dead = record.mode is Mode.ASYNC
        elif waited:
            message = "the gateway was shut down before it started"
            record.end(State.CANCELLED, Reason.CANCELLED, message, self._wall())
        else:
            message = "the gateway was shut down while it ran"
            record.end(State.LOST, Reason.GATEWAY_RESTART, message, self._wall(), ran=True)
            record.dead = record.mode is Mode.ASYNC
        self._invocations.finish(invocation, waited=waited)
