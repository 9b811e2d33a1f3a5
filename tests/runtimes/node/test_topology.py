"""The machine as it is, as a container sees it, and as a file describes it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from manager.errors import InvalidConfig
from runtimes.node.topology import Topology, discover, from_file

GIB = 2**30


def machine(
    root: Path, *, nodes: list[str], memory_kib: int, v2_files: dict[str, str] | None = None
) -> tuple[Path, Path]:
    """A sysfs and a procfs with these NUMA nodes and, where given, a cgroup v2 with these files."""
    sysfs, procfs, group = root / "sys", root / "proc", root / "cgroup"
    for number, cores in enumerate(nodes):
        place = sysfs / f"devices/system/node/node{number}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(cores + "\n")
    (procfs / "self").mkdir(parents=True)
    (procfs / "meminfo").write_text(f"MemTotal:       {memory_kib} kB\nMemFree: 1 kB\n")
    mounted = f"30 23 0:26 / {group} rw,nosuid - cgroup2 cgroup2 rw\n" if v2_files is not None else ""
    (procfs / "self/mountinfo").write_text("22 1 0:20 / / rw - ext4 /dev/root rw\n" + mounted)
    (procfs / "self/cgroup").write_text("0::/\n")
    group.mkdir()
    for name, text in {"cgroup.procs": "", **(v2_files or {})}.items():
        (group / name).write_text(text)
    return sysfs, procfs


def test_this_machine_has_the_cores_it_may_run_on() -> None:
    topology = discover()
    assert set(topology.cores) <= os.sched_getaffinity(0)
    assert topology.cores
    assert 0 < topology.memory_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 1.1


def test_a_file_describes_a_machine_that_is_not_here(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    path.write_text(json.dumps({"numa": ["0-63,128-191", "64-127,192-255"], "memory_bytes": 2**40}))
    topology = from_file(path)
    assert (len(topology.cores), len(topology.numa)) == (256, 2)
    node = topology.reserve(2).node("big")
    assert (node.cores, node.memory_bytes) == (254, 2**40)


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        '{"numa": ["0-1"]}',
        '{"numa": [], "memory_bytes": 1}',
        '{"numa": ["0-1", [1, 2]], "memory_bytes": 1}',
        '{"numa": [[]], "memory_bytes": 1}',
        '{"numa": ["a-b"], "memory_bytes": 1}',
    ],
)
def test_a_file_that_describes_no_machine_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "node.json"
    path.write_text(text)
    with pytest.raises(InvalidConfig):
        from_file(path)


@pytest.mark.parametrize(
    ("nodes", "usable", "files", "numa", "memory_bytes"),
    [
        (["0-1,4-5", "2-3,6-7"], 8, None, ((0, 1, 4, 5), (2, 3, 6, 7)), 8 * GIB),
        ([str(core) for core in range(12)], 12, None, tuple((core,) for core in range(12)), 8 * GIB),
        (["0-3", "4-7"], 3, None, ((0, 1, 2),), 8 * GIB),
        (["0-3", "4-7"], 8, {"cpu.max": "250000 100000", "memory.max": str(GIB)}, ((0, 1),), GIB),
        (["0-3"], 4, {"cpu.max": "max 100000", "memory.max": "max"}, ((0, 1, 2, 3),), 8 * GIB),
        ([], 2, None, ((0, 1),), 8 * GIB),
    ],
    ids=["by NUMA node", "in the order of numbers", "a cpuset", "a quota and a limit", "no bound", "no NUMA"],
)
def test_a_machine_is_what_its_kernel_and_its_control_group_leave(
    tmp_path: Path,
    nodes: list[str],
    usable: int,
    files: dict[str, str] | None,
    numa: tuple[tuple[int, ...], ...],
    memory_bytes: int,
) -> None:
    sysfs, procfs = machine(tmp_path, nodes=nodes, memory_kib=8 * 2**20, v2_files=files)
    assert discover(sysfs, procfs, usable=range(usable)) == Topology(numa=numa, memory_bytes=memory_bytes)


def test_reserved_cores_are_given_to_nobody_and_the_last_one_cannot_be() -> None:
    topology = Topology(numa=((0, 1), (2, 3)), memory_bytes=1).reserve(2)
    assert (topology.numa, topology.reserved) == (((2, 3),), (0, 1))
    with pytest.raises(InvalidConfig, match="one must be left"):
        topology.reserve(2)
