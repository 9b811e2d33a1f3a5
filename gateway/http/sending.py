"""Sending: an answer goes to a caller who reads, and is given up where one does not."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect
from starlette.types import Message, Send

from gateway.http.stream import GIVE_UP_STALLS

#: What any connection takes at once, whether its peer reads or not.
SMALL_BYTES = 16 * 1024


class BoundedSend:
    """An ASGI ``send`` that knows whether an answer has begun."""

    def __init__(self, send: Send, stall_s: float) -> None:
        self._send = send
        self._stall_s = stall_s
        self.started = False

    async def __call__(self, message: Message) -> None:
        """Send; raises ClientDisconnect when the caller, though it is there, does not read."""
        self.started = True
        if len(message.get("body", b"")) <= SMALL_BYTES:
            await self._send(message)
            return
        try:
            async with asyncio.timeout(GIVE_UP_STALLS * self._stall_s):
                await self._send(message)
        except TimeoutError:
            raise ClientDisconnect() from None
