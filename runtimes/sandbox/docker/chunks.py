"""The multiplexed stream of an engine: output in chunks that name their stream."""

from __future__ import annotations

import struct

from runtimes.sandbox.runner.runner import FrameDecoder

STDOUT, STDERR = 1, 2
#: Stream, three bytes of nothing, length.
_HEADER = struct.Struct("!BxxxI")
#: Bytes of one chunk above which it is no engine that speaks.
CHUNK_MAX_BYTES = 16 * 2**20


def chunk_decoder() -> FrameDecoder:
    """Return a decoder whose frames are ``((stream, length), data)``."""
    return FrameDecoder(_HEADER, length_at=1, limit=CHUNK_MAX_BYTES)
