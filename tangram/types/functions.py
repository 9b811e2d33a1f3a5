"""Functions on the wire: how one is defined, and what was learned of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from tangram.types.values.scalars import AnyReason, Count, Instant, JsonObject


class UnitsInfo(Struct, frozen=True, kw_only=True):
    """Admissible unit counts: from ``min`` to ``max``, or those of ``choices``."""

    min: int | UnsetType = UNSET
    max: int | UnsetType = UNSET
    choices: tuple[int, ...] | UnsetType = UNSET


class DurationInfo(Struct, frozen=True, kw_only=True):
    """How its duration is foretold."""

    profile: Annotated[str, Meta(description="learned or declared")]
    key: Annotated[str, Meta(description="The input field whose value keys the learning; empty for none")]
    initial_s: Annotated[float | None, Meta(description="Seconds with one unit, the prior or the truth")]
    size: Annotated[str, Meta(description="Path of the input field on whose size it hangs; empty for none")] = ""


class RetryInfo(Struct, frozen=True, kw_only=True):
    """Its tries after a failure."""

    max_attempts: int
    backoff_s: Annotated[float, Meta(description="Seconds before the second try, doubled with each")]
    backoff_max_s: float
    jitter: Annotated[str, Meta(description="full or none")]
    on: Annotated[tuple[AnyReason, ...], Meta(description="Reasons that are tried again")]
    on_status: Annotated[tuple[int, ...], Meta(description="HTTP statuses of an api function that are tried again")]


class WarmInfo(Struct, frozen=True, kw_only=True):
    """Bounds of a warm pool, in sandboxes."""

    min: Count
    max: Count


class ChoicesInfo(Struct, frozen=True, kw_only=True):
    """What a trajectory may choose for its sandbox, beside image and user."""

    networks: tuple[str, ...]
    env: Annotated[tuple[str, ...], Meta(description="Names of variables, * and ? stand for any")]
    memory_bytes: Annotated[int | None, Meta(description="Most bytes; null: the function's own")]
    idle_ttl_s: Annotated[float | None, Meta(description="Longest; null: the function's own")]
    warm: Annotated[Count, Meta(description="Choices of which some are kept ready too")]


class SandboxInfo(Struct, frozen=True, kw_only=True):
    """The sandbox of its trajectories, or of a handler's instances."""

    image: str
    images: Annotated[tuple[str, ...], Meta(description="Patterns of images that a trajectory may name instead")]
    trajectory: ChoicesInfo
    memory_bytes: Count
    network: Annotated[str, Meta(description="none, internal or egress")]
    allow: Annotated[
        tuple[str, ...], Meta(description="With egress: all that may be reached; empty is the public world")
    ]
    user: str
    users: Annotated[tuple[str, ...], Meta(description="Users that may be asked for; empty: none but its own")]
    runtime: Annotated[str, Meta(description="What the engine runs it with; empty for its default")]
    capabilities: Annotated[str, Meta(description="What root inside may do: minimal, or default")]
    pids: Annotated[int, Meta(description="Most processes at a time")]
    disk_bytes: Count
    shm_bytes: Count
    workdir: str
    env: Mapping[str, str]
    isolation: Annotated[str, Meta(description="any, or container")]
    background: Annotated[str, Meta(description="What its processes do between actions: freeze, run or kill")]
    idle_ttl_s: Annotated[float, Meta(description="Seconds without an action after which a trajectory ends")]
    unattended_s: Annotated[float, Meta(description="Seconds that a command runs on without its gateway")]
    warm: WarmInfo


class SizeLineInfo(Struct, frozen=True, kw_only=True):
    """How a duration hangs on the size of a call: fixed_s + per_unit_s x size, in seconds with one unit."""

    fixed_s: float
    per_unit_s: float
    least: Annotated[float, Meta(description="The least size that it was learned from")]
    most: Annotated[float, Meta(description="The largest; it is followed to twice that")]


class LearnedInfo(Struct, frozen=True, kw_only=True):
    """What was learned of a function's durations, by the value of its key."""

    t_ori_s: Annotated[float, Meta(description="Seconds with one unit, of a call of usual size")]
    observations: Count
    error: Annotated[float, Meta(description="Smoothed relative error of the estimate; 0.1 is about 10 %")]
    serial_fraction: Annotated[float | None, Meta(description="What more units cannot speed up; null if not fitted")]
    batch_marginal: Annotated[float | None, Meta(description="What a further member adds to a batch; null likewise")]
    size: Annotated[
        SizeLineInfo | None, Meta(description="How it hangs on a call's size; null if it is not fitted")
    ] = None


class ValueChange(Struct, frozen=True, kw_only=True):
    """One key of a definition, as text that is cut where it is long."""

    was: str
    now: str


class RevisionChange(Struct, frozen=True, kw_only=True):
    """One change of a function's definition while the gateway ran."""

    at: Instant
    was: Annotated[str, Meta(description="Its revision before")]
    now: Annotated[str, Meta(description="Its revision from then on")]
    values: Annotated[
        Mapping[str, ValueChange],
        Meta(description="What differs, by the path of its key; empty where only a handler's source does"),
    ] = {}


class FunctionInfo(Struct, frozen=True, kw_only=True):
    """A registered function. What is not set is left out; secrets are references and stay so."""

    name: str
    runtime: Annotated[str, Meta(description="The kind of its runtime, as the YAML names it")]
    revision: Annotated[str, Meta(description="Digest of the definition, and of a handler's source")]
    description: str
    cost: Annotated[Mapping[str, int | UnitsInfo], Meta(description="Units that it needs, by resource kind")]
    duration: DurationInfo
    timeout_s: Annotated[float, Meta(description="Bound of its execution in seconds")]
    queue_timeout_s: Annotated[float, Meta(description="Bound of its waiting in seconds")]
    idempotent: bool
    max_queued: Annotated[int, Meta(description="Invocations of it that may wait")]
    output_limit_bytes: Count
    log_limit_bytes: Count
    retry: RetryInfo
    key: Annotated[str | UnsetType, Meta(description="Its key elasticity resource")] = UNSET
    elasticity: Annotated[
        JsonObject | UnsetType, Meta(description="Declared elasticity: serial_fraction, or points [units, efficiency]")
    ] = UNSET
    input_schema: Annotated[JsonObject | UnsetType, Meta(description="JSON Schema of its input")] = UNSET
    result_schema: Annotated[JsonObject | UnsetType, Meta(description="JSON Schema of its result")] = UNSET
    nodes: Annotated[Mapping[str, str], Meta(description="Labels of the machines that it may run on; empty: all")] = {}
    sandbox: SandboxInfo | UnsetType = UNSET
    pytest: Annotated[JsonObject | UnsetType, Meta(description="How tests are run: args, dist, max_workers")] = UNSET
    handler: Annotated[JsonObject | UnsetType, Meta(description="Where the handler lives, and its instances")] = UNSET
    model: Annotated[JsonObject | UnsetType, Meta(description="The checkpoint or engine, and what is asked of it")] = (
        UNSET
    )
    request: Annotated[JsonObject | UnsetType, Meta(description="The HTTP call of an api function")] = UNSET
    own: Annotated[JsonObject | UnsetType, Meta(description="What functions of its kind alone have, by key")] = UNSET
    learned: Annotated[
        Mapping[str, LearnedInfo] | UnsetType,
        Meta(description="What was learned, by the value of its key; left out in listings"),
    ] = UNSET
    source: Annotated[
        Literal["files", "applied"] | UnsetType,
        Meta(description="The server's own files, or a configuration that was applied and is kept over restarts"),
    ] = UNSET
    status: Annotated[
        Literal["preparing", "ready", "unavailable"] | UnsetType,
        Meta(description="Whether its actions start; until it is ready they queue"),
    ] = UNSET
    problem: Annotated[
        str | UnsetType, Meta(description="Why it is unavailable (it is tried again), or what is done to prepare it")
    ] = UNSET
    changes: Annotated[
        tuple[RevisionChange, ...] | UnsetType,
        Meta(description="What was changed since the gateway's start, the last first; left out in listings"),
    ] = UNSET


class FunctionList(Struct, frozen=True, kw_only=True):
    """Every registered function, by name."""

    functions: tuple[FunctionInfo, ...]


class FunctionUpload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One function to be registered, and the files of a handler."""

    definition: Annotated[
        JsonObject, Meta(description="The keys of the function, as in YAML", extra_json_schema={"minProperties": 1})
    ]
    sources: Annotated[
        Mapping[str, str], Meta(description="The handler's files, relative path -> text; empty for other runtimes")
    ] = {}


class ConfigDiff(Struct, frozen=True, kw_only=True):
    """What a configuration changes, or would change."""

    added: tuple[str, ...] = ()
    changed: Annotated[
        Mapping[str, tuple[str, ...]],
        Meta(description="Function -> the keys of its definition that differ; source is the handler's code"),
    ] = {}
    values: Annotated[
        Mapping[str, Mapping[str, ValueChange]],
        Meta(description="Function -> key -> what it is and what it becomes"),
    ] = {}
    removed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    tasks: Annotated[tuple[str, ...], Meta(description="Tasks of which anything differs")] = ()
    resources: Annotated[tuple[str, ...], Meta(description="Resources of which anything differs")] = ()
    needs_restart: Annotated[
        tuple[str, ...], Meta(description="Keys that are read at the start only: such a configuration is refused")
    ] = ()
    applied: Annotated[bool, Meta(description="False for a dry run")] = False

    @property
    def empty(self) -> bool:
        """Whether nothing differs."""
        return not (self.added or self.changed or self.removed or self.tasks or self.resources or self.needs_restart)


class ConfigFile(Struct, frozen=True, kw_only=True):
    """One file of a configuration."""

    path: Annotated[str, Meta(description="Below the server's own configuration, or relative to it")]
    text: Annotated[str, Meta(description="YAML")]


class ConfigFiles(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configuration as its files."""

    files: tuple[ConfigFile, ...]
    variables: Annotated[
        Mapping[str, str],
        Meta(description="What ${NAME} stands for in the files; the gateway's environment is not asked"),
    ] = {}
