"""The server's sections of the YAML: server, node, sandbox, models, scheduler, tasks and resources.

A field's name carries its unit (``drain_grace_s``), its YAML key is the alias (``drain_grace: 30s``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema

from gateway.config import quantities
from manager.config import SchedulerSpec, TaskSpec
from manager.function import Background, Isolation, Network, SandboxSpec, Warm
from manager.scheduler.policy import PolicySpec
from manager.scheduler.registry import PolicyName

NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$"


class Section(BaseModel):
    """A part of the YAML: frozen, and strict about its keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True, allow_inf_nan=False
    )


def refuse_boolean(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


Seconds = Annotated[
    float,
    BeforeValidator(quantities.duration_s),
    WithJsonSchema({"type": "string", "pattern": f"^{quantities.DURATION_PATTERN}$", "examples": ["30s"]}),
]
Bytes = Annotated[
    int,
    BeforeValidator(quantities.size_bytes),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": f"^{quantities.SIZE_PATTERN}$"},
                {"type": "integer", "minimum": 0},
            ],
            "examples": ["512Mi"],
        }
    ),
]
#: Zero or more, one or more, and a non-negative real; text with digits is a number too (an interpolated variable).
Count = Annotated[int, Field(ge=0, le=2**53), BeforeValidator(refuse_boolean)]
Positive = Annotated[int, Field(ge=1, le=2**53), BeforeValidator(refuse_boolean)]
Real = Annotated[float, Field(ge=0), BeforeValidator(refuse_boolean)]
Port = Annotated[int, Field(ge=0, le=65535), BeforeValidator(refuse_boolean)]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]


class RetentionSection(Section):
    """How long ended invocations are kept, with their logs."""

    records_age_s: Seconds = Field(
        default=30 * 86400.0, validation_alias="records_age", description="age of ended records"
    )
    records_bytes: Bytes = Field(
        default=8 * 2**30, validation_alias="records_size", description="size of the record database"
    )
    logs_age_s: Seconds = Field(
        default=7 * 86400.0, validation_alias="logs_age", description="age of the logs of ended invocations"
    )
    logs_bytes: Bytes = Field(default=4 * 2**30, validation_alias="logs_size", description="size of all logs together")
    interval_s: Seconds = Field(default=300.0, validation_alias="interval", description="time between two clean-ups")


class LogsSection(Section):
    """Bounds of live logs; the bound of one invocation's log is the function's ``log_limit``."""

    followers_max: Positive = Field(default=4096, description="most followers at once")
    stall_s: Seconds = Field(
        default=30.0, validation_alias="stall", description="a follower that reads slower is dropped, and told so"
    )
    tail_bytes: Bytes = Field(
        default=64 * 2**10, validation_alias="tail", description="of a running invocation's log, kept in memory"
    )
    heartbeat_s: Seconds = Field(
        default=10.0, validation_alias="heartbeat", description="time between heartbeats to followers"
    )


class CallbacksSection(Section):
    """Where results may be posted to; nowhere unless ``allow`` names it."""

    allow: tuple[str, ...] = Field(default=(), description="host names, host:port or CIDR blocks that may be called")
    secret: str = Field(default="", repr=False, description="key of the HMAC-SHA256 signature")
    timeout_s: Seconds = Field(default=10.0, validation_alias="timeout", description="one delivery")
    max_attempts: Positive = Field(default=8, description="deliveries tried before it is given up")
    backoff_s: Seconds = Field(default=1.0, validation_alias="backoff", description="first wait, doubled each time")
    concurrency: Positive = Field(default=16, description="deliveries at once")


class ServerConfig(Section):
    """The gateway's doors, its record and their bounds."""

    host: str = Field(default="127.0.0.1", description="address to listen on; any but loopback needs a token")
    port: Port = Field(default=8080, description="HTTP port; 0 takes a free one")
    grpc_port: Port = Field(default=8081, description="gRPC port; 0 takes a free one")
    token: str = Field(default="", repr=False, description="bearer token that every request must carry")
    token_file: Path | None = Field(default=None, description="file that holds the token")
    secrets_dir: Path | None = Field(
        default=None, description="directory whose files are the secrets of ${secret:NAME}"
    )
    state_dir: Path = Field(default=Path(".tangram"), description="directory of records, logs and history")
    durability: Literal["process", "power"] = Field(
        default="process", description="what an accepted invocation survives: a killed process, or also a power cut"
    )
    body_limit_bytes: Bytes = Field(
        default=16 * 2**20, validation_alias="body_limit", description="largest request body"
    )
    file_limit_bytes: Bytes = Field(
        default=256 * 2**20, validation_alias="file_limit", description="largest file up or down"
    )
    body_timeout_s: Seconds = Field(
        default=300.0, validation_alias="body_timeout", description="longest time for a request's body to arrive"
    )
    connections_max: Positive = Field(
        default=8192, description="most open connections of each door; beyond it 503, or UNAVAILABLE on gRPC"
    )
    streams_max: Positive = Field(default=1000, description="most open calls of one connection (HTTP/2 and gRPC)")
    inputs_bytes: Bytes = Field(
        default=2**30,
        validation_alias="inputs_max",
        description="bytes of inputs that arrive, or whose invocations have not ended; beyond it 503",
    )
    batch_max: Positive = Field(default=10_000, description="most invocations in one batch")
    wait_max_s: Seconds = Field(
        default=600.0, validation_alias="wait_max", description="longest ?wait= that a caller may ask for"
    )
    drain_grace_s: Seconds = Field(
        default=30.0, validation_alias="drain_grace", description="time for running work at SIGTERM"
    )
    idempotency_ttl_s: Seconds = Field(default=86400.0, validation_alias="idempotency_ttl", description="life of a key")
    max_age_s: Seconds = Field(
        default=86400.0, validation_alias="max_age", description="asynchronous work older than this is not run any more"
    )
    retention: RetentionSection = Field(default=RetentionSection(), description="how long records and logs are kept")
    logs: LogsSection = Field(default=LogsSection(), description="bounds of live logs")
    callbacks: CallbacksSection = Field(default=CallbacksSection(), description="where results may be posted to")


class CpuConfig(Section):
    """Which cores actions may have."""

    reserved: Count = Field(default=0, description="cores left to the gateway, the first of the machine")
    cores: str = Field(default="", description="cores for actions, for example 0-3,8; empty takes all that are allowed")
    topology: Path | None = Field(
        default=None, description="JSON file {numa: [...], memory_bytes: N} instead of the machine's"
    )


class DevicesConfig(Section):
    """The model devices of the node."""

    kind: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto takes cuda where there is one, else cpu"
    )
    count: Count | None = Field(
        default=None, description="devices used; all cuda devices, or one cpu device, by default"
    )
    memory_bytes: Bytes | None = Field(
        default=None, validation_alias="memory", description="bytes of each device; measured by default"
    )


class NodeConfig(Section):
    """This machine as the scheduler sees it."""

    name: Name = Field(default="local", description="name in leases and records")
    cpu: CpuConfig = Field(default=CpuConfig(), description="cores")
    memory_bytes: Bytes | None = Field(
        default=None,
        validation_alias="memory",
        description="bytes that trajectories may hold; nine tenths of the machine's",
    )
    devices: DevicesConfig = Field(default=DevicesConfig(), description="model devices")


class WarmSection(Section):
    """Sandboxes or instances kept ready."""

    min: Count = Field(default=0, description="always kept ready")
    max: Count = Field(default=0, description="most kept ready")


class SandboxSection(Section):
    """A function's sandbox; what is left out comes from the server's ``sandbox`` section."""

    image: str | None = Field(default=None, description="container image")
    memory_bytes: Bytes | None = Field(
        default=None, validation_alias="memory", description="bytes, held for the life of the trajectory"
    )
    network: Network | None = Field(default=None, description="what it may reach")
    allow: tuple[str, ...] | None = Field(
        default=None, description="with egress: hosts or CIDR blocks; empty allows all"
    )
    user: Annotated[str, Field(coerce_numbers_to_str=True)] | None = Field(
        default=None, description="user name or id inside"
    )
    pids: Positive | None = Field(default=None, description="most processes and threads")
    disk_bytes: Bytes | None = Field(default=None, validation_alias="disk", description="bytes it may write")
    shm_bytes: Bytes | None = Field(default=None, validation_alias="shm", description="bytes of /dev/shm")
    workdir: str | None = Field(default=None, pattern=r"^/", description="working directory, absolute")
    env: dict[str, str] | None = Field(default=None, description="environment variables")
    isolation: Isolation | None = Field(default=None, description="container refuses to run without one")
    background: Background | None = Field(default=None, description="its processes between two actions")
    idle_ttl_s: Seconds | None = Field(
        default=None, validation_alias="idle_ttl", description="a trajectory ends after this time without an action"
    )
    unattended_s: Seconds | None = Field(
        default=None,
        validation_alias="unattended",
        description="a durable call's command runs on so long without its gateway, for the next to take over",
    )
    warm: WarmSection | None = Field(default=None, description="sandboxes kept ready")

    def spec(self, defaults: SandboxSection) -> SandboxSpec:
        """The sandbox of one function: its own keys, else the server's, else those of SandboxSpec."""
        given: dict[str, object] = {}
        for name in SandboxSection.model_fields:
            own, default = getattr(self, name), getattr(defaults, name)
            if (value := default if own is None else own) is not None:
                given[name] = Warm(min=value.min, max=value.max) if isinstance(value, WarmSection) else value
        # Any: the names of both are the same, which a test checks.
        return SandboxSpec(**given)  # type: ignore[arg-type]


class DockerSection(Section):
    """The Docker engine that makes container sandboxes, on this machine or on another."""

    host: str = Field(
        default="",
        pattern=r"^((unix|tcp|ssh)://.+)?$",
        description="unix:///path, tcp://host:port or ssh://user@host; by default DOCKER_HOST or the usual socket",
    )
    transport: Literal["auto", "socket", "attach"] = Field(
        default="auto",
        description="how sandboxes are spoken to: over a socket in a directory that the engine mounts, or attached "
        "through the engine; auto takes the socket where the engine is seen to share the state directory",
    )
    copy_limit_bytes: Bytes = Field(
        default=256 * 2**20,
        validation_alias="copy_limit",
        description="most bytes of a handler's directory, which is copied to an engine that cannot mount it",
    )


class SandboxConfig(SandboxSection):
    """How sandboxes are made, and the defaults of every function's ``sandbox`` section."""

    provider: Literal["auto", "container", "process"] = Field(
        default="auto", description="auto takes containers where Docker answers, else local processes"
    )
    max_starting: Positive = Field(default=4, description="sandboxes that are started at once")
    engine_silence_s: Annotated[Seconds, Field(gt=0)] = Field(
        default=10.0,
        validation_alias="engine_silence",
        description="a Docker engine that answers nothing for so long is given up until it answers again",
    )
    docker: DockerSection = Field(default=DockerSection(), description="the engine")


class ModelsConfig(Section):
    """Bounds of the model runtime."""

    host_memory_bytes: Bytes | None = Field(
        default=None, validation_alias="host_memory", description="host memory for checkpoints; half of the machine's"
    )
    stuck_s: Annotated[Seconds, Field(gt=0)] = Field(
        default=60.0,
        validation_alias="stuck",
        description="a device's process without progress for so long is replaced, and its action tried once more",
    )
    dir: Path | None = Field(
        default=None, description="where relative model paths begin; the YAML file's directory by default"
    )


class PolicySection(Section):
    """A policy with its constants."""

    name: PolicyName = Field(description="policy")
    options: dict[str, Real] = Field(default={}, description="constants by name, for example dop: 8 for fixed")

    def spec(self) -> PolicySpec:
        return PolicySpec(name=self.name, options=self.options)


def _policy_form(value: object) -> str | None:
    if isinstance(value, str):
        return "name"
    if isinstance(value, PolicySection) or (isinstance(value, dict) and "name" in value):
        return "options"
    return "kinds" if isinstance(value, dict) else None


Policy = Annotated[
    Annotated[PolicyName, Tag("name")] | Annotated[PolicySection, Tag("options")],
    Discriminator(
        _policy_form,
        custom_error_type="policy",
        custom_error_message="write a policy's name, or {name: ..., options: {...}}",
    ),
]
PolicyChoice = Annotated[
    Annotated[PolicyName, Tag("name")]
    | Annotated[PolicySection, Tag("options")]
    | Annotated[dict[Name, Policy], Tag("kinds")],
    Discriminator(
        _policy_form,
        custom_error_type="policy",
        custom_error_message="write a policy's name, {name: ..., options: {...}}, or one for each resource",
    ),
]


class SchedulerConfig(Section):
    """Policies and bounds of the queue."""

    policy: PolicyChoice = Field(
        default={"default": "price", "cpu": "adaptive"},
        description="one policy, or one by resource ({cpu: adaptive, gpu: price, default: price})",
    )
    strict: bool = Field(default=False, description="FCFS over all resources at once, as in the paper's text; slower")
    max_queued: Positive = Field(default=65536, description="most actions that wait in all")
    trajectories_max: Positive = Field(default=65536, description="most living trajectories; beyond it 503")
    queue_window: Positive = Field(default=2048, description="most waiting actions that a policy is shown")
    replicate: bool = Field(
        default=True, description="copy models in use into free memory of idle devices; the copies go first"
    )

    def spec(self) -> SchedulerSpec:
        chosen = self.policy if isinstance(self.policy, dict) else {"default": self.policy}
        policies = {
            kind: PolicySpec(name=each) if isinstance(each, str) else each.spec() for kind, each in chosen.items()
        }
        return SchedulerSpec(
            policies={"default": PolicySpec(name="price")} | policies,
            strict=self.strict,
            max_queued=self.max_queued,
            trajectories_max=self.trajectories_max,
            queue_window=self.queue_window,
            replicate=self.replicate,
        )


class TaskSection(Section):
    """An RL task: its share and its bounds."""

    weight: Annotated[float, Field(gt=0, le=1e6), BeforeValidator(refuse_boolean)] = Field(
        default=1.0, description="share of a contended resource, relative to the other tasks"
    )
    max_queued: Positive = Field(default=4096, description="most waiting actions; beyond it 429")
    caps: dict[Name, Positive] = Field(default={}, description="most units of a resource held together")

    def spec(self) -> TaskSpec:
        return TaskSpec(weight=self.weight, max_queued=self.max_queued, caps=self.caps)
