"""The gateway's side of one node: an executor whose work is done elsewhere, and that outlives its links.

While there is no link, what runs there runs on, and whoever waits here waits: until `attach` finds it again or `lost`
gives it up. An attempt that a node's inventory lists is attached; one that it does not list has never begun there as
long as the node's epoch is the same, and is sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace

import msgspec
import structlog

from manager.action import Action, Chunk, Lease, Outcome, State
from manager.errors import ActionFailed, CodedError, Reason, Unsupported
from manager.executor import Call
from manager.function import FunctionSpec, SandboxSpec
from runtimes.kinds import KINDS
from runtimes.node import wire
from runtimes.node.errors import facts_of, failed
from runtimes.node.files.remote import RemoteFiles, RemoteTransfers
from runtimes.node.fitness.remote import RemoteFitness
from runtimes.node.handlers.archive import HandlerArchives
from runtimes.node.handlers.remote import RemoteHandlers
from runtimes.node.link import NodeLink
from runtimes.node.listener import NodeListener
from runtimes.node.message import Message
from runtimes.node.models.remote import RemoteModels
from runtimes.node.remote_call import NodeKnowledge, RemoteCall
from runtimes.node.remote_requests import RemoteRequests
from runtimes.node.sessions.remote import RemoteSessions
from runtimes.node.snapshots.remote import RemoteSnapshots
from runtimes.node.wire import COMPONENT
from runtimes.sandbox.command import claims_of
from runtimes.sandbox.files.files import SandboxFiles
from runtimes.sandbox.session import SessionTable

logger = structlog.get_logger("node.remote")

#: Times that an idempotent attempt is begun on the same node, if the daemon loses it each time.
TRIES_MAX = 3


class RemoteNode:
    """A `manager.executor.Executor` for one node. Use from one event loop."""

    def __init__(
        self,
        name: str,
        *,
        on_event: NodeListener | None = None,
        archives: HandlerArchives | None = None,
        sessions: SessionTable | None = None,
        epoch: str = "",
    ) -> None:
        """``archives`` and ``sessions`` are the gateway's, ``epoch`` the node's life that the one before knew."""
        self.name = name
        self._listener = on_event
        self._loop = asyncio.get_running_loop()
        self._link: NodeLink | None = None
        self._requests = RemoteRequests(name)
        self._transfers = RemoteTransfers(name)
        self._handlers = RemoteHandlers(name, self._requests, self._transfers, archives or HandlerArchives())
        self.models = RemoteModels()
        self.snapshots = RemoteSnapshots(name, self._requests)
        self._sessions = RemoteSessions(name, sessions or SessionTable())
        self._calls: dict[str, RemoteCall] = {}
        #: Ended here; the end is not on record yet.
        self._unrecorded: set[str] = set()
        #: Claims that nobody wants any more, to be said when there is a link.
        self._unwanted: dict[str, None] = {}
        fitness = RemoteFitness(lambda *found: None if on_event is None else on_event.fitness(*found))
        self._parts = (self._transfers, self.models, self._sessions, self.snapshots, fitness)
        self._known = NodeKnowledge(epoch)
        self._recovering = False
        #: Whether all that a gateway before has begun there was begun in the present life of the node.
        self._one_life = True

    # --- the link

    @property
    def attached(self) -> bool:
        """Whether there is a link."""
        return self._link is not None

    @property
    def pending(self) -> int:
        """How many executions wait for their end."""
        return len(self._calls)

    def attach(self, link: NodeLink, inventory: wire.Inventory, *, recovering: bool = False) -> None:
        """Go on over this link: compare what both sides have, and say what the other has not heard.

        ``recovering``: what this side does not know is of a gateway before, and waits for `end_unclaimed`.
        Raises ChannelError for an inventory beyond all bounds.
        """
        known = NodeKnowledge.of(inventory)
        before, same = self._known, inventory.epoch == self._known.epoch
        self._one_life = self._one_life and (same or not (before.epoch or recovering))
        if self._link is not None:
            self._link.close("another link took its place")
        self._link = link
        self._recovering = self._recovering or recovering
        self._known = known
        self._requests.attach(link)
        self._transfers.attach(link)
        self.models.attach()
        self._sessions.attach(link)
        for name in before.trajectories.keys() - self._known.trajectories.keys():
            self._requests.remember("mark_lost", name)  # before an action comes that would find a new, empty one
        for claim, remote in list(self._calls.items()):
            if remote.outcome is not None:
                continue
            if claim in self._known.attempts:
                remote.sent, remote.begun = True, remote.begun or self._known.attempts[claim].begun
                self._attach_call(claim, remote)
            elif same or not remote.begun or remote.repeatable:
                self._send(remote)
            else:
                self._gone(remote, "the node came back without what had begun on it")
        for claim in self._known.attempts.keys() - self._calls.keys() - self._unrecorded:
            if not self._recovering or claim in self._unwanted:
                self._unwant(claim)
        for claim in list(self._unwanted):
            if claim not in self._known.attempts:
                del self._unwanted[claim]
        self._requests.ask_again()

    async def serve(self, link: NodeLink) -> str:
        """Take what the node says until the link is gone; return why it is."""
        try:
            return await link.run(self._handle)
        finally:
            if self._link is link:
                self.detach()

    def detach(self) -> None:
        """There is no link; everything waits."""
        self._link = None
        self._requests.detach()
        self._transfers.detach()
        self._sessions.detach()

    def lost(self, why: str) -> None:
        """Give up all that is there: what runs ends ``lost``, what was asked raises ActionFailed(node_lost)."""
        self.detach()
        for remote in list(self._calls.values()):
            self._gone(remote, why)
        self._requests.lost(why)
        self._known = NodeKnowledge()
        self._unrecorded.clear()
        self._unwanted.clear()

    # --- Executor

    async def execute(self, action: Action, lease: Lease, call: Call) -> Outcome:
        """Run the action on the node to its end, or take over what runs of it there."""
        claim = claims_of(action.id, action.attempt)
        try:
            self._requests.check(call.function)
            session = self._sessions.begin(claim, action, call)
        except CodedError as error:
            return failed(error)
        remote = RemoteCall(
            wire.ExecuteAttempt(
                claim,
                action if action.elasticity is None else replace(action, elasticity=None),
                lease,
                "",
                wire.pack(call.input),
                call.traceparent,
                call.tracestate,
                dict(call.context),
            ),
            call.function,
            call,
            session=session,
        )
        assert claim not in self._calls, f"{claim} is executed twice at once"
        self._calls[claim] = remote
        try:
            self._begin(claim, remote)
            while remote.outcome is None:
                try:
                    await remote.ended()
                except asyncio.CancelledError:
                    if remote.let_go:
                        raise
                    self._kill(claim, remote)
            return remote.outcome
        finally:
            del self._calls[claim]
            self._sessions.end(claim)
            if remote.asking is not None:
                remote.asking.cancel()

    def _begin(self, claim: str, remote: RemoteCall) -> None:
        facts = self._known.attempts.get(claim)
        if facts is not None and claim not in self._unwanted:
            remote.sent, remote.begun = True, facts.begun
            if self._link is not None:
                self._attach_call(claim, remote)
        elif self._link is not None:
            self._send(remote)

    def _send(self, remote: RemoteCall) -> None:
        """Send it for the first time, or because it never arrived."""
        if remote.cancelled:
            self._end(remote, Outcome(state=State.CANCELLED, reason=Reason.CANCELLED, message="cancelled"))
            return
        largest_bytes = self._link.settings.frame_max_bytes if self._link is not None else 0
        if len(remote.execute.input) > largest_bytes - wire.GREETING_BYTES:
            message = f"an input of {len(remote.execute.input)} bytes is more than a frame of the channel holds"
            self._end(remote, failed(Unsupported(message, component=COMPONENT)))
            return
        try:
            function = self._handlers.named(remote.function)
            remote.execute.function = self._requests.define(function)
        except (Unsupported, ActionFailed) as error:
            self._end(remote, failed(error))
            return
        kind = KINDS.get(remote.function.runtime)
        inside = kind is not None and kind.works_in_sandbox
        remote.sent, remote.log_bytes = True, 0
        if remote.go is None and (not inside or self._lives_here(remote.execute.action.trajectory)):
            self._find_out(remote)  # nothing is made ready first: told before it is asked, a way to and fro is spared
        self._tell(remote.execute)
        self._sessions.follow(remote.execute.claim)
        if remote.go is not None:
            self._tell(remote.go)
        remote.begun = remote.begun or not inside

    def _attach_call(self, claim: str, remote: RemoteCall) -> None:
        self._tell(wire.AttachAttempt(claim, remote.log_bytes))
        if remote.go is not None:
            self._tell(remote.go)
        if remote.resized is not None:
            self._tell(wire.ResizeAttempt(claim, remote.resized))
        if remote.cancelled:
            self._tell(wire.CancelAttempt(claim, False))

    def _kill(self, claim: str, remote: RemoteCall) -> None:
        """Its end comes as always; nothing that was never sent is waited for."""
        if remote.asking is not None:
            remote.asking.cancel()
        remote.cancelled = True
        if not remote.sent:
            cancelled = Outcome(state=State.CANCELLED, reason=Reason.CANCELLED, message="cancelled")
            self._end(remote, cancelled)
        else:
            self._tell(wire.CancelAttempt(claim, False))

    def _gone(self, remote: RemoteCall, why: str) -> None:
        """It is certain that nothing of it is left."""
        state, reason = (State.LOST, Reason.NODE_LOST)
        if remote.cancelled:
            state, reason = State.CANCELLED, Reason.CANCELLED
        message = f"node {self.name}: {why}"
        self._end(remote, Outcome(state=state, reason=reason, message=message, component=COMPONENT))

    def _end(self, remote: RemoteCall, outcome: Outcome) -> None:
        if remote.outcome is None:
            remote.end(outcome)

    async def resize(self, action: Action, lease: Lease) -> None:
        """Pass the new lease on; a no-op once the action has ended."""
        claim = claims_of(action.id, action.attempt)
        remote = self._calls.get(claim)
        if remote is not None:
            remote.resized = lease
            self._tell(wire.ResizeAttempt(claim, lease))

    async def replicate(self, function: FunctionSpec, service: str, node: str, chunk: Chunk) -> bool:
        """Copy a service on the node's devices; return False where it cannot be, or the node was given up."""
        return await self._requests.replicated(service, function, chunk)

    async def open_trajectory(self, trajectory: str, task: str, function: FunctionSpec) -> None:
        """Make the trajectory's environment there; raises CodedError."""
        await self._requests.answered("open", trajectory, task=task, function=function)

    async def end_trajectory(self, trajectory: str) -> None:
        """Remove the trajectory's environment; one on a node without a link is removed when that is back."""
        self._known.trajectories.pop(trajectory, None)
        answer = self._requests.remember("end", trajectory)
        if self._link is not None:
            await asyncio.wait([answer])

    async def close(self) -> None:
        """Let go: what runs there runs on, for the next gateway."""
        if self._link is not None:
            self._link.close("the gateway ends")
        self.detach()
        asking = [remote.asking for remote in self._calls.values() if remote.asking is not None]
        for task in asking:
            task.cancel()
        for remote in self._calls.values():
            remote.abandon()
        self._requests.close()
        self.models.close()
        await asyncio.gather(*asking, return_exceptions=True)

    # --- functions and sandboxes

    async def prepare(self, function: FunctionSpec) -> None:
        """Let the node check that it can run the function; raises what it says: Unsupported, InvalidConfig."""
        if function.handler is not None:
            await self._handlers.prepare(function)
        else:
            await self._requests.answered("prepare", function.name, function=function)

    def trajectories(self) -> Mapping[str, wire.TrajectoryFacts]:
        """Return the trajectories that have a sandbox there, as far as is known."""
        return self._known.trajectories

    def files(self, trajectory: str) -> SandboxFiles | None:
        """Return the files of a trajectory's sandbox there, if it is known to have one."""
        facts = self._known.trajectories.get(trajectory)
        return None if facts is None else RemoteFiles(self._transfers, trajectory, facts.workdir)

    def mark_lost(self, trajectories: Collection[str]) -> None:
        """The next action of each is told that its sandbox was lost."""
        for name in trajectories:
            self._requests.remember("mark_lost", name)

    def choose(self, trajectory: str, spec: SandboxSpec) -> None:
        """A trajectory's sandbox is made so whenever it is made anew."""
        self._requests.remember("choose", trajectory, body=msgspec.json.encode(spec))

    def drain(self, why: str) -> None:
        """Ask the node to take no new work and to leave when nothing is left."""
        self._tell(wire.DrainNode(why))

    # --- what outlasts a gateway

    def resumable(self) -> set[str]:
        """Return the claims of attempts of a gateway before that have begun there."""
        return {claim for claim, facts in self._known.attempts.items() if facts.begun} - self._unwanted.keys()

    def never_started(self, claims: str) -> bool:
        """Return whether it is certain that no such attempt has begun there."""
        if not self._known.epoch or not self._one_life or claims in self._calls or claims in self._unrecorded:
            return False
        facts = self._known.attempts.get(claims)
        return facts is None or not facts.begun

    async def end_unclaimed(self, taken: Collection[str]) -> None:
        """End the attempts of a gateway before but these: nobody comes for them any more."""
        self._recovering, self._one_life = False, True
        for claim in self._known.attempts.keys() - self._calls.keys() - self._unrecorded - set(taken):
            self._unwant(claim)

    async def leave(self, claims: str) -> bool:
        """Return whether a running attempt goes on for the next gateway, which it does wherever it has begun."""
        remote = self._calls.get(claims)
        return remote is not None and remote.begun and (remote.go is None or remote.go.lasting)

    def detach_claim(self, claims: str) -> None:
        """It outlives its caller from now on."""
        remote = self._calls.get(claims)
        if remote is not None and remote.go is not None and remote.go.refusal is None:
            remote.go = wire.AttemptGo(claims, True, None)
            self._tell(remote.go)

    def acknowledge(self, claims: str) -> None:
        """Its end is on record: the node may forget it."""
        if claims in self._unrecorded:
            self._unrecorded.discard(claims)
            self._known.attempts.pop(claims, None)
            if self._link is None:
                self._unwanted[claims] = None
            self._tell(wire.AcknowledgeEnd(claims), in_no_hurry=True)

    def _unwant(self, claim: str) -> None:
        """Nobody waits for it: it is killed, and its end forgotten."""
        self._unwanted[claim] = None
        if self._link is not None:
            self._tell(wire.CancelAttempt(claim, True))
            self._unwanted.pop(claim, None)
            self._known.attempts.pop(claim, None)

    # --- what the node says

    def _handle(self, message: Message) -> None:
        match message:
            case wire.AttemptLog():
                self._take_log(message)
            case wire.AttemptEnd():
                self._take_end(message)
            case wire.AttemptBegins():
                self._take_begin(message.claim)
            case wire.AttemptStarted():
                remote = self._calls.get(message.claim)
                if remote is not None and not remote.started:
                    remote.started = True
                    if remote.call.begun is not None:
                        remote.call.begun()
            case wire.NodeAnswer():
                self._requests.take(message)
            case wire.SandboxChanged():
                self._take_sandbox(message.facts)
            case wire.NodeDraining():
                if self._listener is not None:
                    self._listener.draining(message.why)
            case wire.NodeGoodbye():
                if self._listener is not None:
                    self._listener.goodbye(message.why, message.killed)
            case _ if not any(part.take(message) for part in self._parts):
                raise wire.ChannelError(f"a {type(message).__name__} from a node")

    def _take_begin(self, claim: str) -> None:
        remote = self._calls.get(claim)
        if remote is None or remote.cancelled:
            return
        if remote.go is not None:
            self._tell(remote.go)
        else:
            self._find_out(remote)

    def _lives_here(self, trajectory: str | None) -> bool:
        """Return whether a trajectory has a sandbox there that stands ready, as far as is known."""
        facts = None if trajectory is None else self._known.trajectories.get(trajectory)
        return facts is not None and facts.alive

    def _find_out(self, remote: RemoteCall) -> None:
        if remote.asking is None:
            remote.asking = self._loop.create_task(self._decide(remote.execute.claim, remote))

    async def _decide(self, claim: str, remote: RemoteCall) -> None:
        """Find out whether it may begin; from the moment that it may, it has begun as far as anybody knows."""
        lasting, refusal = True, None
        try:
            if remote.call.announce is not None:
                lasting = await remote.call.announce()
        except CodedError as error:
            refusal = facts_of(error)
        remote.go = wire.AttemptGo(claim, lasting, refusal)
        remote.begun = refusal is None
        self._tell(remote.go)

    def _take_log(self, piece: wire.AttemptLog) -> None:
        remote = self._calls.get(piece.claim)
        if remote is None:
            return
        if piece.offset > remote.log_bytes:
            logger.warning("a log has a hole", node=self.name, claim=piece.claim, at=remote.log_bytes)
        remote.take_log(piece)

    def _take_end(self, end: wire.AttemptEnd) -> None:
        remote = self._calls.get(end.claim)
        if remote is None or remote.outcome is not None:
            return
        outcome = wire.outcome_of(end)
        if self._again(remote, outcome):
            return
        if end.omitted_bytes:
            remote.call.log.omit(end.omitted_bytes)
        self._unrecorded.add(end.claim)
        self._end(remote, outcome)

    def _again(self, remote: RemoteCall, outcome: Outcome) -> bool:
        """Begin an idempotent attempt once more that a daemon lost; return whether it was."""
        mislaid = outcome.reason is Reason.NODE_LOST and outcome.component == COMPONENT
        if not mislaid or not remote.repeatable or remote.cancelled or remote.tries >= TRIES_MAX:
            return False
        remote.tries += 1
        self._tell(wire.AcknowledgeEnd(remote.execute.claim))
        self._send(remote)
        return True

    def _take_sandbox(self, facts: wire.TrajectoryFacts) -> None:
        self._known.take(facts)
        if self._listener is not None:
            self._listener.sandbox_changed(facts)

    # --- inside

    def _tell(self, message: Message, *, in_no_hurry: bool = False) -> None:
        if self._link is not None:
            self._link.send(message, in_no_hurry=in_no_hurry)
