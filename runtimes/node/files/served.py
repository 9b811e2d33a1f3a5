"""A node's side of transfers: it does with the files of its sandboxes what the gateway asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
import structlog

from manager.errors import CapacityExceeded, CodedError, NotFound, TooLarge
from runtimes.node import wire
from runtimes.node.errors import facts_of
from runtimes.node.files.flow import Inflow, Outflow
from runtimes.node.files.messages import FilesAsk, FilesEnded, FilesOpened, FilesPiece, FilesStop, FilesTaken, FilesVerb
from runtimes.node.link import NodeLink
from runtimes.node.message import Message
from runtimes.node.wire import COMPONENT, ChannelError
from runtimes.sandbox.files.files import SandboxFiles

logger = structlog.get_logger("node.files")


@dataclass(slots=True, eq=False)
class _ServedTransfer:
    """One transfer that is under way."""

    ask: FilesAsk
    link: NodeLink
    inflow: Inflow
    outflow: Outflow
    task: asyncio.Task[None] | None = field(default=None)


class ServedTransfers:
    """The transfers of one node; each ends with the link on which it was asked for."""

    def __init__(
        self,
        files: Callable[[str], SandboxFiles | None],
        take_handler: Callable[[str, AsyncIterator[bytes]], Awaitable[int]],
    ) -> None:
        """``files``: those of a trajectory's sandbox here; ``take_handler`` keeps a handler's by their digest."""
        self._files = files
        self._take_handler = take_handler
        self._transfers: dict[int, _ServedTransfer] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def take(self, link: NodeLink, message: Message) -> bool:
        """Deal with a message of the gateway; return whether it is one of a transfer. Raises ChannelError."""
        if isinstance(message, FilesAsk):
            self._begin(link, message)
        elif isinstance(message, FilesPiece | FilesTaken | FilesStop):
            transfer = self._transfers.get(message.transfer)
            if transfer is None:
                pass  # it ended while this was under way
            elif isinstance(message, FilesPiece):
                transfer.inflow.take(message.data)
            elif isinstance(message, FilesTaken):
                transfer.outflow.taken(message.size_bytes)
            else:
                self._stop(transfer)
        else:
            return False
        return True

    def detach(self, link: NodeLink) -> None:
        """The link is gone: its transfers end."""
        for transfer in list(self._transfers.values()):
            if transfer.link is link:
                self._stop(transfer)

    async def close(self) -> None:
        """End them all, and wait until they have."""
        for transfer in list(self._transfers.values()):
            self._stop(transfer)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _begin(self, link: NodeLink, ask: FilesAsk) -> None:
        if ask.transfer in self._transfers:
            raise ChannelError(f"transfer {ask.transfer} was asked for twice")
        if len(self._transfers) >= link.settings.transfers_max:
            told = f"the node has {len(self._transfers)} transfers of files under way (cluster.transfers_max)"
            refusal = facts_of(CapacityExceeded(told, component=COMPONENT, retry_after_s=1.0))
            link.send(FilesEnded(ask.transfer, refusal, 0, b""))
            return
        transfer = _ServedTransfer(ask, link, Inflow(ask.transfer, link), Outflow(ask.transfer, link))
        self._transfers[ask.transfer] = transfer
        transfer.task = asyncio.create_task(self._serve(transfer), name=f"{ask.verb} {ask.trajectory}:{ask.path}")
        self._ending.add(transfer.task)
        transfer.task.add_done_callback(self._ending.discard)

    def _stop(self, transfer: _ServedTransfer) -> None:
        self._transfers.pop(transfer.ask.transfer, None)
        if transfer.task is not None:
            transfer.task.cancel()

    async def _serve(self, transfer: _ServedTransfer) -> None:
        ask, failure, size_bytes, entries = transfer.ask, None, 0, b""
        try:
            if ask.verb is FilesVerb.HANDLER:
                size_bytes = await self._take_handler(ask.path, transfer.inflow.chunks())
            else:
                size_bytes, entries = await self._with_sandbox(transfer)
        except CodedError as error:
            failure = facts_of(error)
        except Exception as error:  # told to the gateway: a bug here ends no daemon
            logger.exception("a transfer failed", verb=ask.verb, trajectory=ask.trajectory, path=ask.path)
            failure = facts_of(CodedError(f"the node failed: {error!r}", component=COMPONENT))
        self._transfers.pop(ask.transfer, None)
        transfer.link.send(FilesEnded(ask.transfer, failure, size_bytes, entries))

    async def _with_sandbox(self, transfer: _ServedTransfer) -> tuple[int, bytes]:
        """Do what is asked with the files of a sandbox; return the bytes that were written, and its entries."""
        ask = transfer.ask
        files = self._files(ask.trajectory)
        if files is None:
            raise NotFound(f"trajectory {ask.trajectory!r} has no sandbox", component=COMPONENT)
        if ask.verb is FilesVerb.LIST:
            entries = msgspec.msgpack.encode(await files.list(ask.path, user=ask.user))
            if len(entries) > transfer.link.settings.frame_max_bytes - wire.GREETING_BYTES:
                told = f"the entries of {ask.path!r} are more than a frame of the channel holds"
                raise TooLarge(told, component=COMPONENT)
            return 0, entries
        if ask.verb.inward:
            return await self._put(files, transfer), b""
        await self._get(files, transfer)
        return 0, b""

    async def _put(self, files: SandboxFiles, transfer: _ServedTransfer) -> int:
        ask, chunks = transfer.ask, transfer.inflow.chunks()
        if ask.verb is FilesVerb.WRITE:
            return await files.write(ask.path, chunks, mode=ask.mode, user=ask.user)
        return await files.unpack(ask.path, chunks, limit_bytes=ask.limit_bytes, user=ask.user)

    async def _get(self, files: SandboxFiles, transfer: _ServedTransfer) -> None:
        ask = transfer.ask
        if ask.verb is FilesVerb.READ:
            async with files.open(ask.path, limit_bytes=ask.limit_bytes, user=ask.user) as file:
                transfer.link.send(FilesOpened(ask.transfer, file.size_bytes))
                await transfer.outflow.send(file.chunks())
        else:
            archive = files.pack(ask.path, limit_bytes=ask.limit_bytes, user=ask.user, base=ask.base)
            async with archive as chunks:
                transfer.link.send(FilesOpened(ask.transfer, None))
                await transfer.outflow.send(chunks)
