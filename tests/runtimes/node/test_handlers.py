"""Handlers on nodes: their files as archives, over a link, and in a node's store."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from manager.action import State
from manager.errors import ActionFailed, CapacityExceeded, InvalidConfig, InvalidInput, Reason, TooLarge, Unsupported
from manager.function import FunctionSpec, HandlerSpec
from runtimes.node import protocol
from runtimes.node.daemon import HandlerStore
from runtimes.node.protocol import (
    ARCHIVE_MAX_BYTES,
    ChannelError,
    HandlerArchive,
    HandlerArchives,
    Message,
    TransferEnded,
    TransferPiece,
    TransferRequest,
    packed,
)
from runtimes.sandbox.handler.sources import SOURCES_LIMIT_BYTES, SOURCES_MAX
from tests.runtimes.node.machine import Machine
from tests.runtimes.node.session import Session, SessionAction, settled

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
    return packed(source)


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


@pytest.mark.promise("A node runs no handler's files that were damaged on the way or on its disk.")
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


def write(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        file = directory / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        (file if file.suffix else file.with_suffix(".py")).write_text(text)
    return directory


def names(archive: HandlerArchive) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive.data)) as tar:
        return tar.getnames()


def test_the_digest_is_that_of_names_bytes_and_modes_and_of_nothing_else(tmp_path: Path) -> None:
    one, other = (write(tmp_path / name, handler="x = 1", pkg__util="y = 2") for name in ("a", "b"))
    os.utime(other / "handler.py", (1, 1))
    digests = {packed(one).digest}
    assert packed(other).digest in digests
    for change in (
        lambda: (other / "handler.py").write_text("x = 2"),
        lambda: (other / "handler.py").chmod(0o755),
        lambda: (other / "pkg" / "util.py").rename(other / "pkg" / "tool.py"),
    ):
        change()
        digests.add(packed(other).digest)
    assert len(digests) == 4


def test_what_is_hidden_private_elsewhere_or_compiled_stays(tmp_path: Path) -> None:
    source = write(tmp_path / "source", handler="", data__words="", private__secret="", state__log="")
    for name in ("words.txt", "key.pem", "state/log.txt", "private/notes.txt", ".env", ".git/config", "pkg/a.txt"):
        file = source / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
    (source / "__pycache__").mkdir()
    (source / "__pycache__" / "handler.pyc").write_text("")
    (source / "__pycache__" / "odd.py").write_text("")
    (source / "key.pem").chmod(0o600)
    (source / "handler.py").chmod(0o600)
    (source / "private").chmod(0o700)
    (tmp_path / "outside.txt").write_text("")
    (source / "out.txt").symlink_to(tmp_path / "outside.txt")
    (source / "in.txt").symlink_to("words.txt")
    (source / "loop.txt").symlink_to("loop.txt")
    archive = packed(source, frozenset([source / "state"]))
    assert names(archive) == ["data/words.py", "handler.py", "in.txt", "pkg/a.txt", "private/secret.py", "words.txt"]


def test_no_link_takes_along_what_would_stay(tmp_path: Path) -> None:
    source = write(tmp_path / "source", handler="", private__tool="", state__log="")
    stays = ("state/secret.txt", ".env", ".git/config", "private/notes.txt", "key.pem", "__pycache__/handler.pyc")
    for number, name in enumerate(stays):
        file = source / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("secret")
        (source / f"link{number}.txt").symlink_to(name)
        (source / f"link{number}.py").symlink_to(name)
    (source / "key.pem").chmod(0o600)
    (source / "private").chmod(0o700)
    (source / "tool.py").symlink_to("private/tool.py")
    (source / "tool.txt").symlink_to("private/tool.py")
    archive = packed(source, frozenset([source / "state"]))
    assert names(archive) == ["handler.py", "private/tool.py", "tool.py"]


async def test_too_many_files_and_too_many_bytes_are_refused_with_the_remedy(tmp_path: Path) -> None:
    many, large = write(tmp_path / "many", handler=""), write(tmp_path / "large", handler="")
    for number in range(SOURCES_MAX):
        (many / f"{number}.txt").touch()
    with (large / "weights.bin").open("wb") as file:
        file.truncate(SOURCES_LIMIT_BYTES + 1)
    for source in (many, large):
        with pytest.raises(InvalidConfig, match="a directory of its own"):
            packed(source)
    with pytest.raises(InvalidConfig, match="cannot be read"):
        await HandlerArchives().of(function(tmp_path / "none"))


@pytest.fixture
async def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Session]:
    monkeypatch.setattr("runtimes.node.remote.RETRY_AFTER_S", 0.001)
    session = Session(tmp_path / "node", Machine())
    yield session
    await session.close()


@pytest.fixture
def judge(tmp_path: Path) -> FunctionSpec:
    """A handler of a module and some data, together more than one window of a transfer."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "handler.py").write_text("x = 1\n")
    (source / "words.txt").write_text("word " * 300_000)
    return function(source)


async def prepared(session: Session, *functions: FunctionSpec) -> None:
    asked = [asyncio.create_task(session.node.prepare(each)) for each in functions]
    await session.play(lambda: all(each.done() for each in asked))
    for each in asked:
        each.result()


async def ran(session: Session, name: str, function: FunctionSpec) -> SessionAction:
    kept = session.start(name, function)
    await session.play(lambda: settled(session))
    return kept


def code(kept: SessionAction) -> object:
    """Return the code that an action ran with."""
    assert kept.ends[0].state is State.SUCCEEDED, kept.ends[0]
    assert isinstance(kept.ends[0].result, dict)
    return kept.ends[0].result["files"]["handler.py"]


def sent(directory: Path) -> list[Path]:
    return list((directory / "node" / "handlers").iterdir())


async def test_functions_of_one_directory_run_with_its_files_which_are_sent_once(
    session: Session, judge: FunctionSpec, tmp_path: Path
) -> None:
    other = replace(judge, name="other", revision="r9")
    await prepared(session, judge, other)
    await prepared(session, judge)
    assert session.runtimes is not None and sorted(session.runtimes.prepared) == ["judge", "judge", "other"]
    assert code(await ran(session, "a", judge)) == code(await ran(session, "b", other)) == "x = 1\n"
    assert session.kinds[TransferRequest] == len(sent(tmp_path)) == 1


async def test_changed_code_is_sent_beside_the_one_before_and_each_revision_runs_its_own(
    session: Session, judge: FunctionSpec, tmp_path: Path
) -> None:
    await prepared(session, judge)
    assert judge.handler is not None
    (judge.handler.directory / "handler.py").write_text("x = 2\n")
    changed = replace(judge, revision="r2")
    await prepared(session, changed)
    assert code(await ran(session, "a", judge)) == "x = 1\n"
    assert code(await ran(session, "b", changed)) == "x = 2\n"
    assert len(sent(tmp_path)) == 2


@pytest.mark.parametrize("message", [TransferRequest, TransferPiece, TransferEnded, protocol.NodeAnswer])
@pytest.mark.parametrize("fault", ["cut", "daemon"])
async def test_files_arrive_whatever_is_cut_off_in_the_middle(
    session: Session, judge: FunctionSpec, tmp_path: Path, message: type[Message], fault: str
) -> None:
    session.faults_of = {message: fault}
    await prepared(session, judge)
    assert session.faults_of == {} and session.links == 2
    assert code(await ran(session, "a", judge)) == "x = 1\n"
    assert len(sent(tmp_path)) == 1, "and nothing half-written is left"


async def test_a_kind_that_nodes_do_not_execute_is_refused_by_name_and_nothing_is_sent(
    session: Session, judge: FunctionSpec
) -> None:
    asked = replace(judge, name="search", runtime="api")
    with pytest.raises(Unsupported, match=r"'search': api functions run on the gateway's own machine"):
        await session.node.prepare(asked)
    refused, kept = session.start("a", asked), session.start("b")
    await session.play(lambda: settled(session))
    assert (refused.ends[0].state, kept.ends[0].state) == (State.FAILED, State.SUCCEEDED)
    assert session.kinds[protocol.ExecuteAttempt] == 1, "that of the command"


async def test_a_handler_that_the_node_has_not_prepared_is_not_begun(session: Session, judge: FunctionSpec) -> None:
    kept = await ran(session, "a", judge)
    assert (kept.ends[0].reason, session.machine.begun) == (Reason.ENVIRONMENT_LOST, {})


async def test_files_that_went_from_the_node_fail_the_attempt_before_it_begins(
    session: Session, judge: FunctionSpec, tmp_path: Path
) -> None:
    await prepared(session, judge)
    (place,) = sent(tmp_path)
    place.rename(tmp_path / "away")
    kept = await ran(session, "a", judge)
    assert (kept.ends[0].reason, session.machine.begun) == (Reason.ENVIRONMENT_LOST, {})
    await prepared(session, judge)
    assert code(await ran(session, "b", judge)) == "x = 1\n"
