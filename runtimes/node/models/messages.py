"""What a node says of the model services on its devices."""

from __future__ import annotations

from manager.action import Chunk
from manager.config import ServiceSpec
from runtimes.node.message import Message


class ModelsChanged(Message, kw_only=True):
    """All that there is of model services on a node now; what was said before counts no more."""

    #: Those that were prepared, with their costs as measured there.
    services: list[ServiceSpec]
    #: Service -> chunks on which it is resident, counted on the node.
    resident: dict[str, list[Chunk]]
