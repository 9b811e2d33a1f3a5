"""Frames between the gateway and its own model processes: a length, then a pickle. Pipes are private."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import threading

_LENGTH = struct.Struct("<I")

#: Largest frame: an action's tokens or results; far above any, it only stops garbage.
FRAME_BYTES_MAX = 1 << 30


def encode(message: object) -> bytes:
    """One frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {len(body)} bytes exceeds {FRAME_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader) -> object:
    """The next message; raises IncompleteReadError when the process is gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > FRAME_BYTES_MAX:
        raise ConnectionError(f"a frame claims {length} bytes")
    return pickle.loads(await reader.readexactly(length))


class MessagePipe:
    """The end of a pipe inside a model process: blocking, and safe to write from several threads."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._connection = connection
        self._incoming = connection.makefile("rb")
        self._writing = threading.Lock()

    def receive(self) -> object:
        """The next message; raises EOFError when the gateway is gone."""
        head = self._incoming.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            raise EOFError
        (length,) = _LENGTH.unpack(head)
        body = self._incoming.read(length)
        if len(body) < length:
            raise EOFError
        return pickle.loads(body)

    def send(self, message: object) -> None:
        with self._writing:
            self._connection.sendall(encode(message))
