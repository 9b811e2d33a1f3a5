"""Containers that are removed, killed or lost while something else is done with them, and what they send of files."""

from __future__ import annotations

import asyncio
import base64
import json
import tarfile
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from gateway.config.schema import DockerFacade
from gateway.facades.docker import containers
from gateway.facades.docker.api import NEVER, PathStat, _first, entry_stat, instant, stat_header
from gateway.facades.docker.containers import Container, ContainerManager, Containers
from manager.errors import InvalidInput, NotFound, StorageUnavailable
from tests.gateway.conftest import until
from tests.gateway.facades.docker.world import IMAGE, EngineWorld

DEADLINE_S = 60.0

SETTINGS = DockerFacade(socket="/unused", function="box")


@pytest.fixture
async def life(engine: EngineWorld) -> AsyncIterator[ContainerManager]:
    app = engine.running.app
    assert app.api is not None
    assert app.facades.calls is not None
    made = ContainerManager(app.api, app.facades.calls, SETTINGS)
    await made.ready()
    yield made
    await made.close()


async def test_what_is_removed_while_its_start_waits_is_not_begun(engine: EngineWorld, life: ContainerManager) -> None:
    box, _ = await life.create({"Image": IMAGE, "Cmd": ["sleep", "1h"]}, "box")
    async with box.lock:
        start = asyncio.create_task(life.start(box, DEADLINE_S))
        look = asyncio.create_task(looked_into(life, box))
        await asyncio.sleep(0)
        await life.remove(box, force=False)
    for work in (start, look):
        with pytest.raises(NotFound, match="No such container"):
            await work
    assert (await engine.running.http.get("/v1/trajectories")).json()["trajectories"] == []


async def looked_into(life: ContainerManager, box: Container) -> None:
    async with life.sandbox(box, DEADLINE_S):
        pass


async def test_what_has_exited_keeps_its_files_and_no_memory(
    engine: EngineWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "REST_S", 0.0)
    client, app = engine.client, engine.running.app
    write = ["sh", "-c", "echo kept >> /workspace/file; wc -l < /workspace/file"]
    box = await engine.do(lambda: client.containers.run(IMAGE, write, detach=True))
    await until(lambda: not app.engine.trajectories()["trajectories"] and len(app.api.snapshots.all()) == 1)
    archive = await engine.do(lambda: b"".join(box.get_archive("/workspace/file")[0]))
    assert b"kept" in archive, "its files are read from another sandbox"
    await until(lambda: not app.engine.trajectories()["trajectories"])
    await engine.do(box.start)
    assert (await engine.do(box.wait))["StatusCode"] == 0
    assert await engine.do(box.logs) == b"2\n", "and are there when it begins again"
    await engine.do(box.remove)
    await until(lambda: not app.api.snapshots.all())


async def test_frames_go_by_what_the_start_says_of_a_terminal(engine: EngineWorld) -> None:
    box = await engine.keep_alive()
    api = engine.client.api

    def output(terminal: bool, start: bool) -> bytes:
        created = api.exec_create(box.id, ["echo", "it"], tty=terminal)
        result: bytes = api.exec_start(created["Id"], tty=start)
        return result

    for terminal, start, expected in ((True, False, b"it\r\n"), (False, False, b"it\n"), (True, True, b"it\r\n")):
        assert await engine.do(partial(output, terminal, start)) == expected, (terminal, start)


async def test_logs_have_a_frame_a_line_whatever_came_at_once(engine: EngineWorld) -> None:
    write = (
        "import sys; sys.stdout.write('one\\ntwo\\nthr'); sys.stdout.flush(); sys.stdout.write('ee\\n' + 'x' * 20000)"
    )
    box = await engine.do(lambda: engine.client.containers.run(IMAGE, ["python3", "-c", write], detach=True))
    for follow in (True, False):
        frames = await engine.do(lambda follow=follow: list(box.logs(stream=True, follow=follow)))  # type: ignore[misc]
        assert frames == [b"one\n", b"two\n", b"three\n", b"x" * 16384, b"x" * 3616], follow


async def test_what_is_removed_while_it_begins_leaves_nothing(engine: EngineWorld, life: ContainerManager) -> None:
    box, _ = await life.create({"Image": IMAGE, "Cmd": ["sleep", "1h"]}, "box")
    start = asyncio.create_task(life.start(box, DEADLINE_S))
    await until(lambda: engine.running.app.engine.trajectory(box.record.trajectory) is not None)
    await life.remove(box, force=False)
    assert (await asyncio.gather(start, return_exceptions=True))[0] is not True
    await until(lambda: engine.running.app.engine.trajectory(box.record.trajectory) is None)


async def test_who_is_attached_to_what_never_begins_hears_its_end(engine: EngineWorld) -> None:
    box = await engine.do(lambda: engine.client.containers.create(IMAGE, ["seq", "3"]))
    asked = f"POST /containers/{box.id}/attach?stream=1&stdout=1 HTTP/1.1\r\nHost: e\r\nContent-Length: 0\r\n\r\n"
    reader, writer = await asyncio.open_unix_connection(str(engine.socket))
    try:
        async with asyncio.timeout(DEADLINE_S):
            writer.write(asked.encode())
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            await engine.do(box.remove)
            assert await reader.read() == b""
    finally:
        writer.close()


async def test_a_kill_does_not_wait_for_a_stop_that_gives_time(engine: EngineWorld) -> None:
    deaf = ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done"]
    busy = await engine.do(lambda: engine.client.containers.run(IMAGE, deaf, detach=True))
    async with asyncio.timeout(DEADLINE_S):
        while not await engine.do(busy.logs):
            pass
        stop = asyncio.create_task(engine.ask("POST", f"/containers/{busy.id}/stop?t=120"))
        await asyncio.sleep(0)
        await engine.do(busy.kill)
        assert (await engine.do(busy.wait))["StatusCode"] == 137
        await stop


async def test_a_start_that_is_refused_leaves_no_command_that_runs(engine: EngineWorld) -> None:
    box = await engine.keep_alive()
    for argv in (["kill", "-FOO", str(2**40)], ["kill", "-9", "9" * 5000]):
        made = (await engine.do(lambda argv=argv: engine.client.api.exec_create(box.id, argv)))["Id"]  # type: ignore[misc]
        status, told = await engine.ask("POST", f"/exec/{made}/start", {"Detach": True})
        if status == 200:
            continue
        assert status == 400, told
        assert (await engine.ask("GET", f"/exec/{made}/json"))[0] == 400
        await engine.do(box.reload)
        assert made not in (box.attrs["ExecIDs"] or ())


class Documents:
    """A store's documents; the first commits may fail."""

    def __init__(self, *, failures: int = 0) -> None:
        self.kept: dict[str, str] = {}
        self.failures = failures

    async def document(self, name: str) -> str | None:
        return self.kept.get(name)

    async def read(self, query: str, parameters: tuple[str]) -> list[dict[str, str]]:
        assert query == "document_names"
        return [{"name": name} for name in self.kept if name.startswith(parameters)]

    def save_document(self, name: str, text: str | None) -> None:
        self.kept = {kept: each for kept, each in self.kept.items() if kept != name} | ({name: text} if text else {})

    async def commit(self) -> None:
        if self.failures:
            self.failures -= 1
            raise StorageUnavailable("the disk is full", component="store")


async def test_every_sleep_can_be_kept_and_what_cannot_be_read_keeps_nobody_out(life: ContainerManager) -> None:
    slept, _ = await life.create({"Image": IMAGE, "Cmd": ["sleep", "9" * 400]}, "long")
    store: Any = Documents()
    first = Containers(store)
    await first.add(slept.record)
    store.kept["docker_container:odd"] = '{"id": 7}'
    again = Containers(store)
    await again.load()
    assert [each.record.name for each in again.all()] == ["long"]
    await life.remove(slept, force=True)


async def test_a_name_that_could_not_be_kept_is_free_again(life: ContainerManager) -> None:
    box, _ = await life.create({"Image": IMAGE, "Cmd": ["sleep", "1"]}, "box")
    store: Any = Documents(failures=1)
    containers = Containers(store)
    with pytest.raises(StorageUnavailable):
        await containers.add(box.record)
    assert containers.check("box") == "box"
    assert containers.all() == ()
    await life.remove(box, force=True)


async def sent(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def header(kind: bytes, size: int) -> bytes:
    """Return an entry's header with a right checksum and any size, as base 256 has it."""
    entry = tarfile.TarInfo("x")
    entry.type = kind
    block = bytearray(entry.tobuf(tarfile.USTAR_FORMAT))
    block[124:136] = (size % (1 << 96)).to_bytes(12, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.REGTYPE])
async def test_an_entry_smaller_than_nothing_is_refused_and_holds_nobody_up(kind: bytes) -> None:
    with pytest.raises(InvalidInput, match="no archive"):
        await _first(sent(header(kind, -512), bytes(2048)))


async def test_what_is_no_header_is_refused_as_what_it_is() -> None:
    with pytest.raises(InvalidInput, match="no archive"):
        await _first(sent(b"x" * 1024))
    with pytest.raises(InvalidInput, match="no first entry"):
        await _first(sent(b"x" * 100))


async def test_the_first_entry_is_found_behind_headers_that_say_more_of_it() -> None:
    entry = tarfile.TarInfo("n" * 300)
    entry.size = 7
    whole = entry.tobuf(tarfile.PAX_FORMAT)
    head, found = await _first(sent(whole[:700], whole[700:]))
    assert (head, found.size) == (whole, 7)


def test_times_names_and_sizes_that_a_file_may_have_can_all_be_told() -> None:
    assert [instant(time_s) for time_s in (0.0, 1e18, -1e18, float("nan"))] == [NEVER] * 4
    assert instant(1.0) == "1970-01-01T00:00:01.000000Z"
    entry = tarfile.TarInfo("x")
    entry.type, entry.linkname = tarfile.SYMTYPE, "\udcff"
    for path in (entry_stat(entry, "\udcfe"), PathStat("x", 2**80, 0o100644, 1e18)):
        told = json.loads(base64.b64decode(stat_header(path)))
        assert told["size"] == path.size
