"""The gateway's side of a node's model services: what the node said of them last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from manager.chunk import Chunk
from manager.config import ServiceSpec
from runtimes.node.message import Message
from runtimes.node.models.messages import ModelsChanged

_NOTHING = ModelsChanged(services=[], resident={})


class RemoteModels:
    """What one node's devices hold, as far as it has said so on its present link."""

    def __init__(self) -> None:
        self._said = _NOTHING
        #: Called whenever the node has said something new.
        self.on_change: Callable[[], None] = lambda: None

    def attach(self) -> None:
        """There is another link, maybe to another daemon: nothing is known of it."""
        self._said = _NOTHING

    def take(self, message: Message) -> bool:
        """Take what the node says, if it is of this; return whether it is."""
        if not isinstance(message, ModelsChanged):
            return False
        self._said = message
        self.on_change()
        return True

    @property
    def services(self) -> Sequence[ServiceSpec]:
        """The services that the node has prepared, and what each costs there."""
        return self._said.services

    @property
    def resident(self) -> Mapping[str, tuple[Chunk, ...]]:
        """Chunks on which each service is resident, counted on the node."""
        return {service: tuple(chunks) for service, chunks in self._said.resident.items()}
