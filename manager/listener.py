"""The listener: who is told what the engine does."""

from __future__ import annotations

from typing import Protocol

from manager.action import Action
from manager.lease import Lease
from manager.outcome import Settlement


class Listener(Protocol):
    """Whoever wants to know; called from the event loop, must not block and must not raise."""

    def started(self, action: Action, lease: Lease, queue_s: float) -> None: ...

    def settled(self, settlement: Settlement) -> None: ...
