"""The stream of calls: what its frames say (docs/reference/http.md).

One connection carries any number of calls, cancels and answers at once, by numbers that the caller chooses; one
message of the WebSocket is any number of frames. Inputs, records and problems are JSON, as over HTTP.
"""

from __future__ import annotations

from msgspec import Struct

from tangram.frames import FrameCodec
from tangram.types import CallOptions

STREAM_PATH = "/v1/stream"


class StreamMessage(Struct, array_like=True, gc=False):
    """What one frame says."""


class StreamHello(StreamMessage):
    """The gateway's first word: the bounds of what it reads."""

    message_max_bytes: int
    #: Calls and waits that are in flight at once.
    calls_max: int


class StreamCall(StreamMessage):
    """Invoke a function. There is one answer."""

    #: Of none that is in flight.
    id: int
    function: str
    #: A JSON object; empty for an empty one.
    input: bytes = b""
    options: CallOptions = CallOptions()


class StreamWait(StreamMessage):
    """Wait for the end of an invocation, which takes no notice of it; the answer is its record."""

    id: int
    invocation: str
    #: As ``?wait=``.
    wait: str = "0s"


class StreamCancel(StreamMessage):
    """Cancel a call that is in flight, whose answer says so. Of a number that is not in flight nothing is said."""

    id: int
    #: Or leave it, as one leaves by hanging up: there is no answer, and nothing durable is cancelled.
    leave: bool = False


class StreamAnswer(StreamMessage):
    """The answer to a call or a wait: what HTTP would answer."""

    id: int
    status: int
    #: The record, or a problem.
    body: bytes
    #: The key was known: this is the invocation of the first call.
    replayed: bool = False


class StreamLog(StreamMessage):
    """Of a call with ``mode: stream``: records of its log, as lines of JSON."""

    id: int
    lines: bytes


STREAM = FrameCodec(StreamMessage)
