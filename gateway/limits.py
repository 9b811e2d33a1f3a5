"""What this machine has left: disk space, descriptors, memory."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from gateway.config.load import GatewayConfig
from gateway.config.schema import ServerConfig
from gateway.runtime_factory import model_settings
from manager.config import NodeSpec
from manager.errors import InvalidConfig
from runtimes.model.engine import discover as discover_devices
from runtimes.node.topology import Topology, discover, from_file
from runtimes.sandbox.disk import shortage_of
from runtimes.sandbox.linux import parse_cores

logger = structlog.get_logger("gateway.limits")

#: As many as a process needs at most; a higher bound costs who starts others and closes all of them.
DESCRIPTORS_MAX = 2**20
#: The least that a server has, however few descriptors there are.
CONNECTIONS_MIN = 16
SERVERS = 2


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What there is of it, looked at whenever somebody asks."""

    state_dir: Path
    free_min_bytes: int
    #: Connections that one server may have.
    connections_max: int

    @classmethod
    def measured(cls, server: ServerConfig) -> MachineLimits:
        """Raise this process's bound of descriptors as far as it goes, and say what is short at the start."""
        descriptors = raise_descriptors()
        fitting = max(
            CONNECTIONS_MIN, (descriptors - server.descriptors_reserved) // (SERVERS + len(server.facades.ports))
        )
        if fitting < server.connections_max:
            logger.warning(
                "fewer connections than configured: too few descriptors (ulimit -n)",
                descriptors=descriptors,
                connections=fitting,
                configured=server.connections_max,
            )
        room = cls(server.state_dir, server.free_min_bytes, min(server.connections_max, fitting))
        if shortage := room.shortage():
            logger.warning("short of room", why=shortage)
        return room

    def shortage(self) -> str | None:
        """Return what there is too little of now, None if there is enough."""
        try:
            # With a descriptor the table has room for: a full one is seen before a client meets it.
            os.close(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            return f"server.state_dir {self.state_dir}: {error}"
        return shortage_of(self.state_dir, self.free_min_bytes) or None


def raise_descriptors() -> int:
    """Raise the bound of this process's open files to what it may have, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else soft


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
