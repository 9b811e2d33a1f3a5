"""The files of a handler as one archive, and the digest of all of them, which is their name on a node.

The digest is that of names, bytes and modes, not of the archive: a node takes it of what it has unpacked, and again of
what it finds when it was started anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from manager.errors import InvalidConfig, exhaustion
from manager.function import FunctionSpec
from runtimes.sandbox.handler.copies import HandlerCopies
from runtimes.sandbox.handler.files import HandlerFile, handler_files, too_much
from runtimes.sandbox.handler.sources import SOURCES_LIMIT_BYTES, SOURCES_MAX

COMPONENT = "node.handlers"
#: Bytes of the largest archive: its files, and what a tar says of each of them.
ARCHIVE_MAX_BYTES = SOURCES_LIMIT_BYTES + SOURCES_MAX * 8 * tarfile.BLOCKSIZE
#: Bytes of archives that a gateway keeps in mind for the next node.
KEPT_MAX_BYTES = 2 * ARCHIVE_MAX_BYTES


class HandlerArchive(NamedTuple):
    """What travels, and its name."""

    digest: str
    data: bytes


class HandlerArchives:
    """The archives of a gateway's handlers. Use from one event loop."""

    def __init__(
        self, excluded: Collection[Path] = (), uploads: Path | None = None, copies: HandlerCopies | None = None
    ) -> None:
        """Nothing of the ``excluded`` directories ever travels, such as the gateway's own state.

        But each directory in ``uploads``, in which the gateway keeps handlers that it was sent, does, and each of its
        ``copies``.
        """
        self._excluded = frozenset(path.resolve() for path in excluded)
        self._copies = copies or HandlerCopies()
        self._kept_in = {path.resolve() for path in (uploads, self._copies.root) if path is not None}
        #: By directory, the one used last at the end.
        self._kept: dict[Path, tuple[list[HandlerFile], HandlerArchive]] = {}
        self._one = asyncio.Lock()

    async def of_function(self, function: FunctionSpec) -> HandlerArchive:
        """Return the files that this revision of a handler runs; raises as `of`."""
        return await self.of(await self._copies.of(function))

    async def of(self, directory: Path) -> HandlerArchive:
        """Return the files of a handler's directory as they are now.

        Raises InvalidConfig for more than travels, CapacityExceeded where this machine ran short.
        """
        async with self._one:
            try:
                found = await asyncio.to_thread(self._found, directory)
                kept = self._kept.pop(directory, None)
                if kept is None or kept[0] != found:
                    kept = found, await asyncio.to_thread(_packed, directory, found)
            except OSError as error:
                told = f"the files of {directory} cannot be read: {error}"
                raise exhaustion(error, COMPONENT) or InvalidConfig(told, component=COMPONENT) from None
            self._kept[directory] = kept
            while sum(len(archive.data) for _, archive in self._kept.values()) > KEPT_MAX_BYTES:
                del self._kept[next(iter(self._kept))]
            return kept[1]

    def _found(self, directory: Path) -> list[HandlerFile]:
        root = directory.resolve(strict=True)
        if root.parent not in self._kept_in and not self._excluded.isdisjoint((root, *root.parents)):
            told = (
                f"{directory} lies where nothing travels from, as the gateway's state does: keep the handler elsewhere"
            )
            raise InvalidConfig(told, component=COMPONENT)
        return handler_files(directory, self._excluded)


def digest_of(directory: Path) -> str:
    """Return the digest of the files in a directory; raises InvalidConfig and OSError."""
    return _packed(directory, handler_files(directory, frozenset())).digest


def _packed(directory: Path, found: list[HandlerFile]) -> HandlerArchive:
    out, digest, left_bytes = io.BytesIO(), hashlib.sha256(), SOURCES_LIMIT_BYTES
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for each in found:
            with each.path.open("rb") as file:
                data = file.read(left_bytes + 1)
            left_bytes -= len(data)
            if left_bytes < 0:
                raise too_much(directory)
            entry = tarfile.TarInfo(each.name)
            entry.size, entry.mode = len(data), each.mode
            tar.addfile(entry, io.BytesIO(data))
            digest.update(os.fsencode(f"{each.name}\0{entry.mode:o}\0{len(data)}\0"))
            digest.update(data)
    return HandlerArchive(digest.hexdigest(), out.getvalue())
