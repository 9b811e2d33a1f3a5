"""The gateway's side of transfers: the files of sandboxes on a node, as if they were here."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from manager.errors import CapacityExceeded, CodedError
from runtimes.node import wire
from runtimes.node.errors import error_of
from runtimes.node.files.flow import Inflow, Outflow
from runtimes.node.files.messages import FilesAsk, FilesEnded, FilesOpened, FilesPiece, FilesStop, FilesTaken, FilesVerb
from runtimes.node.link import NodeLink
from runtimes.node.message import Message
from runtimes.node.wire import COMPONENT
from runtimes.sandbox.command import FileContent, FileSource, FileStat

#: Seconds after which a caller whose transfer was cut off may try again.
RETRY_AFTER_S = 1.0


@dataclass(slots=True, eq=False)
class _Transfer:
    """One transfer that waits for its end."""

    ask: FilesAsk
    link: NodeLink
    inflow: Inflow
    outflow: Outflow
    opened: asyncio.Future[int | None]
    ended: asyncio.Future[FilesEnded]

    def fail(self, error: CodedError) -> None:
        self.inflow.fail(error)
        for future in (self.opened, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever waits is told; nobody may be waiting for the other one


class RemoteTransfers:
    """The transfers with one node, over the link of now. Use from one event loop."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._link: NodeLink | None = None
        self._transfers: dict[int, _Transfer] = {}
        #: Random, so that no number is one of a gateway before.
        self._number = secrets.randbits(48)

    def attach(self, link: NodeLink) -> None:
        """Ask over this link from now on."""
        self.detach()
        self._link = link

    def detach(self) -> None:
        """There is no link: whoever transfers is told CapacityExceeded, and may try again."""
        self._link = None
        told = f"node {self._node} was cut off in the middle of it"
        for transfer in list(self._transfers.values()):
            transfer.fail(CapacityExceeded(told, component=COMPONENT, retry_after_s=RETRY_AFTER_S))

    def take(self, message: Message) -> bool:
        """Deal with a message of the node; return whether it is one of a transfer. Raises ChannelError."""
        if not isinstance(message, FilesOpened | FilesPiece | FilesTaken | FilesEnded):
            return False
        transfer = self._transfers.get(message.transfer)
        if transfer is None:
            return True  # nobody wants it any more
        match message:
            case FilesOpened():
                if not transfer.opened.done():
                    transfer.opened.set_result(message.size_bytes)
            case FilesPiece():
                transfer.inflow.take(message.data)
            case FilesTaken():
                transfer.outflow.taken(message.size_bytes)
            case FilesEnded(error=None):
                if not transfer.ended.done():
                    transfer.ended.set_result(message)
            case FilesEnded(error=error):
                assert error is not None
                transfer.fail(error_of(error))
        return True

    @asynccontextmanager
    async def begin(self, ask: FilesAsk) -> AsyncIterator[_Transfer]:
        """Yield a transfer that is asked for, and is stopped at the block's end if it has not ended.

        Raises CapacityExceeded if there is no link, or no room on it.
        """
        link = self._link
        if link is None:
            raise CapacityExceeded(f"node {self._node} is not reached now", component=COMPONENT, retry_after_s=1.0)
        if len(self._transfers) >= link.settings.transfers_max:
            told = f"{len(self._transfers)} transfers with node {self._node} are under way (cluster.transfers_max)"
            raise CapacityExceeded(told, component=COMPONENT, retry_after_s=RETRY_AFTER_S)
        self._number += 1
        ask.transfer = self._number
        loop = asyncio.get_running_loop()
        inflow, outflow = Inflow(ask.transfer, link), Outflow(ask.transfer, link)
        transfer = _Transfer(ask, link, inflow, outflow, loop.create_future(), loop.create_future())
        self._transfers[ask.transfer] = transfer
        link.send(ask)
        try:
            yield transfer
        finally:
            del self._transfers[ask.transfer]
            if not transfer.ended.done():
                link.send(FilesStop(ask.transfer))

    async def put(self, ask: FilesAsk, chunks: AsyncIterator[bytes]) -> int:
        """Send the bytes until there are no more, or the node has ended it; the end that comes first counts.

        Return the bytes that were written. Raises what the node says, and what `begin` raises.
        """
        async with self.begin(ask) as transfer:
            sending = asyncio.create_task(transfer.outflow.send(chunks))
            try:
                either: tuple[asyncio.Future[Any], ...] = (sending, transfer.ended)
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if sending.done() and not transfer.ended.done():
                    sending.result()
                return (await transfer.ended).size_bytes
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _RemoteStream:
    """A file of a node that is read piece by piece."""

    size_bytes: int | None
    transfer: _Transfer

    def chunks(self) -> AsyncIterator[bytes]:
        return self.transfer.inflow.chunks()

    def close(self) -> None:
        """Its block ends the transfer."""


class RemoteFiles:
    """`runtimes.sandbox.files.files.SandboxFiles` of a sandbox on a node.

    Besides what those raise: CapacityExceeded while the node is not reached, and for what its link cut off.
    """

    def __init__(self, transfers: RemoteTransfers, trajectory: str, workdir: str) -> None:
        self._transfers = transfers
        self._trajectory = trajectory
        self._workdir = workdir

    @property
    def workdir(self) -> str:
        return self._workdir

    async def write(self, path: str, data: FileSource, *, mode: int | None = None, user: str = "") -> int:
        return await self._transfers.put(self._ask(FilesVerb.WRITE, path, user, mode=mode), FileContent(data).pieces())

    async def unpack(self, path: str, chunks: AsyncIterator[bytes], *, limit_bytes: int, user: str = "") -> int:
        return await self._transfers.put(self._ask(FilesVerb.UNPACK, path, user, limit_bytes=limit_bytes), chunks)

    async def list(self, path: str, *, user: str = "") -> list[FileStat]:
        async with self._transfers.begin(self._ask(FilesVerb.LIST, path, user)) as transfer:
            ended = await transfer.ended
        try:
            return msgspec.msgpack.decode(ended.entries, type=list[FileStat])
        except msgspec.MsgspecError as error:
            raise wire.ChannelError(f"entries that do not fit: {error}") from None

    @asynccontextmanager
    async def open(self, path: str, *, limit_bytes: int, user: str = "") -> AsyncIterator[_RemoteStream]:
        async with self._transfers.begin(self._ask(FilesVerb.READ, path, user, limit_bytes=limit_bytes)) as transfer:
            yield _RemoteStream(await transfer.opened, transfer)

    @asynccontextmanager
    async def pack(
        self, path: str, *, limit_bytes: int, user: str = "", base: bool = False
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        ask = self._ask(FilesVerb.PACK, path, user, limit_bytes=limit_bytes, base=base)
        async with self._transfers.begin(ask) as transfer:
            await transfer.opened
            yield transfer.inflow.chunks()

    def _ask(
        self,
        verb: FilesVerb,
        path: str,
        user: str,
        *,
        mode: int | None = None,
        limit_bytes: int = 0,
        base: bool = False,
    ) -> FilesAsk:
        return FilesAsk(
            transfer=0,
            verb=verb,
            trajectory=self._trajectory,
            path=path,
            user=user,
            mode=mode,
            limit_bytes=limit_bytes,
            base=base,
        )
