"""The files of handlers that a node was sent, each directory named by the digest of what is in it."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import tarfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import structlog

from manager.errors import ActionFailed, CapacityExceeded, CodedError, InvalidInput, Reason, TooLarge, exhaustion
from manager.function import FunctionSpec, Setting
from runtimes.node.handlers.archive import ARCHIVE_MAX_BYTES, COMPONENT, digest_of
from runtimes.node.wire import ChannelError
from runtimes.sandbox.files.archiver import Refused
from runtimes.sandbox.files.trees import unpack_tree
from runtimes.sandbox.handler.sources import SOURCES_LIMIT_BYTES

logger = structlog.get_logger("node.handlers")

#: In a directory of the store: the files themselves, and their bytes.
_FILES, _SIZE = "files", "size"
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerStoreSettings:
    """The bounds of the store."""

    max_bytes: Annotated[
        int, Setting("most bytes of handlers' files; beyond it those used least recently go, never one in use", ge=1)
    ] = 2 * 2**30


class HandlerStore:
    """The handlers' files in one directory. Use from one event loop."""

    def __init__(
        self, directory: Path, settings: HandlerStoreSettings, in_use: Callable[[], Collection[Path]] = lambda: ()
    ) -> None:
        """Directories ``in_use``, which instances have mounted, are never removed."""
        self._directory, self._settings, self._in_use = directory.absolute(), settings, in_use
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(".*"):
            shutil.rmtree(left, ignore_errors=True)  # half of what a daemon before was sent
        #: What was seen to be whole since the start.
        self._whole: set[str] = set()
        self._held: Counter[str] = Counter()
        self._receiving = asyncio.Lock()
        self._changing = asyncio.Lock()

    def placed(self, function: FunctionSpec) -> FunctionSpec:
        """Return a function that travelled as it is here: its handler's directory is that of its digest.

        Its revision names that too, as a handler's files may change beside its code. Raises ChannelError.
        """
        if function.handler is None:
            return function
        digest = str(function.handler.directory)
        if not _DIGEST.fullmatch(digest):
            raise ChannelError(f"function {function.name}: its files are not named by a digest")
        handler = replace(function.handler, directory=self._directory / digest / _FILES)
        return replace(function, revision=f"{function.revision}+{digest[:12]}", handler=handler)

    async def has(self, digest: str) -> bool:
        """Return whether these files are here, and whole."""
        place = self._place(digest)
        async with self._changing:
            if digest not in self._whole and await asyncio.to_thread(_is_whole, place, digest):
                self._whole.add(digest)
            try:
                _touch(place)
            except OSError:
                self._whole.discard(digest)
        return digest in self._whole

    async def take(self, digest: str, chunks: AsyncIterator[bytes]) -> int:
        """Keep the files of an archive that arrives; return its bytes.

        Raises TooLarge, InvalidInput for files of another digest, and CapacityExceeded where there is no room.
        """
        place, part = self._place(digest), self._directory / f".{secrets.token_hex(8)}"
        async with self._receiving:
            try:
                await _to_its_end(asyncio.to_thread(part.mkdir, mode=0o755))
                size_bytes = await _received(part, chunks)
                async with self._changing:
                    in_use = {path.parent.name for path in self._in_use()} | set(self._held)
                    await _to_its_end(asyncio.to_thread(self._keep, part, place, in_use))
                    self._whole.add(digest)
            except (Refused, tarfile.TarError) as error:
                raise InvalidInput(f"what was sent is no handler: {error}", component=COMPONENT) from None
            except OSError as error:
                told = f"the node cannot keep a handler's files: {error}"
                raise exhaustion(error, COMPONENT) or CodedError(told, component=COMPONENT) from None
            finally:
                await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)
        return size_bytes

    @asynccontextmanager
    async def held(self, function: FunctionSpec) -> AsyncIterator[None]:
        """Keep a function's files here for the block; raises ActionFailed if they are not."""
        if function.handler is None:
            yield
            return
        digest = function.handler.directory.parent.name
        self._held[digest] += 1
        try:
            if not await self.has(digest):
                told = f"the files of function {function.name} are not on the node: they come when it is prepared anew"
                raise ActionFailed(Reason.ENVIRONMENT_LOST, told, component=COMPONENT, retry_after_s=1.0)
            yield
        finally:
            self._held[digest] -= 1
            self._held += Counter()  # which drops what nobody holds

    def _place(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise InvalidInput(f"{digest[:80]!r} is no digest", component=COMPONENT)
        return self._directory / digest

    def _keep(self, part: Path, place: Path, in_use: Collection[str]) -> None:
        """Unpack what has arrived, and let it be found by its name once it is whole."""
        size_bytes = unpack_tree(part / "archive", part / _FILES, SOURCES_LIMIT_BYTES)
        if digest_of(part / _FILES) != place.name:
            raise InvalidInput("what was sent are not the files that were promised", component=COMPONENT)
        if place.is_dir():
            return  # it was sent twice
        self._make_room(size_bytes, in_use)
        (part / _SIZE).write_text(str(size_bytes), encoding="ascii")
        part.rename(place)
        _touch(place)

    def _make_room(self, size_bytes: int, in_use: Collection[str]) -> None:
        """Remove what was used least recently until so many bytes have room; raises CapacityExceeded."""
        kept = sorted((each.stat().st_mtime_ns, _size_of(each), each) for each in self._directory.glob("[!.]*"))
        total_bytes = size_bytes + sum(size for _, size, _ in kept)
        for _, size, place in kept:
            if total_bytes <= self._settings.max_bytes:
                return
            if place.name not in in_use:
                self._whole.discard(place.name)
                _remove(place)
                total_bytes -= size
                logger.info("a handler's files were removed to make room", digest=place.name, size_bytes=size)
        if total_bytes > self._settings.max_bytes:
            told = f"the handlers that the node serves have {self._settings.max_bytes} bytes of files already"
            raise CapacityExceeded(told, component=COMPONENT)


async def _received(part: Path, chunks: AsyncIterator[bytes]) -> int:
    size_bytes = 0
    with (part / "archive").open("wb") as file:
        async for chunk in chunks:
            size_bytes += len(chunk)
            if size_bytes > ARCHIVE_MAX_BYTES:
                told = f"the files of a handler are more than {ARCHIVE_MAX_BYTES} bytes"
                raise TooLarge(told, component=COMPONENT)
            file.write(chunk)
    return size_bytes


async def _to_its_end(work: Coroutine[None, None, None]) -> None:
    """Do it; who is cancelled goes once it is done, as a thread is not stopped with who waits for it."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # seen: nobody comes back for it
        raise


def _is_whole(place: Path, digest: str) -> bool:
    """See whether a directory holds what its name says, and remove it if not."""
    if not place.is_dir():
        return False
    try:
        if digest_of(place / _FILES) == digest:
            return True
    except (OSError, CodedError):
        pass
    logger.warning("a handler's files were damaged, and are asked for anew", digest=digest)
    _remove(place)
    return False


def _touch(place: Path) -> None:
    """Make it the one used last, by a finer clock than the kernel's own."""
    now_ns = time.time_ns()
    os.utime(place, ns=(now_ns, now_ns))


def _remove(place: Path) -> None:
    """Remove a directory such that no half of it is ever found by its name."""
    away = place.with_name(f".{secrets.token_hex(8)}")
    place.rename(away)
    shutil.rmtree(away, ignore_errors=True)


def _size_of(place: Path) -> int:
    try:
        return int((place / _SIZE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0  # it is found damaged when it is asked for
