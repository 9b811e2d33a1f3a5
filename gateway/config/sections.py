"""The server's sections of the YAML, each passed whole to who needs it.

A field's name carries its unit (``drain_grace_s``), its YAML key does not (``drain_grace: 30s``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from gateway.config.facades import FacadesSection
from manager.config import ResourceName, SchedulerSpec
from manager.function import SandboxSpec, Setting
from manager.scheduler.policy import PolicySpec
from runtimes.node.membership import RosterSettings
from runtimes.node.protocol import LinkSettings
from runtimes.node.ray.process import RaySettings
from runtimes.sandbox.handler.sources import RequirementSettings
from runtimes.sandbox.provider import ProviderSettings
from runtimes.sandbox.session import SessionSettings
from runtimes.sandbox.snapshots import NodeSnapshotSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionSection:
    """How long ended invocations are kept, with their logs."""

    records_age_s: Annotated[float, Setting("age of ended records")] = 30 * 86400.0
    records_bytes: Annotated[int, Setting("size of the record database", key="records_size")] = 8 * 2**30
    logs_age_s: Annotated[float, Setting("age of the logs of ended invocations")] = 7 * 86400.0
    logs_bytes: Annotated[int, Setting("size of all logs together", key="logs_size")] = 4 * 2**30
    interval_s: Annotated[float, Setting("time between two clean-ups")] = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsSection:
    """Bounds of live logs; the bound of one invocation's log is the function's ``log_limit``."""

    followers_max: Annotated[int, Setting("most followers at once", ge=1)] = 4096
    stall_s: Annotated[float, Setting("a follower that reads slower is dropped, and told so")] = 30.0
    tail_bytes: Annotated[int, Setting("of a running invocation's log, kept in memory")] = 64 * 2**10
    heartbeat_s: Annotated[float, Setting("time between heartbeats to followers")] = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbacksSection:
    """Where results may be posted to; nowhere unless ``allow`` names it."""

    allow: Annotated[tuple[str, ...], Setting("host names, host:port or CIDR blocks that may be called")] = ()
    secret: Annotated[str, Setting("key of the HMAC-SHA256 signature")] = field(default="", repr=False)
    timeout_s: Annotated[float, Setting("one delivery")] = 10.0
    max_attempts: Annotated[int, Setting("deliveries tried before it is given up", ge=1)] = 8
    backoff_s: Annotated[float, Setting("first wait, doubled each time")] = 1.0
    concurrency: Annotated[int, Setting("deliveries at once", ge=1)] = 64
    per_host: Annotated[int, Setting("deliveries at once to one host and port", ge=1)] = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TracesSection:
    """Where spans of ended invocations are sent: OpenTelemetry, OTLP over HTTP; needs the extra ``otel``."""

    endpoint: Annotated[str, Setting("URL of a collector, such as http://127.0.0.1:4318/v1/traces; empty: none")] = ""
    headers: Annotated[Mapping[str, str], Setting("sent with each request, a collector's key for example")] = field(
        default_factory=dict, repr=False
    )
    service: Annotated[str, Setting("service.name of the spans")] = "tangram"
    share: Annotated[float, Setting("of calls without a trace of their own, kept", ge=0.0, le=1.0)] = 1.0
    queue_max: Annotated[int, Setting("most spans that wait; beyond it they are dropped and counted", ge=1)] = 8192
    interval_s: Annotated[float, Setting("longest wait of a span for its request")] = 2.0
    timeout_s: Annotated[float, Setting("one request, with the tries after it")] = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsSection:
    """How many steps of RL tasks are kept (docs/SCHEDULING.md 1.8)."""

    tasks: Annotated[int, Setting("most tasks whose steps are kept; the one told of least recently goes", ge=1)] = 256
    kept: Annotated[int, Setting("most steps of a task; the one opened first goes", ge=1)] = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSection:
    """Certificates of the doors, in PEM."""

    cert: Annotated[Path, Setting("file of the certificate, followed by those that signed it")]
    key: Annotated[Path, Setting("file of its private key")]
    client_ca: Annotated[
        Path | None, Setting("file of who signs callers' certificates: no caller comes in without")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The gateway's doors, its record and their bounds."""

    host: Annotated[str, Setting("address to listen on; any but loopback needs tls or clear_text")] = "127.0.0.1"
    port: Annotated[int, Setting("HTTP port; 0 takes a free one", ge=0, le=65535)] = 8080
    grpc_port: Annotated[int, Setting("gRPC port; 0 takes a free one", ge=0, le=65535)] = 8081
    auth: Annotated[
        Literal["token", "none"],
        Setting("none: whoever reaches this machine's loopback may do everything, web pages of others excepted"),
    ] = "token"
    token: Annotated[
        str,
        Setting(
            "admin token, 16 characters at least, instead of the one that the first start writes to the state directory"
        ),
    ] = field(default="", repr=False)
    token_file: Annotated[Path | None, Setting("file that holds the admin token")] = None
    tls: Annotated[TlsSection | None, Setting("HTTP and gRPC speak TLS")] = None
    clear_text: Annotated[bool, Setting("tokens may cross the network in clear text, beyond loopback")] = False
    secrets_dir: Annotated[Path | None, Setting("directory whose files are the secrets of ${secret:NAME}")] = None
    state_dir: Annotated[Path, Setting("directory of records, logs and history")] = Path(".tangram")
    durability: Annotated[
        Literal["process", "power"],
        Setting("what an accepted invocation survives: a killed process, or also a power cut"),
    ] = "process"
    body_limit_bytes: Annotated[int, Setting("largest request body")] = 16 * 2**20
    file_limit_bytes: Annotated[int, Setting("largest file up or down")] = 256 * 2**20
    body_timeout_s: Annotated[float, Setting("longest time for a request's body to arrive")] = 300.0
    connections_max: Annotated[
        int, Setting("most open connections of each door; beyond it 503, or UNAVAILABLE on gRPC", ge=1)
    ] = 8192
    descriptors_reserved: Annotated[
        int,
        Setting("open files kept for records and sandboxes; the doors share the rest of the machine's limit", ge=64),
    ] = 256
    free_min_bytes: Annotated[
        int, Setting("free bytes of the state directory below which the gateway is not ready", key="free_min")
    ] = 32 * 2**20
    streams_max: Annotated[int, Setting("most open calls of one connection (HTTP/2 and gRPC)", ge=1)] = 1000
    resets_max: Annotated[
        int, Setting("most calls of one HTTP/2 connection that may be reset in a minute; beyond it, it is closed", ge=1)
    ] = 4096
    inputs_bytes: Annotated[
        int,
        Setting("bytes of inputs that arrive, or whose invocations have not ended; beyond it 503", key="inputs_max"),
    ] = 2**30
    batch_max: Annotated[int, Setting("most invocations in one batch", ge=1)] = 10_000
    wait_max_s: Annotated[float, Setting("longest ?wait= that a caller may ask for")] = 600.0
    drain_grace_s: Annotated[float, Setting("time for running work at SIGTERM")] = 30.0
    idempotency_ttl_s: Annotated[float, Setting("life of a key")] = 86400.0
    max_age_s: Annotated[float, Setting("asynchronous work older than this is not run any more")] = 86400.0
    check_time_s: Annotated[
        float, Setting("longest check of the database after an unclean end, beside the work; 0 checks nothing")
    ] = 60.0
    retention: Annotated[RetentionSection, Setting("how long records and logs are kept")] = RetentionSection()
    logs: Annotated[LogsSection, Setting("bounds of live logs")] = LogsSection()
    callbacks: Annotated[CallbacksSection, Setting("where results may be posted to")] = CallbacksSection()
    traces: Annotated[TracesSection, Setting("where spans of invocations are sent")] = field(
        default_factory=TracesSection
    )
    steps: Annotated[StepsSection, Setting("how many steps of tasks are kept")] = StepsSection()
    sessions: Annotated[SessionSettings, Setting("bounds of interactive sessions")] = field(
        default_factory=SessionSettings
    )
    facades: Annotated[FacadesSection, Setting("doors in other protocols, none by default")] = field(
        default_factory=FacadesSection
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuConfig:
    """Which cores actions may have."""

    reserved: Annotated[int, Setting("cores left to the gateway, the first of the machine", ge=0)] = 0
    cores: Annotated[str, Setting("cores for actions, for example 0-3,8; empty takes all that are allowed")] = ""
    topology: Annotated[Path | None, Setting("JSON file {numa: [...], memory_bytes: N} instead of the machine's")] = (
        None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesConfig:
    """The model devices of the node."""

    kind: Annotated[
        Literal["auto", "cpu", "cuda", "none"], Setting("auto takes cuda where there is one, else cpu; none: no models")
    ] = "auto"
    count: Annotated[int | None, Setting("devices used; all cuda devices, or one cpu device, by default", ge=0)] = None
    memory_bytes: Annotated[int | None, Setting("bytes of each device; measured by default")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """This machine as the scheduler sees it."""

    name: Annotated[ResourceName, Setting("name in leases and records")] = "local"
    cpu: Annotated[CpuConfig, Setting("cores")] = CpuConfig()
    memory_bytes: Annotated[int | None, Setting("bytes that trajectories may hold; nine tenths of the machine's")] = (
        None
    )
    devices: Annotated[DevicesConfig, Setting("model devices")] = DevicesConfig()
    labels: Annotated[Mapping[str, str], Setting("what functions may choose it by (nodes: {pool: big})")] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Other machines that join this gateway as nodes (docs/CLUSTER.md)."""

    listen: Annotated[str, Setting("address and port at which nodes join, over TLS; port 0 takes a free one")] = (
        "127.0.0.1:8082"
    )
    advertise: Annotated[str, Setting("the same as nodes reach it; that of listen by default")] = ""
    local: Annotated[
        Literal["inline", "process", "none"],
        Setting("this machine serves in the gateway (inline), by a daemon of its own (process), or not at all (none)"),
    ] = "inline"
    ticket_ttl_s: Annotated[float, Setting("life of a ticket that admits a node once", gt=0)] = 120.0
    greeting_s: Annotated[float, Setting("time for a connection to show who it is", gt=0)] = 10.0
    greetings_max: Annotated[
        int,
        Setting(
            "most connections that have not shown it yet; others are cut, those of the busiest address first", ge=1
        ),
    ] = 64
    link: Annotated[LinkSettings, Setting(inline=True)] = field(default_factory=LinkSettings)
    times: Annotated[RosterSettings, Setting(inline=True)] = field(default_factory=RosterSettings)
    snapshots: Annotated[
        NodeSnapshotSettings, Setting("bounds of the snapshots of trajectories on all nodes together")
    ] = field(default_factory=NodeSnapshotSettings)
    ray: Annotated[RaySettings | None, Setting("a Ray cluster whose machines become nodes by themselves")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxConfig:
    """How sandboxes are made, and the defaults of every function's ``sandbox`` section."""

    default: Annotated[SandboxSpec, Setting(inline=True)] = field(default_factory=SandboxSpec)
    provider: Annotated[ProviderSettings, Setting(inline=True)] = field(default_factory=ProviderSettings)
    requirements: Annotated[RequirementSettings, Setting("what handlers' requirements are installed from")] = field(
        default_factory=RequirementSettings
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(SchedulerSpec):
    """Policies and bounds of the queue."""

    policies: Annotated[
        Mapping[str, PolicySpec],
        Setting("one policy, or one by resource ({cpu: adaptive, gpu: price, default: price})", key="policy"),
    ] = field(default_factory=lambda: {"default": PolicySpec(name="price"), "cpu": PolicySpec(name="adaptive")})
    undeclared_tasks: Annotated[
        Literal["take", "refuse"],
        Setting(
            "calls of a task that no tasks section declares: take, each such task with weight 1, 4096 waiting actions "
            "and no caps, whatever is declared of default; refuse, so that a mistyped X-Task does not get round the "
            "bounds of the task that was meant"
        ),
    ] = "take"
