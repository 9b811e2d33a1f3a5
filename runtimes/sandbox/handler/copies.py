"""What a revision of a handler runs: a copy of its directory, as it was when the revision was first prepared.

A file that is edited while the gateway serves would else be taken by the instances that begin later, and by the nodes
that join later, beside those that have the old one: two codes under one revision.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import structlog

from manager.errors import InvalidConfig, exhaustion
from manager.function import FunctionSpec
from runtimes.sandbox.handler.files import HandlerFile, handler_files
from runtimes.sandbox.handler.sources import COMPONENT, SOURCES_LIMIT_BYTES

_LOG = structlog.get_logger("sandbox.handler")

#: Copies that are kept until the next start; functions that are prepared beyond it run their directories as they are.
COPIES_MAX = 1000


class HandlerCopies:
    """The copies of a gateway's handlers: each a directory of ``root``, named by the digest of what is in it.

    Use from one event loop. Without a root every handler runs its own directory, as on a node, which has copies only.
    """

    def __init__(self, root: Path | None = None, excluded: Collection[Path] = ()) -> None:
        """Nothing of the ``excluded`` directories is ever copied, such as the gateway's own state.

        What is in the root, of the gateway before, is removed: revisions are read anew at each start.
        """
        self.root = None if root is None else root.absolute()
        if self.root is not None:
            shutil.rmtree(self.root, ignore_errors=True)
        self.excluded = frozenset(path.resolve() for path in excluded)
        #: By name and revision.
        self._places: dict[tuple[str, str], Path] = {}
        self._one = asyncio.Lock()

    async def of(self, function: FunctionSpec) -> Path:
        """Return the directory that this revision runs, which is there from its first preparation on.

        A handler's directory that is too large to be copied is that itself, and the log says so. Raises InvalidConfig
        for files that cannot be read, StorageUnavailable or CapacityExceeded where this machine ran short.
        """
        assert function.handler is not None, f"{function.name} has no handler"
        directory, key = function.handler.directory, (function.name, function.revision)
        if self.root is None:
            return directory
        async with self._one:
            known = self._places.get(key)
            if known is None:
                known = self._places[key] = await asyncio.to_thread(self._copied, function.name, directory)
            while len(self._places) > COPIES_MAX:
                del self._places[next(iter(self._places))]
        return known

    def forget(self, function: FunctionSpec) -> None:
        """Copy this revision anew when it is prepared again: it could not be imported as it is."""
        self._places.pop((function.name, function.revision), None)

    def _copied(self, name: str, directory: Path) -> Path:
        assert self.root is not None
        try:
            found = handler_files(directory, self.excluded)
        except InvalidConfig as error:
            _LOG.warning(
                "a handler runs its directory as it is: what is edited there is taken by the instances that begin "
                "later, before it is applied",
                function=name,
                why=error.message,
            )
            return directory
        except OSError as error:
            raise exhaustion(error, COMPONENT) or _unreadable(directory, error) from None
        try:
            self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            if sum(1 for _ in self.root.iterdir()) >= COPIES_MAX:
                _LOG.warning(
                    "too many versions of handlers since the start: this one runs its directory as it is", function=name
                )
                return directory
            with tempfile.TemporaryDirectory(dir=self.root, prefix=".new-") as made:
                files = Path(made, "files")
                files.mkdir(mode=0o755)
                place = self.root / _copy(found, files)
                with suppress(OSError):  # the same files are there already
                    files.rename(place)
                if place.is_dir():
                    return place
        except OSError as error:
            raise exhaustion(error, COMPONENT) or _unreadable(directory, error) from None
        raise InvalidConfig(f"the files of {directory} cannot be kept in {self.root}", component=COMPONENT)


def _copy(found: list[HandlerFile], target: Path) -> str:
    """Copy files into a directory; return the digest of their names, modes and bytes."""
    digest, left_bytes = hashlib.sha256(), SOURCES_LIMIT_BYTES
    for each in found:
        data = each.path.read_bytes()
        left_bytes -= len(data)
        if left_bytes < 0:
            raise OSError(f"{each.path} grew while it was copied")
        file = target / each.name
        file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        file.write_bytes(data)
        file.chmod(each.mode)
        digest.update(os.fsencode(f"{each.name}\0{each.mode:o}\0{len(data)}\0") + data)
    for place in (target, *(each for each in target.rglob("*") if each.is_dir())):
        place.chmod(0o755)  # whatever the umask is
    return digest.hexdigest()


def _unreadable(directory: Path, error: OSError) -> InvalidConfig:
    return InvalidConfig(f"the files of {directory} cannot be copied: {error}", component=COMPONENT)
