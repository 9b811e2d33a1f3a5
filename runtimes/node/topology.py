"""Topology: the cores, their NUMA nodes and the memory of this machine, as far as they are ours to give."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from manager.config import NodeSpec
from manager.errors import InvalidConfig
from runtimes.sandbox.linux import Hierarchy, parse_cores

COMPONENT = "node.topology"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What a node has."""

    #: Core ids by NUMA node; no node is empty, no core comes twice.
    numa: tuple[tuple[int, ...], ...]
    memory_bytes: int
    #: Cores kept back for the system and the gateway; they are in no NUMA node above.
    reserved: tuple[int, ...] = ()

    @property
    def cores(self) -> tuple[int, ...]:
        return tuple(core for node in self.numa for core in node)

    def reserve(self, count: int) -> Topology:
        """The same machine with its first ``count`` cores kept back; InvalidConfig when none would be left."""
        if not 0 <= count < len(self.cores):
            raise InvalidConfig(
                f"{count} cores cannot be reserved on a machine of {len(self.cores)}: one must be left for actions",
                component=COMPONENT,
            )
        kept = self.cores[:count]
        return Topology(
            numa=_without_empty(tuple(core for core in node if core not in kept) for node in self.numa),
            memory_bytes=self.memory_bytes,
            reserved=self.reserved + kept,
        )

    def node(self, name: str, *, memory_bytes: int = 0, devices: int = 0, device_bytes: int = 0) -> NodeSpec:
        """The node as the managers see it; ``memory_bytes`` bounds what trajectories may hold (0: all)."""
        return NodeSpec(
            name=name,
            numa=self.numa,
            memory_bytes=min(self.memory_bytes, memory_bytes or self.memory_bytes),
            devices=devices,
            device_bytes=device_bytes,
        )


def discover(
    sysfs: Path = Path("/sys"), procfs: Path = Path("/proc"), usable: Collection[int] | None = None
) -> Topology:
    """This machine, or the share of it that a container's cpuset, quota and memory limit leave us.

    ``usable`` are the cores that we may run on (None: asked of the kernel).
    """
    ours = frozenset(os.sched_getaffinity(0) if usable is None else usable)
    numa = _without_empty(tuple(sorted(ours & cores)) for cores in _numa_nodes(sysfs))
    known = {core for node in numa for core in node}
    if ours - known:  # no NUMA information, or not of every core
        numa = (*numa, tuple(sorted(ours - known)))
    memory_bytes = _memory_total(procfs)
    limits = _Limits.read(procfs)
    if limits.memory_bytes:
        memory_bytes = min(memory_bytes, limits.memory_bytes)
    return Topology(numa=_at_most(numa, limits.cores), memory_bytes=memory_bytes)


def from_file(path: Path) -> Topology:
    """A machine described in JSON: ``{"numa": ["0-63,128-191", [64, 65]], "memory_bytes": 1099511627776}``.

    Raises InvalidConfig with what is wrong in it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        numa = tuple(
            tuple(parse_cores(node)) if isinstance(node, str) else tuple(int(core) for core in node)
            for node in value["numa"]
        )
        topology = Topology(numa=numa, memory_bytes=int(value["memory_bytes"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(f"the topology file {path} cannot be used: {error!r}", component=COMPONENT) from None
    if not topology.cores or not all(numa) or len(set(topology.cores)) != len(topology.cores):
        raise InvalidConfig(f"{path}: every NUMA node needs cores, and no core may come twice", component=COMPONENT)
    return topology


@dataclass(frozen=True, slots=True)
class _Limits:
    """What our own control group leaves us; 0 where it sets no bound."""

    cores: int
    memory_bytes: int

    @classmethod
    def read(cls, procfs: Path) -> _Limits:
        try:
            hierarchy = Hierarchy.discover((procfs / "self/mountinfo").read_text(encoding="utf-8"))
        except OSError:
            hierarchy = None
        group = None if hierarchy is None else hierarchy.places_of((procfs / "self/cgroup").read_text(encoding="utf-8"))
        if group is None:
            return cls(0, 0)
        return cls(int(group.quota_cores()), group.memory_limit_bytes())


def _numa_nodes(sysfs: Path) -> list[frozenset[int]]:
    places = sorted(sysfs.glob("devices/system/node/node[0-9]*"), key=lambda place: int(place.name[4:]))
    return [frozenset(parse_cores((place / "cpulist").read_text(encoding="ascii"))) for place in places]


def _memory_total(procfs: Path) -> int:
    for line in (procfs / "meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise InvalidConfig("the machine does not say how much memory it has", component=COMPONENT)


def _at_most(numa: tuple[tuple[int, ...], ...], count: int) -> tuple[tuple[int, ...], ...]:
    """The first ``count`` cores, node by node (0: all): a quota is time and not cores, so these are as good as any."""
    if count == 0:
        return numa
    kept = frozenset([core for node in numa for core in node][:count])
    return _without_empty(tuple(core for core in node if core in kept) for node in numa)


def _without_empty(numa: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    return tuple(node for node in numa if node)
