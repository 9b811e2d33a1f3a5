"""The journal: which attempts have begun on this node and how they ended, until the gateway has that on record.

An attempt is written down before it begins and when it has ended; so no daemon of this state directory begins it again,
and its end is told by the next one if this one is killed. Each record has its length and a checksum: one that was torn
by a kill ends the reading. What a kill of the daemon leaves is in the kernel's hands; what a crash of the machine
leaves is not trusted (`epoch`).
"""

from __future__ import annotations

import os
import secrets
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from manager.function import Setting
from runtimes.node.message import Message
from runtimes.node.wire import (
    HEADER,
    AcknowledgeEnd,
    AttemptEnd,
    AttemptGo,
    ChannelError,
    DefineFunction,
    ExecuteAttempt,
    decode,
    encode,
)

SUM = struct.Struct(">I")
NAME = "journal"
#: Beside it: the life of the state directory.
EPOCH = "epoch"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSettings:
    """The bounds of a journal."""

    #: Bytes from which on it is written anew with what still counts, and again at each doubling.
    compact_bytes: Annotated[int, Setting(ge=2**10)] = 16 * 2**20


@dataclass(slots=True)
class JournalEntry:
    """What is known of one attempt."""

    execute: ExecuteAttempt
    lasting: bool
    end: AttemptEnd | None = None


@dataclass(slots=True)
class JournalContents:
    """What a journal says."""

    functions: dict[str, bytes] = field(default_factory=dict)
    attempts: dict[str, JournalEntry] = field(default_factory=dict)


class AttemptJournal:
    """Appends to the file in a directory; read once, at the beginning. Raises OSError where the disk refuses."""

    def __init__(self, directory: Path, settings: JournalSettings | None = None) -> None:
        self._path = directory / NAME
        self._settings = settings or JournalSettings()
        self.contents = JournalContents()
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size_bytes = self._read()
        self._compact_at = self._settings.compact_bytes

    def begun(self, execute: ExecuteAttempt, function: bytes, *, lasting: bool) -> None:
        """An attempt is about to begin: whatever happens, it does not begin again."""
        if execute.function not in self.contents.functions:
            self._append(DefineFunction(execute.function, function))
        self._write(_record(execute) + _record(AttemptGo(execute.claim, lasting, None)))
        self.contents.attempts.setdefault(execute.claim, JournalEntry(execute, lasting=False)).lasting = lasting
        self._keep_short()

    def lasting(self, claim: str, lasting: bool) -> None:
        """It outlives its caller, or does not."""
        self._append(AttemptGo(claim, lasting, None))

    def ended(self, *ends: AttemptEnd) -> None:
        """Attempts have ended."""
        self._append(*ends)

    def acknowledged(self, *claims: str) -> None:
        """Their ends are on record elsewhere."""
        self._append(*map(AcknowledgeEnd, claims))

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, *messages: Message) -> None:
        self._write(b"".join(map(_record, messages)))
        for message in messages:
            self._note(message)
        self._keep_short()

    def _write(self, data: bytes) -> None:
        place = self._size_bytes
        while data:  # at its own place: what a full disk took of it is written over by the next
            written = os.pwrite(self._fd, data, place)
            place, data = place + written, data[written:]
        self._size_bytes = place

    def _keep_short(self) -> None:
        if self._size_bytes > self._compact_at:
            self._compact()

    def _note(self, message: Message) -> None:
        attempts = self.contents.attempts
        match message:
            case DefineFunction():
                self.contents.functions[message.digest] = message.function
            case ExecuteAttempt():
                attempts.setdefault(message.claim, JournalEntry(message, lasting=False))
            case AttemptGo() if message.claim in attempts:
                attempts[message.claim].lasting = message.lasting
            case AttemptEnd() if message.claim in attempts:
                attempts[message.claim].end = message
            case AcknowledgeEnd():
                attempts.pop(message.claim, None)

    def _read(self) -> int:
        """Read what is whole, and cut off the rest."""
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        place = 0
        while len(data) - place >= SUM.size + HEADER.size:
            (wanted,) = SUM.unpack_from(data, place)
            size_bytes, kind = HEADER.unpack_from(data, place + SUM.size)
            begin = place + SUM.size + HEADER.size
            frame = data[place + SUM.size : begin + size_bytes]
            if begin + size_bytes > len(data) or zlib.crc32(frame) != wanted:
                break
            try:
                self._note(decode(kind, data[begin : begin + size_bytes]))
            except ChannelError:
                break
            place = begin + size_bytes
        os.ftruncate(self._fd, place)
        return place

    def _compact(self) -> None:
        """Write a new file with what still counts, and take it in place of the old one."""
        contents = self.contents
        used = {entry.execute.function for entry in contents.attempts.values()}
        contents.functions = {digest: data for digest, data in contents.functions.items() if digest in used}
        messages: list[Message] = [DefineFunction(digest, data) for digest, data in contents.functions.items()]
        for entry in contents.attempts.values():
            messages += [entry.execute, AttemptGo(entry.execute.claim, entry.lasting, None)]
            messages += [] if entry.end is None else [entry.end]
        data = b"".join(_record(message) for message in messages)
        part = self._path.with_suffix(".part")
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
            part.replace(self._path)
        except OSError:
            os.close(fd)
            self._compact_at = 2 * self._size_bytes  # the old one goes on
            return
        os.close(self._fd)
        self._fd, self._size_bytes = fd, len(data)
        self._compact_at = max(self._settings.compact_bytes, 2 * len(data))


def epoch(directory: Path, boot_id: Path = BOOT_ID) -> str:
    """Return which life of a state directory this is: the same until the machine starts anew, or the directory does."""
    place = directory / EPOCH
    try:
        born = place.read_text(encoding="ascii")
    except FileNotFoundError:
        born = secrets.token_hex(8)
        place.write_text(born, encoding="ascii")
    return f"{boot_id.read_text(encoding='ascii').strip()}/{born}"


def _record(message: Message) -> bytes:
    frame = encode(message)
    return SUM.pack(zlib.crc32(frame)) + frame
