"""One attempt of an action on a node: where it stands, and what of it the gateway has heard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from urllib.parse import quote

from manager.function import FunctionSpec
from runtimes.node.link import PATIENCE_S
from runtimes.node.spool import Spool
from runtimes.node.wire import AttemptEnd, AttemptFacts, AttemptGo, ExecuteAttempt, unpack_object


@dataclass(slots=True, kw_only=True, eq=False)
class NodeAttempt:
    """What an agent keeps of an attempt, from its arrival until its end is acknowledged."""

    execute: ExecuteAttempt
    function: FunctionSpec
    #: The same as it travelled.
    function_bytes: bytes
    spool: Spool
    task: asyncio.Task[None] | None = None
    #: Done once the gateway has said whether it may begin.
    go: asyncio.Future[AttemptGo] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    #: Whether it stands ready and asks; whether it may have begun; whether its work runs, since when.
    asking: bool = False
    begun: bool = False
    began_s: float | None = None
    lasting: bool = False
    end: AttemptEnd | None = None
    #: Whether the gateway listens on the present link; what it has heard on it: that the work runs, how much of the
    #: log, the end.
    attached: bool = False
    began_told: bool = False
    told_bytes: int = 0
    end_told: bool = False
    #: Whether nobody waits for its end.
    disowned: bool = False
    #: What is to be begun in its place, once it is gone.
    successor: ExecuteAttempt | None = None

    @property
    def claim(self) -> str:
        return self.execute.claim

    def facts(self, now_s: float) -> AttemptFacts:
        action = self.execute.action
        return AttemptFacts(
            claim=self.claim,
            action_id=action.id,
            attempt=action.attempt,
            trajectory=action.trajectory,
            begun=self.begun,
            ended=self.end is not None,
            ran_s=0.0 if self.began_s is None else now_s - self.began_s,
        )


class SettledAttempts:
    """Attempts whose end is on record: they are forgotten soon, many at once, and not between two that begin."""

    def __init__(self, forget: Callable[[Collection[NodeAttempt]], None]) -> None:
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._settled: dict[str, NodeAttempt] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, attempt: NodeAttempt) -> None:
        """Its end is on record."""
        self._settled[attempt.claim] = attempt
        if self._timer is None:
            self._timer = self._loop.call_later(PATIENCE_S, self.forget)

    def drop(self, attempt: NodeAttempt) -> None:
        """It is forgotten already."""
        self._settled.pop(attempt.claim, None)

    def forget(self, claim: str | None = None) -> None:
        """Forget them now; with a ``claim``, only if its attempt is one of them."""
        if claim is not None and claim not in self._settled:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._settled:
            self._forget(list(self._settled.values()))


def spool_name(claim: str) -> str:
    """Return the name of the file that keeps its log."""
    return quote(claim.rstrip("/"), safe="")


def is_session(execute: ExecuteAttempt) -> bool:
    """Return whether its output is a session's, which no spool holds."""
    return "session" in unpack_object(execute.input)
