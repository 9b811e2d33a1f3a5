"""The configuration as declared: sections, functions, resources and their JSON schema."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache, partial, reduce
from operator import or_
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Self, Union, cast, get_args, get_origin

import orjson
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import ErrorDetails
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from gateway.config.yaml import ConfigProblem, KeyPath, Position, walk_up
from manager.action import Amdahl, EfficiencyTable, Elasticity, UnitSet
from manager.config import ResourceName, SchedulerSpec, TaskSpec
from manager.errors import InvalidConfig, Reason
from manager.function import FunctionSpec, Isolation, RetrySpec, SandboxSpec, Setting, settings_of
from manager.resources.pools import KINDS as RESOURCE_KINDS
from manager.resources.pools import ResourceSpec
from manager.scheduler.policy import PolicySpec
from manager.scheduler.registry import PolicyName, make_policy
from runtimes.kind import DeclarationSite, Kind
from runtimes.kinds import KINDS
from runtimes.model.request import ModelSettings
from runtimes.node.membership import MembershipSettings
from runtimes.node.protocol import LinkSettings
from runtimes.node.ray.process import RaySettings
from runtimes.sandbox.handler.sources import RequirementSettings
from runtimes.sandbox.provider import ProviderSettings
from runtimes.sandbox.session import SessionSettings
from runtimes.sandbox.snapshots import NodeSnapshotSettings
from tangram import types
from tangram.types import mismatch

#: How a number is written, by the unit of its field's name.
_UNITS = ("s", "bytes")
#: Fields of an inline bound; the others of a `Setting` are words.
_BOUNDS = ("ge", "gt", "le", "pattern", "min_length")
#: Beyond it JSON's numbers are not exact.
INTEGER_MAX = 2**53


class Section(BaseModel):
    """A part of the YAML: frozen, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_alias=True, allow_inf_nan=False)


def refuse_boolean(value: object) -> object:
    """Refuse a boolean as a number; text with digits is one too (an interpolated variable)."""
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


Seconds = Annotated[
    float,
    BeforeValidator(types.duration_s),
    WithJsonSchema({"type": "string", "pattern": f"^{types.DURATION_PATTERN}$", "examples": ["30s"]}),
]
Bytes = Annotated[
    int,
    BeforeValidator(types.size_bytes),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": f"^{types.SIZE_PATTERN}$"},
                {"type": "integer", "minimum": 0},
            ],
            "examples": ["512Mi"],
        }
    ),
]


def _at_least_bytes(least: int, value: int) -> int:
    """Refuse fewer bytes; the least is told as sizes are written."""
    if value < least:
        raise ValueError(f"must be at least {types.show_size(least)}")
    return value


def section_of(noun: type, **forms: Any) -> Any:
    """Return the type by which pydantic makes a ``noun`` from its section of the YAML.

    Any: what pydantic is told is an expression. ``forms`` are the types of fields whose YAML has a form of its own.
    """
    return Annotated[model_of(noun, **forms), AfterValidator(partial(made, noun))]


def given_of(noun: type) -> Any:
    """Return the type that yields the fields of a ``noun`` that a section gives, by name; none is required."""
    return Annotated[_model(noun, {}, optional=True), AfterValidator(_given)]


def _given(checked: BaseModel) -> Mapping[str, object]:
    """Return what a section gives, null left out."""
    return {name: value for name in checked.model_fields_set if (value := getattr(checked, name)) is not None}


def model_of(noun: type, **forms: Any) -> type[Section]:
    """Return the model of a noun's section, whose fields are its settings."""
    return _model(noun, forms)


def key_of(name: str, setting: Setting) -> str:
    """Return the key of a field: its name without its unit, unless the setting says otherwise."""
    stem, _, unit = name.rpartition("_")
    return setting.key or (stem if unit in _UNITS else name)


def made(noun: type, checked: BaseModel) -> Any:
    """Make a noun from its checked section; Any: it is a ``noun``."""
    return noun(**values(noun, checked))


def values(noun: type, checked: BaseModel) -> dict[str, Any]:
    """Return the settings of a noun from its checked section, by field."""
    return {
        name: made(_bare(hint), checked) if setting.inline else getattr(checked, _attribute(name))
        for name, hint, setting in settings_of(noun)
    }


def _model(noun: type, forms: Mapping[str, Any], *, optional: bool = False) -> type[Section]:
    return create_model(noun.__name__, __base__=Section, __doc__=noun.__doc__, **_fields(noun, forms, optional))


def _fields(noun: type, forms: Mapping[str, Any], optional: bool) -> dict[str, Any]:
    """Return the fields of the model: type and what else is told of it, by attribute."""
    declared = {field.name: field for field in fields(noun)}
    result: dict[str, Any] = {}
    for name, hint, setting in settings_of(noun):
        if setting.inline:
            result |= _fields(_bare(hint), forms, optional)
            continue
        form = forms[name] if name in forms else _form(hint, name.rpartition("_")[2])
        shown: dict[str, Any] = {"validation_alias": key_of(name, setting), "description": setting.meaning}
        if optional:
            form, shown["default"] = form | None, None
        elif declared[name].default is not MISSING:
            shown["default"] = declared[name].default
        elif declared[name].default_factory is not MISSING:
            shown["default_factory"] = declared[name].default_factory
        result[_attribute(name)] = (form, Field(repr=declared[name].repr, **shown))
    return result


def _attribute(name: str) -> str:
    """A model has attributes of its own: ``json``."""
    return f"{name}_" if hasattr(Section, name) else name


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _form(hint: Any, unit: str, bounds: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return what pydantic checks an annotation with; bounds belong to its innermost type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _form(args[0], unit, {**bounds, **_bounds(args[1:])})
    if origin in (Union, UnionType):
        return Union[tuple(_form(each, unit, bounds) for each in args)]  # noqa: UP007  # made at run time
    if hint is float and unit != "s":
        return Annotated[float, Field(**bounds), BeforeValidator(refuse_boolean)]
    if hint is int and unit != "bytes":
        return Annotated[int, Field(**{"le": INTEGER_MAX, **bounds}), BeforeValidator(refuse_boolean)]
    if hint is Path and bounds:
        return Annotated[str, Field(**bounds), AfterValidator(lambda text: Path(text))]
    form = hint
    if origin is tuple:
        form = tuple[_form(args[0], unit), ...]  # type: ignore[misc]  # made at run time
    elif origin in (Mapping, dict):
        form = dict.__class_getitem__(tuple(_form(each, unit) for each in args))
    elif isinstance(hint, type) and is_dataclass(hint):
        form = section_of(hint)
    elif hint is float:
        form = Seconds
    elif hint is int:
        return Annotated[Bytes, AfterValidator(partial(_at_least_bytes, bounds.get("ge", 0)))]
    return Annotated[form, Field(**bounds)] if bounds and hint is not type(None) else form


def _bounds(metadata: tuple[object, ...]) -> dict[str, Any]:
    settings = [each for each in metadata if isinstance(each, Setting)]
    for each in settings:
        if each.pattern is not None:
            types.declare(each.pattern, each.words)
    result = {name: bound for each in settings for name in _BOUNDS if (bound := getattr(each, name)) is not None}
    return {**result, "coerce_numbers_to_str": True} if any(each.number_too for each in settings) else result


#: Keys beneath which stands data, not schemas.
DATA = ("const", "enum", "default", "examples")


def checked_schema(schema: Mapping[str, object] | None) -> Mapping[str, object] | None:
    """Return the schema; raises ValueError with the place if it is none, or refers to what is not in it."""
    if schema is None:
        return None
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"is no JSON Schema (draft 2020-12): {error.json_path}: {error.message[:300]}") from None
    resolver = Registry().with_resource("", DRAFT202012.create_resource(schema)).resolver()
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except (Unresolvable, ValueError) as error:
            raise ValueError(f"is no JSON Schema that stands alone: $ref {reference!r} leads nowhere in it") from error
    return schema


def _references(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            if key in ("$ref", "$dynamicRef") and isinstance(below, str):
                yield below
            elif key not in DATA or isinstance(below, Mapping):
                yield from _references(below)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for below in value:
            yield from _references(below)


@dataclass(frozen=True, slots=True, kw_only=True)
class FacadeSection:
    """What every facade that speaks plain HTTP has."""

    port: Annotated[
        int | None,
        Setting("a listener of its own, where its paths begin at the root; 0 takes a free one", ge=0, le=65535),
    ] = None
    client_timeout_s: Annotated[
        float | None,
        Setting(
            "its clients give up after this time; a second before, a call is withdrawn. By default what is known of "
            "them"
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardsFacade(FacadeSection):
    """Remote rewards and retrieval: ``/rm/{function}`` (slime, OpenRLHF) and ``/retrieve/{function}`` (Search-R1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxFusionFacade(FacadeSection):
    """SandboxFusion's ``/run_code``, as verl's code reward and ROLL ask."""

    languages: Annotated[
        Mapping[Literal["python", "pytest", "bash", "nodejs", "cpp"], str],
        Setting("language: the exec function that runs it, whose sandbox has python3 and what the language needs"),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsFacade(FacadeSection):
    """Teachers and reward models: what clients of OpenAI, vLLM and SGLang ask of a model server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpFacade(FacadeSection):
    """MCP over streamable HTTP, ``/mcp``: functions as the tools of a model's client; needs the extra ``mcp``."""

    functions: Annotated[
        tuple[Annotated[str, Setting(min_length=1)], ...],
        Setting("the functions that are tools, in this order; no other can be called"),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwerexFacade(FacadeSection):
    """SWE-ReX's runtime server, for SWE-agent: bash sessions, commands and files, one trajectory for each runtime."""

    function: Annotated[
        str,
        Setting(
            "the exec function that runs them where the API key names the trajectory (TOKEN.TRAJECTORY); "
            "its sandbox has bash and python3",
            min_length=1,
        ),
    ]
    keep: Annotated[bool, Setting("whether a trajectory lives on when its client closes the runtime")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class E2bFacade(FacadeSection):
    """The E2B API, for its SDK: a sandbox is a trajectory, and its commands and files are envd's."""

    function: Annotated[
        str,
        Setting(
            "the exec function whose sandboxes are those of the template 'base' and of images; other exec functions "
            "are templates by their names",
            min_length=1,
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerFacade:
    """The Docker Engine API on a unix socket, for the docker CLI and docker-py: a container is a trajectory."""

    socket: Annotated[
        str,
        Setting(
            "where it listens, absolute; only the gateway's own user can open it",
            pattern=r"^/.*[^/]$",
            words="an absolute path",
        ),
    ]
    function: Annotated[
        str,
        Setting(
            "the exec function whose sandboxes are the containers, unless a label tangram.function names another",
            min_length=1,
        ),
    ]
    client_timeout_s: Annotated[
        float | None,
        Setting(
            "its clients give up after this time. By default what is known of them: docker-py 60s, the docker CLI never"
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FacadesSection:
    """Servers of other protocols, for clients as they are; off unless named (``rewards: {}``)."""

    rewards: Annotated[RewardsFacade | None, Setting("remote rewards and retrieval")] = None
    sandboxfusion: Annotated[SandboxFusionFacade | None, Setting("SandboxFusion's /run_code")] = None
    models: Annotated[ModelsFacade | None, Setting("model servers of OpenAI, vLLM and SGLang")] = None
    mcp: Annotated[McpFacade | None, Setting("functions as tools of MCP")] = None
    swerex: Annotated[SwerexFacade | None, Setting("SWE-ReX's runtime server")] = None
    e2b: Annotated[E2bFacade | None, Setting("the E2B API")] = None
    docker: Annotated[DockerFacade | None, Setting("the Docker Engine API on a unix socket")] = None

    def opened(self) -> Iterator[tuple[str, FacadeSection]]:
        """Yield the facades that are open and speak plain HTTP, by the name of their field."""
        for each in fields(self):
            section = getattr(self, each.name)
            if isinstance(section, FacadeSection):
                yield each.name, section

    @property
    def ports(self) -> Mapping[str, int]:
        """The facades that have a listener of their own."""
        return {name: section.port for name, section in self.opened() if section.port is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PortsSection:
    """Servers in sandboxes, reached through a listener of its own (docs/SANDBOXES.md, Ports)."""

    port: Annotated[
        int | None, Setting("their listener on server.host; 0 takes a free port; none by default", ge=0, le=65535)
    ] = None
    advertise: Annotated[str, Setting("the same as callers reach it, as http://HOST:PORT")] = ""
    body_limit_bytes: Annotated[int, Setting("largest body of a request or an answer")] = 2**30
    connections_max: Annotated[
        int, Setting("most connections to the servers of one trajectory; beyond it 503", ge=1, le=1024)
    ] = 256
    grants_max: Annotated[int, Setting("most ports that are open at once; beyond it 503", ge=1)] = 4096
    answer_s: Annotated[float, Setting("a server that has said nothing for so long owes no answer", gt=0)] = 300.0
    linger_s: Annotated[
        float, Setting("servers keep their cores for so long after what they said last, for what may follow", gt=0)
    ] = 0.05
    turn_s: Annotated[
        float, Setting("after so long a server that goes on makes place for the trajectory's other actions", gt=0)
    ] = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionSection:
    """How long ended invocations are kept, with their logs."""

    records_age_s: Annotated[float, Setting("age of ended records")] = 30 * 86400.0
    records_bytes: Annotated[int, Setting("size of the record database", key="records_size")] = 8 * 2**30
    logs_age_s: Annotated[float, Setting("age of the logs of ended invocations")] = 7 * 86400.0
    logs_bytes: Annotated[int, Setting("size of all logs together", key="logs_size")] = 4 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbacksSection:
    """Where results may be posted to; nowhere unless ``allow`` names it."""

    allow: Annotated[tuple[str, ...], Setting("host names, host:port or CIDR blocks that may be called")] = ()
    secret: Annotated[str, Setting("key of the HMAC-SHA256 signature")] = field(default="", repr=False)
    timeout_s: Annotated[float, Setting("one delivery")] = 10.0
    max_attempts: Annotated[int, Setting("deliveries tried before it is given up", ge=1)] = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TracesSection:
    """Where spans of ended invocations are sent: OpenTelemetry, OTLP over HTTP; needs the extra ``otel``."""

    endpoint: Annotated[str, Setting("URL of a collector, such as http://127.0.0.1:4318/v1/traces; empty: none")] = ""
    headers: Annotated[Mapping[str, str], Setting("sent with each request, a collector's key for example")] = field(
        default_factory=dict, repr=False
    )
    service: Annotated[str, Setting("service.name of the spans")] = "tangram"
    share: Annotated[float, Setting("of calls without a trace of their own, kept", ge=0.0, le=1.0)] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSection:
    """Certificates of the servers, in PEM."""

    cert: Annotated[Path, Setting("file of the certificate, followed by those that signed it")]
    key: Annotated[Path, Setting("file of its private key")]
    client_ca: Annotated[
        Path | None, Setting("file of who signs callers' certificates: no caller comes in without")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The gateway's servers, its record and their bounds."""

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
    stream_message_bytes: Annotated[
        int, Setting("largest message of a stream of calls (/v1/stream)", key="stream_message")
    ] = 32 * 2**20
    stream_calls_max: Annotated[
        int, Setting("most calls of one stream that are in flight; beyond it they are answered 429", ge=1)
    ] = 16_384
    connections_max: Annotated[
        int, Setting("most open connections of each server; beyond it 503, or UNAVAILABLE on gRPC", ge=1)
    ] = 8192
    descriptors_reserved: Annotated[
        int,
        Setting("open files kept for records and sandboxes; the servers share the rest of the machine's limit", ge=64),
    ] = 256
    free_min_bytes: Annotated[
        int, Setting("free bytes of the state directory below which the gateway is not ready", key="free_min")
    ] = 32 * 2**20
    inputs_bytes: Annotated[
        int,
        Setting("bytes of inputs that arrive, or whose invocations have not ended; beyond it 503", key="inputs_max"),
    ] = 2**30
    drain_grace_s: Annotated[float, Setting("time for running work at SIGTERM")] = 30.0
    max_age_s: Annotated[float, Setting("asynchronous work older than this is not run any more")] = 86400.0
    retention: Annotated[RetentionSection, Setting("how long records and logs are kept")] = RetentionSection()
    callbacks: Annotated[CallbacksSection, Setting("where results may be posted to")] = CallbacksSection()
    traces: Annotated[TracesSection, Setting("where spans of invocations are sent")] = field(
        default_factory=TracesSection
    )
    sessions: Annotated[SessionSettings, Setting("bounds of interactive sessions")] = field(
        default_factory=SessionSettings
    )
    #: Longest time for a request's body to arrive: a body of 256 MiB over 10 Mbit/s takes as long.
    body_timeout_s: float = 300.0
    #: Most invocations in one batch, which is one commit and one scheduling pass.
    batch_max: int = 10_000
    #: Longest ``?wait=`` that a caller may ask for: proxies cut longer silences.
    wait_max_s: float = 600.0
    #: Life of an Idempotency-Key: clients try a call again for minutes.
    idempotency_ttl_s: float = 86400.0
    #: Most followers of logs at once, seconds between two heartbeats to one, and seconds after which one that reads
    #: slower is dropped, and told so.
    followers_max: int = 4096
    heartbeat_s: float = 10.0
    stall_s: float = 30.0
    facades: Annotated[FacadesSection, Setting("servers of other protocols, none by default")] = field(
        default_factory=FacadesSection
    )
    ports: Annotated[PortsSection, Setting("servers in sandboxes that callers reach")] = field(
        default_factory=PortsSection
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
        Literal["inline", "none"], Setting("this machine serves in the gateway (inline), or not at all (none)")
    ] = "inline"
    #: Life of a ticket that admits a node once.
    ticket_ttl_s: float = 120.0
    handshake_s: Annotated[float, Setting("time for a connection to show who it is", gt=0)] = 10.0
    handshakes_max: Annotated[
        int,
        Setting(
            "most connections that have not shown it yet; others are cut, those of the busiest address first", ge=1
        ),
    ] = 64
    link: Annotated[LinkSettings, Setting(inline=True)] = field(default_factory=LinkSettings)
    times: Annotated[MembershipSettings, Setting(inline=True)] = field(default_factory=MembershipSettings)
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


Name = Annotated[str, Field(pattern=ResourceName.__metadata__[0].pattern)]


class PolicySection(Section):
    """A policy with its constants."""

    name: PolicyName = Field(description="policy")
    options: dict[str, Annotated[float, Field(ge=0), BeforeValidator(refuse_boolean)]] = Field(
        default={}, description="constants by name, for example dop: 8 for fixed"
    )

    @model_validator(mode="after")
    def _known(self) -> Self:
        """Refuse options that the policy has not, or not in this range."""
        try:
            make_policy(PolicySpec(name=self.name, options=self.options))
        except InvalidConfig as error:
            raise ValueError(str(error)) from error
        return self


def _policy_form(value: object) -> str | None:
    if isinstance(value, str):
        return "name"
    if isinstance(value, PolicySection) or (isinstance(value, dict) and "name" in value):
        return "options"
    return "kinds" if isinstance(value, dict) else None


def _policies(chosen: str | PolicySection | Mapping[str, str | PolicySection]) -> Mapping[str, PolicySpec]:
    by_kind = chosen if isinstance(chosen, Mapping) else {"default": chosen}
    specs = {
        kind: PolicySpec(name=each) if isinstance(each, str) else PolicySpec(name=each.name, options=each.options)
        for kind, each in by_kind.items()
    }
    return {"default": PolicySpec(name="price")} | specs


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
    AfterValidator(_policies),
]
Scheduler = section_of(SchedulerConfig, policies=PolicyChoice)


def _declared_form(spec: type[ResourceSpec]) -> Any:
    """Return what pydantic checks one kind with; Any: it is made at run time."""
    fields: dict[str, Any] = {"kind": (Literal[spec.kind], Field(description=spec.meaning))}
    model = create_model(spec.__name__, __base__=model_of(spec), __doc__=spec.__doc__, **fields)
    return Annotated[model, AfterValidator(partial(made, spec))]


#: What pydantic checks an entry with.
RESOURCE: Any = Annotated[
    reduce(or_, [Annotated[_declared_form(spec), Tag(spec.kind)] for spec in RESOURCE_KINDS]), Discriminator("kind")
]


#: Most units of a resource that one action may ask for: the search for the best count grows with it.
UNITS_MAX = 65536

Units = Annotated[int, Field(ge=1, le=UNITS_MAX), BeforeValidator(refuse_boolean)]
Efficiency = Annotated[float, Field(gt=0, le=1), BeforeValidator(refuse_boolean)]


class UnitRange(Section):
    """Every count from ``min`` to ``max``."""

    min: Units = Field(description="fewest units")
    max: Units = Field(description="most units")

    @model_validator(mode="after")
    def _ordered(self) -> UnitRange:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        return self

    def unit_set(self) -> UnitSet:
        return UnitSet.span(self.min, self.max)


class UnitChoices(Section):
    """Some counts only, for example 1, 2, 4, 8."""

    choices: tuple[Units, ...] = Field(min_length=1, description="admissible counts")

    def unit_set(self) -> UnitSet:
        return UnitSet.of(self.choices)


def _amount_form(value: object) -> str | None:
    if isinstance(value, dict):
        return "choices" if "choices" in value else "range"
    return "units" if isinstance(value, int | float | str) else None


Amount = Annotated[
    Annotated[Units, Tag("units")] | Annotated[UnitRange, Tag("range")] | Annotated[UnitChoices, Tag("choices")],
    Discriminator(
        _amount_form,
        custom_error_type="amount",
        custom_error_message="write a count, {min: ..., max: ...} or {choices: [...]}",
    ),
]


def unit_set(amount: int | UnitRange | UnitChoices) -> UnitSet:
    return UnitSet.fixed(amount) if isinstance(amount, int) else amount.unit_set()


class ElasticitySection(Section):
    """How much faster more units of the key resource make it; learned unless it is given."""

    key: Name = Field(description="the resource whose amount changes the duration")
    serial_fraction: Annotated[float, Field(ge=0, le=1), BeforeValidator(refuse_boolean)] | None = Field(
        default=None, description="part of the work that cannot be shared (Amdahl)"
    )
    table: dict[Units, Efficiency] | None = Field(
        default=None, min_length=1, description="efficiency E by units: {1: 1.0, 2: 0.9}"
    )
    learned: bool = Field(default=False, description="fit it to the history (also when nothing is given)")

    @model_validator(mode="after")
    def _one_form(self) -> ElasticitySection:
        if [self.serial_fraction is not None, self.table is not None, self.learned].count(True) > 1:
            raise ValueError("give one of serial_fraction, table and learned")
        return self

    def elasticity(self) -> Elasticity | None:
        """The declared curve, or None to learn it."""
        if self.serial_fraction is not None:
            return Amdahl(self.serial_fraction)
        return None if self.table is None else EfficiencyTable(tuple(sorted(self.table.items())))


def _reason_or_status(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and 400 <= value <= 599:
        return value
    if isinstance(value, str) and value in set(Reason):
        return Reason(value)
    raise ValueError(f"{value!r} is neither a reason ({', '.join(Reason)}) nor an HTTP status from 400 to 599")


def _parted(retry: RetrySpec) -> RetrySpec:
    """Part what is tried again into reasons and statuses, which the YAML writes in one list."""
    if retry.max_attempts > 1 and not retry.on:
        raise ValueError("say on what it is tried again, for example on: [environment_lost, 503]")
    reasons = tuple(each for each in retry.on if isinstance(each, Reason))
    return replace(retry, on=reasons, on_status=tuple(int(each) for each in retry.on if each not in reasons))


TriedAgain = Annotated[
    Reason | int,
    BeforeValidator(_reason_or_status),
    WithJsonSchema({"enum": [*Reason, *range(400, 600)]}),
]
Retry: Any = Annotated[section_of(RetrySpec, on=tuple[TriedAgain, ...]), AfterValidator(_parted)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSection:
    """A function as its section describes it."""

    kind: Kind
    #: Fields of its `FunctionSpec`.
    settings: Mapping[str, Any]
    cost: Mapping[str, UnitSet] | None
    elasticity: ElasticitySection | None
    #: The keys of its kind: an instance of its `Kind.section`.
    own: object
    #: What it says of its sandbox, by field; None for kinds without one.
    sandbox: Mapping[str, Any] | None


class _Costs(Section):
    """What a function takes, and what that makes of its duration."""

    cost: dict[Name, Amount] | None = Field(
        default=None, description="units of each resource; one cpu (gpu for a model, nothing for an api) by default"
    )
    elasticity: ElasticitySection | None = Field(default=None, description="how more units make it faster")


#: A schema that callers' inputs are checked against, or that results are said to follow.
DeclaredSchema = Annotated[Mapping[str, object] | None, AfterValidator(checked_schema)]
_Every = model_of(FunctionSpec, retry=Retry, input_schema=DeclaredSchema, result_schema=DeclaredSchema)


def form_name(kind: Kind) -> str:
    """Return the name of a kind's functions in the JSON Schema."""
    return f"{kind.name.title()}Function"


def _function_form(kind: Kind) -> Any:
    """Return the type that makes a `FunctionSection` of one kind."""
    own = () if kind.section is None else (model_of(kind.section),)
    result: dict[str, Any] = {"runtime": (Literal[kind.name], Field(description=kind.meaning))}
    if kind.sandbox:
        result["sandbox"] = (given_of(SandboxSpec), Field(default={}, description=kind.sandbox))
    meaning = f"{kind.meaning[0].upper()}{kind.meaning[1:]}."
    bases = (*own, _Every, _Costs)
    model = create_model(form_name(kind), __base__=bases, __doc__=meaning, **result)
    return Annotated[model, AfterValidator(partial(_made, kind))]


def _made(kind: Kind, checked: Any) -> FunctionSection:
    cost = checked.cost
    return FunctionSection(
        kind=kind,
        settings=values(FunctionSpec, checked),
        cost=None if cost is None else {name: unit_set(amount) for name, amount in cost.items()},
        elasticity=checked.elasticity,
        own=None if kind.section is None else kind.section(**values(kind.section, checked)),
        sandbox=checked.sandbox if kind.sandbox else None,
    )


#: Any of the kinds, chosen by ``runtime``.
Function: Any = Annotated[Union[tuple(map(_function_form, KINDS.values()))], Field(discriminator="runtime")]  # noqa: UP007


#: Kinds that the machine itself has; a cost may name them without a declaration.
MACHINE_KINDS = ("cpu", "gpu")

FunctionName = Annotated[str, Field(pattern=f"^{types.NAME_PATTERN}$")]

#: Checks one kind of value. Any: what comes out is told by its class.
Adapter = TypeAdapter[Any]

#: Sections that one file holds: form, default and meaning.
_SECTIONS: Mapping[str, tuple[Any, object, str]] = {
    "version": (Literal[1], 1, "version of this format"),
    "server": (section_of(ServerConfig), ServerConfig(), "servers, record and their bounds"),
    "node": (section_of(NodeConfig), NodeConfig(), "this machine as the scheduler sees it"),
    "cluster": (section_of(ClusterConfig), None, "other machines that join as nodes; none without this section"),
    "sandbox": (section_of(SandboxConfig), SandboxConfig(), "how sandboxes are made, and their defaults"),
    "models": (section_of(ModelSettings), ModelSettings(), "bounds of the model runtime"),
    "scheduler": (Scheduler, SchedulerConfig(), "policies and bounds of the queue"),
}
#: Sections whose entries may come from several files: form of a name, form of an entry, and meaning.
_MAPS: Mapping[str, tuple[Any, Any, str]] = {
    "resources": (Name, RESOURCE, "quotas and bounds besides the machine's cpu and gpu"),
    "tasks": (FunctionName, section_of(TaskSpec), "RL tasks"),
    "functions": (FunctionName, Function, "functions by name"),
}
SECTIONS: Mapping[str, Adapter] = {name: TypeAdapter(form) for name, (form, _, _) in _SECTIONS.items()}
NAMES: Mapping[str, Adapter] = {name: TypeAdapter(form) for name, (form, _, _) in _MAPS.items()}
MAPS: Mapping[str, Adapter] = {name: TypeAdapter(form) for name, (_, form, _) in _MAPS.items()}


@cache
def schema() -> dict[str, object]:
    """The JSON Schema of a file as it is written, variables not yet replaced."""
    result: dict[str, Any] = {
        name: (form, Field(default=default, description=meaning))
        for name, (form, default, meaning) in _SECTIONS.items()
    } | {
        name: (dict[key, form], Field(default={}, description=meaning))  # type: ignore[valid-type]  # made at run time
        for name, (key, form, meaning) in _MAPS.items()
    }
    doc = "Any of the files: they are merged, and nothing may be given twice."
    document = create_model("ConfigDocument", __base__=Section, __doc__=doc, **result)
    generated = document.model_json_schema(by_alias=True, mode="validation")
    generated["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    generated["title"] = "tangram configuration"
    _write_defaults(generated)
    _allow_variables(generated)
    return generated


def check(
    adapter: Adapter, value: object, path: KeyPath, positions: Mapping[KeyPath, Position]
) -> tuple[object, list[ConfigProblem]]:
    """The value as its model, or None and what is wrong with it. ``path`` is where it stands in its file."""
    try:
        return adapter.validate_python(value, by_alias=True, by_name=False), []
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        return None, [_problem(each, value, path, positions) for each in details]


def suggestion(word: object, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest known word, else the known ones, else nothing."""
    names = sorted(known)
    return nearest(word, names) or (f"; known here: {', '.join(names)}" if names else "")


def _problem(
    detail: ErrorDetails, value: object, path: KeyPath, positions: Mapping[KeyPath, Position]
) -> ConfigProblem:
    """One of pydantic's errors in our words, at the nearest key path that stands in the file."""
    result: KeyPath = path
    # A function's own tag comes first, and may be spelled like one of its keys (``model``).
    for key in detail["loc"][1:] if path[:1] == ("functions",) else detail["loc"]:
        # Union tags are in pydantic's path, not in the file's.
        if (*result, key) in positions:
            result = (*result, key)
    if detail["type"] == "missing":
        result = (*result, detail["loc"][-1])
    message = _message(detail, value, result[len(path) :], path)
    place = next((positions[each] for each in walk_up(result) if each in positions), None)
    return ConfigProblem(message=message, path=result, position=place)


def _message(detail: ErrorDetails, value: object, inner: KeyPath, path: KeyPath) -> str:
    context: Mapping[str, object] = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            return f"unknown key {inner[-1]!r}" + (
                _deeper(inner[-1], path, value, inner[:-1])
                or suggestion(inner[-1], known_keys(path, value, inner[:-1]))
            )
        case "missing":
            return "is required"
        case "union_tag_not_found":
            return f"{str(context['discriminator']).strip(chr(39))} is required"
        case "union_tag_invalid":
            expected = re.findall(r"'([^']*)'", str(context["expected_tags"]))
            return f"{context['tag']!r} is none of {', '.join(expected)}{nearest(context['tag'], expected)}"
        case "literal_error" | "enum":
            expected = re.findall(r"'([^']*)'", str(context["expected"]))
            inputs = inner[-1] if detail["loc"][-1:] == ("[key]",) else _at(value, inner)
            return f"{inputs!r} is none of {context['expected']}{nearest(inputs, expected)}"
        case "value_error":
            return str(context["error"])
        case "string_pattern_mismatch":
            return mismatch(str(context["pattern"]))
        case _:
            return detail["msg"].replace("Input should", "should")


def nearest(word: object, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest known word, else nothing."""
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _deeper(word: object, path: KeyPath, value: object, inner: KeyPath) -> str:
    """``; did you mean 'sandbox.image'?`` for a key of a section that may stand there, else nothing."""
    if path[:1] == ("functions",) and not inner and word in MACHINE_KINDS:
        return f"; did you mean 'cost.{word}'?"
    sections = sorted(known_keys(path, value, inner))
    found = [each for each in sections if word in known_keys(path, value, (*inner, each))]
    return f"; did you mean '{found[0]}.{word}'?" if found else ""


def _at(value: object, path: KeyPath) -> object:
    for key in path:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
    return value


def known_keys(section: KeyPath, value: object, inner: KeyPath) -> set[str]:
    """The keys that may stand at ``inner`` of the value of ``section``, by the JSON Schema."""
    nodes = [schema()]
    for key in section:
        nodes = [child for node in nodes for child in _children(node, key, {})]
    for key in inner:
        nodes = [child for node in nodes for child in _children(node, key, value)]
        value = _at(value, (key,))
    return {name for node in nodes for each in _flat(node, value) for name in _mapping(each, "properties")}


def _children(node: Mapping[str, object], key: object, value: object) -> list[dict[str, object]]:
    result = []
    for each in _flat(node, value):
        patterns = [*_mapping(each, "patternProperties").values(), each.get("additionalProperties"), each.get("items")]
        candidates = [_mapping(each, "properties").get(str(key)), *patterns]
        result.append(next((child for child in candidates if isinstance(child, dict)), {}))
    return result


def _flat(node: Mapping[str, object], value: object) -> list[Mapping[str, object]]:
    """The alternatives of a schema node with references followed; the one that ``value`` chose where it is tagged."""
    if isinstance(reference := node.get("$ref"), str):
        definition = _mapping(schema(), "$defs")[reference.rpartition("/")[2]]
        return _flat(cast(Mapping[str, object], definition), value)
    if isinstance(tagged := node.get("discriminator"), dict) and isinstance(value, dict):
        chosen = tagged["mapping"].get(value.get(tagged["propertyName"]))
        if chosen is not None:
            return _flat({"$ref": chosen}, value)
    alternatives = node.get("anyOf", node.get("oneOf"))
    if isinstance(alternatives, list):
        return [flat for each in alternatives for flat in _flat(each, value)]
    return [node]


def _mapping(node: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = node.get(key, {})
    return value if isinstance(value, dict) else {}


def _write_defaults(node: object) -> None:
    """Defaults in the words of the YAML: ``10m`` and ``4Mi``; those of whole sections are their keys' own."""
    if isinstance(node, list):
        for each in node:
            _write_defaults(each)
    if not isinstance(node, dict):
        return
    default = node.get("default")
    if "default" in node and (default is None or isinstance(default, dict | list)):
        del node["default"]
    elif isinstance(default, int | float) and node.get("type") == "string":
        node["default"] = types.write_duration(default)
    elif isinstance(default, int) and node.get("examples") == ["512Mi"]:
        node["default"] = types.show_size(default)
    for each in node.values():
        _write_defaults(each)


def _allow_variables(node: object) -> None:
    """Let ``${VAR}`` stand where a number, a boolean or a certain text is wanted: an editor sees the raw file."""
    if isinstance(node, list):
        for each in node:
            _allow_variables(each)
    if not isinstance(node, dict):
        return
    if node.get("type") in ("integer", "number", "boolean"):
        node["type"] = [node["type"], "string"]
        node["pattern"] = r"\$\{"
    elif isinstance(node.get("pattern"), str):
        node["pattern"] += r"|\$\{"
    for each in node.values():
        _allow_variables(each)


def function_spec(
    name: str,
    section: FunctionSection,
    place: DeclarationSite,
    *,
    kinds: Collection[str],
    sandbox: SandboxConfig,
) -> FunctionSpec:
    """Return the function that the section describes; what is wrong with it is in ``place.problems``."""
    kind = section.kind
    cost = _cost(section, kinds, place)
    key = _key(section, cost, place)
    # Any: a kind names fields of its functions' class, which checks them.
    own: Mapping[str, Any] = kind.spec(section.own, place)
    spec = kind.function(
        name=name,
        runtime=kind.name,
        cost=cost,
        key=key,
        elasticity=None if section.elasticity is None else section.elasticity.elasticity(),
        sandbox=None if section.sandbox is None else replace(sandbox.default, **section.sandbox),
        **section.settings,
        **own,
    )
    if spec.retry.on_status and kind.name != "api":
        place.refuse(("retry", "on"), "HTTP statuses are tried again by api functions only: name a reason")
    _check_sandbox(spec, sandbox, place)
    return replace(spec, revision=_revision(spec, kind, place))


def _cost(section: FunctionSection, kinds: Collection[str], place: DeclarationSite) -> Mapping[str, UnitSet]:
    if section.cost is None:
        return {} if section.kind.cost is None else {section.kind.cost: UnitSet.fixed(1)}
    for kind in section.cost:
        if kind == "memory":
            place.refuse(("cost", kind), "memory is no cost: write sandbox.memory, which a trajectory holds")
        elif kind not in kinds:
            place.refuse(("cost", kind), f"{kind!r} is no resource{suggestion(kind, kinds)}")
    return section.cost


def _key(section: FunctionSection, cost: Mapping[str, UnitSet], place: DeclarationSite) -> str | None:
    """The key elasticity resource: the declared one, else the only elastic one (its elasticity is then learned)."""
    if section.elasticity is not None:
        key = section.elasticity.key
        if key not in cost:
            place.refuse(("elasticity", "key"), f"{key!r} is not in the cost{suggestion(key, cost)}")
            return None
        return key
    elastic = [kind for kind, units in cost.items() if units.elastic]
    if len(elastic) > 1:
        place.refuse(("cost",), f"{' and '.join(elastic)} are elastic: say which is the key (elasticity.key)")
    return elastic[0] if elastic else None


def _check_sandbox(spec: FunctionSpec, server: SandboxConfig, place: DeclarationSite) -> None:
    if spec.sandbox is None:
        return
    if server.provider.kind == "none":
        place.refuse((), "it needs sandboxes, and sandbox.provider is none")
        return
    if spec.sandbox.warm.min > spec.sandbox.warm.max:
        place.refuse(("sandbox", "warm"), f"min {spec.sandbox.warm.min} is more than max {spec.sandbox.warm.max}")
    if refused := spec.sandbox.refuses(spec.sandbox.user):
        place.refuse(("sandbox", "user"), refused)
    if spec.sandbox.isolation is Isolation.CONTAINER:
        if server.provider.kind in ("process", "plain"):
            message = f"a container is required, but sandbox.provider is {server.provider.kind}"
            place.refuse(("sandbox", "isolation"), message)
        if not spec.sandbox.image:
            place.refuse(("sandbox", "image"), "a container is required: name its image here or in the sandbox section")


def _revision(spec: FunctionSpec, kind: Kind, place: DeclarationSite) -> str:
    """Twelve hex digits of the definition, and of what it points to."""
    try:
        text = orjson.dumps(spec, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError as error:
        place.refuse((), f"cannot be written as JSON: {error}")
        return ""
    digest = hashlib.sha256(text)
    if place.look and not place.problems:
        try:
            digest.update(kind.source(spec).encode())
        except (OSError, ValueError) as error:
            place.refuse((kind.name,), str(error))
    return digest.hexdigest()[:12]
