"""An engine that is slow, silent or killed, and what it forgets of a container."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from manager.errors import CapacityExceeded
from runtimes.sandbox.docker.engine import EngineWatchdog, LeftoverCleaner
from runtimes.sandbox.linux import Cgroup, Hierarchy

SILENCE_S = 0.1
DEADLINE_S = 60.0


class SlowEngine:
    """An engine that keeps its callers until it is let go, and answers pings or not."""

    def __init__(self) -> None:
        self.answers = True
        self.pinged = threading.Semaphore(0)
        self.released = threading.Event()
        self.begun = threading.Semaphore(0)

    def ping(self, within_s: float) -> bool:
        assert within_s == SILENCE_S / 2
        self.pinged.release()
        return self.answers

    def work(self) -> str:
        self.begun.release()
        assert self.released.wait(DEADLINE_S)
        return "done"


@pytest.fixture
def slow_engine() -> Iterator[SlowEngine]:
    slow_engine = SlowEngine()
    yield slow_engine
    slow_engine.released.set()


async def test_a_slow_call_is_waited_for_while_the_engine_answers(slow_engine: SlowEngine) -> None:
    watchdog = EngineWatchdog(slow_engine.ping, threads=1, silence_s=SILENCE_S)
    call = asyncio.create_task(watchdog.call(slow_engine.work))
    for _ in range(3):
        assert await asyncio.to_thread(slow_engine.pinged.acquire, timeout=DEADLINE_S)
    slow_engine.released.set()
    assert await call == "done"
    await watchdog.close()


async def test_a_silent_engine_is_given_up_by_all_and_asked_nothing_more_until_it_answers(
    slow_engine: SlowEngine,
) -> None:
    slow_engine.answers = False
    watchdog = EngineWatchdog(slow_engine.ping, threads=2, silence_s=SILENCE_S)
    async with asyncio.timeout(DEADLINE_S):
        ends = await asyncio.gather(*(watchdog.call(slow_engine.work) for _ in range(4)), return_exceptions=True)
        assert [type(end) for end in ends] == [CapacityExceeded] * 4
        with pytest.raises(CapacityExceeded, match="does not answer") as refusal:
            await watchdog.call(lambda: pytest.fail("it was asked"))
        assert refusal.value.retry_after_s == SILENCE_S / 2
        slow_engine.answers = True
        slow_engine.released.set()
        while watchdog.silent:
            await asyncio.to_thread(slow_engine.pinged.acquire, timeout=DEADLINE_S)
        assert await watchdog.call(lambda: "heard") == "heard"
        await watchdog.close()
    begun = sum(iter(lambda: int(slow_engine.begun.acquire(blocking=False)), 0))
    assert begun == 2, "what waited for a thread was carried out after all"


async def test_a_look_tells_whether_it_answers_and_no_call_is_refused_for_it(slow_engine: SlowEngine) -> None:
    watchdog = EngineWatchdog(slow_engine.ping, threads=1, silence_s=SILENCE_S)
    assert await watchdog.look()
    slow_engine.answers = False
    assert not await watchdog.look()
    assert not watchdog.silent and await watchdog.call(lambda: "tried") == "tried"
    slow_engine.answers = True
    assert await watchdog.look(), "and so it is seen when it is back"
    await watchdog.close()


async def test_a_cancelled_call_lets_go_at_once(slow_engine: SlowEngine) -> None:
    watchdog = EngineWatchdog(slow_engine.ping, threads=1, silence_s=60.0)
    call = asyncio.create_task(watchdog.call(slow_engine.work))
    assert await asyncio.to_thread(slow_engine.begun.acquire, timeout=DEADLINE_S)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    slow_engine.released.set()
    assert await watchdog.call(lambda: "free") == "free"
    await watchdog.close()


@contextmanager
def sleeping(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its end, under the name and with the arguments of ``argv``."""
    name, *rest = argv
    # It says when it runs: for an instant after its start the kernel has no arguments to show.
    script = "import signal; print(flush=True); signal.pause()"
    process = subprocess.Popen([name, "-c", script, *rest], executable=sys.executable, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def places() -> Iterator[tuple[Hierarchy, str]]:
    """The machine's hierarchies, and a group of our own in each of them."""
    hierarchy = Hierarchy.discover()
    if hierarchy is None or os.geteuid() != 0:
        pytest.skip("needs root and control groups")
    parent = f"tangram-test-{secrets.token_hex(4)}"
    yield hierarchy, parent
    for root in hierarchy.roots:
        for group in sorted(root.glob(f"{parent}/*"), reverse=True):
            with suppress(OSError):
                group.rmdir()
        with suppress(OSError):
            (root / parent).rmdir()


def make(hierarchy: Hierarchy, parent: str, container: str, pid: int) -> None:
    """A container's groups, as an engine makes them, with a process in those that govern it."""
    for root in hierarchy.roots:
        group = root / parent / container
        group.mkdir(parents=True)
        if root in [hierarchy.mounts[name] for name in ("cpu", "freezer", "pids")]:
            (group / "cgroup.procs").write_text(str(pid))


def groups(hierarchy: Hierarchy, parent: str, container: str) -> list[Path]:
    return [root / parent / container for root in hierarchy.roots if (root / parent / container).is_dir()]


def test_processes_shims_and_groups_of_a_forgotten_container_go(places: tuple[Hierarchy, str], tmp_path: Path) -> None:
    hierarchy, parent = places
    forgotten, living = secrets.token_hex(32), secrets.token_hex(32)
    shim = ("containerd-shim-runc-v2", "-namespace", "moby", "-id")
    with ExitStack() as stack:
        started = {
            (what, of): stack.enter_context(sleeping(*argv))
            for of in (forgotten, living)
            for what, argv in (("shim", (*shim, of)), ("init", ("init",)))
        }
        for container in (forgotten, living):
            make(hierarchy, parent, container, started["init", container].pid)
        cleaner = LeftoverCleaner(hierarchy, tmp_path, grace_s=0.0)
        cleaner.learn(living, started["init", living].pid)
        cleaner.watch(forgotten)
        assert cleaner.sweep() == 1
        assert [started[what, forgotten].wait(10) for what in ("shim", "init")] == [-signal.SIGKILL] * 2
        cleaner.sweep()
        assert groups(hierarchy, parent, forgotten) == []
        assert cleaner.sweep() == 0, "it is over"
        assert len(groups(hierarchy, parent, living)) == len(hierarchy.roots)
        assert [started[what, living].poll() for what in ("shim", "init")] == [None, None]


def fake(tmp_path: Path) -> tuple[Hierarchy, Path]:
    """Two hierarchies of plain directories, and a process table in which process 1 is container ``one``."""
    roots = tmp_path / "cpu", tmp_path / "devices"
    membership = tmp_path / "proc/1/cgroup"
    membership.parent.mkdir(parents=True)
    membership.write_text("2:cpu:/system.slice/docker-one.scope\n1:devices:/system.slice/docker-one.scope\n")
    for root in roots:
        (root / "system.slice/docker-two.scope").mkdir(parents=True)
    return Hierarchy(1, {"cpu": roots[0]}, roots), tmp_path / "proc"


def test_an_engine_that_lives_is_left_the_time_to_clean_up(tmp_path: Path) -> None:
    hierarchy, proc = fake(tmp_path)
    cleaner = LeftoverCleaner(hierarchy, tmp_path / "removed", proc=proc)
    cleaner.learn("one", 1)
    cleaner.watch("two")
    assert cleaner.sweep() == 0
    assert (tmp_path / "cpu/system.slice/docker-two.scope").is_dir()


def test_groups_that_are_not_ours_to_write_end_no_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Cgroup) -> None:
        raise PermissionError("cgroup.kill")

    monkeypatch.setattr(Cgroup, "kill", denied)
    hierarchy, proc = fake(tmp_path)
    mounts = {"cpu": tmp_path / "cpu", "freezer": tmp_path / "cpu"}
    cleaner = LeftoverCleaner(Hierarchy(1, mounts, hierarchy.roots), tmp_path / "removed", proc=proc, grace_s=0.0)
    cleaner.learn("one", 1)
    cleaner.watch("two")
    assert cleaner.sweep() == 1


def test_the_next_gateway_goes_on_looking_and_forgets_what_is_gone(tmp_path: Path) -> None:
    hierarchy, proc = fake(tmp_path)
    killed = LeftoverCleaner(hierarchy, tmp_path / "removed", proc=proc, grace_s=0.0)
    killed.watch("two")
    following = LeftoverCleaner(hierarchy, tmp_path / "removed", proc=proc, grace_s=0.0)
    following.learn("one", 1)
    assert [following.sweep(), following.sweep()] == [1, 0]
    assert list((tmp_path / "removed").iterdir()) == []
