"""The barest sandbox: no bubblewrap and no control groups; what it still keeps, and what it says that it does not."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from manager.errors import CapacityExceeded, CodedError, InvalidInput, NotFound, Reason, Unsupported
from manager.function import Background, Network, SandboxSpec
from runtimes.sandbox.command import Command, CommandResult
from runtimes.sandbox.process import Means, ProcessProvider
from runtimes.sandbox.runner.client import unmade
from runtimes.sandbox.sandbox import CreationGate, Sandbox
from runtimes.sandbox.spec import SandboxRecord
from tests.runtimes.sandbox.conftest import unique

DEADLINE_S = 60.0


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """A directory that the sandbox's user may pass through, as pytest's own are not."""
    with TemporaryDirectory(prefix="tangram-plain-") as place:
        path = Path(place)
        path.chmod(0o755)
        yield path


@pytest.fixture
async def provider(state_dir: Path) -> AsyncIterator[ProcessProvider]:
    means = Means(bubblewrap=None, root=os.geteuid() == 0, cgroup=None)
    made = ProcessProvider(state_dir=state_dir, gate=CreationGate(1), shared_cores=(0,), means=means)
    yield made
    await made.reap(())
    await made.close()


@pytest.fixture
async def sandbox(provider: ProcessProvider) -> AsyncIterator[Sandbox]:
    made = await provider.create(SandboxSpec(), name=unique("plain"), labels={}, mounts={})
    yield made
    await made.close()


async def sh(sandbox: Sandbox, text: str, *, timeout_s: float = 10.0, cwd: str = "") -> CommandResult:
    return await sandbox.run(Command(shell=text, timeout_s=timeout_s, kill_grace_s=0.2, cwd=cwd))


def living(words: str) -> int:
    """Processes of this machine with these words in their command line."""
    found = 0
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += words.encode() in process.read_bytes().replace(b"\0", b" ")
    return found


def settled(mark: str, wanted: set[str]) -> bool:
    """Whether they come to be in these states: a signal takes effect a moment after it was sent."""
    deadline_s = time.monotonic() + DEADLINE_S
    while states(mark) != wanted:
        if time.monotonic() > deadline_s:
            return False
    return True


def states(mark: str) -> set[str]:
    """The kernel's states of the processes whose name begins with ``mark``."""
    found = set()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if process.read_bytes().startswith(mark.encode()):
                found.add((process.parent / "stat").read_text(encoding="ascii").rpartition(")")[2].split()[0])
    return found


async def test_it_says_what_it_does_not_promise(provider: ProcessProvider) -> None:
    info = provider.info
    assert (info.kind, info.engine) == ("plain", "plain processes")
    promised = {name for name, kept in info.limits.items() if kept}
    assert not promised & {"filesystem", "network", "memory", "pids", "seccomp", "processes_hidden"}
    with pytest.raises(Unsupported):
        await provider.check(SandboxSpec(network=Network.INTERNAL))


async def test_commands_have_a_directory_of_their_own(sandbox: Sandbox) -> None:
    await sh(sandbox, "mkdir sub; echo x > sub/file")
    assert (await sh(sandbox, "cat file; basename $PWD", cwd="/workspace/sub")).stdout == b"x\nsub\n"
    assert await sandbox.read_file("/workspace/sub/file", limit_bytes=9) == b"x\n"
    await sandbox.write_file("new/file", b"y")
    assert (await sh(sandbox, "cat new/file")).stdout == b"y"
    assert [entry.path for entry in await sandbox.list_files("/workspace/new")] == ["/workspace/new/file"]


@pytest.mark.parametrize("path", ["/etc/passwd", "out", "out/passwd", "absolute", "up/x", "/proc/self/environ"])
async def test_the_file_interface_stays_inside_whatever_is_planted(sandbox: Sandbox, path: str) -> None:
    await sh(sandbox, "ln -s /etc out; ln -s /etc/passwd absolute; ln -s ../../.. up")
    with pytest.raises((InvalidInput, NotFound)):
        await sandbox.read_file(path, limit_bytes=10**6)
    with pytest.raises((InvalidInput, NotFound)):
        await sandbox.list_files(path)
    if path not in ("out", "absolute"):  # a write replaces such a link itself
        with pytest.raises((InvalidInput, NotFound)):
            await sandbox.write_file(path, b"x")


async def test_a_timeout_finds_every_process_and_spares_earlier_ones(sandbox: Sandbox) -> None:
    mark, earlier = unique("9"), unique("8")
    await sh(sandbox, f"exec -a {earlier} sleep 300 >/dev/null 2>&1 &")
    hidden = f"(setsid bash -c 'exec -a {mark} sleep 300' >/dev/null 2>&1 &)"
    assert (await sh(sandbox, f"{hidden}; sleep 300", timeout_s=0.4)).timed_out
    assert (living(mark), living(earlier)) == (0, 1)
    await sandbox.close()
    assert living(earlier) == 0


async def test_freeze_stops_and_thaw_continues_the_tree(sandbox: Sandbox) -> None:
    mark = unique("7")
    begin = f"setsid bash -c 'exec -a {mark} sleep 300' >/dev/null 2>&1 &\n"
    assert (await sh(sandbox, begin + f"until grep -q '^{mark}' /proc/$!/cmdline; do sleep 0.01; done")).exit_code == 0

    await sandbox.quiesce(Background.FREEZE)
    assert settled(mark, {"T"})
    assert (await sh(sandbox, "echo on")).stdout == b"on\n"
    assert settled(mark, {"S"})
    await sandbox.quiesce(Background.KILL)
    assert settled(mark, set())


async def test_cores_are_an_affinity(sandbox: Sandbox) -> None:
    last = sorted(os.sched_getaffinity(0))[-1:]
    await sandbox.set_cores(last)
    show = Command(argv=("python3", "-c", "import os; print(sorted(os.sched_getaffinity(0)))"))
    assert (await sandbox.run(show)).stdout.decode().strip() == str(last)


async def test_a_cancelled_creation_leaves_nothing(provider: ProcessProvider) -> None:
    name = unique("cancelled")
    task = asyncio.create_task(provider.create(SandboxSpec(), name=name, labels={}, mounts={}))
    async with asyncio.timeout(DEADLINE_S):
        while living(f"{name}/run") == 0 and not task.done():
            await asyncio.to_thread(os.sched_yield)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await (await task).close()
    assert living(f"{name}/run") == 0
    assert await provider.reap(()) == 0


async def test_it_is_adopted_by_the_next_gateway(provider: ProcessProvider) -> None:
    first = await provider.create(SandboxSpec(), name=unique("kept"), labels={"a": "b"}, mounts={})
    await sh(first, "echo kept > file")
    await first.release()
    async with asyncio.timeout(DEADLINE_S):
        [(second, labels)] = await provider.adopt()
    assert (labels, (await sh(second, "cat file")).stdout) == ({"a": "b"}, b"kept\n")
    await second.close()
    assert living(f"{first.id}/run") == 0


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in which nothing can be made."""
    options = "size=64k,nr_inodes=2"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", tmp_path], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("no file system can be mounted here")
    (tmp_path / "sandboxes").mkdir()
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


async def test_a_full_disk_is_never_the_fault_of_the_work(full_disk: Path) -> None:
    means = Means(bubblewrap=None, root=os.geteuid() == 0, cgroup=None)
    provider = ProcessProvider(state_dir=full_disk, gate=CreationGate(1), shared_cores=(0,), means=means)
    with pytest.raises(CapacityExceeded, match="No space left") as refusal:
        await provider.create(SandboxSpec(), name="full", labels={}, mounts={})
    assert unmade(refusal.value).reason is Reason.ENVIRONMENT_LOST
    await provider.close()


@pytest.mark.parametrize("failing", [1, 2])
async def test_a_disk_that_is_full_while_a_sandbox_is_recorded_leaves_no_process(
    provider: ProcessProvider, state_dir: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    writes = 0
    whole = SandboxRecord.write

    def write(record: SandboxRecord, directory: Path) -> None:
        nonlocal writes
        writes += 1
        if writes == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(record, directory)

    monkeypatch.setattr(SandboxRecord, "write", write)
    name = unique("full")
    with pytest.raises(CodedError):
        await provider.create(SandboxSpec(), name=name, labels={}, mounts={})
    assert writes == failing
    assert living(name) == 0
    assert not list((state_dir / "sandboxes").glob("*"))
