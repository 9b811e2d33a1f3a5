"""A whole node: ``tangram node join`` as a process, with containers, killed in the middle of its work."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from manager.action import Action, Grant, Lease, Outcome, State, UnitSet
from manager.executor import Call
from manager.function import FunctionSpec, PytestSpec, SandboxSpec
from runtimes.node.certificate import ensure_certificate
from tests.runtimes.node.session import KeptLog
from tests.runtimes.node.test_daemon import StandInDoor

pytestmark = pytest.mark.docker

#: Seconds after which a test is taken for stuck: containers are made on a machine that does much else.
STUCK_S = 240.0
BOX = SandboxSpec(image="tangram-base:bookworm", memory_bytes=256 * 2**20)
SHELL = FunctionSpec(name="shell", runtime="exec", sandbox=BOX, timeout_s=STUCK_S)
SUITE = FunctionSpec(name="suite", runtime="pytest", sandbox=BOX, pytest=PytestSpec(), timeout_s=STUCK_S)
TESTS = "def test_good():\n    assert True\n\ndef test_bad():\n    assert False\n"


class FollowedLog(KeptLog):
    """A log on which one can wait."""

    def __init__(self) -> None:
        super().__init__()
        self._written = asyncio.Event()

    def write(self, stream: str, data: str) -> None:
        super().write(stream, data)
        self._written.set()

    async def says(self, text: str) -> None:
        """Wait until its standard output ends so."""
        while not self.said.get("stdout", "").endswith(text):
            self._written.clear()
            await self._written.wait()


class NodeProcess:
    """``tangram node join`` in a process of its own."""

    def __init__(self, door: StandInDoor, port: int, state_dir: Path) -> None:
        self._command = [sys.executable, "-m", "gateway", "node", "join", "--gateway", f"127.0.0.1:{port}"]
        self._command += ["--fingerprint", door.certificate.fingerprint, "--ticket", "t", "--name", "n1"]
        self._command += ["--state-dir", str(state_dir), "--sandboxes", "docker", "--drain-grace", "0"]
        self._environment = {**os.environ, "RAY_AUTH_TOKEN": "secret"}
        self._door, self._log = door, state_dir.with_suffix(".log")
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, and wait until it has joined."""
        self._door.attached.clear()
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self._command, env=self._environment, stdout=log, stderr=log
            )
        joined = asyncio.ensure_future(self._door.attached.wait())
        ended = asyncio.ensure_future(self.process.wait())
        await asyncio.wait({joined, ended}, return_when=asyncio.FIRST_COMPLETED)
        assert joined.done(), self._log.read_text()
        ended.cancel()

    async def end(self, how: signal.Signals) -> None:
        """Send it a signal, and wait for its end."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(how)
            await self.process.wait()


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[StandInDoor]:
    door = StandInDoor(ensure_certificate(tmp_path))
    yield door
    await door.close()


@pytest.fixture
async def node(door: StandInDoor, tmp_path: Path, docker: str) -> AsyncIterator[NodeProcess]:
    node = NodeProcess(door, await door.open(), tmp_path / "node")
    async with asyncio.timeout(STUCK_S):
        await node.start()
    yield node
    async with asyncio.timeout(STUCK_S):
        await node.end(signal.SIGTERM)


async def execute(
    door: StandInDoor, name: str, function: FunctionSpec, given: Mapping[str, object], log: KeptLog | None = None
) -> Outcome:
    """Run an action of the one trajectory to its end, and have that on record."""
    cost = {"cpu": UnitSet.fixed(1)}
    action = Action(id=name, function=function.name, trajectory="t", cost=cost, timeout_s=STUCK_S)
    grants = {"cpu": Grant(pool="cpu:n1", units=1, cores=(min(os.sched_getaffinity(0)),))}
    lease = Lease(action_id=name, node="n1", grants=grants)
    outcome = await door.node.execute(action, lease, Call(function=function, input=given, log=log or KeptLog()))
    door.node.acknowledge(f"{name}.1/")
    return outcome


def result_of(outcome: Outcome) -> dict[str, object]:
    assert outcome.state is State.SUCCEEDED, outcome
    assert isinstance(outcome.result, dict)
    return outcome.result


async def test_commands_and_rewards_survive_the_kill_of_their_daemon(door: StandInDoor, node: NodeProcess) -> None:
    async with asyncio.timeout(STUCK_S):
        await door.node.prepare(SHELL)
        await door.node.prepare(SUITE)
        env = result_of(await execute(door, "env", SHELL, {"command": "env"}))
        assert "RAY_" not in str(env["stdout"])

        # A command that says something, waits for a file, and says more; its daemon is killed while it waits.
        script = "echo begun >> begins; seq 1 500; while [ ! -e go ]; do sleep 0.1; done; seq 501 1000"
        log = FollowedLog()
        running = asyncio.create_task(execute(door, "long", SHELL, {"command": script}, log))
        await log.says("\n500\n")
        await node.end(signal.SIGKILL)
        await node.start()
        assert not running.done()
        (facts,) = [facts for facts in door.inventories[-1].attempts if facts.claim == "long.1/"]
        assert facts.begun and not facts.ended
        running.cancel()
        assert (await running).state is State.CANCELLED
        assert log.said["stdout"] == "".join(f"{each}\n" for each in range(1, 501))
        begins = result_of(await execute(door, "count", SHELL, {"command": "cat begins"}))
        assert begins["stdout"] == "begun\n"

        made = {"command": "cat > test_it.py", "stdin": TESTS}
        assert result_of(await execute(door, "files", SHELL, made))["exit_code"] == 0
        reward = result_of(await execute(door, "reward", SUITE, {"targets": ["test_it.py"]}))
        assert reward["reward"] == 0.5, reward
        assert door.node.trajectories()["t"].alive
        await door.node.end_trajectory("t")


@pytest.mark.slow
async def test_a_command_that_ends_while_its_daemon_is_dead_has_one_end_and_its_whole_log(
    door: StandInDoor, node: NodeProcess
) -> None:
    async with asyncio.timeout(STUCK_S):
        log = FollowedLog()
        script = "echo first; while [ ! -e go ]; do sleep 0.05; done; seq 1 1000"
        await execute(door, "ready", SHELL, {"command": "true"})
        running = asyncio.create_task(execute(door, "long", SHELL, {"command": f"(sleep 3; touch go) & {script}"}, log))
        await log.says("first\n")
        await node.end(signal.SIGKILL)
        await node.start()
        result = result_of(await running)
        whole = "first\n" + "".join(f"{each}\n" for each in range(1, 1001))
        assert (result["exit_code"], log.said["stdout"]) == (0, whole)
