"""The agent: a node's side of the channel. It turns frames into calls of an executor, and ends into frames.

Nothing here depends on a link: attempts run on while there is none, their ends lie in the journal and their logs in
spools, and a gateway that comes back asks for what it has not heard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import structlog

from manager.action import Outcome, State
from manager.clock import Clock, MonotonicClock
from manager.errors import ActionFailed, CodedError, InvalidConfig, Reason, StorageUnavailable
from manager.executor import Call
from manager.function import Setting
from runtimes.kinds import KINDS
from runtimes.node import wire
from runtimes.node.attempt import NodeAttempt, SettledAttempts, is_session, spool_name
from runtimes.node.errors import as_failure, error_of, failed, mislaid, oversized
from runtimes.node.files.served import ServedTransfers
from runtimes.node.fitness.messages import FitnessChanged
from runtimes.node.fitness.served import FitnessSettings, NodeFitness
from runtimes.node.handlers.store import HandlerStore, HandlerStoreSettings
from runtimes.node.journal import AttemptJournal, JournalSettings, epoch
from runtimes.node.link import NodeLink
from runtimes.node.message import Message
from runtimes.node.requests import DefinedFunctions, NodeRequests, NodeWork
from runtimes.node.sessions.served import ServedSessions
from runtimes.node.spool import Spool
from runtimes.node.telling import Telling, TellingSettings
from runtimes.node.wire import COMPONENT

logger = structlog.get_logger("node.agent")

#: In a state directory: a spool for each attempt, and the files of handlers.
SPOOLS, HANDLERS = "spool", "handlers"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """The bounds of an agent."""

    attempts_max: Annotated[int, Setting("most attempts that run, or whose end is not acknowledged", ge=1)] = 16384
    functions_max: Annotated[int, Setting("most functions that are known at once", ge=1)] = 4096
    logs: TellingSettings = field(default_factory=TellingSettings)
    journal: JournalSettings = field(default_factory=JournalSettings)
    handlers: HandlerStoreSettings = field(default_factory=HandlerStoreSettings)
    fitness: FitnessSettings = field(default_factory=FitnessSettings)


class Agent:
    """Executes what gateways ask for, each attempt at most once. Use from one event loop."""

    def __init__(
        self,
        directory: Path,
        work: NodeWork,
        settings: AgentSettings | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings or AgentSettings()
        spools = directory / SPOOLS
        spools.mkdir(parents=True, exist_ok=True)
        #: What daemons before left there, and the directory's name.
        self._left, self._spools = list(spools.iterdir()), str(spools)
        self.epoch = epoch(directory)
        self._journal = AttemptJournal(directory, self.settings.journal)
        self.fitness = NodeFitness(directory, self.settings.fitness, trouble=work.trouble)
        self._work = work
        self._clock = clock or MonotonicClock()
        self._loop = asyncio.get_running_loop()
        self._attempts: dict[str, NodeAttempt] = {}
        #: Ends that were told, and are written down in the same turn of the loop.
        self._ends: list[wire.AttemptEnd] = []
        self._settled = SettledAttempts(lambda settled: None if self._closing else self._forget(*settled))
        self._link: NodeLink | None = None
        self._handlers = HandlerStore(directory / HANDLERS, self.settings.handlers, work.handlers_in_use)
        self._functions = DefinedFunctions(self.settings.functions_max, self._handlers)
        self._requests = NodeRequests(work, self._functions, self.say, self._handlers)
        self._transfers = ServedTransfers(work.sandboxes.files, self._handlers.take)
        self._sessions = ServedSessions(work.sandboxes.sessions, self._session_told)
        self._telling = Telling(self.settings.logs, self._sessions.owes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        #: Called when the gateway asks the node to drain, with why.
        self.on_drain: Callable[[str], None] = lambda why: None
        work.sandboxes.on_change = self._tell_sandbox
        self.fitness.on_change = self.say
        if work.models is not None:
            work.models.on_change = self.say

    # --- beginning and end

    async def start(self) -> None:
        """Adopt what a daemon before left: sandboxes and their commands; what it left and no sandbox holds, is lost."""
        await self._work.sandboxes.start()
        held = self._work.sandboxes.resumable()
        contents = self._journal.contents
        for digest, data in contents.functions.items():
            self._functions.define(digest, data)
        for claim, entry in list(contents.attempts.items()):
            attempt = self._enter(entry.execute, fresh=False)
            if attempt is None:
                continue
            attempt.begun, attempt.lasting = True, entry.lasting
            holds = any(each.startswith(claim) for each in held)
            if entry.end is not None and not (holds and is_session(entry.execute)):
                attempt.end = entry.end
            elif holds:
                self._run(attempt)
            else:
                self._conclude(attempt, mislaid("the node's daemon ended while it ran, and with it what it had begun"))
        await self._work.sandboxes.end_unclaimed(self._attempts)
        known = {spool_name(claim) for claim in self._attempts}
        for stale in self._left:
            if stale.name not in known:
                stale.unlink(missing_ok=True)
        self._left.clear()
        self._spawn(self._telling.talk_for_ever())
        self._spawn(self.fitness.watch_for_ever())

    @property
    def busy(self) -> bool:
        """Whether anything runs, or has to be told yet."""
        return bool(self._attempts)

    @property
    def idle(self) -> bool:
        """Whether it has nothing: no attempt and no trajectory."""
        return not self._attempts and not self._work.sandboxes.facts()

    async def end_all(self) -> None:
        """Kill every attempt and remove every trajectory, and forget both."""
        tasks = [attempt.task for attempt in self._attempts.values() if attempt.task is not None]
        for attempt in self._attempts.values():
            attempt.disowned, attempt.successor = True, None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._forget(*self._attempts.values())
        for facts in self._work.sandboxes.facts():
            await self._work.executor.end_trajectory(facts.trajectory)

    async def end_idle(self) -> None:
        """Remove every trajectory in which nothing runs."""
        busy = {attempt.execute.action.trajectory for attempt in self._attempts.values()}
        idle = [facts.trajectory for facts in self._work.sandboxes.facts() if facts.trajectory not in busy]
        await asyncio.gather(*map(self._work.executor.end_trajectory, idle))

    async def close(self) -> None:
        """Stop. What runs in a sandbox is left as it is, for the next daemon of this directory; idempotent."""
        self._settled.forget()
        self._closing = True
        self.detach()
        for attempt in self._attempts.values():
            attempt.spool.paused = True  # what its command says from now on is the next daemon's
        await self._work.sandboxes.leave(claim for claim, attempt in self._attempts.items() if attempt.end is None)
        tasks = [*self._tasks, *self._requests.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transfers.close()
        await self._sessions.close()
        for attempt in self._attempts.values():
            attempt.spool.close()
        self._write_ends()
        self._journal.close()

    # --- the link

    def inventory(self) -> wire.Inventory:
        """Return all that is here."""
        self._settled.forget()
        now_s = self._clock.now()
        return wire.Inventory(
            epoch=self.epoch,
            attempts=[attempt.facts(now_s) for attempt in self._attempts.values() if not attempt.disowned],
            trajectories=self._work.sandboxes.facts(),
        )

    async def serve(self, link: NodeLink) -> str:
        """Say what is here, then do what the gateway asks until the link is gone; return why it is."""
        link.send(self.inventory())
        link.send(FitnessChanged(self.fitness.why, self.fitness.newcomers))
        if self._work.models is not None and (models := self._work.models.facts()).services:
            link.send(models)
        self._link = self._telling.link = link
        try:
            return await link.run(partial(self._handle, link))
        finally:
            self._transfers.detach(link)
            self._sessions.detach(link)
            if self._link is link:
                self.detach()

    def detach(self) -> None:
        """There is no gateway; everything goes on."""
        self._link = self._telling.link = None
        self._requests.detach()
        for attempt in self._attempts.values():
            attempt.attached = attempt.end_told = False
            if not attempt.begun and attempt.go.done():
                attempt.go = self._loop.create_future()  # the next inventory says that it has not begun: it asks again

    def say(self, message: Message) -> None:
        """Tell the gateway, if there is one."""
        if self._link is not None:
            self._link.send(message)

    def _handle(self, link: NodeLink, message: Message) -> None:
        match message:
            case wire.ExecuteAttempt():
                self._execute(message)
            case wire.AttemptGo():
                self._told_to_go(message)
            case wire.AcknowledgeEnd():
                self._acknowledged(message.claim)
            case wire.DefineFunction():
                self._functions.define(message.digest, message.function)
            case wire.AttachAttempt():
                self._attach(message)
            case wire.CancelAttempt():
                self._cancel(message)
            case wire.ResizeAttempt():
                self._resize(message)
            case wire.NodeRequest():
                self._requests.begin(message)
            case wire.DrainNode():
                self.on_drain(message.why)
            case _ if not self._transfers.take(link, message) and not self._sessions.take(link, message):
                raise wire.ChannelError(f"a {type(message).__name__} to a node")

    # --- attempts

    def _execute(self, execute: wire.ExecuteAttempt) -> None:
        self._settled.forget(execute.claim)
        known = self._attempts.get(execute.claim)
        if known is not None and not known.disowned:
            known.attached = True
            self._retell(known, 0)
        elif known is not None:
            known.successor = execute
        elif (attempt := self._enter(execute)) is not None:
            attempt.attached = True
            self._run(attempt)

    def _enter(self, execute: wire.ExecuteAttempt, *, fresh: bool = True) -> NodeAttempt | None:
        """Make room for an attempt; one that cannot be had ends at once."""
        try:
            data, function = self._functions.get(execute.function)
            if len(self._attempts) >= self.settings.attempts_max:
                raise StorageUnavailable(f"the node has {self.settings.attempts_max} attempts", component=COMPONENT)
            place = f"{self._spools}/{spool_name(execute.claim)}"
            spool = Spool(place, function.log_limit_bytes, partial(self._said, execute.claim), fresh=fresh)
        except (OSError, StorageUnavailable, InvalidConfig) as error:
            if isinstance(error, OSError):
                self.fitness.refused(error)
            message = f"the node cannot take it: {error}"
            refused = Outcome(state=State.FAILED, reason=Reason.ENVIRONMENT_LOST, message=message, component=COMPONENT)
            self.say(wire.end_of(execute.claim, refused, 0))
            return None
        attempt = NodeAttempt(execute=execute, function=function, function_bytes=data, spool=spool)
        self._attempts[execute.claim] = attempt
        return attempt

    def _run(self, attempt: NodeAttempt) -> None:
        given = wire.unpack_object(attempt.execute.input)
        self._sessions.begin(attempt.claim, attempt.execute.action, attempt.execute.context, given)
        work = self._work_on(attempt, given)
        attempt.task = self._loop.create_task(work)
        self._tasks.add(attempt.task)
        attempt.task.add_done_callback(partial(self._worked, attempt))

    async def _work_on(self, attempt: NodeAttempt, given: Mapping[str, object]) -> None:
        execute, function = attempt.execute, attempt.function
        call = Call(
            function=function,
            input=given,
            log=attempt.spool,
            traceparent=execute.traceparent,
            tracestate=execute.tracestate,
            context=execute.context,
            announce=partial(self._announce, attempt),
            begun=partial(self._started, attempt),
        )
        try:
            kind = KINDS.get(function.runtime)
            async with nullcontext() if function.handler is None else self._handlers.held(function):
                if not attempt.begun and (kind is None or not kind.works_in_sandbox):
                    await self._announce(attempt)  # its runtime does not ask
                outcome = await self._work.executor.execute(execute.action, execute.lease, call)
        except CodedError as error:
            outcome = failed(error)
        except asyncio.CancelledError:
            outcome = Outcome(state=State.CANCELLED, reason=Reason.CANCELLED, message="cancelled", component=COMPONENT)
        if not self._closing:
            self._conclude(attempt, outcome)

    def _worked(self, attempt: NodeAttempt, task: asyncio.Task[None]) -> None:
        """Its task is over: it has an end, even if it was cancelled before its first step or met a bug."""
        self._tasks.discard(task)
        state, reason, message = State.CANCELLED, Reason.CANCELLED, "cancelled"
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("an attempt failed on the node", claim=attempt.claim, exc_info=error)
            state, reason, message = State.FAILED, Reason.INTERNAL, f"the node failed: {error!r}"
        if attempt.end is None and not self._closing:
            self._conclude(attempt, Outcome(state=state, reason=reason, message=message, component=COMPONENT))

    async def _announce(self, attempt: NodeAttempt) -> bool:
        """Ask whether it may begin, and write down that it does; every command outlives the daemon.

        Raises ActionFailed if it may not.
        """
        if attempt.begun:
            return True  # by its first command, or under a daemon before
        attempt.asking = True
        if attempt.attached and not attempt.go.done():
            self.say(wire.AttemptBegins(attempt.claim))
        while not attempt.go.done():  # another one takes its place if the link goes
            await attempt.go
        go = attempt.go.result()
        attempt.asking = False
        if go.refusal is not None:
            raise as_failure(error_of(go.refusal))
        try:
            self._journal.begun(attempt.execute, attempt.function_bytes, lasting=go.lasting)
        except OSError as error:
            self.fitness.refused(error)
            message = f"the node cannot write down that it begins: {error}"
            raise ActionFailed(Reason.ENVIRONMENT_LOST, message, component=COMPONENT, retry_after_s=5.0) from error
        attempt.begun, attempt.lasting = True, go.lasting
        self._look(attempt)
        return True

    def _told_to_go(self, go: wire.AttemptGo) -> None:
        """It may begin, perhaps before it asks, or its caller has gone, and it outlives him."""
        attempt = self._attempts.get(go.claim)
        if attempt is None:
            return
        if not attempt.begun:
            if attempt.go.done():
                attempt.go = self._loop.create_future()
            attempt.go.set_result(go)
        elif attempt.begun and attempt.end is None and go.refusal is None and attempt.lasting != go.lasting:
            attempt.lasting = go.lasting
            self._written(partial(self._journal.lasting, go.claim, go.lasting))

    def _started(self, attempt: NodeAttempt) -> None:
        attempt.began_s = self._clock.now()
        self._telling.more(attempt)

    def _conclude(self, attempt: NodeAttempt, outcome: Outcome) -> None:
        """It has ended, once and for all."""
        attempt.asking = False
        end = wire.end_of(attempt.claim, outcome, attempt.spool.omitted_bytes)
        if len(end.result) + len(end.detail) > self._frame_bytes:
            large = oversized(outcome, len(end.result))
            end = wire.end_of(attempt.claim, large, attempt.spool.omitted_bytes)
        attempt.end = end
        self._sessions.ended(attempt.claim)
        self._look(attempt)
        self._written(attempt.spool.flush)
        if not attempt.disowned:
            self._telling.more(attempt, at_once=True)
        if attempt.begun:  # behind the telling: nobody waits for the disk, and ends of one turn are one write
            if not self._ends:
                self._loop.call_soon(self._write_ends)
            self._ends.append(end)
        if attempt.disowned:
            self._forget(attempt)

    def _session_told(self, claim: str) -> None:
        """All of a session's output is told: its end may follow."""
        attempt = self._attempts.get(claim)
        if attempt is not None:
            self._telling.more(attempt, at_once=True)

    def _said(self, claim: str) -> None:
        attempt = self._attempts.get(claim)
        if attempt is not None:
            self._telling.more(attempt)

    @property
    def _frame_bytes(self) -> int:
        most_bytes = 64 * 2**20 if self._link is None else self._link.settings.frame_max_bytes
        return most_bytes - 64 * 2**10

    def _cancel(self, asked: wire.CancelAttempt) -> None:
        attempt = self._attempts.get(asked.claim)
        if attempt is None:
            return
        attempt.successor = None
        attempt.disowned = attempt.disowned or asked.disowned
        if attempt.end is not None:
            if attempt.disowned:
                self._forget(attempt)
        elif attempt.task is not None:
            attempt.task.cancel()

    def _resize(self, asked: wire.ResizeAttempt) -> None:
        attempt = self._attempts.get(asked.claim)
        if attempt is not None and attempt.end is None:
            self._spawn(self._work.executor.resize(attempt.execute.action, asked.lease))

    def _acknowledged(self, claim: str) -> None:
        attempt = self._attempts.get(claim)
        if attempt is not None and attempt.end is not None:
            self._settled.add(attempt)

    def _write_ends(self) -> None:
        ends, self._ends = self._ends, []
        if ends:
            self._written(partial(self._journal.ended, *ends))

    def _forget(self, *attempts: NodeAttempt) -> None:
        self._write_ends()
        if begun := [attempt.claim for attempt in attempts if attempt.begun]:
            self._written(partial(self._journal.acknowledged, *begun))
        for attempt in attempts:
            self._forget_one(attempt)

    def _forget_one(self, attempt: NodeAttempt) -> None:
        del self._attempts[attempt.claim]
        self._settled.drop(attempt)
        self._sessions.forget(attempt.claim)
        self._telling.forget(attempt)
        attempt.spool.remove()
        self._work.sandboxes.acknowledge(attempt.execute.action.trajectory, attempt.claim)
        if attempt.successor is not None:
            self._execute(attempt.successor)

    def _written(self, write: Callable[[], None]) -> None:
        """Write; a disk that refuses costs what a crash would cost, and nothing else."""
        try:
            write()
        except OSError as error:
            logger.error("the node's disk refuses", why=str(error))
            self.fitness.refused(error)

    # --- telling

    def _attach(self, asked: wire.AttachAttempt) -> None:
        attempt = self._attempts.get(asked.claim)
        if attempt is not None:
            attempt.attached = True
            self._retell(attempt, asked.log_offset)

    def _retell(self, attempt: NodeAttempt, log_offset: int) -> None:
        """Tell the gateway what it has not heard."""
        attempt.told_bytes, attempt.began_told, attempt.end_told = min(log_offset, attempt.spool.end), False, False
        if attempt.asking and not attempt.go.done():
            self.say(wire.AttemptBegins(attempt.claim))
        self._telling.more(attempt, at_once=True)

    def _look(self, attempt: NodeAttempt) -> None:
        """See whether its trajectory has another sandbox by now."""
        if attempt.execute.action.trajectory is not None:
            self._work.sandboxes.look(attempt.execute.action.trajectory)

    def _tell_sandbox(self, facts: wire.TrajectoryFacts) -> None:
        self.say(wire.SandboxChanged(facts))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
