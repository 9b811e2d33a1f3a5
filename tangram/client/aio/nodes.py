"""What a client may ask of the machines that a gateway has: what there is, and for operators drain and ticket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from tangram.client import node_requests, requests
from tangram.client.requests import ApiRequest
from tangram.types import ResourcesInfo
from tangram.types.nodes import NodeStatus, NodeTicket, RayMachineStatus

_T = TypeVar("_T")


class AsyncNodeCalls(ABC):
    """The part of a client that speaks of machines."""

    @abstractmethod
    async def _send(self, request: ApiRequest[_T]) -> _T:
        """Send, and send again where that is safe."""

    async def resources(self) -> ResourcesInfo:
        """Return pools, what is held of them, and what the sandboxes and model devices are."""
        return await self._send(requests.get_resources())

    async def nodes(self) -> Sequence[NodeStatus]:
        """Return the machines that actions run on, and how they are."""
        return (await self._send(node_requests.list_nodes())).nodes

    async def ray_machines(self) -> Sequence[RayMachineStatus]:
        """Return the machines of a Ray cluster that are to be nodes, and how far that has come (`cluster.ray`)."""
        return (await self._send(node_requests.list_nodes())).ray

    async def drain_node(self, name: str, why: str = "") -> NodeStatus:
        """Have a machine take no new work and leave when it is empty; raises NotFoundError. Needs the admin token."""
        return await self._send(node_requests.drain_node(name, why))

    async def node_ticket(self, name: str) -> NodeTicket:
        """Return what admits one machine once, soon (`tangram node join`). Needs the admin token."""
        return await self._send(node_requests.issue_ticket(name))
