"""Handlers between a gateway and a node: their files travel once, whatever happens to the link or the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from manager.action import State
from manager.errors import InvalidConfig, Reason, Unsupported
from manager.function import FunctionSpec
from runtimes.node import protocol
from runtimes.node.protocol import Message, TransferEnded, TransferPiece, TransferRequest
from runtimes.sandbox.handler.sources import SOURCES_LIMIT_BYTES
from tests.runtimes.node.handlers.test_store import function
from tests.runtimes.node.machine import Machine
from tests.runtimes.node.session import Session, SessionAction, settled


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


@pytest.mark.parametrize(
    "message", [TransferRequest, TransferPiece, TransferEnded, protocol.NodeAnswer, protocol.DefineFunction]
)
@pytest.mark.parametrize("fault", ["cut", "daemon"])
async def test_files_arrive_whatever_is_cut_off_in_the_middle(
    session: Session, judge: FunctionSpec, tmp_path: Path, message: type[Message], fault: str
) -> None:
    session.faults_of = {message: fault}
    await prepared(session, judge)
    assert session.faults_of == {} and session.links == 2
    assert code(await ran(session, "a", judge)) == "x = 1\n"
    assert len(sent(tmp_path)) == 1, "and nothing half-written is left"


async def test_a_running_handler_outlives_a_cut_and_its_files_are_kept_for_it(
    session: Session, judge: FunctionSpec
) -> None:
    await prepared(session, judge)
    session.machine.long.add("a.1/")
    kept = session.start("a", judge)
    await session.play(lambda: "a.1/" in session.machine.commands)
    session.faults = {session.frames + 1: "cut"}
    session.machine.finish("a.1/")
    await session.play(lambda: settled(session))
    assert code(kept) == "x = 1\n"
    assert session.machine.begun == {"a.1/": 1}


async def test_a_kind_that_nodes_do_not_execute_is_refused_by_name_and_nothing_is_sent(
    session: Session, judge: FunctionSpec
) -> None:
    asked = replace(judge, name="search", runtime="api")
    with pytest.raises(Unsupported, match=r"'search': api functions run on the gateway's own machine"):
        await session.node.prepare(asked)
    refused, kept = session.start("a", asked), session.start("b")
    await session.play(lambda: settled(session))
    assert (refused.ends[0].state, kept.ends[0].state) == (State.FAILED, State.SUCCEEDED)
    assert session.kinds[protocol.DefineFunction] == 1, "that of the command"


async def test_files_larger_than_travel_are_refused_and_nothing_is_sent(session: Session, judge: FunctionSpec) -> None:
    assert judge.handler is not None
    with (judge.handler.directory / "weights.bin").open("wb") as file:
        file.truncate(SOURCES_LIMIT_BYTES)
    with pytest.raises(InvalidConfig, match="too much for a handler"):
        await session.node.prepare(judge)
    assert session.frames == 0


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
