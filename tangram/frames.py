"""Frames: messages in msgpack, one after the other, as nodes and streams of calls carry them.

A frame is its body's length (4 bytes, big-endian), its kind (1 byte) and its body, an array of the message's fields.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

HEADER = struct.Struct(">IB")
_M = TypeVar("_M", bound=msgspec.Struct)


class FrameError(Exception):
    """What came is no frame, or one of another protocol."""


class FrameCodec(Generic[_M]):
    """Messages as frames; the kind of each is its place among the types that are made of one, from 1 on."""

    def __init__(self, base: type[_M]) -> None:
        #: Every message by the kind that stands in its frame.
        self.kinds = dict(enumerate(base.__subclasses__(), 1))
        self._numbers = {message: kind for kind, message in self.kinds.items()}
        self._decoders = {kind: msgspec.msgpack.Decoder(message) for kind, message in self.kinds.items()}
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: _M) -> bytes:
        """Return a message as a frame."""
        body = self._encoder.encode(message)
        return HEADER.pack(len(body), self._numbers[type(message)]) + body

    def decode(self, kind: int, body: bytes | memoryview) -> _M:
        """Return the message in a frame's body; raises FrameError, caused by what does not fit."""
        decoder = self._decoders.get(kind)
        if decoder is None:
            raise FrameError(f"a frame of unknown kind {kind}")
        try:
            return decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, TypeError, AssertionError) as error:
            raise FrameError(f"a {self.kinds[kind].__name__} that does not fit: {error}") from error


def split(data: bytes) -> Iterator[tuple[int, memoryview]]:
    """Yield kind and body of frames that stand one after the other; raises FrameError if the last is not whole."""
    view, start = memoryview(data), 0
    while start < len(data):
        begin = start + HEADER.size
        if begin > len(data):
            raise FrameError("half a frame")
        length, kind = HEADER.unpack_from(data, start)
        start = begin + length
        if start > len(data):
            raise FrameError("half a frame")
        yield kind, view[begin:start]
