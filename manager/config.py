"""What the scheduler is made from: nodes, resources, tasks and policies, as plain frozen values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from manager.action import ANYWHERE, NodeChoice
from manager.function import Setting
from manager.resources.pools import ResourceSpec
from manager.scheduler.policy import PolicySpec

#: Name of a resource, a policy or a node.
ResourceName = Annotated[
    str,
    Setting(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$",
        words="1 to 128 letters, digits or . _ - that start with a letter, a digit or _",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One machine as the managers see it."""

    name: str
    #: Core ids by NUMA node, usable by actions (reserved ones already left out).
    numa: tuple[tuple[int, ...], ...]
    #: Bytes that trajectories and actions may hold together.
    memory_bytes: int
    #: Model devices: their number (six make a chunk of four and one of two) and the bytes of each.
    devices: int = 0
    device_bytes: int = 0
    #: What they are; empty without any.
    device_kind: Literal["", "cpu", "cuda"] = ""
    #: What functions may choose it by.
    labels: Mapping[str, str] = field(default_factory=dict)
    #: The functions that it is able to run; None for all.
    able: frozenset[str] | None = None

    @property
    def cores(self) -> int:
        return sum(len(ids) for ids in self.numa)

    def suits(self, placement: NodeChoice) -> bool:
        """Return whether an action of this placement may run here."""
        if placement is ANYWHERE:
            return True
        able = self.able is None or not placement.function or placement.function in self.able
        return (
            able
            and placement.node in ("", self.name)
            and all(self.labels.get(label) == value for label, value in placement.labels)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """An RL task: its share and its bounds."""

    weight: Annotated[float, Setting("share of a contended resource, relative to the other tasks", gt=0, le=1e6)] = 1.0
    max_queued: Annotated[int, Setting("most waiting actions; beyond it 429", ge=1)] = 4096
    caps: Annotated[
        Mapping[ResourceName, Annotated[int, Setting(ge=1)]], Setting("most units of a resource held together")
    ] = field(default_factory=dict)
    keep_idle: Annotated[
        bool,
        Setting(
            "a trajectory that was idle for a minute is not ended, though another task waits for memory, and this one "
            "holds more than its share of it"
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """A model service as the GPU manager sees it: bytes on each device by DoP, and restore seconds by DoP."""

    name: str
    bytes_by_dop: Mapping[int, int]
    restore_s_by_dop: Mapping[int, float]
    #: Tokens that queued actions may add up to in one batch; 0: no batching.
    batch_tokens: int = 0
    #: Restore seconds as each node that can hold it has measured them, by node and DoP; empty: all nodes are alike.
    restore_s_by_node: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    #: Whether it can be resident on several chunks at once; a server of its own (an external engine) cannot.
    replicable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec:
    """The policies and the bounds of the queue."""

    #: By resource kind (``cpu``, ``gpu``); ``default`` for the others.
    policies: Annotated[
        Mapping[str, PolicySpec],
        Setting("one policy, or one by resource ({cpu: adaptive, gpu: price, default: price})", key="policy"),
    ] = field(default_factory=lambda: {"default": PolicySpec()})
    objective: Annotated[
        Literal["act", "step"],
        Setting("what adaptive shortens: act, the mean ACT; step, the end of the last trajectory of a batch"),
    ] = "act"
    #: docs/SCHEDULING.md R1; for comparison only.
    strict: Annotated[bool, Setting("FCFS over all resources at once, as in the paper's text; slower")] = False
    max_queued: Annotated[int, Setting("most actions that wait in all", ge=1)] = 65536
    trajectories_max: Annotated[int, Setting("most living trajectories; beyond it 503", ge=1)] = 65536
    memory_reserve: Annotated[
        float,
        Setting(
            "fraction of each node's memory that trajectories leave to actions of none (rewards in new sandboxes); "
            "one larger than the rest has a node of which no other trajectory holds memory",
            ge=0,
            le=0.9,
        ),
    ] = 0.1
    #: Most waiting actions that a policy is shown: the bound of what one decision costs.
    queue_window: int = 2048
    #: Whether models in use are copied into free memory of idle devices; off for comparison only.
    replicate: bool = True


#: Part of a bound of the whole gateway that one task may take.
TASK_SHARE = 0.75


def share_of(limit: int) -> int:
    """Return what one task may take of a bound that all share."""
    return math.ceil(limit * TASK_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerSpec:
    """Everything that `manager.assembly` builds a core from."""

    nodes: tuple[NodeSpec, ...]
    #: Declared resources by name.
    resources: Mapping[str, ResourceSpec] = field(default_factory=dict)
    tasks: Mapping[str, TaskSpec] = field(default_factory=lambda: {"default": TaskSpec()})
    services: Mapping[str, ServiceSpec] = field(default_factory=dict)
    scheduler: SchedulerSpec = SchedulerSpec()
