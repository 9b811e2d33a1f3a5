"""Files of containers: what is asked of a path, and trees as the tars in which they travel."""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import AsyncIterator

import msgspec
from msgspec.structs import replace as replaced

from gateway.facades.docker.containers import Container
from gateway.facades.docker.exchange import EngineExchange
from gateway.facades.docker.lifecycle import ContainerLife
from gateway.facades.docker.shapes import PathStat, entry_stat, stat_header
from gateway.operations.files import as_files_are, placed_path
from gateway.services import Services
from manager.errors import CodedError, Conflict, InvalidInput, NotFound
from runtimes.sandbox.command import Command
from runtimes.sandbox.files import gathered, open_archive, put_archive
from runtimes.sandbox.runner.client import FILE_ERROR
from runtimes.sandbox.sandbox import Sandbox

COMPONENT = "docker"
TAR = "application/x-tar"
STAT = "X-Docker-Container-Path-Stat"
#: Bytes of an archive's beginning in which its first entry is looked for.
FIRST_BYTES = 2**20
BLOCK_BYTES = tarfile.BLOCKSIZE
#: Headers before the one of an entry that say more of it.
EXTENDING = frozenset({tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK})
#: What tells of a path without following it: python3 of the sandbox, as for archives. Status 65: there is none.
LSTAT = r"""
import json, os, sys
path = sys.argv[1]
try:
    found = os.lstat(path)
    link = os.path.realpath(path) if os.path.islink(path) else ""
except OSError:
    sys.exit(65)
told = {"name": os.path.basename(path) or "/", "size": found.st_size, "mode": found.st_mode, "mtime": found.st_mtime}
print(json.dumps({**told, "link": link}))
"""
ABSENT, STAT_S, STAT_BYTES = 65, 30.0, 16384


class ContainerFiles:
    """The endpoints."""

    def __init__(self, services: Services, life: ContainerLife) -> None:
        self._services = services
        self._life = life

    async def stat(self, exchange: EngineExchange, container: Container, called: str, timeout_s: float) -> None:
        """Answer what a path is."""
        path = _asked(exchange)
        sandbox = await self._life.sandbox(container, timeout_s)
        try:
            told = await _lstat(sandbox, _placed(path))
        except CodedError as error:
            raise _told(error, called, path) from None
        await exchange.answer(200, None, {STAT: stat_header(replaced(told, name=_shown(path)))})

    async def get(self, exchange: EngineExchange, container: Container, called: str, timeout_s: float) -> None:
        """Answer with what a path is as a tar; its names begin with the path's own, or with ``.`` for ``path/.``."""
        path = _asked(exchange)
        sandbox = await self._life.sandbox(container, timeout_s)
        place, limit_bytes, name = _placed(path), self._services.bounds.file_limit_bytes, _shown(path)
        packed = open_archive(sandbox, place, limit_bytes=limit_bytes, base=name != ".", follow=False)
        try:
            async with packed as chunks:
                head, entry = await _first(chunks)
                told = entry_stat(entry, name)
                link = posixpath.normpath(posixpath.join(posixpath.dirname(place), told.link)) if told.link else ""
                headers = {STAT: stat_header(replaced(told, size=told.size or len(told.link), link=link))}
                async with exchange.streamed(TAR, headers) as body:
                    await body.send(head)
                    async for chunk in chunks:
                        await body.send(chunk)
        except CodedError as error:
            raise _told(error, called, path) from None

    async def put(self, exchange: EngineExchange, container: Container, called: str, timeout_s: float) -> None:
        """Unpack a tar into a directory that is there; its entries belong to the sandbox's user."""
        path = _asked(exchange)
        sandbox = await self._life.sandbox(container, timeout_s)
        place, limit_bytes = _placed(path), self._services.bounds.file_limit_bytes
        await self._require_directory(sandbox, called, path)
        try:
            with as_files_are():
                chunks = exchange.chunks(limit_bytes)
                await put_archive(sandbox, place, chunks, limit_bytes=limit_bytes)
        except CodedError as error:
            raise _told(error, called, path) from None
        await exchange.answer(200)

    async def _require_directory(self, sandbox: Sandbox, called: str, path: str) -> None:
        """Raise NotFound or InvalidInput, as the engine does, unless it is one."""
        try:
            await sandbox.list_files(_placed(path))
        except CodedError as error:
            if error.detail is not None and error.detail.get(FILE_ERROR) == "not_a_directory":
                raise InvalidInput("extraction point is not a directory", component=COMPONENT) from None
            raise _told(error, called, path) from None


def _asked(exchange: EngineExchange) -> str:
    path = exchange.query.get("path", "")
    if not path:
        raise InvalidInput("bad parameter: path cannot be empty", component=COMPONENT, detail={"path": "path"})
    return path


def _placed(path: str) -> str:
    """Return where a path leads, absolute: a relative one begins at the root, as the engine's do."""
    return placed_path(path, "/")


def _shown(path: str) -> str:
    """Return by which name a path is told: its last, and ``.`` for what a directory holds."""
    return "." if path.endswith("/.") else posixpath.basename(_placed(path)) or "/"


async def _lstat(sandbox: Sandbox, place: str) -> PathStat:
    """Return what a path is; raises NotFound."""
    async with sandbox.transfer(place, user=""):
        process = await sandbox.spawn(Command(argv=("-c", LSTAT, place), python=True, timeout_s=STAT_S))
        try:
            await process.close_stdin()
            said = await gathered(process, "stdout", STAT_BYTES)
            code = (await process.wait()).exit_code
        finally:
            await process.kill()
    if code == ABSENT:
        raise NotFound(place, component=COMPONENT)
    try:
        return msgspec.json.decode(said, type=PathStat)
    except msgspec.MsgspecError:
        raise InvalidInput(f"{place!r} could not be looked at (status {code})", component=COMPONENT) from None


async def _first(chunks: AsyncIterator[bytes]) -> tuple[bytes, tarfile.TarInfo]:
    """Return the beginning of a tar, and its first entry; raises InvalidInput.

    What the sandbox sends is not to be believed: its user can write to the pipe of the process that packs.
    """
    head, start = b"", 0
    async for chunk in chunks:
        head += chunk
        while len(head) >= start + BLOCK_BYTES:
            entry = _entry(head[start : start + BLOCK_BYTES])
            if entry.type not in EXTENDING:
                return head, entry
            start += BLOCK_BYTES + -(-entry.size // BLOCK_BYTES) * BLOCK_BYTES
        if len(head) > FIRST_BYTES:
            break
    raise InvalidInput("the archive has no first entry", component=COMPONENT)


def _entry(block: bytes) -> tarfile.TarInfo:
    """Return an entry of its header; raises InvalidInput, also for a size below zero, which a header can have."""
    try:
        entry = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.TarError as error:
        raise InvalidInput(f"what the sandbox sent is no archive: {error}", component=COMPONENT) from None
    if entry.size < 0:
        raise InvalidInput("what the sandbox sent is no archive: an entry's size is below zero", component=COMPONENT)
    return entry


def _told(error: CodedError, called: str, path: str) -> CodedError:
    """Return what is wrong with a path in the engine's words, as far as it has some; the container as it was called."""
    if isinstance(error, NotFound):
        told = f"Could not find the file {path} in container {called[:128]}"
        return NotFound(told, component=COMPONENT)
    if isinstance(error, Conflict | InvalidInput):
        return InvalidInput(error.message, component=COMPONENT, detail=error.detail)
    return error
