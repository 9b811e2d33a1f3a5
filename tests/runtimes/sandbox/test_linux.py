"""Control groups of both versions, users, and the filter of system calls."""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import select
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from manager.errors import InvalidConfig, InvalidInput, Unsupported
from manager.function import SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.linux import ENOSYS, EPERM, ERRNO, MACHINES, Cgroup, CpuWeight, Hierarchy, compiled, parse_cores
from runtimes.sandbox.sandbox import Provider, Sandbox
from tests.runtimes.sandbox.conftest import ON_SHARED_LOOP, sh, unique

V1 = """\
31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
33 30 0:29 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
34 30 0:30 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer
35 30 0:31 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
DEADLINE_S = 60.0
CONTROLLERS = ("cpuset", "cpu", "memory", "pids")
#: What commands try, each with the error's name or "ok" as its answer.
ATTEMPTS = """
import ctypes, errno, json, os, socket, threading
libc = ctypes.CDLL(None, use_errno=True)
numbers = {"x86_64": (425, 250, 248, 41, 272, 302), "aarch64": (425, 219, 217, 198, 97, 261)}[os.uname().machine]
io_uring_setup, keyctl, add_key, raw_socket, unshare, prlimit64 = numbers

def call(*arguments):
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    return "ok" if libc.syscall(*words) >= 0 else errno.errorcode[ctypes.get_errno()]

def opened(family, kind, protocol=0):
    try:
        socket.socket(family, kind, protocol).close()
        return "ok"
    except OSError as error:
        return errno.errorcode[error.errno]

threads = []
thread = threading.Thread(target=threads.append, args=("ok",))
thread.start(); thread.join()
print(json.dumps({
    "io_uring": call(io_uring_setup, 1, ctypes.create_string_buffer(120)),
    "keyctl": call(keyctl, 0, -3, 1),
    "add_key": call(add_key, b"user", b"name", b"x", 1, -3),
    "vsock": opened(40, socket.SOCK_STREAM),
    "vsock, more bits": call(raw_socket, 40 | 1 << 32, 1, 0),
    "netfilter": opened(socket.AF_NETLINK, socket.SOCK_RAW, 12),
    "netfilter, more bits": call(raw_socket, 16 | 1 << 40, 3, 12 | 1 << 32),
    "user namespace": call(unshare, 0x10000000),
    "the runner's limits": call(prlimit64, 1, 7, (ctypes.c_ulong * 2)(3, 3), 0),
    "the runner's limits, more bits": call(prlimit64, 1 | 1 << 32, 7, (ctypes.c_ulong * 2)(3, 3), 0),
    "its own limits": call(prlimit64, 0, 7, (ctypes.c_ulong * 2)(99, 99), 0),
    "call of tomorrow": call(1000),
    "routes": opened(socket.AF_NETLINK, socket.SOCK_RAW, 0),
    "inet": opened(socket.AF_INET, socket.SOCK_STREAM),
    "unix": opened(socket.AF_UNIX, socket.SOCK_STREAM),
    "thread": threads[0],
}))
"""
REFUSED = (
    "io_uring",
    "keyctl",
    "add_key",
    "vsock",
    "vsock, more bits",
    "netfilter",
    "netfilter, more bits",
    "user namespace",
    "the runner's limits",
    "the runner's limits, more bits",
)
#: Machine code for a call by the kernel's 32-bit entry: socket(AF_VSOCK, SOCK_STREAM, 0).
BY_32_BITS = """
import ctypes, mmap, os
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("53 b867010000 bb28000000 b901000000 31d2 cd80 5b c3"))
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""
#: Tools that the sandbox has (the base image is without compiler and git) do their work.
TOOLS = """
if command -v git >/dev/null
then git init -q . && git -c user.name=x -c user.email=x@x commit -q --allow-empty -m one && git log --oneline | wc -l
else echo 1
fi
if command -v gcc >/dev/null
then echo 'int main(void) { return 7; }' > a.c && gcc -o a a.c && ./a; echo $?
else echo 7
fi
python3 -c 'import concurrent.futures as f; print(sum(f.ThreadPoolExecutor(4).map(abs, range(9))))'
"""
#: socket, keyctl, io_uring_setup, ptrace, getpid, clone on each machine.
NUMBERS = {"x86_64": (41, 250, 425, 101, 39, 56), "aarch64": (198, 219, 425, 117, 172, 220)}
ALLOWED, REFUSED_BY = 0x7FFF0000, ERRNO | EPERM


def group(root: Path, version: int, files: dict[str, str]) -> Cgroup:
    for name, text in files.items():
        (root / name).write_text(text)
    return Cgroup(version, dict.fromkeys(("cpuset", "cpu", "memory", "freezer", "pids"), root))


def test_version_1_has_a_tree_for_each_controller() -> None:
    hierarchy = Hierarchy.discover(V1)
    assert hierarchy is not None
    found = hierarchy.places_of("4:memory:/docker/abc\n3:cpuset:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n")
    assert (found.version, found.places["cpu"]) == (1, Path("/sys/fs/cgroup/cpu,cpuacct/docker/abc"))
    assert "freezer" not in found.places
    assert not found.freezable


def test_version_2_has_one_tree() -> None:
    hierarchy = Hierarchy.discover(V2)
    assert hierarchy is not None
    found = hierarchy.places_of("0::/system.slice/docker-abc.scope\n")
    assert (found.version, set(found.places.values())) == (2, {Path("/sys/fs/cgroup/system.slice/docker-abc.scope")})


def test_a_machine_without_groups_has_no_hierarchy() -> None:
    assert Hierarchy.discover("22 1 0:20 / / rw - ext4 /dev/root rw\n") is None


@pytest.mark.parametrize(
    ("version", "files", "quota"), [(1, {"cpu.cfs_quota_us": ""}, "200000"), (2, {"cpu.max": ""}, "200000 100000")]
)
def test_cores_are_set_and_time_with_them(tmp_path: Path, version: int, files: dict[str, str], quota: str) -> None:
    cgroup = group(tmp_path, version, {"cpuset.cpus": "0-7", **files})
    assert cgroup.writable
    cgroup.set_cores((1, 5))
    assert cores(cgroup) == (1, 5)
    assert (tmp_path / next(iter(files))).read_text() == quota


@pytest.mark.parametrize(
    ("version", "file", "weights"), [(1, "cpu.shares", [2, 512, 1024]), (2, "cpu.weight", [1, 50, 100])]
)
def test_files_that_travel_yield_to_actions_and_not_to_what_they_left(
    tmp_path: Path, version: int, file: str, weights: list[int]
) -> None:
    bounds = {"cpuset.cpus": "0-7", "cpu.cfs_quota_us" if version == 1 else "cpu.max": "", file: ""}
    cgroup = group(tmp_path, version, bounds)
    told = []
    for weight in (CpuWeight.BACKGROUND, CpuWeight.TRANSFER, CpuWeight.ACTION):
        cgroup.set_cores((0,), weight)
        told.append(int((tmp_path / file).read_text()))
    assert told == weights


@pytest.mark.parametrize(
    ("version", "file", "frozen", "thawed"), [(1, "freezer.state", "FROZEN", "THAWED"), (2, "cgroup.freeze", "1", "0")]
)
def test_freeze_and_thaw(tmp_path: Path, version: int, file: str, frozen: str, thawed: str) -> None:
    cgroup = group(tmp_path, version, {file: ""})
    cgroup.freeze()
    assert (tmp_path / file).read_text() == frozen
    (tmp_path / file).write_text("")
    cgroup.thaw()
    assert (tmp_path / file).read_text() == thawed


@pytest.mark.parametrize(
    ("version", "files"),
    [
        (1, {"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3", "memory.max_usage_in_bytes": "77"}),
        (2, {"memory.events": "low 0\noom 4\noom_kill 3\noom_group_kill 0", "memory.peak": "77"}),
    ],
)
def test_what_the_kernel_knows_of_memory(tmp_path: Path, version: int, files: dict[str, str]) -> None:
    cgroup = group(tmp_path, version, files)
    assert (cgroup.oom_kills(), cgroup.peak_memory_bytes()) == (3, 77)


@pytest.mark.parametrize("version", [1, 2])
def test_the_kernel_counts_the_processes_that_it_refused(tmp_path: Path, version: int) -> None:
    assert group(tmp_path, version, {"pids.events": "max 4"}).forks_refused() == 4


def test_a_group_that_is_gone_knows_nothing(tmp_path: Path) -> None:
    cgroup = group(tmp_path, 2, {})
    assert (cgroup.oom_kills(), cgroup.peak_memory_bytes(), cgroup.processes()) == (0, 0, [])
    assert cgroup.forks_refused() == 0
    assert not cgroup.writable
    with pytest.raises(FileNotFoundError):
        cgroup.set_cores((0,))


@pytest.mark.parametrize(
    ("version", "files", "cores", "memory"),
    [
        (2, {"cpu.max": "150000 100000", "memory.max": "1000"}, 1.5, 1000),
        (2, {"cpu.max": "max 100000", "memory.max": "max"}, 0, 0),
        (
            1,
            {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000", "memory.limit_in_bytes": str(2**63 - 4096)},
            0,
            0,
        ),
        (1, {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000", "memory.limit_in_bytes": "5"}, 1.0, 5),
    ],
)
def test_bounds_as_they_are(tmp_path: Path, version: int, files: dict[str, str], cores: float, memory: int) -> None:
    cgroup = group(tmp_path, version, {"cgroup.procs": "", **files})
    assert (cgroup.quota_cores(), cgroup.memory_limit_bytes()) == (cores, memory)


def test_core_lists() -> None:
    assert list(parse_cores("0-3,8,10-11\n")) == [0, 1, 2, 3, 8, 10, 11]
    assert list(parse_cores("\n")) == []


@pytest.fixture(scope="module")
def unified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The mount point of a real hierarchy of version 2."""
    if os.geteuid() != 0:
        pytest.skip("only root can make control groups at the top")
    lines = [line.split(" ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for words in lines:
        if words[words.index("-") + 1] == "cgroup2" and os.access(words[4], os.W_OK):
            yield Path(words[4])
            return
    place = tmp_path_factory.mktemp("cgroup2")
    done = subprocess.run(["mount", "-t", "cgroup2", "none", str(place)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no cgroup2 can be mounted: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def real(unified: Path) -> Iterator[Cgroup]:
    """An empty group of its own, removed with whatever is in it."""
    place = unified / f"tangram-test-{secrets.token_hex(4)}"
    place.mkdir()
    made = Cgroup(2, dict.fromkeys((*CONTROLLERS, "freezer"), place))
    yield made
    made.kill()
    made.remove()
    assert not place.exists()


@contextmanager
def process(script: str) -> Iterator[subprocess.Popen[bytes]]:
    """A shell that waits for a line before it begins."""
    with subprocess.Popen(["sh", "-c", f"read go; {script}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as made:
        try:
            yield made
        finally:
            made.kill()


def begin(shell: subprocess.Popen[bytes]) -> None:
    assert shell.stdin is not None
    shell.stdin.write(b"go\n")
    shell.stdin.flush()


def cores(cgroup: Cgroup) -> tuple[int, ...]:
    """Return the cores that it may use now."""
    return tuple(parse_cores((cgroup.places["cpuset"] / "cpuset.cpus").read_text()))


def settled(cgroup: Cgroup, frozen: bool) -> bool:
    """Whether the kernel says so within the deadline; it wakes whoever polls the events of a group."""
    with (cgroup.places["freezer"] / "cgroup.events").open("rb") as events:
        waiting, deadline_s = select.poll(), time.monotonic() + DEADLINE_S
        waiting.register(events, select.POLLPRI)
        while (is_frozen := b"frozen 1" in os.pread(events.fileno(), 4096, 0)) is not frozen:
            if time.monotonic() >= deadline_s:
                break
            waiting.poll(1000)
    return is_frozen is frozen


def test_a_real_group_freezes_all_but_its_runner(real: Cgroup) -> None:
    with (
        process("while :; do echo x; read again; done") as runner,
        process("while :; do sleep 100 & sleep 0.01; done") as user,
    ):
        for shell in (runner, user):
            real.enter(shell.pid)
            begin(shell)
        real.freeze(runner.pid)
        below = Cgroup(2, {"freezer": real.places["freezer"] / "user"})
        assert settled(below, True)
        assert {runner.pid, user.pid} <= set(real.processes())
        assert (real.places["freezer"] / "cgroup.procs").read_text().split() == [str(runner.pid)]
        assert runner.stdout is not None
        assert runner.stdout.readline() == b"x\n"
        begin(runner)
        assert runner.stdout.readline() == b"x\n"
        real.thaw(runner.pid)
        assert settled(below, False)
        real.freeze(runner.pid)
        assert settled(below, True)
        os.kill(user.pid, 9)  # under version 2 what is frozen can be ended
        assert user.wait(DEADLINE_S) == -9


def test_a_real_group_of_version_1_is_left_by_its_runner_to_be_frozen() -> None:
    hierarchy = Hierarchy.discover()
    if os.geteuid() != 0 or hierarchy is None or hierarchy.version != 1 or "freezer" not in hierarchy.mounts:
        pytest.skip("no freezer of version 1 here")
    place = hierarchy.mounts["freezer"] / f"tangram-test-{secrets.token_hex(4)}"
    place.mkdir()
    group = Cgroup(1, {"freezer": place, "pids": place})
    with process("while :; do echo x; read again; done") as runner, process("while :; do echo y; read a; done") as user:
        for shell in (runner, user):
            group.enter(shell.pid)
            begin(shell)
        assert user.stdout is not None
        assert user.stdout.readline() == b"y\n"
        group.freeze(runner.pid)
        assert group.processes() == [user.pid]
        begin(user)
        assert runner.stdout is not None
        assert runner.stdout.readline() == b"x\n"
        begin(runner)
        assert runner.stdout.readline() == b"x\n"
        assert select.select([user.stdout], [], [], 0.05)[0] == []
        group.thaw()
        assert user.stdout.readline() == b"y\n"
        assert group.processes() == [user.pid], "the runner starts nothing: it need not come back"
        group.freeze(runner.pid)
        group.thaw(runner.pid)
        assert sorted(group.processes()) == sorted([runner.pid, user.pid])
    group.remove()
    assert not list(place.parent.glob(f"{place.name}*"))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_real_group_is_ended_however_it_forks(real: Cgroup, frozen: bool) -> None:
    with process("while :; do sleep 100 & sleep 0.001; done") as shell:
        real.enter(shell.pid)
        begin(shell)
        deadline_s = time.monotonic() + DEADLINE_S
        while len(real.processes()) < 20:
            assert time.monotonic() < deadline_s
        if frozen:
            real.freeze()
        real.kill()
        assert shell.wait(DEADLINE_S) == -9
        assert real.processes() == []


def test_a_real_group_has_bounds(unified: Path, real: Cgroup) -> None:
    offered = (unified / "cgroup.controllers").read_text().split()
    if not set(CONTROLLERS) <= set(offered):
        pytest.skip(f"version 1 holds the controllers; version 2 has {' '.join(offered) or 'none'} here")
    with suppress(OSError):
        (unified / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))
    if not (real.places["memory"] / "memory.max").exists():
        pytest.skip("the top group has processes of its own: its controllers are not handed down")
    real.make(memory_bytes=64 * 2**20, pids=50)
    core = sorted(os.sched_getaffinity(0))[-1]
    real.set_cores([core])
    assert (cores(real), real.quota_cores(), real.memory_limit_bytes()) == ((core,), 1.0, 64 * 2**20)
    hog = "exec python3 -c 'x = bytearray(10**9)'"
    with process(hog) as shell:
        real.enter(shell.pid)
        begin(shell)
        assert shell.wait(DEADLINE_S) == -9
    assert real.oom_kills() == 1
    assert real.peak_memory_bytes() > 32 * 2**20


@ON_SHARED_LOOP
async def test_commands_run_as_the_users_own_self(tidy_sandbox: Sandbox) -> None:
    result = await sh(tidy_sandbox, "id -u; id -g; echo $HOME; touch mine && echo written")
    uid = result.stdout.split()[0]
    assert int(uid) >= 1000
    assert result.stdout == b"%s\n%s\n/workspace\nwritten\n" % (uid, uid)
    name = await sh(tidy_sandbox, "id -un; mkdir in && cd in && touch file && stat -c %U:%G file")
    assert name.stdout in (b"agent\nagent:agent\n", b"sandbox\nsandbox:sandbox\n")


async def test_a_listed_user_keeps_the_id_that_it_has(provider: Provider, spec: SandboxSpec) -> None:
    fixed = replace(spec, user="1000", users=("1000",))
    sandbox = await provider.create(fixed, name=unique("fixed"), labels={}, mounts={})
    assert (await sh(sandbox, "id -u; touch mine && echo written")).stdout == b"1000\nwritten\n"
    await sandbox.close()


@pytest.mark.promise("Each sandbox has a user, and so the kernel's quotas, of its own.")
async def test_each_sandbox_has_a_user_and_so_the_kernels_quotas_of_its_own(
    provider: Provider, sandbox: Sandbox, spec: SandboxSpec
) -> None:
    if not provider.info.limits["own_user"]:
        pytest.skip("only root has other users' ids to give")
    other = await provider.create(spec, name=unique("other"), labels={}, mounts={})
    watch = (
        "import ctypes, os, sys, time\nlibc = ctypes.CDLL(None)\nlibc.inotify_init.restype = ctypes.c_int\n"
        "most = int(open('/proc/sys/fs/inotify/max_user_instances').read())\n"
        "got = sum(libc.inotify_init() >= 0 for _ in range(min(most, 2000)))\n"
        "print(got == min(most, 2000), flush=True)\nsys.stdin.read()\n"
    )
    holder = await sandbox.spawn(Command(argv=("python3", "-c", watch), timeout_s=math.inf))
    async with asyncio.timeout(DEADLINE_S):
        assert await anext(holder.chunks()) == ("stdout", b"True\n")
        assert (await other.run(Command(argv=("python3", "-c", watch)))).stdout == b"True\n"
    await holder.kill()
    uids = [(await sh(each, "id -u")).stdout for each in (sandbox, other)]
    assert len(set(uids)) == 2 or provider.info.kind != "container"  # there each has its own block of ids
    await other.release()
    adopted = {each.id: each for each, _ in await provider.adopt()}
    assert (await sh(adopted[other.id], "id -u")).stdout == uids[1]
    await adopted[other.id].close()


@ON_SHARED_LOOP
async def test_another_user_can_be_asked_for(tidy_sandbox: Sandbox) -> None:
    assert (await sh(tidy_sandbox, "id -u", user="65534")).stdout == b"65534\n"
    assert (await sh(tidy_sandbox, "id -u", user="root")).stdout == b"0\n"


@pytest.mark.promise("Only the listed users can be requested.")
async def test_no_user_but_those_listed_can_be_asked_for(provider: Provider, spec: SandboxSpec) -> None:
    alone = replace(spec, user="1000", users=())
    sandbox = await provider.create(alone, name=unique("alone"), labels={}, mounts={})
    for user in ("root", "0", "00", "65534", "sandbox", "1000:0"):
        with pytest.raises(InvalidInput, match=r"list it: sandbox\.users") as refused:
            await sh(sandbox, "id -u", user=user)
        assert refused.value.detail == {"path": "$.user"}
        with pytest.raises(InvalidConfig, match=r"list it: sandbox\.users"):
            await provider.check(replace(alone, user=user, users=("1000",)))
    assert (await sh(sandbox, "id -u", user="1000")).stdout == b"1000\n"
    await sandbox.close()


async def test_a_sandbox_of_roots_own_asks_for_it_by_name(provider: Provider, spec: SandboxSpec) -> None:
    with pytest.raises(InvalidConfig, match=r"'root' is root.*list it: sandbox\.users: \[root\]"):
        await provider.create(replace(spec, user="root", users=()), name=unique("root"), labels={}, mounts={})


@ON_SHARED_LOOP
async def test_an_unknown_user_is_invalid_input(tidy_sandbox: Sandbox) -> None:
    with pytest.raises(InvalidInput, match="no user 'nobody-here'"):
        await sh(tidy_sandbox, "true", user="nobody-here")


async def test_a_sandbox_whose_user_is_nowhere_is_not_made_and_says_whom_it_lacks(
    provider: Provider, spec: SandboxSpec
) -> None:
    if provider.info.kind != "container":
        pytest.skip("its own system files name whatever user it has")
    with pytest.raises(InvalidInput, match="no user 'nobody-here'"):
        await provider.create(replace(spec, user="nobody-here"), name=unique("nobody"), labels={}, mounts={})


@pytest.mark.promise("Root inside cannot take the runner's limits away.")
@pytest.mark.promise("System calls are filtered, and ordinary programs work.")
@ON_SHARED_LOOP
async def test_refused_calls_are_not_permitted_and_ordinary_ones_work(tidy_sandbox: Sandbox) -> None:
    done = await tidy_sandbox.run(Command(argv=("python3", "-c", ATTEMPTS)))
    assert done.exit_code == 0, done.stderr
    answers = json.loads(done.stdout)
    wanted = {**dict.fromkeys(answers, "ok"), **dict.fromkeys(REFUSED, "EPERM"), "call of tomorrow": "ENOSYS"}
    assert answers == wanted


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the machine code is of x86")
@ON_SHARED_LOOP
async def test_the_32_bit_entry_is_no_way_around(tidy_sandbox: Sandbox) -> None:
    done = await tidy_sandbox.run(Command(argv=("python3", "-c", BY_32_BITS)))
    assert done.exit_code != 0 or int(done.stdout) < 0, done.stdout


@ON_SHARED_LOOP
async def test_tools_work(tidy_sandbox: Sandbox) -> None:
    done = await tidy_sandbox.run(Command(shell=TOOLS))
    assert done.stdout.split() == [b"1", b"7", b"36"], done.stderr


def verdict(program: bytes, token: int, call: int, *arguments: int) -> int:
    """What the kernel's interpreter would return for a call."""
    data = struct.pack("=IIQ6Q", call, token, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    steps = list(struct.iter_unpack("=HBBI", program))
    at, held = 0, 0
    while True:
        code, yes, no, value = steps[at]
        at += 1
        if code == 0x20:
            held = struct.unpack_from("=I", data, value)[0]
        elif code == 0x54:
            held &= value
        elif code == 0x05:
            at += value
        elif code == 0x06:
            return int(value)
        else:
            true = {0x15: held == value, 0x25: held > value, 0x35: held >= value, 0x45: held & value != 0}[code]
            at += yes if true else no


@pytest.mark.parametrize("machine", MACHINES)
def test_the_program_of_each_machine_means_the_same(machine: str) -> None:
    program, token = compiled("default", machine), MACHINES[machine][0]
    socket, keyctl, io_uring, ptrace, getpid, clone = NUMBERS[machine]
    assert len(program) <= 4096 * 8
    for call in ((keyctl,), (io_uring,), (socket, 40), (socket, 1 << 32 | 40), (socket, 16, 3, 12), (clone, 1 << 28)):
        assert verdict(program, token, *call) == REFUSED_BY, call
    for call in ((getpid,), (ptrace,), (socket, 1), (socket, 2), (socket, 16, 3, 0), (clone, 0x1200011)):
        assert verdict(program, token, *call) == ALLOWED, call
    assert verdict(program, token, 435) == verdict(program, token, 2000) == ERRNO | ENOSYS
    assert verdict(program, 0x40000003, getpid) == 0, "another architecture's calls end the thread"
    assert verdict(compiled("no-ptrace", machine), token, ptrace) == REFUSED_BY


def test_a_machine_without_a_program_is_told() -> None:
    with pytest.raises(Unsupported, match=r"sandbox\.seccomp: none"):
        compiled("default", "riscv64")
