"""Nodes on the wire: the machines that have joined, how they are, and what admits another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from tangram.types.resources import ChunkPair
from tangram.types.values.scalars import Count, Name

NodeCondition = Literal["joining", "ready", "unfit", "suspect", "draining", "drained", "lost"]


class NodeStatus(Struct, frozen=True, kw_only=True):
    """One machine."""

    node: str
    state: NodeCondition
    why: Annotated[str, Meta(description="Of any state but ready")]
    since_s: Annotated[float, Meta(description="Seconds for which it has been so")]
    local: Annotated[bool, Meta(description="Whether it is the gateway's own machine")]
    cores: Count
    devices: Count
    device_kind: Annotated[
        Literal["", "cpu", "cuda"], Meta(description="What its devices are; empty where it has none, or has not said")
    ]
    memory_bytes: Count
    labels: Mapping[str, str]
    running: Annotated[Count, Meta(description="Actions that run there")]
    trajectories: Annotated[Count, Meta(description="Trajectories, and actions of none, that hold memory there")]
    able: Annotated[tuple[str, ...], Meta(description="Functions that it can run")]
    unable: Annotated[Mapping[str, str], Meta(description="Functions that it cannot run, and why")]
    resident: Annotated[
        Mapping[str, tuple[ChunkPair, ...]], Meta(description="Model service -> the devices on which it is there")
    ] = msgspec.field(default_factory=dict)
    peer: Annotated[str, Meta(description="Where it joins from")] = ""
    version: str = ""
    isolation: Annotated[str, Meta(description="What its sandboxes are")] = ""
    losses: Annotated[Count, Meta(description="How often it was lost of late")] = 0
    refused_s: Annotated[float, Meta(description="Seconds for which it may not join, as it was lost too often")] = 0.0


RayMachineState = Literal["found", "waiting", "starting", "serving", "failed", "draining", "released"]


class RayMachineStatus(Struct, frozen=True, kw_only=True):
    """One machine of a Ray cluster that is to be a node, and how far that has come."""

    machine: Annotated[str, Meta(description="Ray's id of it")]
    node: Annotated[str, Meta(description="As it joins")]
    address: str
    state: RayMachineState
    why: Annotated[str, Meta(description="Of any state but serving")]
    since_s: Annotated[float, Meta(description="Seconds for which it has been so")]


class NodeStatusList(Struct, frozen=True, kw_only=True):
    """All machines."""

    nodes: tuple[NodeStatus, ...]
    storm_s: Annotated[
        float,
        Meta(description="Seconds for which none is counted lost, because too many were silent within a short time"),
    ] = 0.0
    ray: Annotated[tuple[RayMachineStatus, ...], Meta(description="Machines of a Ray cluster (cluster.ray)")] = ()


class DrainWanted(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a machine is to take no new work."""

    why: Annotated[str, Meta(max_length=500)] = "an operator asked for it"


class TicketWanted(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is to join."""

    name: Name


class NodeTicket(Struct, frozen=True, kw_only=True):
    """What admits one machine once."""

    name: str
    ticket: str
    expires_in_s: float
    gateway: Annotated[str, Meta(description="Where nodes join, host:port")]
    fingerprint: Annotated[str, Meta(description="SHA-256 of the gateway's certificate there")]
