"""Lists and files in messages of a bounded size, whatever their length."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TypeVar

from google.protobuf.message import Message

#: Bytes of the bytes of a file that one message sends.
PIECE_BYTES = 256 * 1024
#: Bytes of the entries of a list that one message sends, beyond its last one. A client takes 4 MiB by default.
PORTION_BYTES = 256 * 1024

Entry = TypeVar("Entry", bound=Message)


def portions(entries: Iterable[Entry]) -> Iterator[tuple[list[Entry], bool]]:
    """Yield the entries in order, so many at a time as fit a message, and whether they are the last, or none at all."""
    portion: list[Entry] = []
    size_bytes = 0
    for entry in entries:
        if size_bytes >= PORTION_BYTES:
            yield portion, False
            portion, size_bytes = [], 0
        portion.append(entry)
        size_bytes += entry.ByteSize()
    yield portion, True


async def pieces(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the bytes as they come, at most `PIECE_BYTES` at a time."""
    async for chunk in chunks:
        for start in range(0, len(chunk), PIECE_BYTES):
            yield chunk[start : start + PIECE_BYTES]
