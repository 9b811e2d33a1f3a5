"""Process sandboxes: the barest kind, without bubblewrap and control groups, and a gateway that is not root."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import pwd
import shutil
import signal
import site
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest

from manager.errors import (
    CapacityExceeded,
    CodedError,
    Conflict,
    InvalidConfig,
    InvalidInput,
    NotFound,
    Reason,
    Unsupported,
)
from manager.function import Background, Network, SandboxSpec
from runtimes.sandbox import process as process_sandboxes
from runtimes.sandbox.command import Command
from runtimes.sandbox.disk import DiskSettings
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.process import HostSupport, ProcessProvider, inside, require_shown, shown_places, state_of
from runtimes.sandbox.provider import ProviderSettings, make_provider
from runtimes.sandbox.runner.client import unmade
from runtimes.sandbox.runner.runner import DEFAULT_PATH
from runtimes.sandbox.sandbox import CreationGate, Sandbox, descendants
from runtimes.sandbox.snapshots import pack
from runtimes.sandbox.spec import SandboxRecord
from tangram.archive import opened_directory
from tests.runtimes.sandbox.conftest import provided, sh, unique

DEADLINE_S = 60.0
NOBODY = 65534
TIMEOUT_S = 120
#: env executes as nobody; setpriv itself still executes with root's rights.
AS_NOBODY = (
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all",
    "env",
)  # fmt: skip
#: A gateway's life with sandboxes, told as JSON.
LIFE = """
import asyncio, json, os, sys
from pathlib import Path
from manager.errors import ActionFailed
from manager.function import Background, SandboxSpec
from runtimes.sandbox.provider import ProviderSettings, make_provider
from runtimes.sandbox.command import Command

async def live(state_dir):
    told = {"uid": os.getuid()}
    settings = ProviderSettings(kind="process", state_dir=state_dir)
    provider = make_provider(settings)
    told["engine"], told["limits"] = provider.info.engine, dict(provider.info.limits)
    sandbox = await provider.create(SandboxSpec(), name="one", labels={"a": "b"}, mounts={str(state_dir): "/seen"})

    async def sh(text, **options):
        return (await sandbox.run(Command(shell=text, kill_grace_s=0.1, **options)))

    told["said"] = (await sh("cat; pwd; echo err >&2", stdin=b"in ")).stdout.decode()
    await sandbox.write_file("deep/file", b"data")
    told["file"] = (await sandbox.read_file("deep/file", limit_bytes=4)).decode()
    told["host"] = (await sh("ls -A /home /root /var 2>/dev/null; ls /seen/state-id && touch /seen/x")).exit_code
    told["net"] = (await sh("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '")).stdout.decode().split()
    told["timed_out"] = (await sh("(setsid sleep 12321 &); sleep 1000", timeout_s=0.3)).timed_out
    told["left"] = (await sh("grep -l '1232[1]' /proc/[0-9]*/cmdline 2>/dev/null | wc -l")).stdout.decode().strip()
    told["caps"] = (await sh("grep -E '^(CapEff|NoNewPrivs)' /proc/self/status")).stdout.decode().split()
    await sh("sleep 1000 >/dev/null 2>&1 &")
    await sandbox.quiesce(Background.FREEZE)
    await sandbox.release()
    provider = make_provider(settings)
    [(sandbox, labels)] = await provider.adopt()
    told["adopted"] = [labels, (await sandbox.run(Command(shell="cat deep/file"))).stdout.decode()]
    await sandbox.close()
    told["leaked"] = [path.name for path in (state_dir / "sandboxes").iterdir()]
    await provider.close()
    return told

state_dir = Path(sys.argv[1])
(state_dir / "state-id").touch()
print(json.dumps(asyncio.run(live(state_dir))))
"""


#: A gateway that is killed when it has started a sandbox's process, and has not yet noted which.
KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from manager.function import SandboxSpec
from runtimes.sandbox.process import ProcessProvider
from runtimes.sandbox.provider import ProviderSettings, make_provider

start = ProcessProvider._start
ProcessProvider._start = lambda *words: (start(*words), os.kill(os.getpid(), signal.SIGKILL))
provider = make_provider(ProviderSettings(kind=sys.argv[2], plain_as_root=True, state_dir=Path(sys.argv[1])))
asyncio.run(provider.create(SandboxSpec(), name="one", labels={}, mounts={}))
"""
#: A gateway's sandbox whose user puts a link to what is the gateway's in place of its working directory, and a fork.
WAY_OUT = """
import asyncio, sys
from pathlib import Path
from manager.errors import CodedError
from manager.function import SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.provider import ProviderSettings, make_provider

async def attack(state_dir, workdir):
    state_dir.mkdir()
    provider = make_provider(ProviderSettings(kind="process", state_dir=state_dir))
    (state_dir / "kept").mkdir()
    (state_dir / "w").mkdir()
    (state_dir / "w" / "admin.token").write_text("of the gateway")
    try:
        sandbox = await provider.create(SandboxSpec(workdir=workdir), name="one", labels={}, mounts={})
        await sandbox.run(Command(shell=f"mv /tmp/a /tmp/b; ln -s {state_dir} /tmp/a", cwd="/"))
        await sandbox.snapshot("s", state_dir / "kept", 2**30)
    except CodedError as error:
        print("refused", error.code)
    await provider.close()
    print("read" if any(b"of the gateway" in each.read_bytes() for each in state_dir.glob("kept/*")) else "held")

for number, workdir in enumerate(sys.argv[2:]):
    asyncio.run(attack(Path(sys.argv[1], str(number)), workdir))
"""
#: Goes on whenever it is stopped: its timers continue it.
RESTLESS = """
import ctypes, os, signal, time
signal.signal(signal.SIGCONT, lambda *_: None)
rt = ctypes.CDLL("librt.so.1")
event = (ctypes.c_int * 16)(0, 0, 18, 0)  # struct sigevent: SIGCONT
for ms in range(1, 31):  # a signal that is taken back when the process is stopped silences its timer
    timer, every = ctypes.c_void_p(), (ctypes.c_long * 4)(0, ms * 10**6, 0, ms * 10**6)
    assert rt.timer_create(1, event, ctypes.byref(timer)) == 0
    assert rt.timer_settime(timer, 0, every, None) == 0
open("pid", "w").write(str(os.getpid()))
while True:
    time.sleep(1000)
"""


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """A directory that the sandbox's user may pass through, as pytest's own are not."""
    with TemporaryDirectory(prefix="tangram-plain-") as place:
        path = Path(place)
        path.chmod(0o755)
        yield path


@pytest.fixture
async def provider(state_dir: Path) -> AsyncIterator[ProcessProvider]:
    host = HostSupport(bubblewrap=None, root=os.geteuid() == 0, cgroup=None)
    made = ProcessProvider(state_dir=state_dir, gate=CreationGate(1), shared_cores=(0,), host=host)
    yield made
    await made.reap(())
    await made.close()


@pytest.fixture
async def sandbox(provider: ProcessProvider) -> AsyncIterator[Sandbox]:
    made = await provider.create(SandboxSpec(), name=unique("plain"), labels={}, mounts={})
    yield made
    await made.close()


def pids(words: str) -> list[int]:
    """Processes of this machine with these words in their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if words.encode() in process.read_bytes().replace(b"\0", b" "):
                found.append(int(process.parent.name))
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


@pytest.mark.promise("A sandbox reports what it does not hold.")
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


async def test_the_file_interface_stays_inside_whatever_is_planted(sandbox: Sandbox) -> None:
    await sh(sandbox, "ln -s /etc out; ln -s /etc/passwd absolute; ln -s ../../.. up")
    for path in ("/etc/passwd", "out", "out/passwd", "absolute", "up/x", "/proc/self/environ"):
        with pytest.raises((InvalidInput, NotFound)):
            await sandbox.read_file(path, limit_bytes=10**6)
        with pytest.raises((InvalidInput, NotFound)):
            await sandbox.list_files(path)
        if path not in ("out", "absolute"):  # a write replaces such a link itself
            with pytest.raises((InvalidInput, NotFound)):
                await sandbox.write_file(path, b"x")


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
        while not pids(f"{name}/run") and not task.done():
            await asyncio.to_thread(os.sched_yield)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await (await task).close()
    assert not pids(f"{name}/run")
    assert await provider.reap(()) == 0


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


@pytest.mark.promise("A full disk or too few descriptors are never the fault of the work.")
async def test_a_full_disk_is_never_the_fault_of_the_work(full_disk: Path) -> None:
    host = HostSupport(bubblewrap=None, root=os.geteuid() == 0, cgroup=None)
    provider = ProcessProvider(state_dir=full_disk, gate=CreationGate(1), shared_cores=(0,), host=host)
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
    assert not pids(name)
    assert not list((state_dir / "sandboxes").glob("*"))


ROOT = Path(__file__).resolve().parents[3]


def as_nobody(*words: str) -> subprocess.CompletedProcess[str]:
    packages = os.pathsep.join([str(ROOT), *site.getsitepackages()])
    return subprocess.run(
        [*AS_NOBODY, *words],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def python() -> str:
    """An interpreter that nobody may run, where nobody may make user namespaces."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become nobody")
    if shutil.which("bwrap") is None or as_nobody("bwrap", "--unshare-all", "--ro-bind", "/", "/", "true").returncode:
        pytest.skip("unprivileged user namespaces are off, or bubblewrap is not installed")
    for candidate in (sys.executable, "/usr/bin/python3"):
        if as_nobody(candidate, "-c", "import runtimes.sandbox.provider").returncode == 0:
            return candidate
    message = f"nobody may run {sys.executable}: it lies where only root may go"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def test_bubblewrap_holds_for_a_gateway_that_is_not_root(python: str) -> None:
    state_dir = Path(f"/var/tmp/tangram-nobody-{os.getpid()}")
    state_dir.mkdir(mode=0o700)
    os.chown(state_dir, NOBODY, NOBODY)
    try:
        lived = as_nobody(python, "-c", LIFE, str(state_dir))
    finally:
        shutil.rmtree(state_dir)
    assert lived.returncode == 0, lived.stderr[-3000:]
    told = json.loads(lived.stdout.splitlines()[-1])
    assert (told["uid"], told["engine"]) == (NOBODY, "bubblewrap")
    promised = {"filesystem", "network", "processes_hidden", "cores", "freeze", "disk", "seccomp", "snapshot"}
    assert {name for name, kept in told["limits"].items() if kept} == promised
    assert told["said"] == "in /workspace\n"
    assert told["file"] == "data"
    assert told["host"] != 0
    assert told["net"] == ["lo"]
    assert (told["timed_out"], told["left"]) == (True, "0")
    assert told["caps"] == ["CapEff:", "0000000000000000", "NoNewPrivs:", "1"]
    assert told["adopted"] == [{"a": "b"}, "data"]
    assert told["leaked"] == []


def test_a_fork_reads_nothing_of_a_gateway_that_is_not_root(python: str) -> None:
    workdirs = ("/tmp/a/w", "/workspace/../tmp/a/w", "//tmp/a/w")
    state_dir = Path(f"/var/tmp/tangram-nobody-{os.getpid()}")
    state_dir.mkdir(mode=0o700)
    os.chown(state_dir, NOBODY, NOBODY)
    try:
        lived = as_nobody(python, "-c", WAY_OUT, str(state_dir), *workdirs)
    finally:
        shutil.rmtree(state_dir)
    told = [line for line in lived.stdout.splitlines() if line.partition(" ")[0] in ("refused", "held", "read")]
    assert told == ["refused unsupported", "held"] * 3, lived.stdout + lived.stderr[-3000:]


def test_a_directory_of_a_sandbox_is_reached_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "root" / "real").mkdir(parents=True)
    (tmp_path / "root" / "a").symlink_to(tmp_path)
    with opened_directory(tmp_path / "root") as root:
        with inside(root, "/real/../real") as fd:
            assert os.path.samestat(os.fstat(fd), (tmp_path / "root" / "real").stat())
        with pytest.raises(Conflict, match="link"), inside(root, "/a/root"):
            pass


async def test_what_will_not_stand_still_is_ended_before_files_are_kept(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.write_file("restless.py", RESTLESS.encode())
    await sh(sandbox, "sleep 1000 >/dev/null 2>&1 & echo $! > patient")
    await sh(sandbox, "python3 restless.py >/dev/null 2>&1 & while [ ! -s pid ]; do sleep 0.01; done")
    await sandbox.snapshot("s", tmp_path, 2**30)
    ended = await sh(sandbox, "for each in pid patient; do kill -0 $(cat $each) 2>/dev/null && echo $each; done")
    assert ended.stdout == b"patient\n"


@pytest.mark.parametrize("disk", ["auto", "walk"])
@pytest.mark.parametrize("end", ["its bound", "its trajectory"])
async def test_what_is_removed_while_its_files_are_read_makes_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, disk: Literal["auto", "walk"]
) -> None:
    """A file that is gone when it is looked at is left out: of a tree that is being removed that would be all."""
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def pack_late(root: int, target: Path, **bounds: Any) -> int:
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(60)
        return pack(root, target, **bounds)

    monkeypatch.setattr(process_sandboxes, "pack", pack_late)
    provider = make_provider(
        ProviderSettings(kind="process", state_dir=tmp_path / "state", disk_bound=DiskSettings(by=disk))
    )
    environments = Environments(provider)
    sandbox = await environments.ensure("t", SandboxSpec())
    await sandbox.write_file("file", b"kept")
    taking = asyncio.create_task(environments.snapshot("t"))
    await begun.wait()
    if end == "its bound":
        await sandbox.kill_for("its disk bound is exceeded")
    else:
        await environments.end("t")
    go_on.set()
    with pytest.raises(CodedError, match=r"its disk bound is exceeded|the sandbox is closed"):
        await taking
    assert provider.snapshots.all() == [] and list((tmp_path / "state" / "snapshots").iterdir()) == []
    await environments.close()
    await provider.close()


@pytest.mark.parametrize("user", ["own", "other"])
def test_a_path_shows_no_home_and_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str) -> None:
    home = tmp_path / "home" / "me"
    (home / "bin").mkdir(parents=True)
    (home / "lib" / "python3.11").mkdir(parents=True)
    if user == "own":
        monkeypatch.setenv("HOME", str(home))
    else:
        entry = pwd.struct_passwd(("me", "x", 1234, 1234, "", str(home), ""))
        monkeypatch.setattr(pwd, "getpwall", lambda: [entry])
    require_shown(f"/usr/bin:{home}/bin", tmp_path / "state")
    assert str(home) not in shown_places(f"/usr/bin:{home}/bin") and f"{home}/bin" in shown_places(f"{home}/bin")
    (home / "lib" / "python3.11" / "os.py").touch()  # a Python of the home's own needs the whole home
    for path, state_dir in (
        (f"{home}/bin", tmp_path / "state"),
        (f"{tmp_path}/home", tmp_path),
        (f"{home}/x", home / "x"),
    ):
        with pytest.raises(InvalidConfig, match=r"sandbox\.path"):
            require_shown(path, state_dir)


async def test_python_is_there_by_the_name_that_agents_type_and_nobody_replaces_it(state_dir: Path) -> None:
    async with provided(state_dir / "state") as provider:
        made = await provider.create(SandboxSpec(), name=unique("python"), labels={}, mounts={})
        seen = await sh(made, "python -c 'import sys; print(sys.version_info.major)'; echo exit >/.tangram/bin/python")
        assert (seen.stdout, seen.exit_code != 0) == (b"3\n", True), seen


async def test_of_a_directory_of_programs_its_neighbours_are_not_seen(state_dir: Path) -> None:
    (state_dir / "tools" / "bin").mkdir(parents=True)
    (state_dir / "tools" / "secret").write_text("of the host")
    path = f"{state_dir}/tools/bin:{DEFAULT_PATH}"
    async with provided(state_dir / "state", path=path) as provider:
        made = await provider.create(SandboxSpec(), name=unique("path"), labels={}, mounts={})
        seen = await sh(made, f"ls {state_dir}/tools; cat {state_dir}/tools/secret")
        assert seen.stdout == b"bin\n", seen


@pytest.mark.parametrize("kind", ["process", "plain"])
async def test_a_process_that_no_record_knows_ends_with_the_next_gateway(
    state_dir: Path, kind: Literal["process", "plain"]
) -> None:
    command = [sys.executable, "-c", KILLED, str(state_dir), kind]
    killed = await asyncio.to_thread(subprocess.run, command, timeout=TIMEOUT_S, check=False)
    assert killed.returncode == -signal.SIGKILL
    started = f"{state_dir}/sandboxes/one/run"
    deadline_s = time.monotonic() + DEADLINE_S
    while not (tree := {each for pid in pids(started) for each in (pid, *descendants([pid]))}):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)
    provider = make_provider(ProviderSettings(kind=kind, plain_as_root=True, state_dir=state_dir))
    assert await provider.adopt() == []
    assert not {pid for pid in (*tree, *pids(started)) if state_of(pid) not in ("", "Z")}
    await provider.close()
