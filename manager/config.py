"""What the scheduler is made from: nodes, resources, tasks and policies, as plain frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from manager.resources.declared import ResourceSpec
from manager.scheduler.policy import PolicySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One machine as the managers see it."""

    name: str
    #: Core ids by NUMA node, usable by actions (reserved ones already left out).
    numa: tuple[tuple[int, ...], ...]
    #: Bytes that trajectories may hold together.
    memory_bytes: int
    #: Model devices: their number (six make a chunk of four and one of two) and the bytes of each.
    devices: int = 0
    device_bytes: int = 0

    @property
    def cores(self) -> int:
        return sum(len(ids) for ids in self.numa)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """An RL task: its share and its bounds."""

    weight: float = 1.0
    max_queued: int = 4096
    #: Most units of a resource kind that its actions hold together; absent means no cap.
    caps: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """A model service as the GPU manager sees it: bytes on each device by DoP, and restore seconds by DoP."""

    name: str
    bytes_by_dop: Mapping[int, int]
    restore_s_by_dop: Mapping[int, float]
    #: Tokens that queued actions may add up to in one batch; 0: no batching.
    batch_tokens: int = 0
    #: Whether it can be resident on several chunks at once; a server of its own (an external engine) cannot.
    replicable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec:
    """The policies and the bounds of the queue."""

    #: Policy by resource kind (``cpu``, ``gpu``); ``default`` for the others.
    policies: Mapping[str, PolicySpec] = field(default_factory=lambda: {"default": PolicySpec()})
    #: FCFS over the whole resource vector, as the paper's text has it (docs/SCHEDULING.md R1); for comparison only.
    strict: bool = False
    #: Most actions that wait in all; beyond it submissions are refused.
    max_queued: int = 65536
    #: Most living trajectories; beyond it an action of another one is refused.
    trajectories_max: int = 65536
    #: Most waiting actions of one pool that a policy is shown.
    queue_window: int = 2048
    #: Whether services in use are copied into free memory of idle devices.
    replicate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerSpec:
    """Everything that `manager.assembly` builds a core from."""

    nodes: tuple[NodeSpec, ...]
    #: Declared resources by name.
    resources: Mapping[str, ResourceSpec] = field(default_factory=dict)
    tasks: Mapping[str, TaskSpec] = field(default_factory=lambda: {"default": TaskSpec()})
    services: Mapping[str, ServiceSpec] = field(default_factory=dict)
    scheduler: SchedulerSpec = SchedulerSpec()
