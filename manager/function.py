"""The function: a registered kind of action, as plain frozen values (parsed from YAML by ``gateway.config.load``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from manager.action import Elasticity, UnitSet
from manager.errors import Reason
from manager.setting import Setting


class Isolation(StrEnum):
    """How well a sandbox must be isolated."""

    ANY = "any"  #: whatever the machine offers
    CONTAINER = "container"  #: a container, or the function is refused


class Network(StrEnum):
    """What a sandbox may reach."""

    NONE = "none"  #: loopback only
    INTERNAL = "internal"  #: other sandboxes on an internal bridge
    EGRESS = "egress"  #: the outside, through ``allow`` where given


class Background(StrEnum):
    """What happens to a sandbox's processes between actions."""

    FREEZE = "freeze"  #: they stop until the next action
    RUN = "run"  #: they run on, on the trajectory's shared cores
    KILL = "kill"  #: they are ended with the action


@dataclass(frozen=True, slots=True, kw_only=True)
class Warm:
    """Sandboxes or instances kept ready."""

    min: Annotated[int, Setting("always kept ready", ge=0)] = 0
    max: Annotated[int, Setting("most kept ready", ge=0)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """A function's sandbox; what is left out comes from the server's ``sandbox`` section."""

    image: Annotated[str, Setting("container image")] = ""
    memory_bytes: Annotated[int, Setting("bytes, held for the life of the trajectory")] = 512 * 2**20
    network: Annotated[Network, Setting("what it may reach")] = Network.NONE
    allow: Annotated[tuple[str, ...], Setting("with egress: hosts or CIDR blocks; empty allows all")] = ()
    user: Annotated[str, Setting("user name or id inside", number_too=True)] = "1000"
    pids: Annotated[int, Setting("most processes and threads", ge=1)] = 256
    disk_bytes: Annotated[int, Setting("bytes it may write")] = 2 * 2**30
    shm_bytes: Annotated[int, Setting("bytes of /dev/shm")] = 64 * 2**20
    workdir: Annotated[str, Setting("working directory, absolute", pattern=r"^/")] = "/workspace"
    env: Annotated[Mapping[str, str], Setting("environment variables")] = field(default_factory=dict)
    isolation: Annotated[Isolation, Setting("container refuses to run without one")] = Isolation.ANY
    background: Annotated[Background, Setting("its processes between two actions")] = Background.FREEZE
    idle_ttl_s: Annotated[float, Setting("a trajectory ends after this time without an action")] = 1800.0
    unattended_s: Annotated[
        float, Setting("a durable call's command runs on so long without its gateway, for the next to take over")
    ] = 600.0
    warm: Annotated[Warm, Setting("sandboxes kept ready")] = Warm()


@dataclass(frozen=True, slots=True, kw_only=True)
class PytestSpec:
    """How a test suite is run."""

    args: Annotated[tuple[str, ...], Setting("options added to every run")] = ()
    dist: Annotated[
        Literal["load", "loadscope", "loadfile", "loadgroup", "worksteal", "no"], Setting("pytest-xdist's --dist")
    ] = "worksteal"
    max_workers: Annotated[int, Setting("most workers, whatever was granted", ge=1)] = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSpec:
    """Where a Python handler lives: ``module:callable`` under ``directory``, imported once per warm instance."""

    module: str
    callable: str
    #: Host directory of the function (the one that holds function.yaml), mounted read-only.
    directory: Path
    #: Actions that one instance executes at a time.
    per_instance: int
    instances_min: int
    instances_max: int
    idle_s: float


class ModelAction(StrEnum):
    """What a model does with an input."""

    SCORE = "score"
    LOGPROBS = "logprobs"
    GENERATE = "generate"
    EMBED = "embed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A checkpoint (Hugging Face layout, safetensors only), or an external engine, and what is asked of it."""

    path: Annotated[
        Path, Setting("directory with config.json and *.safetensors; the model's name on an engine", min_length=1)
    ]
    action: Annotated[ModelAction, Setting("score, logprobs, generate or embed")]
    dtype: Annotated[Literal["", "float32", "float16", "bfloat16"], Setting("the checkpoint's own by default")] = ""
    max_tokens: Annotated[int, Setting("most tokens of one text", ge=1)] = 8192
    overlong: Annotated[Literal["error", "truncate"], Setting("what happens to a longer text")] = "error"
    batch_tokens: Annotated[int, Setting("tokens of one packed batch", ge=1)] = 16384
    max_new_tokens: Annotated[int, Setting("most generated tokens", ge=1)] = 512
    #: External engine: base URL of an OpenAI-compatible server and its sleep and wake paths; empty runs in-house.
    engine_url: str = ""
    sleep_path: str = ""
    wake_path: str = ""

    @property
    def service(self) -> str:
        """Return the name under which the model is resident: functions of one checkpoint and head share it."""
        head = "lm" if self.action in (ModelAction.LOGPROBS, ModelAction.GENERATE) else self.action.value
        return ":".join(filter(None, (self.engine_url or str(self.path), head, self.dtype)))


#: Of an answer.
HttpStatus = Annotated[int, Setting(ge=100, le=599)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """A templated HTTP call; ``{name}`` comes from the input, ``${secret:NAME}`` from the server."""

    method: Annotated[Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"], Setting("HTTP method")] = "GET"
    url: Annotated[str, Setting("URL; scheme, host and port are fixed")]
    headers: Annotated[Mapping[str, str], Setting("headers")] = field(default_factory=dict)
    json: Annotated[object, Setting("JSON template of the body")] = None
    accept: Annotated[tuple[HttpStatus, ...], Setting("answers besides 2xx")] = ()
    response_limit_bytes: Annotated[int, Setting("largest answer")] = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationSpec:
    """What is known of the duration before anything is measured."""

    profile: Annotated[Literal["learned", "declared"], Setting("learned from history, or as declared")] = "learned"
    key: Annotated[str, Setting("input field whose value keys the learning, for example suite")] = ""
    initial_s: Annotated[float | None, Setting("with one unit")] = None

    def __post_init__(self) -> None:
        if self.profile == "declared" and self.initial_s is None:
            raise ValueError("a declared duration needs initial")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySpec:
    """Tries after a failure."""

    max_attempts: Annotated[int, Setting("tries in all", ge=1, le=100)] = 1
    backoff_s: Annotated[float, Setting("first wait, doubled each time")] = 1.0
    backoff_max_s: Annotated[float, Setting("longest wait")] = 60.0
    jitter: Annotated[Literal["full", "none"], Setting("full waits a random part of the time")] = "full"
    on: Annotated[
        tuple[Reason, ...], Setting("reasons, and HTTP statuses of an api function, that are tried again")
    ] = ()
    #: HTTP statuses of an api function that are tried again.
    on_status: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """A registered function; frozen, and replaced as a whole by a reload."""

    name: str
    #: The name of its kind (``runtimes.kinds``).
    runtime: str
    #: Digest of the definition (and of the handler's source): a change serves new invocations only.
    revision: str = ""
    description: Annotated[str, Setting("one line for people")] = ""
    cost: Mapping[str, UnitSet] = field(default_factory=dict)
    #: The key elasticity resource; None for a rigid function.
    key: str | None = None
    #: Declared elasticity; None means learned (if there is a key).
    elasticity: Elasticity | None = None
    duration: Annotated[DurationSpec, Setting("what is known of the duration")] = DurationSpec()
    #: None takes what the runtime takes.
    input_schema: Annotated[Mapping[str, object] | None, Setting("JSON Schema of the input", key="input")] = None
    #: None tells what the runtime returns.
    result_schema: Annotated[
        Mapping[str, object] | None, Setting("JSON Schema of the result, told to callers and not checked", key="result")
    ] = None
    timeout_s: Annotated[float, Setting("execution only", gt=0)] = 60.0
    queue_timeout_s: Annotated[float, Setting("waiting only", gt=0)] = 600.0
    idempotent: Annotated[bool, Setting("may be run again after a node or the gateway is lost")] = False
    max_queued: Annotated[int, Setting("most waiting invocations; beyond it 429", ge=1)] = 1024
    output_limit_bytes: Annotated[int, Setting("largest result")] = 1 * 2**20
    log_limit_bytes: Annotated[int, Setting("log kept of one invocation")] = 4 * 2**20
    retry: Annotated[RetrySpec, Setting("tries after a failure")] = RetrySpec()
    sandbox: SandboxSpec | None = None
    pytest: PytestSpec | None = None
    handler: HandlerSpec | None = None
    model: ModelSpec | None = None
    request: RequestSpec | None = None
