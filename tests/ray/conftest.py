"""Clusters for the tests, one for each module, and a driver of the gateway's on each."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from runtimes.node.ray.process import RayDriverProcess, RayMessage, RaySettings

#: The interpreter that has Ray; `.ci/ray-tests` makes it.
PYTHON = os.environ.get("TANGRAM_RAY_PYTHON", "")
DEADLINE_S = 120.0
HERE = Path(__file__).parent
POOL = "tangram-pool"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without that interpreter these tests say so and are skipped."""
    if PYTHON:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="no Ray (make ray runs these)"))


class RealCluster:
    """A cluster on this machine, by `tests/ray/cluster.py` in the interpreter that has Ray."""

    def __init__(self, directory: Path) -> None:
        #: Where its tests have the state directories of their daemons.
        self.places: list[Path] = []
        self._log = (directory / "cluster.log").open("w")
        self._process = subprocess.Popen(
            [PYTHON, str(HERE / "cluster.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"RAY_TMPDIR": str(directory), "RAY_ENABLE_AUTO_CONNECT": "0"},
            start_new_session=True,
        )
        self.address = self._answer()

    def ask(self, command: str, *given: object) -> Any:
        """Have a method of its `Commands` called."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, *given]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def add(self, pool: str, cpus: int = 2, gpus: int = 0) -> str:
        """Add a machine of a pool; its id."""
        return str(self.ask("add", cpus, gpus, {POOL: pool}))

    def close(self) -> None:
        """End it, with everything that it has started."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(DEADLINE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.end_daemons()  # an actor starts the daemon of a dead one again as long as it lives
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._log.close()

    def end_daemons(self) -> None:
        for place in self.places:
            for pid in place.glob("*/pid"):
                with suppress(OSError, ValueError):
                    number = int(pid.read_text())
                    if str(place) in Path(f"/proc/{number}/cmdline").read_text():  # and nobody else's by now
                        os.kill(number, signal.SIGKILL)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, Path(self._log.name).read_text()[-2000:]
        return json.loads(line)


class KeptCluster:
    """A cluster, the gateway's driver on it, what that has said, and daemons on its machines."""

    def __init__(self, cluster: RealCluster, directory: Path, **settings: Any) -> None:
        self.cluster = cluster
        self.directory = directory
        cluster.places.append(directory)
        self.said: list[RayMessage] = []
        usual: dict[str, Any] = {"address": cluster.address, "python": PYTHON, "labels": {POOL: "*"}}
        self.driver = RayDriverProcess(RaySettings(**(usual | settings)), self.said.append)

    async def heard(self, kind: str, node: str | None = None, count: int = 1) -> RayMessage:
        """The ``count``th message of a kind, about a machine if one is named."""

        def found() -> list[RayMessage]:
            return [each for each in self.said if each.kind == kind and node in (None, each.node)]

        await until(lambda: len(found()) >= count, lambda: f"{kind} of {node}: {self.said}")
        return found()[count - 1]

    async def driver_pid(self, count: int = 1) -> int:
        return (await self.heard("connected", count=count)).pid

    def state_dir(self, node: str) -> Path:
        return self.directory / node[:12]

    def daemon(self, node: str) -> int:
        """The pid that a machine's daemon has written; 0 if none lives."""
        with suppress(OSError, ValueError):
            pid = int((self.state_dir(node) / "pid").read_text())
            return pid if alive(pid) else 0
        return 0

    def start(self, node: str) -> None:
        """Have a machine's daemon started, as a gateway does whenever an actor is ready."""
        place = str(self.state_dir(node))
        self.driver.start_daemon(node, [sys.executable, str(HERE / "daemon.py"), place], {"OWN": "yes"}, place)

    async def served(self, node: str) -> tuple[int, int]:
        """Wait until a machine's actor and daemon are there; their pids."""
        await self.heard("actor", node)
        self.start(node)
        started = await self.heard("started", node)
        assert started.daemon == self.daemon(node) != 0
        return started.pid, started.daemon

    async def gone(self, node: str) -> None:
        """Take a machine away, and its daemon: the next test's driver finds neither."""
        self.driver.release(node, kill=True)
        await self.heard("released", node)
        self.cluster.ask("remove", node)


def alive(pid: int) -> bool:
    """Whether a process lives and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def until(condition: Callable[[], bool], about: Callable[[], str] = lambda: "") -> None:
    """Return when it holds; fails at the deadline with what ``about`` says."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, about()
        event = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, event.set)
        await event.wait()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RealCluster]:
    """A head without machines; each test adds its own."""
    with tempfile.TemporaryDirectory(prefix="tr-", dir="/tmp") as directory:  # sockets have short names
        made = RealCluster(Path(directory))
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def keep(cluster: RealCluster, tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[KeptCluster]]:
    """Makes the gateway's driver on the module's cluster; arguments are settings of `RaySettings`."""

    @asynccontextmanager
    async def running(**settings: Any) -> AsyncIterator[KeptCluster]:
        made = KeptCluster(cluster, tmp_path, **settings)
        task = asyncio.create_task(made.driver.run())
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            cluster.end_daemons()

    return running
