"""The machine: which of its cores, memory and devices the configuration gives to actions."""

from __future__ import annotations

from dataclasses import replace

from gateway.config.load import GatewayConfig
from gateway.runtime_factory import model_settings
from manager.config import NodeSpec
from manager.errors import InvalidConfig
from runtimes.model.engine import discover as discover_devices
from runtimes.node.topology import Topology, discover, from_file
from runtimes.sandbox.linux import parse_cores

#: Share of the machine's memory that trajectories may hold when nothing is configured.
MEMORY_SHARE = 0.9


def describe(config: GatewayConfig) -> NodeSpec:
    """This machine as the scheduler sees it; raises InvalidConfig where it is not as configured."""
    node = config.node
    topology = discover() if node.cpu.topology is None else from_file(node.cpu.topology)
    topology = _confined(topology, node.cpu.cores).reserve(node.cpu.reserved)
    devices = discover_devices(model_settings(config))
    spec = topology.node(
        node.name,
        memory_bytes=node.memory_bytes or int(topology.memory_bytes * MEMORY_SHARE),
        devices=len(devices),
        device_bytes=min((device.arena_bytes for device in devices), default=0),
    )
    return replace(spec, labels=node.labels, device_kind=devices[0].kind if devices else "")


def _confined(topology: Topology, cores: str) -> Topology:
    """Only the listed cores; all where nothing is listed."""
    if not cores:
        return topology
    try:
        wanted = set(parse_cores(cores))
    except ValueError:
        raise InvalidConfig(f"node.cpu.cores: {cores!r} is no list such as 0-3,8", component="machine") from None
    missing = wanted - set(topology.cores)
    if missing:
        raise InvalidConfig(f"node.cpu.cores: core {min(missing)} is not usable here", component="machine")
    numa = tuple(tuple(core for core in node if core in wanted) for node in topology.numa)
    return replace(topology, numa=tuple(node for node in numa if node))
