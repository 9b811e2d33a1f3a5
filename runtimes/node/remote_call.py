"""What the gateway keeps of a node: its executions there that wait for their end, and what it has heard of the rest."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from manager.action import Lease, Outcome
from manager.executor import Call
from manager.function import FunctionSpec
from runtimes.node import wire
from runtimes.node.spool import records

#: Of one node: as many as a gateway has in all by default (``scheduler.trajectories_max``), more than a machine runs.
TRAJECTORIES_MAX = 65536


@dataclass(slots=True, eq=False)
class RemoteCall:
    """One execution that waits for its end."""

    execute: wire.ExecuteAttempt
    function: FunctionSpec
    call: Call
    #: Its end, and who waits for that.
    outcome: Outcome | None = None
    waiter: asyncio.Future[None] | None = None
    #: Whether nobody waits any more, as the gateway ends.
    let_go: bool = False
    #: Whether it was ever sent, and whether it may have begun.
    sent: bool = False
    begun: bool = False
    #: The answer to its question whether it may begin, and who finds that out.
    go: wire.AttemptGo | None = None
    asking: asyncio.Task[None] | None = None
    started: bool = False
    cancelled: bool = False
    log_bytes: int = 0
    tries: int = 1
    #: Its lease, once that is another one.
    resized: Lease | None = None
    #: Whether somebody types to it: then it is never begun again.
    session: bool = False

    @property
    def repeatable(self) -> bool:
        """Whether it may be begun once more where it was lost."""
        return self.function.idempotent and not self.session

    async def ended(self) -> None:
        """Wait for its end; a cancellation takes nothing from who waits next."""
        self.waiter = asyncio.get_running_loop().create_future()
        await self.waiter

    def end(self, outcome: Outcome) -> None:
        """It has ended so."""
        self.outcome = outcome
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def abandon(self) -> None:
        """Let who waits be cancelled: no end comes any more."""
        self.let_go = True
        if self.waiter is not None:
            self.waiter.cancel()

    def take_log(self, piece: wire.AttemptLog) -> None:
        """Write what of a piece is not known yet."""
        known_bytes = max(0, self.log_bytes - piece.offset)
        write = self.call.log.write
        for stream, text in records(piece.records[known_bytes:]):
            write(stream, text)
        self.log_bytes = max(self.log_bytes, piece.offset + len(piece.records))


@dataclass(slots=True)
class NodeKnowledge:
    """What the last inventory, and what was said since, tell of a node."""

    epoch: str = ""
    attempts: dict[str, wire.AttemptFacts] = field(default_factory=dict)
    trajectories: dict[str, wire.TrajectoryFacts] = field(default_factory=dict)

    @classmethod
    def of(cls, inventory: wire.Inventory) -> NodeKnowledge:
        """Return what an inventory tells; raises ChannelError for more than a node may have."""
        known = cls(inventory.epoch, {facts.claim: facts for facts in inventory.attempts})
        for facts in inventory.trajectories:
            known.trajectories[facts.trajectory] = facts
        known._check()
        return known

    def take(self, facts: wire.TrajectoryFacts) -> None:
        """Note that a trajectory has a sandbox, or none any more; raises ChannelError for one too many."""
        if not facts.sandbox:
            self.trajectories.pop(facts.trajectory, None)
            return
        self.trajectories[facts.trajectory] = facts
        self._check()

    def _check(self) -> None:
        if len(self.trajectories) > TRAJECTORIES_MAX:
            raise wire.ChannelError(f"a node that tells of more than {TRAJECTORIES_MAX} trajectories")
