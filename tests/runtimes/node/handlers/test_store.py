"""The files of handlers on a node: whole or not there, bounded, and never taken away from who uses them."""

from __future__ import annotations

import asyncio
import io
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from manager.errors import ActionFailed, CapacityExceeded, InvalidInput, Reason, TooLarge
from manager.function import FunctionSpec, HandlerSpec
from runtimes.node.daemon import HandlerStore
from runtimes.node.protocol import ARCHIVE_MAX_BYTES, ChannelError, HandlerArchive, HandlerArchives
from runtimes.sandbox.files import unpack_tree

STUCK_S = 60.0


def function(directory: Path | str) -> FunctionSpec:
    spec = HandlerSpec(
        module="handler",
        callable="f",
        directory=Path(directory),
        per_instance=1,
        instances_min=0,
        instances_max=1,
        idle_s=60.0,
    )
    return FunctionSpec(name="judge", runtime="handler", revision="r1", handler=spec)


async def archive(directory: Path, text: str) -> HandlerArchive:
    """Return the archive of a handler of this text."""
    source = directory / f"source-{len(text)}-{hash(text)}"
    source.mkdir()
    (source / "handler.py").write_text(text)
    return await HandlerArchives().of(source)


async def pieces(data: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def store(directory: Path, max_bytes: int = 10**6, in_use: Iterator[Path] | tuple[Path, ...] = ()) -> HandlerStore:
    return HandlerStore(directory / "store", max_bytes, lambda: tuple(in_use))


def kept(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "store").iterdir())


async def test_files_that_were_sent_are_there_for_the_next_daemon_too(tmp_path: Path) -> None:
    sent, here = await archive(tmp_path, "x = 1"), store(tmp_path)
    assert not await here.has(sent.digest)
    assert await here.take(sent.digest, pieces(sent.data)) == len(sent.data)
    assert await here.has(sent.digest)
    assert await store(tmp_path).has(sent.digest)
    placed = here.placed(function(sent.digest))
    assert placed.handler is not None
    assert (placed.handler.directory / "handler.py").read_text() == "x = 1"
    assert placed.revision == f"r1+{sent.digest[:12]}"
    async with here.held(placed):
        pass


async def test_a_damaged_piece_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    sent, here = await archive(tmp_path, "x = 1"), store(tmp_path)
    damaged = sent.data.replace(b"x = 1", b"x = 2")
    assert damaged != sent.data
    for data in (damaged, sent.data[:600], b"no tar at all", b""):
        with pytest.raises(InvalidInput):
            await here.take(sent.digest, pieces(data))
    assert kept(tmp_path) == []


async def test_files_that_were_damaged_on_disk_are_not_used_and_asked_for_anew(tmp_path: Path) -> None:
    sent = await archive(tmp_path, "x = 1")
    await store(tmp_path).take(sent.digest, pieces(sent.data))
    (tmp_path / "store" / sent.digest / "files" / "handler.py").write_text("x = 2")
    next_one = store(tmp_path)
    with pytest.raises(ActionFailed) as lost:
        async with next_one.held(next_one.placed(function(sent.digest))):
            pass
    assert lost.value.reason is Reason.ENVIRONMENT_LOST
    assert kept(tmp_path) == []
    await next_one.take(sent.digest, pieces(sent.data))
    assert await next_one.has(sent.digest)


async def test_what_a_killed_daemon_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / "store" / ".0123").mkdir(parents=True)
    (tmp_path / "store" / ".0123" / "archive").write_bytes(b"half")
    store(tmp_path)
    assert kept(tmp_path) == []


async def test_a_sender_that_fails_in_the_middle_leaves_nothing_and_the_next_one_is_heard(tmp_path: Path) -> None:
    sent, here = await archive(tmp_path, "x = 1"), store(tmp_path)

    async def broken() -> AsyncIterator[bytes]:
        yield sent.data[:100]
        raise CapacityExceeded("cut", component="test")

    with pytest.raises(CapacityExceeded):
        await here.take(sent.digest, broken())
    assert kept(tmp_path) == []
    await here.take(sent.digest, pieces(sent.data))
    assert await here.has(sent.digest)


async def test_a_receiver_that_is_cancelled_leaves_nothing_half_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, here = await archive(tmp_path, "x = 1"), store(tmp_path)
    loop, unpacking, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    failed: list[BaseException] = []

    def slow(source: Path, target: Path, limit_bytes: int) -> int:
        loop.call_soon_threadsafe(unpacking.set)
        assert go_on.wait(STUCK_S)
        try:
            return unpack_tree(source, target, limit_bytes)
        except BaseException as error:
            failed.append(error)
            raise

    monkeypatch.setattr("runtimes.node.daemon.unpack_tree", slow)
    taking = asyncio.create_task(here.take(sent.digest, pieces(sent.data)))
    async with asyncio.timeout(STUCK_S):
        await unpacking.wait()
        for _ in range(2):  # whoever cancels it may do so again
            taking.cancel()
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await taking
    assert not failed
    assert kept(tmp_path) == [sent.digest]
    assert await here.has(sent.digest)


async def test_files_used_least_recently_make_room_and_those_in_use_never(tmp_path: Path) -> None:
    first, second, third, fourth = [await archive(tmp_path, str(number) * 400) for number in range(4)]
    mounted: list[Path] = []
    here = HandlerStore(tmp_path / "store", 1000, lambda: tuple(mounted))
    for each in (first, second):
        await here.take(each.digest, pieces(each.data))
    assert await here.has(first.digest), "which makes it the one used last"
    await here.take(third.digest, pieces(third.data))
    assert kept(tmp_path) == sorted([first.digest, third.digest])
    mounted.append(tmp_path / "store" / first.digest / "files")
    async with here.held(here.placed(function(third.digest))):
        with pytest.raises(CapacityExceeded, match="serves"):
            await here.take(fourth.digest, pieces(fourth.data))
        assert kept(tmp_path) == sorted([first.digest, third.digest])
    await here.take(fourth.digest, pieces(fourth.data))
    assert kept(tmp_path) == sorted([first.digest, fourth.digest])
    assert not await here.has(third.digest)


async def test_more_than_a_handler_may_have_is_refused_while_it_arrives(tmp_path: Path) -> None:
    arrived = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal arrived
        while True:
            arrived += 2**20
            yield bytes(2**20)

    with pytest.raises(TooLarge):
        await store(tmp_path).take("0" * 64, endless())
    assert arrived <= ARCHIVE_MAX_BYTES + 2**20
    assert kept(tmp_path) == []


async def test_no_entry_of_an_archive_leads_out_of_the_store(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../../escaped.py"))
    with pytest.raises(InvalidInput):
        await store(tmp_path).take("0" * 64, pieces(out.getvalue()))
    assert kept(tmp_path) == []


@pytest.mark.parametrize("name", ["", "..", "/etc", "0" * 63, "G" * 64, f"../{'0' * 64}"])
async def test_a_directory_that_is_no_digest_is_refused(tmp_path: Path, name: str) -> None:
    here = store(tmp_path)
    with pytest.raises(ChannelError):
        here.placed(function(name))
    with pytest.raises(InvalidInput):
        await here.has(name)
