"""What the scheduler shows on the wire: the queue, tasks and living trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from tangram.types.leases import OpeningLease
from tangram.types.steps import StepInfo, StepNumber
from tangram.types.values.quantities import DURATION_PATTERN, IMAGE_PATTERN, SIZE_PATTERN
from tangram.types.values.scalars import Count, Name, SandboxUser
from tangram.types.values.wording import worded


class WaitCause(Struct, frozen=True, kw_only=True):
    """What a waiting action lacks; ``need`` and ``free`` count units of the pool, or bytes of memory."""

    kind: Annotated[
        str,
        Meta(
            description="units, devices, quota, memory, trajectory (an earlier action of it), task_cap, hold (the "
            "policy waits on purpose) or turn (what is free is kept for earlier actions)"
        ),
    ]
    text: Annotated[str, Meta(description="The same for people")]
    pool: Annotated[str, Meta(description="The pool, or node:NAME for memory; empty if none is meant")] = ""
    need: Count = 0
    free: Count = 0
    behind: Annotated[str | None, Meta(description="The action that has to end first")] = None
    until_s: Annotated[float | None, Meta(description="Seconds until it is expected, if that is known")] = None


class CauseCount(Struct, frozen=True, kw_only=True):
    """Waiting actions of one task with the same cause."""

    cause: WaitCause
    task: str
    count: Count
    oldest_s: Annotated[float, Meta(description="Seconds for which the first of them has waited")]


class QueueEntry(Struct, frozen=True, kw_only=True):
    """A waiting action."""

    id: str
    function: str
    task: str
    trajectory: str | None
    age_s: Annotated[float, Meta(description="Seconds since it was submitted")]
    cost: Annotated[Mapping[str, tuple[int, int]], Meta(description="Least and most units by resource kind")]
    waits_for: Annotated[str, Meta(description="What it waits for, in plain words")]
    cause: Annotated[WaitCause, Meta(description="The same as data")]
    t_ori_s: Annotated[float | None, Meta(description="Expected seconds with one unit; null if nothing is known")] = (
        None
    )


class QueuePage(Struct, frozen=True, kw_only=True):
    """How many actions wait, and some of them in order of service."""

    waiting: Count
    queue: tuple[QueueEntry, ...]
    causes: Annotated[tuple[CauseCount, ...], Meta(description="All that wait, by cause and task")] = ()
    next_cursor: Annotated[str | None, Meta(description="The cursor of the next page; null on the last")]


class TaskInfo(Struct, frozen=True, kw_only=True):
    """An RL task: its share and bounds, what runs, what it used, and how it fared once something was settled."""

    task: str
    weight: float
    max_queued: int | None
    caps: Annotated[Mapping[str, int], Meta(description="Most units at a time, by resource kind")]
    queued: Count
    running: Count
    core_s: Annotated[float, Meta(description="Core-seconds used")]
    gpu_s: Annotated[float, Meta(description="Device-seconds used")]
    quota_units: Annotated[Mapping[str, float], Meta(description="Units of quotas used, by resource")]
    slot_s: Annotated[Mapping[str, float], Meta(description="Slot-seconds of concurrency used, by resource")]
    settled: Annotated[Mapping[str, int] | UnsetType, Meta(description="Ended actions by state")] = UNSET
    completed: Annotated[
        int | UnsetType,
        Meta(description="Actions that were started, and neither cancelled nor lost: those that the times are of"),
    ] = UNSET
    act_s: Annotated[float | UnsetType, Meta(description="Sum of their action completion times")] = UNSET
    queue_s: float | UnsetType = UNSET
    overhead_s: float | UnsetType = UNSET
    execution_s: float | UnsetType = UNSET
    steps: Annotated[tuple[StepInfo, ...], Meta(description="Its steps that have not ended, opened last first")] = ()


class TaskList(Struct, frozen=True, kw_only=True):
    """Every task that is configured or was seen."""

    tasks: tuple[TaskInfo, ...]


#: A size as text, or a whole number of bytes.
Size = (
    Annotated[str, worded(f"^{SIZE_PATTERN}$", "a size, for example 512Mi or 16Gi", examples=["512Mi"])]
    | Annotated[int, Meta(ge=0, le=2**53)]
)
#: A duration as text, or seconds.
Span = (
    Annotated[
        str, worded(f"^{DURATION_PATTERN}$", "a duration with its unit, for example 30s or 10m", examples=["30m"])
    ]
    | Annotated[float, Meta(gt=0)]
)
Image = Annotated[
    str,
    worded(f"^{IMAGE_PATTERN}$", "the name of an image, for example debian:bookworm", examples=["debian:bookworm"]),
]
Workdir = Annotated[str, worded(r"^/[^\x00]{1,1023}$", "an absolute path", examples=["/workspace"])]
#: As the gateway has chosen it.
SnapshotId = Annotated[
    str, worded("^[0-9a-f]{12}$", "the id of a snapshot: 12 hexadecimal digits", examples=["3f9a61c0d2e4"])
]
EnvName = Annotated[str, worded("^[A-Za-z_][A-Za-z0-9_]{0,254}$", "the name of a variable")]


class SandboxChoice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trajectory chooses for its sandbox, as far as the function allows it; the rest is the function's own."""

    image: Annotated[Image | None, Meta(description="Container image, of sandbox.images")] = None
    env: Annotated[
        Mapping[EnvName, str] | None,
        Meta(description="Environment variables, added to the function's; names of sandbox.trajectory.env"),
    ] = None
    workdir: Annotated[
        Workdir | None, Meta(description="Working directory, absolute, in no directory of the system")
    ] = None
    user: Annotated[SandboxUser | None, Meta(description="User name or id, of sandbox.users")] = None
    memory: Annotated[Size | None, Meta(description="Bytes, at most the function's or sandbox.trajectory.memory")] = (
        None
    )
    network: Annotated[
        Literal["none", "internal", "egress"] | None, Meta(description="none, or one of sandbox.trajectory.networks")
    ] = None
    idle_ttl: Annotated[
        Span | None, Meta(description="It ends after so long without an action, at most sandbox.trajectory.idle_ttl")
    ] = None


class LivingSandbox(Struct, frozen=True, kw_only=True):
    """The sandbox of a trajectory as it is."""

    image: Annotated[str, Meta(description="Empty or of no meaning where sandboxes are processes")]
    workdir: str
    user: str
    network: str
    memory_bytes: Count


class TrajectoryOpening(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for a trajectory's environment before its first action."""

    function: Annotated[Name, Meta(description="The registered function whose sandbox it is")]
    task: Annotated[Name, Meta(description="The RL task that it belongs to")] = "default"
    step: Annotated[StepNumber | None, Meta(description="The step of the task that it belongs to; else X-Step")] = None
    sandbox: Annotated[
        SandboxChoice | None, Meta(description="What it chooses for its sandbox; 409 if it lives with another")
    ] = None
    snapshot: Annotated[
        SnapshotId | None, Meta(description="The snapshot whose files it begins with; in place of sandbox")
    ] = None
    lease_s: OpeningLease = None


class TrajectoryInfo(Struct, frozen=True, kw_only=True):
    """A living trajectory."""

    trajectory: Name
    task: str
    node: Annotated[str, Meta(description="Where its environment is; empty before")]
    memory_bytes: Count
    ttl_s: Annotated[float, Meta(description="Seconds without an action after which it ends")]
    state: Annotated[str, Meta(extra_json_schema={"enum": ["idle", "queued", "running", "waiting", "ending"]})]
    queued: Annotated[Count, Meta(description="Actions behind the active one")]
    active: Annotated[str | None, Meta(description="The action whose turn it is")]
    idle_s: float
    sandbox: Annotated[
        LivingSandbox | UnsetType | None, Meta(description="Its sandbox, null before there is one; not in lists")
    ] = UNSET
    lease_left_s: Annotated[
        float | None,
        Meta(description="Seconds until it ends unless its client says that it lives; null without a lease"),
    ] = None


class TrajectoryPage(Struct, frozen=True, kw_only=True):
    """Living trajectories, by name."""

    trajectories: tuple[TrajectoryInfo, ...]
    next_cursor: Annotated[Name | None, Meta(description="The cursor of the next page; null on the last")]
