"""Control groups of both versions, on plain files; the machine's real ones are under every sandbox test.

Version 2 is also tested on a real hierarchy wherever one can be mounted: all of it where it has the controllers, and
its core (freezing, ending, moving processes) where those of version 1 hold them.
"""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from runtimes.sandbox.linux import Cgroup, CpuWeight, Hierarchy, parse_cores

V1 = """\
31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
33 30 0:29 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
34 30 0:30 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer
35 30 0:31 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


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
    assert cgroup.cores() == (1, 5)
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


DEADLINE_S = 60.0
CONTROLLERS = ("cpuset", "cpu", "memory", "pids")


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


def settled(cgroup: Cgroup, frozen: bool) -> bool:
    """Whether the kernel says so within the deadline; it wakes whoever polls the events of a group."""
    with (cgroup.places["freezer"] / "cgroup.events").open("rb") as events:
        waiting, deadline_s = select.poll(), time.monotonic() + DEADLINE_S
        waiting.register(events, select.POLLPRI)
        while cgroup.frozen() is not frozen and time.monotonic() < deadline_s:
            waiting.poll(1000)
            os.pread(events.fileno(), 1, 0)
    return cgroup.frozen() is frozen


def test_a_real_group_freezes_thaws_and_tells(real: Cgroup) -> None:
    assert real.freezable
    with process("while :; do echo x; read again; done") as shell:
        real.enter(shell.pid)
        assert real.processes() == [shell.pid]
        begin(shell)
        assert shell.stdout is not None
        assert shell.stdout.readline() == b"x\n"
        real.freeze()
        assert settled(real, True)
        begin(shell)
        assert select.select([shell.stdout], [], [], 0.05)[0] == []
        real.thaw()
        assert settled(real, False)
        assert shell.stdout.readline() == b"x\n"


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
        group.thaw(runner.pid)
        assert user.stdout.readline() == b"y\n"
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
    assert (real.cores(), real.quota_cores(), real.memory_limit_bytes()) == ((core,), 1.0, 64 * 2**20)
    hog = "exec python3 -c 'x = bytearray(10**9)'"
    with process(hog) as shell:
        real.enter(shell.pid)
        begin(shell)
        assert shell.wait(DEADLINE_S) == -9
    assert real.oom_kills() == 1
    assert real.peak_memory_bytes() > 32 * 2**20
