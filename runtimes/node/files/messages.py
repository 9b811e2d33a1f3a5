"""What travels of a file: a question, its bytes in pieces both ways as far as the other side has room, one end.

A transfer lives as long as the link on which it was asked for; neither side goes on with one over another link.
"""

from __future__ import annotations

from enum import StrEnum

from runtimes.node.message import ErrorFacts, Message


class FilesVerb(StrEnum):
    """What is done with the files of a sandbox, or that those of a handler are kept (``path``: their digest)."""

    WRITE = "write"
    READ = "read"
    LIST = "list"
    UNPACK = "unpack"
    PACK = "pack"
    HANDLER = "handler"

    @property
    def inward(self) -> bool:
        """Whether its bytes go to the node."""
        return self in (FilesVerb.WRITE, FilesVerb.UNPACK, FilesVerb.HANDLER)


class FilesAsk(Message, kw_only=True):
    """Begin a transfer; to the node."""

    transfer: int
    verb: FilesVerb
    trajectory: str
    path: str
    #: Empty: the sandbox's own.
    user: str
    #: Of a file that is written; None keeps what is there.
    mode: int | None = None
    #: Most bytes of what is read, packed or unpacked.
    limit_bytes: int = 0
    #: Whether names in an archive begin at the directory's own.
    base: bool = False


class FilesOpened(Message):
    """What is read is there, and its pieces follow; from the node."""

    transfer: int
    #: None if only the end tells.
    size_bytes: int | None


class FilesPiece(Message):
    """The next bytes, either way; an empty piece is the last one."""

    transfer: int
    data: bytes


class FilesTaken(Message):
    """So many bytes were taken, and there is room for as many more; either way."""

    transfer: int
    size_bytes: int


class FilesEnded(Message):
    """It is done, or failed, and the transfer is over; from the node."""

    transfer: int
    error: ErrorFacts | None
    #: Bytes that were written.
    size_bytes: int
    #: A directory's entries, msgpack of `runtimes.sandbox.command.FileStat`s.
    entries: bytes


class FilesStop(Message):
    """Nobody wants more of it, or there is no more to give; to the node, which says nothing of it any more."""

    transfer: int


#: In the order of their kinds; what was released keeps its place.
FILES_MESSAGES: tuple[type[Message], ...] = (FilesAsk, FilesOpened, FilesPiece, FilesTaken, FilesEnded, FilesStop)
