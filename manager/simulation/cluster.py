"""The cluster of a simulation: a `ManagerSpec` from a handful of numbers, and policies from their short names."""

from __future__ import annotations

from collections.abc import Mapping

from manager.config import ManagerSpec, NodeSpec, SchedulerSpec, ServiceSpec, TaskSpec
from manager.errors import InvalidInput
from manager.resources.declared import ResourceSpec
from manager.scheduler.policy import PolicySpec

#: Bytes of a node and of a device where nothing else is said (the paper's nodes, rounded).
NODE_BYTES = 2400 * 10**9
DEVICE_BYTES = 80 * 10**9
CORES_PER_NUMA = 128


def cluster(
    *,
    cores: int = 1280,
    nodes: int = 5,
    devices: int = 0,
    device_nodes: int = 0,
    services: Mapping[str, ServiceSpec] | None = None,
    resources: Mapping[str, ResourceSpec] | None = None,
    policy: str = "adaptive",
    strict: bool = False,
    replicate: bool = True,
) -> ManagerSpec:
    """CPU nodes with ``cores`` in all and device nodes with ``devices`` in all, as even as possible.

    Where ``device_nodes`` does not say how many, a device node has eight and the last one what is left.

    Raises InvalidInput where there are fewer units than nodes or the policy's name cannot be read.
    """
    if cores and cores < nodes:
        raise InvalidInput(f"{nodes} nodes cannot share {cores} cores", component="simulate")
    shares = _even(devices, device_nodes) if device_nodes else _full(devices)
    specs = [_cpu_node(index, count) for index, count in enumerate(_even(cores, nodes if cores else 0))]
    specs += [_device_node(index, count) for index, count in enumerate(shares)]
    return ManagerSpec(
        nodes=tuple(specs),
        resources=dict(resources or {}),
        tasks={"default": TaskSpec(max_queued=10**9)},
        services=dict(services or {}),
        scheduler=SchedulerSpec(policies=policies(policy), strict=strict, max_queued=10**9, replicate=replicate),
    )


def policies(text: str) -> dict[str, PolicySpec]:
    """Policies by resource kind from ``NAME``, ``fixed:8``, or ``adaptive,resize_interval_s=0.5``.

    ``adaptive`` means adaptive on cores and price on everything else.
    """
    name, *settings = text.split(",")
    name, _, dop = name.partition(":")
    options = dict(_setting(setting) for setting in settings)
    if dop:
        options["dop"] = _number(dop, text)
    spec = PolicySpec(name=name, options=options)
    return {"cpu": spec, "default": PolicySpec(name="price")} if name == "adaptive" else {"default": spec}


def _setting(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    if not equals:
        hint = "an option is NAME=NUMBER; several policies are joined by +, or --policy is given again"
        raise InvalidInput(f"policy option {text!r}: {hint}", component="simulate")
    return name, _number(value, text)


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InvalidInput(f"policy {whole!r}: {text!r} is no number", component="simulate") from error


def _even(units: int, parts: int) -> list[int]:
    """Units dealt to parts, the first ones one more where it does not divide."""
    return [units // parts + (index < units % parts) for index in range(parts)] if parts else []


def _full(devices: int) -> list[int]:
    """Devices in nodes of eight, the last one with the rest."""
    return [min(8, devices - start) for start in range(0, devices, 8)]


def _cpu_node(index: int, cores: int) -> NodeSpec:
    numa = tuple(tuple(range(start, min(cores, start + CORES_PER_NUMA))) for start in range(0, cores, CORES_PER_NUMA))
    return NodeSpec(name=f"node{index}", numa=numa, memory_bytes=NODE_BYTES)


def _device_node(index: int, devices: int) -> NodeSpec:
    return NodeSpec(name=f"gpu{index}", numa=(), memory_bytes=NODE_BYTES, devices=devices, device_bytes=DEVICE_BYTES)
