"""What travels of a session: its output from a byte on as far as there is room, its input, and what steers it.

The node keeps the end of the output and numbers both byte by byte, so that after a cut either side says again what the
other has not heard. A session is named by the claim of its attempt.
"""

from __future__ import annotations

from runtimes.node.message import ErrorFacts, Message


class AttachSession(Message, kw_only=True):
    """Tell of this session on this link; to the node."""

    claim: str
    #: New for each side that steers it: its numbers are counted anew.
    life: str
    #: The first byte of output that is wanted, and how many may be under way.
    offset: int
    window_bytes: int
    #: Whether somebody reads it. If not, nothing is sent before its end, and its command waits for nobody.
    attended: bool
    #: Whether who reads it is slow: nothing is sent before there is room again.
    held: bool
    #: Seconds without a reader after which it is ended.
    unattended_s: float


class SessionRoom(Message):
    """Its output was taken up to here, and whether somebody reads it; to the node."""

    claim: str
    taken: int
    attended: bool


class TypeToSession(Message, kw_only=True):
    """Pass on input that begins at an offset; to the node, which answers it."""

    claim: str
    number: int
    offset: int
    data: bytes
    #: Whether there is no more.
    end: bool
    #: Whether nobody waits for it any more: no more of it is passed on, and the answer says how far it came. It bears
    #: the number of what it withdraws, and no data.
    withdrawn: bool = False


class SteerSession(Message, kw_only=True):
    """Resize its terminal (rows, columns), signal its foreground, or end it; to the node, which does it once."""

    claim: str
    number: int
    size: tuple[int, int] | None = None
    signal: int | None = None
    end: bool = False


class SessionOpened(Message, kw_only=True):
    """Its command runs; from the node, on each link."""

    claim: str
    #: Where the output that is kept begins.
    start: int
    #: Bytes of input that it was passed.
    input_offset: int
    reads: bool
    #: How many bytes the node sends ahead of what was taken.
    window_bytes: int


class SessionSaid(Message):
    """A piece of its output; from the node."""

    claim: str
    offset: int
    stream: str
    data: bytes


class SessionTold(Message):
    """It has ended, and this was all of its output; from the node."""

    claim: str


class SessionTyped(Message, kw_only=True):
    """How far its input came; from the node."""

    claim: str
    number: int
    input_offset: int
    reads: bool
    error: ErrorFacts | None


class SessionSteered(Message):
    """It was steered so; from the node."""

    claim: str
    number: int


#: In the order of their kinds; what was released keeps its place.
SESSION_MESSAGES: tuple[type[Message], ...] = (
    AttachSession,
    SessionRoom,
    TypeToSession,
    SteerSession,
    SessionOpened,
    SessionSaid,
    SessionTold,
    SessionTyped,
    SessionSteered,
)
