"""Byte streams: the way of the bytes between the gateway and one resident runner, whatever is spoken over it."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from pathlib import Path
from typing import Protocol

from runtimes.sandbox.runner.protocol import lost

CONNECT_STEP_S = 0.002


class ByteStream(Protocol):
    """A way to one runner."""

    async def join(self, end: asyncio.BufferedProtocol, *, deadline_s: float) -> int:
        """Connect ``end`` with the runner, which may be starting up; both begin at the start of a frame.

        Return the runner's process id as this side sees it, 0 if it cannot. Raises ActionFailed(environment_lost)
        if the runner is not there by ``deadline_s`` of the monotonic clock.
        """
        ...


class SocketStream:
    """The runner's Unix socket, in a directory that both sides see."""

    def __init__(self, directory: Path, *, peer_pid: int = 0) -> None:
        self._directory = directory
        #: The process that must be listening, if known: a socket planted by another is not spoken to.
        self._peer_pid = peer_pid

    async def join(self, end: asyncio.BufferedProtocol, *, deadline_s: float) -> int:
        sock = await self._reach(deadline_s)
        seen_pid: int
        seen_pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if self._peer_pid and seen_pid and seen_pid != self._peer_pid:
            sock.close()
            raise lost(f"another process ({seen_pid}) than the runner ({self._peer_pid}) listens on its socket")
        await asyncio.get_running_loop().create_unix_connection(lambda: end, sock=sock)
        return seen_pid

    async def _reach(self, deadline_s: float) -> socket.socket:
        """Return a connected socket, tried until the deadline or the runner's end."""
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                _connect(sock, self._directory)
                return sock
            except OSError as error:
                sock.close()
                if _ended(self._peer_pid) or time.monotonic() >= deadline_s:
                    raise lost(f"the sandbox's runner cannot be reached: {error}") from None
            await asyncio.sleep(CONNECT_STEP_S)


def _ended(pid: int) -> bool:
    return pid != 0 and not Path(f"/proc/{pid}").exists()


def _connect(sock: socket.socket, directory: Path) -> None:
    """Connect through the directory's descriptor: a socket's path may have 107 bytes, a state directory's more."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        sock.connect(f"/proc/self/fd/{fd}/s")
    finally:
        os.close(fd)
