"""Sessions of MCP: each is a trajectory, which begins with its first call and ends with the session."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

from gateway.facades.mcp_rpc import INVALID_REQUEST, RequestId, RpcRefused
from gateway.services import Services
from manager.errors import CapacityExceeded

#: What the names of sessions' trajectories begin with.
PREFIX = "mcp-"
FULL_S = 5.0


@dataclass(eq=False, slots=True)
class McpSession:
    """One session; ``name`` is its id and its trajectory's."""

    name: str
    #: Whether its sandbox has begun: from then on it is not to begin anew, empty, without a word.
    begun: bool = False
    #: The calls that are under way, each the work of one request.
    running: dict[RequestId, asyncio.Task[object]] = field(default_factory=dict)

    def cancel(self, request_id: object) -> None:
        """Take a call back, if it is under way: a number is no text of it."""
        if isinstance(request_id, str | int) and (work := self.running.get(request_id)) is not None:
            work.cancel()


class McpSessions:
    """The sessions, the one unused longest first; ``most`` at once."""

    def __init__(self, services: Services, most: int) -> None:
        self._services = services
        self._most = most
        self._known: OrderedDict[str, McpSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def open(self) -> McpSession:
        """Return a new session; raises CapacityExceeded."""
        self._make_room()
        session = McpSession(f"{PREFIX}{secrets.token_hex(16)}")
        self._known[session.name] = session
        return session

    def get(self, name: str) -> McpSession:
        """Return a living session; raises RpcRefused, 404, on which a client begins a new one."""
        session = self._known.get(name) or self._of_earlier_gateway(name)
        if session is None or self._is_over(session):
            self._known.pop(name, None)
            told = "no such session: it has ended, or never began, or the gateway began anew; initialize another"
            raise RpcRefused(INVALID_REQUEST, told, status=404)
        self._known.move_to_end(name)
        return session

    async def end(self, session: McpSession) -> None:
        """End it with its trajectory; calls that are under way are told so."""
        self._known.pop(session.name, None)
        await self._services.engine.end_trajectory(session.name)

    def settle(self, session: McpSession) -> None:
        """Take note, after a call, of whether its sandbox has begun."""
        session.begun = session.begun or self._services.environments.get(session.name) is not None

    def _is_over(self, session: McpSession) -> bool:
        """Whether its trajectory has ended: by somebody's request, or idle for too long."""
        return session.begun and not session.running and self._services.engine.trajectory(session.name) is None

    def _of_earlier_gateway(self, name: str) -> McpSession | None:
        """Return a session whose trajectory has outlived the gateway that opened it."""
        if not name.startswith(PREFIX) or self._services.environments.get(name) is None:
            return None
        self._make_room()
        session = self._known[name] = McpSession(name, begun=True)
        return session

    def _make_room(self) -> None:
        """Forget what is over, then the session unused longest that has nothing to lose."""
        if len(self._known) < self._most:
            return
        for session in [each for each in self._known.values() if self._is_over(each)]:
            del self._known[session.name]
        idle = (each for each in self._known.values() if not each.begun and not each.running)
        if len(self._known) >= self._most and (oldest := next(idle, None)) is not None:
            del self._known[oldest.name]
        if len(self._known) >= self._most:
            told = f"{self._most} sessions live (server.facades.mcp.sessions): end one, or come again"
            raise CapacityExceeded(told, component="mcp", retry_after_s=FULL_S)
