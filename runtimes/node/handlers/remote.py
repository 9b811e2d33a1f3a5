"""The gateway's side of handlers on a node: it sends their files before it asks for them to be prepared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count
from pathlib import Path

from manager.errors import ActionFailed, CapacityExceeded, Reason
from manager.function import FunctionSpec, HandlerSpec
from runtimes.node.files.messages import FilesAsk, FilesVerb
from runtimes.node.files.remote import RETRY_AFTER_S, RemoteTransfers
from runtimes.node.handlers.archive import COMPONENT, HandlerArchive, HandlerArchives
from runtimes.node.remote_requests import RemoteRequests

#: Times that files are sent whose way was cut off, or had no room.
TRIES_MAX = 5
#: Handlers of which is known what they are called on the node; one that was forgotten is prepared anew.
NAMED_MAX = 4096


class RemoteHandlers:
    """The handlers of one node. Use from one event loop."""

    def __init__(
        self, node: str, requests: RemoteRequests, transfers: RemoteTransfers, archives: HandlerArchives
    ) -> None:
        self._node = node
        self._requests, self._transfers, self._archives = requests, transfers, archives
        #: By name and revision, the digest of the files with which the node has prepared it.
        self._digests: dict[tuple[str, str], str] = {}
        #: How such a function travels, as long as it is the same object.
        self._named: dict[tuple[str, str], tuple[FunctionSpec, FunctionSpec]] = {}
        self._sending = asyncio.Lock()

    def named(self, function: FunctionSpec) -> FunctionSpec:
        """Return a function as it travels: its handler's directory is the digest of its files.

        Raises ActionFailed for a handler that the node has not prepared.
        """
        if function.handler is None:
            return function
        key = (function.name, function.revision)
        known = self._named.get(key)
        if known is not None and known[0] is function:
            return known[1]
        digest = self._digests.get(key)
        if digest is None:
            told = f"node {self._node} has not prepared function {function.name}"
            raise ActionFailed(Reason.ENVIRONMENT_LOST, told, component=COMPONENT, retry_after_s=RETRY_AFTER_S)
        named = _named(function, function.handler, digest)
        self._named[key] = function, named
        return named

    async def prepare(self, function: FunctionSpec) -> None:
        """Send the node what it has not of the handler's files, and let it prepare the function.

        Raises what the node says, InvalidConfig for files that do not travel, CapacityExceeded where they do not
        arrive, and ActionFailed(node_lost) if it is given up.
        """
        assert function.handler is not None, f"{function.name} has no handler"
        self._requests.check(function)
        archive = await self._archives.of_function(function)
        async with self._sending:  # one at a time, as those of one directory have the same files
            await self._send(archive)
        named = _named(function, function.handler, archive.digest)
        await self._requests.answered("prepare", function.name, function=named)
        key = (function.name, function.revision)
        self._digests.pop(key, None)
        self._named.pop(key, None)
        self._digests[key] = archive.digest
        while len(self._digests) > NAMED_MAX:
            oldest = next(iter(self._digests))
            del self._digests[oldest]
            self._named.pop(oldest, None)

    async def _send(self, archive: HandlerArchive) -> None:
        """Send the files, unless they are there; a link that is cut off in the middle is waited for."""
        for tries in count(1):
            if await self._requests.answered("has_handler", archive.digest):
                return
            ask = FilesAsk(transfer=0, verb=FilesVerb.HANDLER, trajectory="", path=archive.digest, user="")
            try:
                await self._transfers.put(ask, _whole(archive.data))
                return
            except CapacityExceeded as error:
                if tries >= TRIES_MAX or error.retry_after_s is None:
                    raise
                await asyncio.sleep(error.retry_after_s)


def _named(function: FunctionSpec, handler: HandlerSpec, digest: str) -> FunctionSpec:
    return replace(function, handler=replace(handler, directory=Path(digest)))


async def _whole(data: bytes) -> AsyncIterator[bytes]:
    yield data
