"""The function: a registered kind of action, as plain frozen values (parsed from YAML by ``gateway.config.load``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from manager.action import Elasticity, UnitSet
from manager.errors import Reason


class RuntimeKind(StrEnum):
    """The five runtimes."""

    EXEC = "exec"
    PYTEST = "pytest"
    HANDLER = "handler"
    MODEL = "model"
    API = "api"


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
    """Bounds of a warm pool, counted in sandboxes or instances."""

    min: int = 0
    max: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """The environment of a trajectory (or of a handler's instance)."""

    image: str = ""
    memory_bytes: int = 512 * 2**20
    network: Network = Network.NONE
    #: With ``network: egress``: host names or CIDR blocks; empty allows all.
    allow: tuple[str, ...] = ()
    user: str = "1000"
    pids: int = 256
    disk_bytes: int = 2 * 2**30
    shm_bytes: int = 64 * 2**20
    workdir: str = "/workspace"
    env: Mapping[str, str] = field(default_factory=dict)
    isolation: Isolation = Isolation.ANY
    background: Background = Background.FREEZE
    idle_ttl_s: float = 1800.0
    #: Seconds that a command of an asynchronous or keyed call runs on without its gateway; 0 ends it at once.
    unattended_s: float = 600.0
    warm: Warm = Warm()


@dataclass(frozen=True, slots=True, kw_only=True)
class PytestSpec:
    """How a test suite is run."""

    #: Options added to every run, for example ``-p no:cacheprovider``.
    args: tuple[str, ...] = ()
    #: pytest-xdist's ``--dist``.
    dist: str = "worksteal"
    #: Most workers that are ever started, whatever was granted.
    max_workers: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSpec:
    """Where a Python handler lives: ``module:callable`` under ``directory``, imported once per warm instance."""

    module: str
    callable: str
    #: Host directory of the function (the one that holds function.yaml), mounted read-only.
    directory: Path
    #: Actions that one instance executes at a time.
    per_instance: int = 1
    instances_min: int = 0
    instances_max: int = 8
    idle_s: float = 300.0


class ModelAction(StrEnum):
    """What a model does with an input."""

    SCORE = "score"
    LOGPROBS = "logprobs"
    GENERATE = "generate"
    EMBED = "embed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A checkpoint (Hugging Face layout, safetensors only), or an external engine, and what is asked of it."""

    path: Path
    action: ModelAction
    #: torch dtype name, for example ``float32`` or ``bfloat16``; empty keeps the checkpoint's.
    dtype: str = ""
    max_tokens: int = 8192
    #: Over-long input: ``error`` or ``truncate``.
    overlong: str = "error"
    #: Tokens of one packed batch.
    batch_tokens: int = 16384
    #: Bound of generated tokens (``generate`` only).
    max_new_tokens: int = 512
    #: External engine: base URL of an OpenAI-compatible server and its sleep and wake paths; empty runs in-house.
    engine_url: str = ""
    sleep_path: str = ""
    wake_path: str = ""

    @property
    def service(self) -> str:
        """Return the name under which the model is resident: functions of one checkpoint and head share it."""
        head = "lm" if self.action in (ModelAction.LOGPROBS, ModelAction.GENERATE) else self.action.value
        return ":".join(filter(None, (self.engine_url or str(self.path), head, self.dtype)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """A templated HTTP call. The host is fixed by the YAML; ``{name}`` comes from the input, quoted."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    #: JSON template of the body; strings may hold ``{name}``. None sends no body.
    json: object = None
    #: Statuses that are an answer and no failure, besides 2xx.
    accept: tuple[int, ...] = ()
    response_limit_bytes: int = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationSpec:
    """What is known of the duration before anything is measured."""

    #: ``learned`` or ``declared``.
    profile: str = "learned"
    #: Name of the input field whose value keys the learning (for example ``suite``); empty learns per function.
    key: str = ""
    #: Seconds with one unit, the prior (learned) or the truth (declared); None when nothing is known.
    initial_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySpec:
    """Tries after a failure."""

    max_attempts: int = 1
    backoff_s: float = 1.0
    backoff_max_s: float = 60.0
    #: ``full`` or ``none``.
    jitter: str = "full"
    #: Reasons that are tried again.
    on: tuple[Reason, ...] = ()
    #: HTTP statuses of an api function that are tried again.
    on_status: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """A registered function; frozen, and replaced as a whole by a reload."""

    name: str
    runtime: RuntimeKind
    #: Digest of the definition (and of the handler's source): a change serves new invocations only.
    revision: str = ""
    description: str = ""
    cost: Mapping[str, UnitSet] = field(default_factory=dict)
    #: The key elasticity resource; None for a rigid function.
    key: str | None = None
    #: Declared elasticity; None means learned (if there is a key).
    elasticity: Elasticity | None = None
    duration: DurationSpec = DurationSpec()
    #: JSON Schema of the input; None takes what the runtime takes.
    input_schema: Mapping[str, object] | None = None
    #: JSON Schema of the result as its callers are told it; None tells what the runtime returns. It is not checked.
    result_schema: Mapping[str, object] | None = None
    timeout_s: float = 60.0
    queue_timeout_s: float = 600.0
    idempotent: bool = False
    max_queued: int = 1024
    output_limit_bytes: int = 1 * 2**20
    log_limit_bytes: int = 4 * 2**20
    retry: RetrySpec = RetrySpec()
    sandbox: SandboxSpec | None = None
    pytest: PytestSpec | None = None
    handler: HandlerSpec | None = None
    model: ModelSpec | None = None
    request: RequestSpec | None = None
