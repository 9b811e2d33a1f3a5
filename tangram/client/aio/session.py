"""The handle of one interactive session, for the asynchronous client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, TypeVar

import httpx

from tangram.client import requests, session_requests
from tangram.client.aio.connections import AsyncLink
from tangram.client.aio.running import pause
from tangram.client.answers import connection_lost, error_of
from tangram.client.requests import ApiRequest
from tangram.client.retries import Retries
from tangram.client.session_follower import SessionFollower
from tangram.errors import ConnectionFailed, TangramError
from tangram.types import SessionEnd, SessionOutput

_T = TypeVar("_T")
#: Bytes of input that are sent at once.
INPUT_PIECE_BYTES = 256 * 2**10


class AsyncSessionSender(Protocol):
    """Who sends what a session is told: the client."""

    _retries: Retries

    async def _send(self, request: ApiRequest[_T]) -> _T: ...

    def _link(self) -> AsyncLink: ...


class AsyncSessionHandle:
    """A command in a trajectory's sandbox that somebody types to; it holds its cores until it ends.

    It goes on without this process, and whoever knows its ``id`` may attach to it: what it says is numbered byte by
    byte, and the last of it is kept. A session to which nobody is attached for a while is ended. One task, or thread,
    may read while another writes.
    """

    def __init__(self, client: AsyncSessionSender, id: str, *, begun: bool) -> None:
        """``begun``: by this handle, and nothing was typed yet."""
        self.id = id
        self._client = client
        self._follower = SessionFollower(id, client._retries, input_offset=0 if begun else None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    @property
    def end(self) -> SessionEnd | None:
        """How it ended; None before `output` has come to its end."""
        return self._follower.end

    @property
    def missing(self) -> int:
        """Bytes of output that were no longer kept when this handle asked for them."""
        return self._follower.missing

    async def output(self) -> AsyncIterator[SessionOutput]:
        """Yield what it says until it ends, over broken connections; who was attached before is detached.

        Raises ConflictError when another caller attaches.
        """
        while self._follower.end is None:
            try:
                async for piece in self._pieces():
                    yield piece
                if self._follower.end is None:
                    raise ConnectionFailed(f"the output of session {self.id} broke off")
            except TangramError as error:
                wait_s = self._follower.again_s(error)
                if wait_s is None:
                    raise
                await pause(wait_s)

    async def _pieces(self) -> AsyncIterator[SessionOutput]:
        """Yield what one connection brings."""
        link, follower = self._client._link(), self._follower
        path, params = session_requests.session_path(self.id), {"offset": str(follower.offset)}
        try:
            async with link.lasting, link.http.stream("GET", path, params=params) as response:
                if not response.is_success:
                    await response.aread()
                    raise error_of(response)
                async for text in response.aiter_lines():
                    if (piece := follower.feed(text)) is not None:
                        yield piece
        except httpx.TransportError as error:
            raise connection_lost(f"session {self.id}", error) from error

    async def wait(self) -> SessionEnd:
        """Read to its end, and return how it ended."""
        async for _ in self.output():
            pass
        assert self._follower.end is not None
        return self._follower.end

    async def write(self, data: bytes | str) -> bool:
        """Type so much; return whether its command still reads. It is passed on once, however often it is sent."""
        rest = data.encode() if isinstance(data, str) else data
        while rest:
            offset = self._follower.input_offset
            fed = await self._client._send(session_requests.write_session(self.id, rest[:INPUT_PIECE_BYTES], offset))
            rest = rest[INPUT_PIECE_BYTES if offset is None else fed.input_offset - offset :]
            self._follower.input_offset = fed.input_offset
            if not fed.reads:
                return False
        return True

    async def close_input(self) -> None:
        """Say that there is no more input; a command that waits for its turn is waited for."""
        reads = True
        while reads:  # still reading: it has not begun, or not read what came before, for as long as the gateway waits
            request = session_requests.write_session(self.id, b"", self._follower.input_offset, end=True)
            reads = (await self._client._send(request)).reads

    async def resize(self, rows: int, columns: int) -> None:
        """Tell its terminal how large it is; raises ConflictError if it has none."""
        await self._client._send(session_requests.steer_session(self.id, size=(rows, columns)))

    async def signal(self, name: str) -> None:
        """Signal what runs in its foreground: INT, TERM, KILL, HUP, QUIT, USR1, USR2, TSTP or CONT."""
        await self._client._send(session_requests.steer_session(self.id, signal=name))

    async def cancel(self) -> None:
        """End it with everything that it started; raises ConflictError if it has ended."""
        await self._client._send(requests.cancel_invocation(self.id))


async def attached(client: AsyncSessionSender, id: str) -> AsyncSessionHandle:
    """Return the handle of a session that was begun elsewhere; raises NotFoundError."""
    await client._send(requests.get_invocation(id))
    return AsyncSessionHandle(client, id, begun=False)
