"""What a node says of itself when it greets, as far as it can be: the scheduler is told of nothing else."""

from __future__ import annotations

from dataclasses import replace

from manager.config import NodeSpec
from manager.errors import InvalidConfig
from runtimes.node.protocol import NodeHello

#: More than any machine has: a larger number is a mistake, and every device and core takes memory here.
DEVICES_MAX = 4096
CORES_MAX = 8192


def described(hello: NodeHello) -> NodeSpec:
    """Return the node that greets, able to run nothing yet; raises InvalidConfig for one that cannot be."""
    spec = replace(hello.spec, name=hello.name, labels={**hello.spec.labels, **hello.labels}, able=frozenset())
    cores = [core for ids in spec.numa for core in ids]
    if not all(spec.numa) or len(set(cores)) != len(cores) or not all(0 <= core < CORES_MAX for core in cores):
        raise _refused(spec, f"no core comes twice, its ids are 0 to {CORES_MAX - 1}, and every NUMA node has some")
    if not 0 <= spec.devices <= DEVICES_MAX:
        raise _refused(spec, f"it has 0 to {DEVICES_MAX} devices, not {spec.devices}")
    if min(spec.memory_bytes, spec.device_bytes) < 0:
        raise _refused(spec, "its memory, and that of its devices, is not negative")
    return spec


def is_changed(spec: NodeSpec, before: NodeSpec, *, awaited: bool) -> bool:
    """Return whether a node has other units than the scheduler leases, which it may not while it is there.

    Nothing is on the devices of one that is ``awaited``, nor on any where there were none: those may be others.
    """
    if (spec.numa, spec.memory_bytes) != (before.numa, before.memory_bytes):
        return True
    devices_stay = bool(before.devices) and not awaited
    return devices_stay and (spec.devices, spec.device_bytes) != (before.devices, before.device_bytes)


def _refused(spec: NodeSpec, rule: str) -> InvalidConfig:
    told = f"{spec.name} describes a machine that cannot be: {rule} (the section node of its configuration)"
    return InvalidConfig(told, component="cluster")
