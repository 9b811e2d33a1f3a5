"""The runner in a sandbox and the client that speaks with it: claims, sessions, faults and its protocol."""

from __future__ import annotations

import asyncio
import json
import math
import os
import pwd
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.runner import KNOWN_FAULTS, fuzz
from manager.errors import ActionFailed, CapacityExceeded, InvalidInput, Reason
from manager.function import SandboxSpec
from runtimes.sandbox.command import Command, CommandResult, FileContent
from runtimes.sandbox.process import state_of
from runtimes.sandbox.runner import client as packing
from runtimes.sandbox.runner import runner as wire
from runtimes.sandbox.runner.client import (
    ISOLATED,
    MARKER,
    SocketStream,
    StreamClient,
    encode_json,
    packed_beside,
    packed_runner,
)
from runtimes.sandbox.runner.runner import FrameDecoder, ProtocolError, _json_coders, as_json, encode, from_json
from runtimes.sandbox.session import InteractiveSession, SessionSettings, TerminalSize
from runtimes.sandbox.spec import SandboxRecord
from tests.runtimes.sandbox.box import Box, running_box

DEADLINE_S = 60.0
#: Says that it began, waits for the test, and says that it ended.
GATED = "echo one; echo two >&2; echo run >> runs; until [ -e go ]; do sleep 0.01; done; echo three; exit 7"
SLEEP = "echo begun; exec sleep 1000"
#: Every command has ended before the runner goes on from its start, and few bytes fit on their way to the gateway.
ENDED_AT_ONCE = """
import socket
spawn = runner._spawn
def ended(*given):
    pid = spawn(*given)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid
runner._spawn = ended
begin = runner.GatewayConnection.__init__
def small(self, source, sink, sock=None):
    begin(self, source, sink, sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
runner.GatewayConnection.__init__ = small
"""
#: Something of ours fails, as if a file were not there, while the gateway has a file called ``fault``.
FAULT = """
def failing(owner, name):
    real = getattr(owner, name)
    def fail(self, *given, **more):
        if os.path.exists({place!r}):
            raise FileNotFoundError(2, "No such file or directory")
        return real(self, *given, **more)
    setattr(owner, name, fail)
failing(runner.{owner}, {name!r})
"""
START_S = 60.0


def command(shell: str = GATED, claim: str = "a.1/1", **given: object) -> Command:
    return Command(shell=shell, claim=claim, **({"detached": True, "kill_grace_s": 0.2} | given))  # type: ignore[arg-type]


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(0.005)


async def abandoned(box: Box, given: Command, *, unattended_s: float = 60.0) -> None:
    """A gateway begins with the command and goes away once it has said something."""
    said = asyncio.Event()
    client = await box.connect(unattended_s)
    running = asyncio.create_task(client.run(given, lambda *_: said.set()))
    async with asyncio.timeout(DEADLINE_S):
        await said.wait()
    client.close()
    await asyncio.gather(running, return_exceptions=True)


async def claimed(box: Box, given: Command) -> CommandResult:
    """What the next gateway gets."""
    client = await box.connect()
    try:
        assert given.claim in client.resumable
        async with asyncio.timeout(DEADLINE_S):
            return await client.run(given)
    finally:
        client.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has another user's id to give")
async def test_a_name_that_is_roots_in_the_image_is_root(box: Box) -> None:
    client = await box.connect(user="65534", root=False)
    toor = next(each.pw_name for each in pwd.getpwall() if each.pw_uid == 0)
    with pytest.raises(InvalidInput, match="cannot run commands as root"):
        await client.run(command("id -u", user=toor))
    client.close()


async def holds(box: Box, claim: str = "a.1/1", *, running: bool | None = None) -> bool:
    client = await box.connect()
    held = client.resumable.get(claim)
    client.close()
    return held is not None and running in (None, held.running)


@pytest.mark.promise("A running command of a durable call goes on over a kill and is taken over with its whole output.")
async def test_a_running_command_is_claimed_with_all_that_it_said(box: Box) -> None:
    await abandoned(box, command())
    client = await box.connect()
    assert client.resumable["a.1/1"].running
    seen: list[tuple[str, bytes]] = []
    running = asyncio.create_task(client.run(command(), lambda *said: seen.append(said)))
    await until(lambda: len(seen) == 2)
    box.open_gate()
    result = await running
    assert seen == [("stdout", b"one\n"), ("stderr", b"two\n"), ("stdout", b"three\n")]
    assert (result.exit_code, result.stdout, result.stderr, box.runs) == (7, b"one\nthree\n", b"two\n", 1)
    client.close()


async def test_one_that_ended_meanwhile_is_claimed_with_its_end(box: Box) -> None:
    await abandoned(box, command())
    box.open_gate()
    await until(lambda: holds(box, running=False))
    result = await claimed(box, command())
    assert (result.exit_code, result.stdout, result.stderr, box.runs) == (7, b"one\nthree\n", b"two\n", 1)
    assert result.duration_s > 0
    assert result.peak_memory_bytes > 0


async def test_it_can_be_claimed_again_until_its_end_is_acknowledged(box: Box) -> None:
    box.open_gate()
    client = await box.connect()
    assert (await client.run(command())).exit_code == 7
    client.close()
    assert (await claimed(box, command())).exit_code == 7
    client = await box.connect()
    client.keep("a.1/", detached=False)
    await client.sweep()
    client.close()
    assert not await holds(box)


async def test_what_was_started_is_told_until_it_is_acknowledged_whatever_became_of_it(box: Box) -> None:
    client = await box.connect()
    assert client.started == frozenset()
    box.open_gate()
    await client.run(command(claim="ended.1/1"))
    await client.run(command(claim="attended.1/1", detached=False))
    killed = asyncio.create_task(client.run(command(SLEEP, "killed.1/1")))
    await asyncio.sleep(0)
    killed.cancel()
    await asyncio.gather(killed, return_exceptions=True)
    client.close()
    client = await box.connect(unattended_s=0.0)
    assert client.started == frozenset({"ended.1/1", "killed.1/1"})
    assert set(client.resumable) == {"ended.1/1", "killed.1/1"}
    client.close()

    async def dropped() -> bool:  # by the runner, once it has seen that the gateway left
        client = await box.connect(unattended_s=0.0)
        client.close()
        return not client.resumable

    await until(dropped)
    client = await box.connect()
    assert client.started == frozenset({"ended.1/1", "killed.1/1"}), "what is not kept any more was begun all the same"
    for claims in ("ended.1/", "killed.1/"):
        client.keep(claims, detached=False)
    await client.sweep()
    client.close()
    client = await box.connect()
    assert client.started == frozenset()
    client.close()


async def test_of_more_claims_than_it_can_remember_nothing_is_certain(box: Box) -> None:
    client = await box.connect()
    for number in range(wire.STARTED_MAX + 1):
        await client.run(command("true", f"{number}.1/1"))
    client.close()
    client = await box.connect()
    assert client.started is None
    client.close()


async def test_what_is_not_detached_ends_with_its_gateway(box: Box) -> None:
    await abandoned(box, command("echo $$; exec sleep 1000", detached=False))
    assert not await holds(box)
    await until(lambda: not children(box))


async def test_it_may_become_detached_while_it_runs(box: Box) -> None:
    client = await box.connect()
    said = asyncio.Event()
    running = asyncio.create_task(client.run(command(detached=False), lambda *_: said.set()))
    await said.wait()
    client.keep("a.1/", detached=True)
    await client.list_files("")
    client.close()
    await asyncio.gather(running, return_exceptions=True)
    box.open_gate()
    assert (await claimed(box, command())).stdout == b"one\nthree\n"


async def test_without_a_gateway_for_too_long_it_is_ended_and_nothing_is_kept(box: Box) -> None:
    await abandoned(box, command("echo a; exit 0", "early.1/1"))
    await abandoned(box, command("trap '' TERM; echo b; while :; do sleep 0.05; done"), unattended_s=0.2)
    await until(lambda: not children(box))
    assert not await holds(box)
    assert not await holds(box, "early.1/1")


async def test_its_timeout_is_kept_without_a_gateway(box: Box) -> None:
    given = command("echo begun; exec sleep 1000", timeout_s=2.0)
    await abandoned(box, given)
    await until(lambda: not children(box))
    result = await claimed(box, given)
    assert (result.timed_out, result.stdout) == (True, b"begun\n")


async def test_no_more_is_kept_than_its_bound(box: Box) -> None:
    given = command("echo begun; yes | head -c 1000000; exit 3", output_limit_bytes=10_000)
    await abandoned(box, given)
    await until(lambda: holds(box, running=False))
    result = await claimed(box, given)
    head, tail = result.stdout.split(MARKER % (1_000_006 - 10_000))
    assert (head[:6], len(head), len(tail)) == (b"begun\n", 5000, 5000)
    assert (result.stdout_truncated, result.exit_code) == (True, 3)


async def test_the_oldest_ends_make_room(box: Box) -> None:
    client = await box.connect()
    for number in range(wire.ENDED_MAX + 2):
        await client.run(command("echo a", f"{number}.1/1"))
    large = command("head -c 3000000 /dev/zero", "x", output_limit_bytes=2**22)
    client.close()
    client = await box.connect()
    assert list(client.resumable) == [f"{number}.1/1" for number in range(2, wire.ENDED_MAX + 2)]
    for claim in ("large.1/1", "larger.1/1"):
        await client.run(command(large.shell, claim, output_limit_bytes=2**22))
    client.close()
    client = await box.connect()
    assert list(client.resumable) == ["larger.1/1"]
    client.close()


async def test_one_that_has_not_got_all_its_input_is_ended(box: Box) -> None:
    given = command("echo begun; exec sleep 1000", stdin=b"x" * (2 * wire.WINDOW_BYTES))
    await abandoned(box, given)
    assert not await holds(box)
    await until(lambda: not children(box))


async def test_a_program_that_cannot_be_started_is_kept_as_well(box: Box) -> None:
    given = Command(argv=("/nowhere",), claim="a.1/1", detached=True)
    await abandoned(box, given)
    assert (await claimed(box, given)).exit_code == 127


async def test_what_was_claimed_can_be_killed(box: Box) -> None:
    await abandoned(box, command())
    client = await box.connect()
    running = asyncio.create_task(client.run(command()))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not children(box)
    client.close()
    client = await box.connect()
    assert (await client.run(command())).killed, "who asked for its end may not live to tell it"
    client.keep("a.1/", detached=False)
    await client.sweep()
    client.close()
    assert not await holds(box)


@pytest.mark.parametrize("token", [None, "guessed"])
async def test_a_stranger_inside_neither_hears_nor_ends_it(box: Box, token: str | None) -> None:
    await abandoned(box, command())
    frames = [] if token is None else [encode_json(wire.HELLO, 0, {"token": token})]
    frames += [
        encode_json(wire.CLAIM, 1, {"claim": "a.1/1"}),
        encode_json(wire.KEEP, 2, {"claim": "", "lasting": False}),
    ]
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(DEADLINE_S)
        stranger.connect(str(box.directory / "s"))
        stranger.sendall(b"".join(frames))
        with suppress(ConnectionResetError):
            assert stranger.recv(1000) == b""
    assert await holds(box, running=True)


def children(box: Box) -> list[str]:
    """The runner's children that live: of what has ended, one may not be reaped yet."""
    found = Path(f"/proc/{box.process.pid}/task/{box.process.pid}/children").read_text().split()
    return [pid for pid in found if state_of(int(pid)) not in ("", "Z")]


# --- sessions
def session_command(session: InteractiveSession) -> Command:
    shell = "echo begun; while read -r line; do echo said $line; done; exit 9"
    return command(shell, session=session, timeout_s=math.inf)


async def heard(session: InteractiveSession, offset: int, data: bytes) -> bytes:
    """What a session says from an offset on, until that was said."""
    found = b""
    async with asyncio.timeout(DEADLINE_S), aclosing(session.read(offset, DEADLINE_S)) as pages:
        async for page in pages:
            found += b"".join(piece.data for piece in page)
            if data in found:
                break
    return found


async def test_a_session_goes_on_without_its_gateway_and_the_next_one_types_on(box: Box) -> None:
    first, client = InteractiveSession(SessionSettings(), None), await box.connect()
    running = asyncio.create_task(client.run(session_command(first)))
    await first.write(b"one\ntw")
    await heard(first, 0, b"said one\n")
    client.close()
    await asyncio.gather(running, return_exceptions=True)
    second, client = InteractiveSession(SessionSettings(), None), await box.connect()
    running = asyncio.create_task(client.run(session_command(second)))
    assert await second.write(b"one\ntwo\n", 0) == 8, "what it was sent before is not typed again"
    assert await heard(second, 6, b"two\n") == b"said one\nsaid two\n"
    await second.write(b"", end=True)
    async with asyncio.timeout(DEADLINE_S):
        assert (await running).exit_code == 9
    client.close()


async def test_of_a_session_that_spoke_to_nobody_the_last_is_kept_and_numbered(box: Box) -> None:
    settings, size = SessionSettings(output_bytes=4096), 2**20
    first, client = InteractiveSession(settings, None), await box.connect()
    given = command(f"echo begun; read -r line; head -c {size} /dev/zero; echo end", timeout_s=math.inf, session=first)
    running = asyncio.create_task(client.run(given))
    await heard(first, 0, b"begun\n")
    await first.write(b"go\n")
    client.close()
    await asyncio.gather(running, return_exceptions=True)
    await until(lambda: holds(box, running=False))
    second, client = InteractiveSession(settings, None), await box.connect()
    async with asyncio.timeout(DEADLINE_S):
        assert (await client.run(command("ignored", session=second))).exit_code == 0
    second.close()
    assert second.end == len("begun\n") + size + len("end\n")
    assert (await heard(second, 0, b"end\n")).endswith(b"\0end\n")
    assert second.end - second.start <= 4096
    client.close()


@asynccontextmanager
async def connected(box: Box) -> AsyncIterator[StreamClient]:
    client = await box.connect()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield client
    finally:
        client.close()


async def test_a_command_that_ends_at_once_is_answered_right_though_its_gateway_reads_nothing() -> None:
    with running_box(change=ENDED_AT_ONCE) as box:
        async with connected(box) as client:
            client.pause_reading()
            shells = [f"head -c 60000 /dev/zero; touch done{number}" for number in range(10)]
            running = [asyncio.create_task(client.run(Command(shell=shell))) for shell in shells]
            await until((box.work / "done9").exists)
            client.resume_reading()
            results = await asyncio.gather(*running)
        assert [(each.exit_code, len(each.stdout)) for each in results] == [(0, 60_000)] * 10
        assert box.process.poll() is None


async def run(client: StreamClient) -> None:
    await client.run(Command(shell="echo said; cat", stdin=b"typed"))


async def start_and_kill(client: StreamClient) -> None:
    await client.run(Command(shell="exec sleep 1000", timeout_s=0.0, kill_grace_s=0.0))


async def read(client: StreamClient) -> None:
    await client.read_file("there", limit_bytes=10)


async def write(client: StreamClient) -> None:
    await client.write_file("new", FileContent(b"data"), mode=None)


async def look(client: StreamClient) -> None:
    await client.list_files("")


@pytest.mark.promise("A fault of the runner ends one exchange only, and is reported as a fault of the gateway.")
@pytest.mark.parametrize(
    ("work", "owner", "name"),
    [
        (run, "Launcher", "plumb"),
        (run, "Launcher", "environment_of"),
        (run, "Jobs", "on_input"),
        (run, "Jobs", "on_output"),
        (run, "Jobs", "finish"),
        (run, "Job", "accounts"),
        (start_and_kill, "Jobs", "pursue"),
        (start_and_kill, "ProcessTree", "signal"),
        (start_and_kill, "ProcessTree", "members"),
        (read, "Files", "read"),
        (read, "Download", "abandon"),
        (write, "Files", "write"),
        (write, "Files", "feed"),
        (look, "Files", "list_directory"),
    ],
)
async def test_a_fault_of_the_runner_ends_one_exchange_and_is_told_as_its_own(
    tmp_path: Path, work: Callable[[StreamClient], Awaitable[None]], owner: str, name: str
) -> None:
    fault = tmp_path / "fault"
    with running_box(change=FAULT.format(place=str(fault), owner=owner, name=name)) as box:
        (box.work / "there").write_bytes(b"data")
        async with connected(box) as client:
            begun, shell = asyncio.Event(), "echo other; until [ -e go ]; do sleep 0.01; done"
            other = asyncio.create_task(client.run(Command(shell=shell), lambda *_: begun.set()))
            await begun.wait()
            fault.touch()
            with pytest.raises(ActionFailed, match="runner failed: FileNotFoundError") as caught:
                await work(client)
            fault.unlink()
            assert caught.value.reason is Reason.INTERNAL
            box.open_gate()
            assert (await other).stdout == b"other\n"
            assert (await client.run(Command(shell="echo again"))).stdout == b"again\n"
        assert box.process.poll() is None


# --- whose a process is
@pytest.mark.promise("A process that a command left behind is not ended with a later one.")
async def test_a_server_whose_wrapper_ends_meanwhile_is_not_ended_with_a_later_command(box: Box) -> None:
    wait = "until [ -e go ]; do sleep 0.01; done"
    async with connected(box) as client:
        await client.run(Command(shell=f"({wait}; sleep 1000 & echo $! > server) <&- >/dev/null 2>&1 &"))
        said = asyncio.Event()
        adopted = f'grep -q "PPid:.{box.process.pid}$" /proc/$(cat server)/status 2>/dev/null'
        shell = f"touch go; until {adopted}; do sleep 0.01; done; echo ready; sleep 1000"
        running = asyncio.create_task(client.run(Command(shell=shell), lambda *_: said.set()))
        await said.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert "sleep" in (Path("/proc") / (box.work / "server").read_text().strip() / "status").read_text()
        assert await client.sweep() == 1


async def test_what_hides_where_it_comes_from_is_ended_with_the_command_that_it_was_adopted_from(box: Box) -> None:
    async with connected(box) as client:
        said = asyncio.Event()
        shell = "(env -i sleep 1000 & TANGRAM_ACTION=made-up setsid sleep 1000 &); echo ready; exec sleep 1000"
        running = asyncio.create_task(client.run(Command(shell=shell), lambda *_: said.set()))
        await said.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert await client.sweep() == 0


def test_markers_that_no_process_bears_are_forgotten() -> None:
    workplace = wire.Workplace()
    workplace.config = {"user": str(os.geteuid()), "workdir": "/"}
    tree = wire.ProcessTree(workplace, {})
    with subprocess.Popen(["sleep", "1000"], env={**os.environ, "TANGRAM_ACTION": "0"}) as process:
        for number in range(2 * wire.MARKERS_MAX):
            tree.remember(wire.Job(number, {"marker": str(number), "grace_s": 0.0}, set()))
            assert len(tree.markers) <= wire.MARKERS_MAX
        assert tree.marker_of(process.pid) == b"TANGRAM_ACTION=0"
        process.kill()


# --- terminals
@pytest.mark.parametrize("last", ["exit 3", "echo again > /dev/tty; exit 3"])
async def test_a_command_that_closes_its_terminal_is_not_hung_up_on(box: Box, last: str) -> None:
    session = InteractiveSession(SessionSettings(), TerminalSize())
    shell = f"read x; exec 0<&- 1>&- 2>&-; touch closed; until [ -e go ]; do sleep 0.01; done; {last}"
    async with connected(box) as client:
        running = asyncio.create_task(client.run(Command(shell=shell, session=session, timeout_s=math.inf)))
        await session.write(b"typed\n", end=True)
        await until((box.work / "closed").exists)
        for _ in range(2):
            await client.list_files("")  # by the end of the second it has seen that the terminal is closed
        box.open_gate()
        result = await running
        session.close()
    assert (result.exit_code, result.signal) == (3, None)
    if "again" in last:
        assert b"again" in await heard(session, 0, b"again")


# --- what was never started
async def test_a_command_that_was_refused_is_not_told_as_started(box: Box) -> None:
    async with connected(box) as client:
        with pytest.raises(InvalidInput):
            await client.run(Command(shell="true", cwd="nowhere", claim="a.1/1", detached=True))
        assert (await client.run(Command(argv=("/nowhere",), claim="b.1/1", detached=True))).exit_code == 127
    async with connected(box) as client:
        assert client.started == frozenset({"b.1/1"})


# --- descriptors
@pytest.mark.parametrize("terminal", [False, True])
async def test_a_shortage_of_descriptors_refuses_commands_and_leaves_none_open(box: Box, terminal: bool) -> None:
    def descriptors() -> set[int]:
        return {int(name) for name in os.listdir(f"/proc/{box.process.pid}/fd")}  # noqa: PTH208

    async def attempt() -> None:
        session = InteractiveSession(SessionSettings(), TerminalSize()) if terminal else None
        await client.run(Command(shell="exit 0", stdin=b"" if terminal else b"typed", session=session))

    async with connected(box) as client:
        await attempt()
        bound, before, refused = resource.prlimit(box.process.pid, resource.RLIMIT_NOFILE), descriptors(), 0
        for more in range(wire.RESERVED_DESCRIPTORS + 8):
            resource.prlimit(box.process.pid, resource.RLIMIT_NOFILE, (max(before) + 1 + more, bound[1]))
            with suppress(CapacityExceeded):
                await attempt()
                refused -= 1
            refused += 1
            await until(lambda: descriptors() == before)
        resource.prlimit(box.process.pid, resource.RLIMIT_NOFILE, bound)
        assert wire.RESERVED_DESCRIPTORS <= refused < wire.RESERVED_DESCRIPTORS + 8
        await attempt()


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()

VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(st.dictionaries(st.text(), VALUES))
def test_what_it_writes_and_reads_is_what_pythons_module_does(value: dict[str, Any]) -> None:
    written = as_json(value)
    assert written == json.dumps(value, separators=(",", ":")).encode()
    assert from_json(written) == json.loads(written) == value
    assert from_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    "payload", [b"", b"x", b"{", b'{"a":1}{}', b'{"a":1} ', b"\xff", b'{"a" 1}', b"[1,]", b'"\\u12"']
)
def test_what_is_no_json_is_a_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError):
        from_json(payload)


def test_what_lies_too_deep_is_told() -> None:
    with pytest.raises(RecursionError):
        from_json(b"[" * 200_000)


def test_where_python_has_no_such_functions_its_module_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "_json", None)
    read, write = _json_coders()
    assert write({"a": [1, None, "\udc80"]}) == '{"a":[1,null,"\\udc80"]}'
    assert read('{"a":1.5}') == {"a": 1.5}


@asynccontextmanager
async def started(python: str, packed: Path, directory: Path) -> AsyncIterator[StreamClient]:
    (directory / "run").mkdir()
    runner = await asyncio.create_subprocess_exec(python, *ISOLATED, str(packed), str(directory / "run"))
    spec = SandboxSpec(workdir=str(directory), user=pwd.getpwuid(os.getuid()).pw_name)
    record = SandboxRecord(name="one", token="t" * 32, spec=spec, labels={}, provider="process")
    try:
        stream = SocketStream(directory / "run", peer_pid=runner.pid)
        client = await StreamClient.open(stream, record.greeting(own_cgroup=False, root=True), within_s=START_S)
        yield client
        client.close()
    finally:
        with suppress(ProcessLookupError):
            runner.kill()
        await runner.wait()


def runs(python: str) -> bool:
    """Return whether it is more than a name on the path."""
    return subprocess.run([python, "-c", "pass"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("reads_bytecode", [True, False])
async def test_a_packed_runner_serves_whether_or_not_its_bytecode_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads_bytecode: bool
) -> None:
    if not reads_bytecode:
        monkeypatch.setattr(packing, "compiled", lambda source, name: b"another version's, which this cannot load")
    packed = packed_beside(tmp_path / "state")
    async with started(sys.executable, packed, tmp_path) as client:
        assert (await client.run(Command(argv=("echo", "served")))).stdout == b"served\n"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.12", "3.13", "3.14"])
async def test_a_packed_runner_serves_on_other_pythons(tmp_path: Path, version: str) -> None:
    python = shutil.which(f"python{version}")
    if python is None or not runs(python):
        pytest.skip(f"there is no python{version}")
    async with started(python, packed_beside(tmp_path / "state"), tmp_path) as client:
        assert (await client.run(Command(argv=("echo", "served")))).stdout == b"served\n"


def test_the_packed_runner_of_another_version_is_replaced_and_a_mounted_one_stays(tmp_path: Path) -> None:
    place = tmp_path / "runner.py"
    place.write_bytes(b"earlier")
    with place.open("rb") as mounted:
        assert packed_beside(tmp_path).read_bytes() == packed_runner()
        assert mounted.read() == b"earlier"
    kept = place.stat().st_ino
    packed_beside(tmp_path)
    assert (place.stat().st_ino, [path.name for path in tmp_path.iterdir()]) == (kept, ["runner.py"])


SECONDS = float(os.environ.get("RUNNER_FUZZ_S", "4"))

SEED = int(os.environ.get("RUNNER_FUZZ_SEED", "1"))


@pytest.mark.timeout(SECONDS + 180)
async def test_whatever_is_asked_under_backpressure_ends_as_it_should() -> None:
    findings = await fuzz(SEED, SECONDS)
    assert findings.exchanges
    assert findings.clean, f"seed {SEED}: {findings}"


@pytest.mark.parametrize("fault", KNOWN_FAULTS)
async def test_the_fuzzer_finds_a_known_fault(fault: str) -> None:
    change, says = KNOWN_FAULTS[fault]
    findings = await fuzz(SEED, 60.0, change=change)
    assert any(says in told for told in findings.wrong), findings


@pytest.mark.parametrize("answer", [None, (wire.ERROR, {"code": "invalid_input", "message": "no such user"})])
async def test_a_connection_that_comes_to_nothing_is_closed(
    tmp_path: Path, answer: tuple[int, dict[str, str]] | None
) -> None:
    greeted, closed = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_frame(reader)
        if answer is not None:
            writer.write(encode_json(answer[0], 0, answer[1]))
        greeted.set()
        assert not await reader.read()
        closed.set()
        await hang_up(writer)

    async with await asyncio.start_unix_server(serve, tmp_path / "s"), asyncio.timeout(DEADLINE_S):
        opening = asyncio.create_task(StreamClient.open(SocketStream(tmp_path), {"token": "t"}, within_s=DEADLINE_S))
        await greeted.wait()
        if answer is None:
            opening.cancel()
        (failure,) = await asyncio.gather(opening, return_exceptions=True)
        assert isinstance(failure, asyncio.CancelledError if answer is None else InvalidInput)
        await closed.wait()


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def speaking(directory: Path, script: Script) -> AsyncIterator[StreamClient]:
    """A client to a runner that answers the greeting properly and then follows its script."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_frame(reader)
        writer.write(encode_json(wire.READY, 0, {"protocol": wire.PROTOCOL, "known": False}))
        await script(reader, writer)
        await hang_up(writer)
        over.set()

    over = asyncio.Event()
    server = await asyncio.start_unix_server(serve, directory / "s")
    client = await StreamClient.open(SocketStream(directory), {"token": "t"}, within_s=5)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield client
    finally:
        client.close()
        async with asyncio.timeout(DEADLINE_S):
            await over.wait()
        server.close()
        await server.wait_closed()


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def next_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    length, kind, number = wire.HEADER.unpack(await reader.readexactly(wire.HEADER.size))
    return kind, number, await reader.readexactly(length)


@given(
    frames=st.lists(st.tuples(st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=50)), max_size=8),
    cuts=st.lists(st.integers(1, 40), min_size=1),
)
def test_frames_survive_any_cutting(frames: list[tuple[int, int, bytes]], cuts: list[int]) -> None:
    stream = b"".join(encode(*frame) for frame in frames)
    decoder, seen, start, turn = FrameDecoder(), [], 0, 0
    while start < len(stream):
        size = cuts[turn % len(cuts)]
        seen += [(kind, number, data) for (_, kind, number), data in decoder.feed(stream[start : start + size])]
        start, turn = start + size, turn + 1
    assert seen == frames


def test_an_oversized_frame_is_refused_before_it_is_taken_in() -> None:
    with pytest.raises(ProtocolError):
        list(FrameDecoder().feed(wire.HEADER.pack(wire.FRAME_MAX_BYTES + 1, wire.STDOUT, 1)))


async def _nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await next_frame(reader)
    writer.write(b"\xff" * 100)


async def _hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await next_frame(reader)


async def _bad_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    _, number, _ = await next_frame(reader)
    writer.write(encode(wire.EXIT, number, b'{"code": "zero"}'))
    await reader.read()


async def _no_json(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    _, number, _ = await next_frame(reader)
    writer.write(encode(wire.EXIT, number, b"[1]"))
    await reader.read()


async def _unknown_kind(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    _, number, _ = await next_frame(reader)
    writer.write(encode(200, number, b""))
    await reader.read()


@pytest.mark.parametrize("script", [_nonsense, _hang_up, _bad_end, _no_json, _unknown_kind])
async def test_a_runner_that_breaks_the_protocol_is_a_lost_environment(tmp_path: Path, script: Script) -> None:
    async with speaking(tmp_path, script) as client:
        with pytest.raises(ActionFailed) as caught:
            await client.run(Command(argv=("true",)))
        assert caught.value.reason is Reason.ENVIRONMENT_LOST


async def test_a_runner_that_falls_silent_is_given_up_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtimes.sandbox.runner.client.SILENCE_S", 0.05)
    monkeypatch.setattr(wire, "UNKILLABLE_S", 0.05)

    async def whisper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, number, _ = await next_frame(reader)
        writer.write(encode(wire.STDOUT, number, b"begun"))
        await reader.read()

    async with speaking(tmp_path, whisper) as client:
        with pytest.raises(ActionFailed, match="fallen silent") as caught:
            await client.run(Command(shell="x", timeout_s=0.05, kill_grace_s=0.0))
        assert caught.value.reason is Reason.ENVIRONMENT_LOST
        assert caught.value.result == {"stdout": "begun", "stderr": ""}
        assert client.lost.is_set()


async def test_a_cancelled_command_is_killed_before_it_is_let_go(tmp_path: Path) -> None:
    steps: list[str] = []
    begun = asyncio.Event()

    async def obey(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, number, _ = await next_frame(reader)
        begun.set()
        kind, killed, _ = await next_frame(reader)
        assert (kind, killed) == (wire.KILL, number)
        steps.append("killed")
        writer.write(encode_json(wire.EXIT, number, {"code": None, "signal": 9}))
        await reader.read()

    async with speaking(tmp_path, obey) as client:
        running = asyncio.create_task(client.run(Command(shell="x")))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        steps.append("let go")
        assert not client.lost.is_set()
    assert steps == ["killed", "let go"]


async def test_a_listener_that_is_not_the_runner_is_not_spoken_to(tmp_path: Path) -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hang_up(writer)
        over.set()

    over = asyncio.Event()
    server = await asyncio.start_unix_server(never, tmp_path / "s")
    with pytest.raises(ActionFailed, match="another process"):
        await StreamClient.open(SocketStream(tmp_path, peer_pid=1), {"token": "t"}, within_s=5)
    async with asyncio.timeout(DEADLINE_S):
        await over.wait()
    server.close()
    await server.wait_closed()


async def test_a_runner_that_is_not_there_is_told_in_time(tmp_path: Path) -> None:
    with pytest.raises(ActionFailed, match="cannot be reached"):
        await StreamClient.open(SocketStream(tmp_path), {"token": "t"}, within_s=0.05)
