"""Files between a gateway and a node: windows, cuts, and many at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from manager.errors import CapacityExceeded, InvalidInput, NotFound, TooLarge
from runtimes.node.daemon import TransferServer
from runtimes.node.protocol import (
    AHEAD_BYTES,
    KINDS,
    PIECE_BYTES,
    WINDOW_BYTES,
    FileTransfer,
    Inventory,
    LinkSettings,
    NodeLink,
    TransferCredit,
    TransferPiece,
    TransferRequest,
    TransferVerb,
)
from runtimes.node.remote import RemoteFiles, RemoteNode
from runtimes.sandbox.command import FileContent, FileSource, FileStat, FileStream
from tests.runtimes.node.machine import Machine, daemon_on
from tests.runtimes.node.memory_stream import CALM, pair

#: Seconds after which a test is taken for stuck.
STUCK_S = 60.0
CHUNK_BYTES = 100_000


class MemoryStream:
    """A file that is read in chunks of its own size."""

    def __init__(self, data: bytes, breaks_at: int | None) -> None:
        self._data, self._breaks_at = data, breaks_at

    @property
    def size_bytes(self) -> int | None:
        return len(self._data)

    async def chunks(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._data), CHUNK_BYTES):
            if self._breaks_at is not None and start >= self._breaks_at:
                raise InvalidInput("it became shorter", component="memory")
            yield self._data[start : start + CHUNK_BYTES]

    def close(self) -> None: ...


class MemoryFiles:
    """`SandboxFiles` in memory, which say who asked for what."""

    workdir = "/workspace"

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.asked: list[tuple[str, str, str, int | None]] = []
        #: Bytes of what is being written that have arrived, and how often a write was broken off.
        self.arrived_bytes = 0
        self.broken = 0
        #: While unset, nothing more is taken of what is written.
        self.takes = asyncio.Event()
        self.takes.set()
        self.disk_bytes = 2**30
        self.breaks_at: int | None = None
        self.changed = asyncio.Condition()

    async def write(self, path: str, data: FileSource, *, mode: int | None = None, user: str = "") -> int:
        self.asked.append(("write", path, user, mode))
        kept = bytearray()
        try:
            async for piece in FileContent(data, self.disk_bytes).pieces():
                await self.takes.wait()
                kept += piece
                async with self.changed:
                    self.arrived_bytes = len(kept)
                    self.changed.notify_all()
        except BaseException:
            self.broken += 1
            async with self.changed:
                self.changed.notify_all()
            raise
        self.kept[path] = bytes(kept)
        return len(kept)

    async def list(self, path: str, *, user: str = "") -> list[FileStat]:
        self.asked.append(("list", path, user, None))
        if path not in ("/", "/workspace"):
            raise NotFound(f"no directory {path!r}", component="memory", detail={"file_error": "not_found"})
        return [
            FileStat(path=name, size_bytes=len(data), directory=False, mode=0o644)
            for name, data in sorted(self.kept.items())
        ]

    @asynccontextmanager
    async def open(self, path: str, *, limit_bytes: int, user: str = "") -> AsyncIterator[FileStream]:
        self.asked.append(("read", path, user, None))
        if path not in self.kept:
            raise NotFound(f"no file {path!r}", component="memory", detail={"file_error": "not_found"})
        if len(self.kept[path]) > limit_bytes:
            raise TooLarge(f"{path!r} is larger than {limit_bytes} bytes", component="memory")
        yield MemoryStream(self.kept[path], self.breaks_at)

    async def unpack(self, path: str, chunks: AsyncIterator[bytes], *, limit_bytes: int, user: str = "") -> int:
        self.asked.append(("unpack", path, user, limit_bytes))
        self.kept[path] = b"".join([chunk async for chunk in chunks])
        return len(self.kept[path])

    @asynccontextmanager
    async def pack(
        self, path: str, *, limit_bytes: int, user: str = "", base: bool = False
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        self.asked.append(("pack", path, user, int(base)))
        yield MemoryStream(self.kept[path], None).chunks()


class FilesWorld:
    """A gateway's and a node's side, joined."""

    def __init__(self, directory: Path) -> None:
        self.there = MemoryFiles()
        self.node = RemoteNode("n1")
        self.daemon = daemon_on(Machine(), directory)
        self.daemon._transfers = TransferServer({"t": self.there}.get, self._no_handler)
        #: Kinds of the frames.
        self.frames: list[int] = []
        self.near: NodeLink | None = None
        self._running: list[asyncio.Task[str]] = []

    async def _no_handler(self, digest: str, chunks: AsyncIterator[bytes]) -> int:
        raise AssertionError("no handler is sent")

    @property
    def files(self) -> RemoteFiles:
        return RemoteFiles(self.node, "t", "/workspace")

    async def join(self, settings: LinkSettings = CALM) -> None:
        """Join both sides by a new link."""
        near, far = pair(self._arrives, settings)
        serving = asyncio.create_task(self.daemon.serve(far))
        self.node.connect(near, await near.receive(Inventory, STUCK_S))
        self._running = [asyncio.create_task(self.node.serve(near)), serving]
        self.near = near

    def _arrives(self, kind: int) -> bool:
        self.frames.append(kind)
        return True

    async def cut(self) -> list[str]:
        """Cut the link; return why each side says that it ended."""
        assert self.near is not None
        self.near.close("cut")
        return await self.gone()

    async def gone(self) -> list[str]:
        """Wait until both sides know that there is no link; return why."""
        return list(await asyncio.gather(*self._running))

    async def until_arrived(self, size_bytes: int) -> None:
        """Wait until so much of a file has arrived in the sandbox."""
        async with self.there.changed:
            await self.there.changed.wait_for(lambda: self.there.arrived_bytes >= size_bytes)

    async def until_broken(self) -> None:
        """Wait until a write was broken off in the sandbox."""
        async with self.there.changed:
            await self.there.changed.wait_for(lambda: self.there.broken > 0)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[FilesWorld]:
    """Both sides, joined."""
    made = FilesWorld(tmp_path)
    await made.daemon.start()
    await made.join()
    async with asyncio.timeout(STUCK_S):
        yield made
        await made.node.close()
        await made.daemon.close()


LARGE = random.Random(7).randbytes(5 * 2**20 + 17)
LIMIT_BYTES = 2**30


ASK = TransferRequest(transfer=1, verb=TransferVerb.READ, trajectory="t", path="f", user="")


async def chunked(data: bytes, size_bytes: int = 30_011) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size_bytes):
        yield data[start : start + size_bytes]


async def read(world: FilesWorld, path: str) -> bytes:
    async with world.files.open(path, limit_bytes=LIMIT_BYTES) as file:
        return b"".join([chunk async for chunk in file.chunks()])


@pytest.mark.parametrize("data", [b"", b"x", LARGE], ids=["empty", "one byte", "five windows"])
async def test_what_is_written_is_read_again(world: FilesWorld, data: bytes) -> None:
    assert await world.files.write("/workspace/f", chunked(data), mode=0o640, user="agent") == len(data)
    assert world.there.kept == {"/workspace/f": data}
    async with world.files.open("/workspace/f", limit_bytes=LIMIT_BYTES, user="agent") as file:
        assert file.size_bytes == len(data)
        assert b"".join([chunk async for chunk in file.chunks()]) == data
    assert world.there.asked == [("write", "/workspace/f", "agent", 0o640), ("read", "/workspace/f", "agent", None)]


async def test_bytes_that_are_there_already_travel_as_those_that_come(world: FilesWorld) -> None:
    assert await world.files.write("/workspace/f", LARGE) == len(LARGE)
    assert await read(world, "/workspace/f") == LARGE


async def test_trees_and_directories(world: FilesWorld) -> None:
    assert await world.files.unpack("/workspace/d", chunked(LARGE), limit_bytes=77, user="root") == len(LARGE)
    async with world.files.pack("/workspace/d", limit_bytes=78, user="root", base=True) as chunks:
        assert b"".join([chunk async for chunk in chunks]) == LARGE
    assert world.there.asked == [("unpack", "/workspace/d", "root", 77), ("pack", "/workspace/d", "root", 1)]
    (entry,) = await world.files.list("/workspace")
    assert (entry.path, entry.size_bytes, entry.directory, entry.mode) == ("/workspace/d", len(LARGE), False, 0o644)


async def test_many_at_once_each_get_their_own(world: FilesWorld) -> None:
    datas = {f"/workspace/{number}": random.Random(number).randbytes(300_000 + number) for number in range(40)}
    await asyncio.gather(*[world.files.write(path, chunked(data)) for path, data in datas.items()])
    assert dict(zip(datas, await asyncio.gather(*[read(world, path) for path in datas]), strict=True)) == datas


async def test_errors_of_the_sandbox_arrive_with_what_they_say(world: FilesWorld) -> None:
    with pytest.raises(NotFound, match="no file") as refused:
        await read(world, "/workspace/none")
    assert refused.value.detail == {"file_error": "not_found"}
    with pytest.raises(NotFound, match="no directory"):
        await world.files.list("/nowhere")
    world.there.disk_bytes = 100
    with pytest.raises(TooLarge, match="more than the sandbox's disk"):
        await world.files.write("/workspace/f", chunked(LARGE))
    world.there.disk_bytes = LIMIT_BYTES
    assert await world.files.write("/workspace/f", chunked(LARGE)) == len(LARGE), "the next one is not disturbed"
    with pytest.raises(TooLarge):
        async with world.files.open("/workspace/f", limit_bytes=10):
            pass
    world.there.breaks_at = 3 * 2**20
    with pytest.raises(InvalidInput, match="became shorter"):
        await read(world, "/workspace/f")
    with pytest.raises(NotFound, match="no sandbox"):
        await RemoteFiles(world.node, "another", "/workspace").list("/")


async def test_a_sandbox_that_takes_nothing_holds_up_no_more_than_a_window(world: FilesWorld) -> None:
    world.there.takes.clear()
    given_bytes = 0

    async def counted() -> AsyncIterator[bytes]:
        nonlocal given_bytes
        for _ in range(200):
            given_bytes += PIECE_BYTES
            yield bytes(PIECE_BYTES)

    writing = asyncio.create_task(world.files.write("/workspace/f", counted()))
    for _ in range(2000):
        await asyncio.sleep(0)
    assert AHEAD_BYTES <= given_bytes <= AHEAD_BYTES + 2 * PIECE_BYTES
    assert await world.files.list("/") == [], "what else the channel carries goes on"
    world.there.takes.set()
    assert await writing == 200 * PIECE_BYTES


async def test_a_reader_that_takes_nothing_is_sent_no_more_than_a_window(world: FilesWorld) -> None:
    world.there.kept["/workspace/f"] = LARGE
    piece = next(number for number, kind in KINDS.items() if kind is TransferPiece)
    async with world.files.open("/workspace/f", limit_bytes=LIMIT_BYTES) as file:
        for _ in range(2000):
            await asyncio.sleep(0)
        assert world.frames.count(piece) * PIECE_BYTES <= AHEAD_BYTES + 8 * PIECE_BYTES
        assert b"".join([chunk async for chunk in file.chunks()]) == LARGE


async def test_a_writer_that_breaks_off_leaves_nothing(world: FilesWorld) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield bytes(PIECE_BYTES)
        await world.until_arrived(PIECE_BYTES)
        raise InvalidInput("the caller hung up", component="test")

    with pytest.raises(InvalidInput, match="hung up"):
        await world.files.write("/workspace/f", broken())
    await world.until_broken()
    assert world.there.kept == {}


async def test_a_cut_ends_what_is_under_way_and_the_next_link_begins_anew(world: FilesWorld) -> None:
    world.there.kept["/workspace/large"] = LARGE

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1000)
            await asyncio.sleep(0)

    writing = asyncio.create_task(world.files.write("/workspace/f", endless()))
    await world.until_arrived(10_000)
    async with world.files.open("/workspace/large", limit_bytes=LIMIT_BYTES) as file:
        chunks = file.chunks()
        first = await anext(chunks)
        assert await world.cut() == ["cut", "the other side hung up"]
        with pytest.raises(CapacityExceeded, match="cut off") as cut:
            b"".join([chunk async for chunk in chunks])
    assert LARGE.startswith(first) and cut.value.retry_after_s
    with pytest.raises(CapacityExceeded, match="cut off"):
        await writing
    await world.until_broken()
    with pytest.raises(CapacityExceeded, match="not reached now"):
        await world.files.list("/")
    await world.join()
    assert await read(world, "/workspace/large") == LARGE
    assert "/workspace/f" not in world.there.kept


async def test_no_more_at_once_than_the_link_allows(world: FilesWorld) -> None:
    await world.cut()
    await world.join(LinkSettings(beat_s=3600.0, silent_s=7200.0, transfers_max=2))
    world.there.takes.clear()
    writing = [asyncio.create_task(world.files.write(f"/workspace/{n}", chunked(LARGE))) for n in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(CapacityExceeded, match="2 transfers") as full:
        await world.files.list("/")
    assert full.value.retry_after_s
    world.there.takes.set()
    assert await asyncio.gather(*writing) == [len(LARGE)] * 2
    assert len(await world.files.list("/")) == 2


async def test_a_node_refuses_more_than_it_allows(world: FilesWorld) -> None:
    """A gateway that does not count is told so, too."""
    world.there.takes.clear()
    await world.cut()
    await world.join(LinkSettings(beat_s=3600.0, silent_s=7200.0, transfers_max=2))
    assert world.near is not None
    for number in range(2):
        ask = TransferRequest(transfer=number, verb=TransferVerb.WRITE, trajectory="t", path=f"/{number}", user="")
        world.near.send(ask)
    with pytest.raises(CapacityExceeded, match="the node has 2"):
        await world.files.list("/")


@pytest.mark.parametrize(
    "sent",
    [
        [TransferPiece(1, bytes(WINDOW_BYTES))] * 3,  # the first may be taken before the next arrives
        [TransferCredit(1, 5)],
        [TransferRequest(transfer=1, verb=TransferVerb.LIST, trajectory="t", path="/", user="")],
    ],
    ids=["more than the window", "taken what was never sent", "one number twice"],
)
async def test_who_breaks_the_rules_is_cut(
    world: FilesWorld, sent: list[TransferPiece | TransferCredit | TransferRequest]
) -> None:
    world.there.takes.clear()
    assert world.near is not None
    world.near.send(TransferRequest(transfer=1, verb=TransferVerb.WRITE, trajectory="t", path="/f", user=""))
    for message in sent:
        world.near.send(message)
    near, far = await world.gone()
    assert near == "the other side hung up"
    assert any(word in far for word in ("sent ahead", "taken than were sent", "asked for twice"))
    await world.until_broken()


async def test_others_have_a_turn_between_two_pieces_where_the_link_has_room_for_all() -> None:
    near, _ = pair()
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def chunks() -> AsyncIterator[bytes]:
        yield bytes(AHEAD_BYTES)

    running = asyncio.create_task(others())
    await FileTransfer(ASK, near).send(chunks())
    running.cancel()
    assert turns >= AHEAD_BYTES // PIECE_BYTES
