"""Control groups of both versions, on plain files; the real ones are under every sandbox test."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtimes.sandbox.cgroup import Cgroup, Hierarchy, parse_cores

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


def test_a_group_that_is_gone_knows_nothing(tmp_path: Path) -> None:
    cgroup = group(tmp_path, 2, {})
    assert (cgroup.oom_kills(), cgroup.peak_memory_bytes(), cgroup.processes()) == (0, 0, [])
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
