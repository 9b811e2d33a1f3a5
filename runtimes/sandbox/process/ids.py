"""User ids of process sandboxes: a block of 65536 for each, held by the sandbox itself as long as it lives.

What the kernel counts or keeps for a user (inotify instances, processes, keyrings) is then one sandbox's alone, and
its root is nobody on the machine. Gateways of one machine share a directory with a file for each block; who has a
block has a lock on its file. The runner inherits the open file, so that a block outlives its gateway with the sandbox,
and no end of either has to be seen.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

from manager.errors import CapacityExceeded, InvalidConfig
from manager.function import Setting

COMPONENT = "sandbox.process"
#: Ids of one sandbox: those that images and programs know.
BLOCK = 2**16
#: The machine's, not the state directory's: two gateways must not take the same block.
CLAIMS = Path("/run/tangram-ids")
#: Seconds that the processes of a sandbox that has ended are given to be gone, if no other block is free.
LEAVE_S = 2.0
LEAVE_EVERY_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class IdSettings:
    """The user and group ids that process sandboxes of a gateway that is root are given on the machine."""

    first: Annotated[
        int, Setting("first id, a multiple of 65536; nobody else on the machine may use them", ge=BLOCK, le=2**31)
    ] = 0x7100_0000
    blocks: Annotated[int, Setting("blocks of 65536 ids: process sandboxes at once", ge=1, le=2**14)] = 1024


@dataclass(frozen=True, slots=True)
class IdBlock:
    """The ids from ``base`` on, until all who have the claim open have closed it, and nobody runs as one of them."""

    base: int
    #: The block's file, locked.
    claim: IO[bytes]
    #: A user namespace whose ids from 0 on are these.
    namespace: IO[bytes]

    def close(self) -> None:
        """Close our own; whoever has inherited the claim keeps the block. Idempotent."""
        self.namespace.close()
        self.claim.close()


class IdBlocks:
    """The blocks of a configured range."""

    def __init__(self, settings: IdSettings, directory: Path = CLAIMS) -> None:
        if settings.first % BLOCK:
            raise InvalidConfig(f"sandbox.ids.first must be a multiple of {BLOCK}, not {settings.first}")
        self._settings, self._directory = settings, directory
        self._next = 0

    def claim(self) -> IdBlock:
        """Return a block that no other sandbox of this machine has. Blocks for milliseconds, LEAVE_S at most.

        Raises CapacityExceeded if there is none, OSError if root may not make user namespaces here.
        """
        self._directory.mkdir(mode=0o700, exist_ok=True)
        deadline_s = time.monotonic() + LEAVE_S
        while True:
            block, leaving = self._look()
            if block is not None:
                return block
            if not leaving or time.monotonic() > deadline_s:
                raise CapacityExceeded(
                    f"all {self._settings.blocks} blocks of user ids for process sandboxes are taken: "
                    "end some sandboxes, or raise sandbox.ids.blocks",
                    component=COMPONENT,
                )
            time.sleep(LEAVE_EVERY_S)

    def _look(self) -> tuple[IdBlock | None, bool]:
        """Return a free block, and without one whether there is one that nobody holds and somebody still runs under."""
        leaving = False
        for index in self._order():
            base = self._settings.first + index * BLOCK
            claim = _locked(self._directory / str(base))
            if claim is None:
                continue
            try:
                # The first process of a sandbox closes its files a moment before its others are ended.
                if os.fstat(claim.fileno()).st_size == 0 or not _in_use(base):
                    claim.write(b"claimed")
                    self._next = index + 1
                    return IdBlock(base, claim, _namespace(base)), False
            except OSError:
                claim.close()
                raise
            claim.close()
            leaving = True
        return None, leaving

    def _order(self) -> Iterator[int]:
        for step in range(self._settings.blocks):
            yield (self._next + step) % self._settings.blocks


def _namespace(base: int) -> IO[bytes]:
    """Return a new user namespace; raises OSError, with the reason, where root may not make one.

    It is the block's own first user who makes it: the kernel counts for the maker of a namespace what is in it.
    """
    capability = ("--inh-caps=-all,+sys_admin", "--ambient-caps=-all,+sys_admin")  # where users may make none
    words = ("setpriv", f"--reuid={base}", f"--regid={base}", "--clear-groups", *capability, "unshare", "--user", "cat")
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as inside:
        assert inside.stdin is not None and inside.stdout is not None and inside.stderr is not None
        with suppress(BrokenPipeError):
            inside.stdin.write(b".")  # what comes back has come through the namespace
        if not inside.stdout.read(1):
            raise OSError(inside.stderr.read().decode(errors="replace").strip() or "unshare ended")
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{inside.pid}/{name}").write_text(f"0 {base} {BLOCK}\n", encoding="ascii")
        return Path(f"/proc/{inside.pid}/ns/user").open("rb", buffering=0)


def _locked(path: Path) -> IO[bytes] | None:
    """Return the file, open and locked; None if somebody else has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return os.fdopen(fd, "r+b", buffering=0)


def _in_use(base: int) -> bool:
    """Return whether a process that can be seen from here lives under one of the ids."""
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            text = status.read_text(encoding="utf-8", errors="replace")
            words = text.partition("\nUid:")[2].split()
            if "\nState:\tZ" not in text and any(base <= int(word) < base + BLOCK for word in words[:4]):
                return True
    return False
