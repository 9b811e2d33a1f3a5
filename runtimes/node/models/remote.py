"""The gateway's side of a node's model services: what the node said of them last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from manager.action import Chunk
from manager.config import ServiceSpec
from runtimes.node.message import Message
from runtimes.node.models.messages import ModelsChanged

#: Seconds in which what a node says of its models is taken up at most once: it may say it as often as it likes.
EVERY_S = 0.1
_NOTHING = ModelsChanged(services=[], resident={})


class RemoteModels:
    """What one node's devices hold, as far as it has said so on its present link."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._said = _NOTHING
        #: What came since, of which only the last counts, and the end of the time in which it waits.
        self._waiting: ModelsChanged | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: Called whenever the node has said something new.
        self.on_change: Callable[[], None] = lambda: None

    def attach(self) -> None:
        """There is another link, maybe to another daemon: nothing is known of it."""
        self._said, self._waiting = _NOTHING, None

    def take(self, message: Message) -> bool:
        """Take what the node says, if it is of this; return whether it is."""
        if not isinstance(message, ModelsChanged):
            return False
        if self._timer is None:
            self._take_up(message)
        else:
            self._waiting = message
        return True

    def close(self) -> None:
        """Take up nothing more."""
        self._waiting = None
        if self._timer is not None:
            self._timer.cancel()

    def _take_up(self, message: ModelsChanged) -> None:
        self._said = message
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._may_again)
        self.on_change()

    def _may_again(self) -> None:
        self._timer = None
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._take_up(waiting)

    @property
    def services(self) -> Sequence[ServiceSpec]:
        """The services that the node has prepared, and what each costs there."""
        return self._said.services

    @property
    def resident(self) -> Mapping[str, tuple[Chunk, ...]]:
        """Chunks on which each service is resident, counted on the node."""
        return {service: tuple(chunks) for service, chunks in self._said.resident.items()}
