"""Restart: what is taken over from an earlier gateway, and what is left for the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import structlog

from gateway import wire
from gateway.invocations.admission import RETRY_MIN_S, Admission
from gateway.invocations.invocation import FunctionLookup, LiveInvocation
from gateway.invocations.invocations import GONE, Invocations
from gateway.invocations.logs import Logs
from gateway.invocations.reattach import Reattachment
from gateway.invocations.record import Mode, Record
from gateway.store.store import Store
from manager.action import Outcome, State
from manager.errors import Draining, NotFound, Reason, StorageUnavailable
from manager.function import FunctionSpec
from tangram.types import Attempt

RESTARTED = "the gateway was restarted"


class _Loss(NamedTuple):
    """With what a running action was lost."""

    reason: Reason
    story: str


_OF_GATEWAY = _Loss(Reason.GATEWAY_RESTART, RESTARTED)


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
        #: What runs on nodes that are not back yet.
        self._awaited: dict[str, list[LiveInvocation]] = {}
        self._log = structlog.get_logger("gateway.restart")

    async def recover(self, awaited: Callable[[Record], bool] = lambda record: False) -> Mapping[str, int]:
        """Decide on what an earlier gateway left unfinished, in order; returns how many went which way.

        What is ``awaited`` runs on a node that is not back yet: `recover_on` decides on it.

        One whose command its sandbox still holds goes on; else what was queued, or was being made ready, runs, and what
        ran runs again when its function is idempotent, else it is ``lost``; one whose caller went down with its
        connection is cancelled.
        """
        again: list[LiveInvocation] = []
        counts = {"queued": 0, "resumed": 0, "rerun": 0, "lost": 0, "cancelled": 0}
        self._takeover.look()
        for record in await self._store.unfinished():
            invocation = await self._enter(record)
            if record.node is not None and awaited(record):
                self._awaited.setdefault(record.node, []).append(invocation)
            else:
                counts[self._take_over(invocation, again, _OF_GATEWAY)] += 1
        await self._takeover.end_unclaimed()
        self._invocations.submit(again)
        waiting = sum(map(len, self._awaited.values()))
        return counts | ({"awaited": waiting} if waiting else {})

    async def recover_on(self, node: str, found: Reattachment | None) -> None:
        """Decide on what a node was awaited with, which is back (``found`` on it), or lost (None)."""
        again: list[LiveInvocation] = []
        lost = _OF_GATEWAY if found is not None else _Loss(Reason.NODE_LOST, f"node {node} was lost")
        if found is not None:
            found.look()
        for invocation in self._awaited.pop(node, ()):
            if not invocation.record.terminal:
                self._take_over(invocation, again, lost, found)
        if found is not None:
            await found.end_unclaimed()
        self._invocations.submit(again)

    async def _enter(self, record: Record) -> LiveInvocation:
        """Let it live on, with its log."""
        function = self._function(record.function)
        limit_bytes = 0 if function is None else function.log_limit_bytes
        log = await self._logs.resume(record.seq, limit_bytes, record.started_s or record.accepted_s)
        given = wire.loads_object(record.input or b"{}")
        invocation = LiveInvocation(record=record, function=function, input=given, log=log)
        self._invocations.enter(invocation)
        return invocation

    def _take_over(
        self,
        invocation: LiveInvocation,
        again: list[LiveInvocation],
        lost: _Loss,
        found: Reattachment | None = None,
    ) -> str:
        """Decide on one; ``found`` holds the commands of a node, and is None for this machine and for a lost node."""
        record, function = invocation.record, invocation.function
        takeover = self._takeover if lost is _OF_GATEWAY and found is None else found
        was_queued = record.state is State.QUEUED
        if takeover is not None and takeover.holds(invocation) and self._invocations.resume(invocation):
            takeover.take(invocation)
            return "resumed"
        if invocation.log is not None:
            invocation.log.pass_over_nothing()
        never = takeover is not None and takeover.never_started(invocation)
        if record.detached and function is not None and not was_queued and never:
            self._invocations.take_back(invocation)
            was_queued = True
        if not record.detached:
            record.end(State.CANCELLED, Reason.CANCELLED, f"{RESTARTED} and {GONE}", self._wall())
        elif function is None:
            record.end(State.LOST, Reason.GATEWAY_RESTART, f"{RESTARTED} without its function", self._wall())
        elif not was_queued and not function.idempotent:
            record.end(State.LOST, lost.reason, f"{lost.story} while it ran", self._wall())
        if record.terminal:
            record.dead = record.mode is Mode.ASYNC and record.state is State.LOST
            self._invocations.finish(invocation, waited=was_queued)
            return "lost" if record.state is State.LOST else "cancelled"
        if not was_queued:
            self._invocations.requeue(invocation, self._lost_try(record, lost))
        again.append(invocation)
        return "queued" if was_queued else "rerun"

    def _function(self, name: str) -> FunctionSpec | None:
        try:
            return self._functions.get(name)
        except NotFound:
            return None

    def _lost_try(self, record: Record, lost: _Loss) -> Attempt:
        return record.tried(Outcome(state=State.LOST, reason=lost.reason, message=lost.story), self._wall())

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
                invocation.leave_behind(_draining("the gateway is shutting down; the next one goes on with the call"))
                return
        fault = self._invocations.engine.fault
        if fault is not None:
            record.end(State.FAILED, Reason.INTERNAL, fault, self._wall(), ran=True)
            record.dead = record.mode is Mode.ASYNC
        elif waited:
            message = "the gateway was shut down before it started"
            invocation.refusal = _draining(message)  # who waits may send it again: nothing has run
            record.end(State.CANCELLED, Reason.CANCELLED, message, self._wall())
        else:
            message = "the gateway was shut down while it ran"
            record.end(State.LOST, Reason.GATEWAY_RESTART, message, self._wall(), ran=True)
            record.dead = record.mode is Mode.ASYNC
        self._invocations.finish(invocation, waited=waited)


def _draining(why: str) -> Draining:
    """What is told to whoever waits for a call: to send it again, which joins it or runs what has not run."""
    return Draining(why, component="invocations", retry_after_s=RETRY_MIN_S)
