"""What the gateway keeps of a node: its executions there that wait for their end, and what it has heard of the rest."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from manager.errors import ActionFailed, CodedError, Reason
from manager.executor import Call
from manager.function import FunctionSpec
from manager.lease import Lease
from manager.outcome import Outcome, State
from runtimes.node import wire


@dataclass(slots=True, eq=False)
class RemoteCall:
    """One execution that waits for its end."""

    execute: wire.ExecuteAttempt
    function: FunctionSpec
    call: Call
    end: asyncio.Future[Outcome]
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


@dataclass(slots=True)
class NodeKnowledge:
    """What the last inventory, and what was said since, tell of a node."""

    epoch: str = ""
    attempts: dict[str, wire.AttemptFacts] = field(default_factory=dict)
    trajectories: dict[str, wire.TrajectoryFacts] = field(default_factory=dict)


def refused(error: CodedError) -> Outcome:
    """Return the end of an attempt that is not begun."""
    reason = error.reason if isinstance(error, ActionFailed) else Reason.INVALID_INPUT
    return Outcome(state=State.FAILED, reason=reason, message=error.message, component=error.component)
