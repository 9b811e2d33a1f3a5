"""Functions as the scheduler knows them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from manager.action import ANYWHERE, Elasticity, NodeChoice, UnitSet
from manager.errors import Reason

# How a setting is declared: once, on the frozen value that is passed whole to who needs it.
#
#     max_queued: Annotated[int, Setting("most waiting actions; beyond it 429", ge=1)] = 4096
#
# The configuration derives its check, its JSON Schema and its reference page from that; the unit of a field's name
# (``timeout_s``, ``memory_bytes``) says how it is written (``timeout: 30s``, ``memory: 512Mi``). A field without a
# `Setting` cannot be set by the YAML.


@dataclass(frozen=True, slots=True)
class Setting:
    """What is said of a field: its meaning in one line, and its bounds."""

    meaning: str = ""
    #: Its key in the YAML; by default the field's name without its unit.
    key: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    pattern: str | None = None
    #: What fits the pattern, in words that go on after "must be".
    words: str = ""
    min_length: int | None = None
    #: Whether a number may be written where text is wanted: a user's id.
    number_too: bool = False
    #: Whether the keys of the field's own settings stand beside the others, without a key for the field itself.
    inline: bool = False

    def __post_init__(self) -> None:
        if (self.pattern is None) == bool(self.words):
            raise TypeError("a pattern and its words are given together")


@cache
def settings_of(noun: type) -> tuple[tuple[str, Any, Setting], ...]:
    """Return the name, the annotation and the `Setting` of each field of a dataclass that has one.

    Any: annotations have no common type.
    """
    hints = get_type_hints(noun, include_extras=True)
    return tuple(
        (field.name, hints[field.name], setting)
        for field in fields(noun)
        for setting in getattr(hints[field.name], "__metadata__", ())[-1:]
        if isinstance(setting, Setting)
    )


class Isolation(StrEnum):
    """How well a sandbox must be isolated."""

    ANY = "any"  #: whatever the machine offers
    CONTAINER = "container"  #: a container, or the function is refused


class Network(StrEnum):
    """What a sandbox may reach."""

    NONE = "none"  #: loopback only
    INTERNAL = "internal"  #: other sandboxes of its task
    EGRESS = "egress"  #: the public world, or what ``allow`` names


class Background(StrEnum):
    """What happens to a sandbox's processes between actions."""

    FREEZE = "freeze"  #: they stop until the next action
    RUN = "run"  #: they run on, on the trajectory's shared cores
    KILL = "kill"  #: they are ended with the action


class Capabilities(StrEnum):
    """What root in a sandbox may do."""

    MINIMAL = "minimal"  #: own, signal and become other users
    DEFAULT = "default"  #: as in a plain container, less raw sockets and device files


#: An IPv6 address stands in brackets where a port follows it.
AllowedPlace = Annotated[
    str,
    Setting(
        pattern=r"^(\[[0-9A-Fa-f:.]+(/[0-9]{1,3})?\](:[0-9]{1,5})?|[0-9A-Fa-f.]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(/[0-9]{1,3})?"
        r"|[0-9]{1,3}(\.[0-9]{1,3}){3}(/[0-9]{1,2})?(:[0-9]{1,5})?"
        r"|([A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?\.)*[A-Za-z]([A-Za-z0-9-]*[A-Za-z0-9])?(:[0-9]{1,5})?)$",
        words="a host, an address or a block of them, with :port if wanted: pypi.org:443, 10.0.0.0/8, [fd00::1]:80",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Warm:
    """Sandboxes or instances kept ready."""

    min: Annotated[int, Setting("always kept ready", ge=0)] = 0
    max: Annotated[int, Setting("most kept ready", ge=0)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryChoices:
    """What a trajectory may choose for its own sandbox, beside ``images`` and ``users``; without it nothing more."""

    networks: Annotated[
        tuple[Network, ...], Setting("networks besides the function's own; none may always be chosen")
    ] = ()
    env: Annotated[
        tuple[Annotated[str, Setting(min_length=1)], ...],
        Setting("names of environment variables that it may set, * and ? stand for any"),
    ] = ()
    memory_bytes: Annotated[int | None, Setting("most bytes; the function's own by default")] = None
    idle_ttl_s: Annotated[float | None, Setting("longest idle_ttl; the function's own by default")] = None
    #: Choices of which up to ``warm.max`` are kept ready too, the last claimed: each costs the memory of its sandboxes.
    warm: int = 4


#: The image of containers where nothing names one.
BASE_IMAGE = "tangram-base:bookworm"
#: What the sandbox's own runner needs; with less no command begins.
MEMORY_MIN_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """A function's sandbox; what is left out comes from the server's ``sandbox`` section."""

    image: Annotated[str, Setting("container image; `tangram images build` makes tangram-base:bookworm")] = BASE_IMAGE
    images: Annotated[
        tuple[Annotated[str, Setting(min_length=1)], ...],
        Setting("images that a trajectory may name instead, for example swebench/*; * and ? stand for any text"),
    ] = ()
    trajectory: Annotated[TrajectoryChoices, Setting("what else a trajectory may choose")] = TrajectoryChoices()
    memory_bytes: Annotated[int, Setting("bytes, held for the life of the trajectory", ge=MEMORY_MIN_BYTES)] = (
        512 * 2**20
    )
    network: Annotated[Network, Setting("what it may reach")] = Network.NONE
    allow: Annotated[
        tuple[AllowedPlace, ...],
        Setting(
            "with egress: hosts, addresses and CIDR blocks, with :port if wanted, and nothing else; "
            "by default the public world. Only what lies in a private range as a whole opens it"
        ),
    ] = ()
    user: Annotated[
        str, Setting("user name or id inside; auto is an id that no other sandbox has", number_too=True)
    ] = "auto"
    users: Annotated[
        tuple[Annotated[str, Setting(number_too=True)], ...],
        Setting("users that it and an action's input may name, root only if listed; by default none but its own user"),
    ] = ()
    runtime: Annotated[
        str, Setting("what the engine runs containers with: runc, crun, runsc, kata ...; empty takes its default")
    ] = ""
    capabilities: Annotated[
        Capabilities,
        Setting(
            "what root inside may do: minimal is CHOWN, KILL, SETUID and SETGID; default is what container engines "
            "give root, less NET_RAW and MKNOD, for tasks that install packages or write as root everywhere. Other "
            "users have none"
        ),
    ] = Capabilities.MINIMAL
    pids: Annotated[int, Setting("most processes and threads", ge=1)] = 256
    disk_bytes: Annotated[int, Setting("bytes it may write")] = 2 * 2**30
    shm_bytes: Annotated[int, Setting("bytes of /dev/shm")] = 64 * 2**20
    workdir: Annotated[str, Setting("working directory, absolute", pattern=r"^/", words="an absolute path")] = (
        "/workspace"
    )
    env: Annotated[
        Mapping[
            Annotated[
                str,
                Setting(pattern=r"^[^=\x00]{1,255}$", words="the name of a variable, without = and at most 255 long"),
            ],
            Annotated[str, Setting(pattern=r"^[^\x00]*$", words="text without NUL")],
        ],
        Setting("environment variables"),
    ] = field(default_factory=dict)
    isolation: Annotated[Isolation, Setting("container refuses to run without one")] = Isolation.ANY
    background: Annotated[Background, Setting("its processes between two actions")] = Background.FREEZE
    idle_ttl_s: Annotated[float, Setting("a trajectory ends after this time without an action")] = 1800.0
    unattended_s: Annotated[
        float, Setting("a durable call's command runs on so long without its gateway, for the next to take over")
    ] = 600.0
    still_s: Annotated[
        float,
        Setting(
            "a command of which a process is stopped (SIGSTOP) is ended when none of it has worked or said anything "
            "for so long; 0 never"
        ),
    ] = 60.0
    warm: Annotated[Warm, Setting("sandboxes kept ready")] = Warm()
    #: Whether a trajectory has chosen some of it (`runtimes.sandbox.spec`).
    chosen: bool = False
    #: The snapshot whose files it begins with (`runtimes.sandbox.snapshots`); empty for those of the image alone.
    snapshot: str = ""

    def refuses(self, user: str) -> str:
        """Return why nothing may run as ``user`` (a name or an id), with the remedy; empty if it may."""
        wanted = _plain(user)
        if wanted == self.user == AUTO:
            return ""
        listed = {_plain(each) for each in self.users} or {_plain(self.user)} - {ROOT}
        if wanted in listed:
            return ""
        remedy = f"list it: sandbox.users: [{', '.join(dict.fromkeys((*self.users, user)))}]"
        if wanted == ROOT and not self.users:
            return f"the user {user!r} is root, which must be asked for by name; {remedy}"
        known = ", ".join(self.users) or self.user
        return f"the user {user!r} is not among those that the function may ask for ({known}); {remedy}"


#: The id of the user root, and the name of a sandbox's own user.
ROOT, AUTO = "0", "auto"


def _plain(user: str) -> str:
    """Return a user in its one form: an id without leading zeros, root by its id."""
    if user.isascii() and user.isdigit():
        return str(int(user))
    return ROOT if user == "root" else user


@dataclass(frozen=True, slots=True, kw_only=True)
class PytestSpec:
    """How a test suite is run."""

    args: Annotated[tuple[str, ...], Setting("options added to every run")] = ()
    dist: Annotated[
        Literal["load", "loadscope", "loadfile", "loadgroup", "worksteal", "no"], Setting("pytest-xdist's --dist")
    ] = "worksteal"
    max_workers: Annotated[int, Setting("most workers, whatever was granted", ge=1)] = 64
    grade: Annotated[
        Literal["same_sandbox", "fresh"],
        Setting("where the suite runs: where the agent worked, or in a new sandbox with what the agent has changed"),
    ] = "same_sandbox"
    tree_options: Annotated[
        Literal["use", "ignore"],
        Setting("conftests and pytest's options that the agent has changed (fresh), or any of the tree (same_sandbox)"),
    ] = "use"
    missing: Annotated[
        Literal["invalid", "zero"],
        Setting("a suite in which no listed test is found, or none at all, has no reward (null), or 0.0"),
    ] = "invalid"
    ignore: Annotated[
        tuple[Literal["skipped", "xfailed", "xpassed"], ...],
        Setting(
            "verdicts that take a test out of the count; without them such a test has not passed. A test of "
            "fail_to_pass must pass all the same, and where no test counts the reward is 0.0"
        ),
    ] = ()
    changes_limit_bytes: Annotated[
        int, Setting("with grade fresh: bytes that the agent may have changed; more is worth 0.0", ge=1)
    ] = 64 * 2**20


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
    #: What it needs from a package index, each as pip takes it; files named by ``-r`` are read where it is declared.
    requirements: tuple[str, ...] = ()


class ModelAction(StrEnum):
    """What a model does with an input."""

    SCORE = "score"
    STEP_SCORES = "step_scores"
    LOGPROBS = "logprobs"
    GENERATE = "generate"
    EMBED = "embed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """A server of vLLM's API that computes instead of us: one that runs already (url), or one that we start (command).

    It needs devices of its own: a gateway whose node has GPUs serves either engines or its own models.
    """

    url: Annotated[
        str,
        Setting(
            "base URL of a server that runs already. It computes where it was started: the chunk of its action says "
            "when it may be awake",
            pattern=r"^(https?://.+)?$",
            words="an address that begins with http:// or https://",
        ),
    ] = ""
    command: Annotated[
        tuple[Annotated[str, Setting(min_length=1)], ...],
        Setting(
            "what starts a server instead, word by word: {path}, {devices} (their number), and {socket} (a Unix "
            "socket) or {port} on loopback stand for what it must serve"
        ),
    ] = ()
    environment: Annotated[Mapping[str, str], Setting("added to the environment of the command")] = field(
        default_factory=dict
    )
    start_s: Annotated[float, Setting("time that a start may take", key="start_within", gt=0)] = 600.0
    sleep: Annotated[
        str, Setting("path posted to evict the model; without one, what was started is ended to evict it")
    ] = ""
    wake: Annotated[str, Setting("path posted to restore the model")] = ""

    @property
    def name(self) -> str:
        """Return what tells it from others."""
        return self.url or f"engine-{zlib.crc32(repr((self.command, sorted(self.environment.items()))).encode()):08x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A checkpoint (Hugging Face layout, safetensors only), or an engine, and what is asked of it."""

    path: Annotated[
        Path, Setting("directory with config.json and *.safetensors; the model's name on an engine", min_length=1)
    ]
    action: Annotated[ModelAction, Setting("score, step_scores, logprobs, generate or embed")]
    dtype: Annotated[Literal["", "float32", "float16", "bfloat16"], Setting("the checkpoint's own by default")] = ""
    ignore_weights: Annotated[
        tuple[Annotated[str, Setting(min_length=1)], ...],
        Setting("names of tensors that the model may have no use for, * and ? stand for any; others are an error"),
    ] = ()
    max_tokens: Annotated[int, Setting("most tokens of one text", ge=1)] = 8192
    overlong: Annotated[Literal["error", "truncate"], Setting("what happens to a longer text")] = "error"
    truncate: Annotated[
        Literal["", "left", "right"],
        Setting("the side on which it is cut: left by default for score and generate, right for the others"),
    ] = ""
    batch_tokens: Annotated[int, Setting("tokens of one packed batch", ge=1)] = 16384
    max_new_tokens: Annotated[int, Setting("most generated tokens", ge=1)] = 512
    engine: Annotated[EngineSpec | None, Setting("a server of vLLM's API computes instead of the gateway's own")] = None

    @property
    def cut(self) -> Literal["", "left", "right"]:
        """Return the side on which an overlong text is cut, the same for all forms of input; empty: it is refused."""
        ends_count = self.action in (ModelAction.SCORE, ModelAction.GENERATE)
        return "" if self.overlong == "error" else self.truncate or ("left" if ends_count else "right")

    @property
    def service(self) -> str:
        """Return the name under which the model is resident: functions of one checkpoint and head share it."""
        head = "lm" if self.action in (ModelAction.LOGPROBS, ModelAction.GENERATE) else self.action.value
        name = str(self.path) if self.engine is None else self.engine.url or f"{self.engine.name}:{self.path}"
        return ":".join(filter(None, (name, head, self.dtype)))


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
    size: Annotated[
        str,
        Setting(
            "path of an input field on whose size the duration hangs: a number, a text's characters or a list's "
            "elements, for example max_tokens or messages.content",
            pattern=r"^([^.]+(\.[^.]+)*)?$",
            words="names of fields with a dot between them",
        ),
    ] = ""
    initial_s: Annotated[float | None, Setting("with one unit")] = None

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the input fields that the learning looks at, which may stand beside those of the runtime."""
        return tuple(dict.fromkeys(filter(None, (self.key, self.size.partition(".")[0]))))

    def __post_init__(self) -> None:
        if self.profile == "declared" and self.initial_s is None:
            raise ValueError("a declared duration needs initial")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySpec:
    """Tries after a failure."""

    max_attempts: Annotated[int, Setting("tries in all", ge=1, le=100)] = 1
    backoff_s: Annotated[float, Setting("first wait, doubled each time")] = 1.0
    #: Longest wait: what is mended within minutes is not waited for longer.
    backoff_max_s: float = 60.0
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
    max_queued: Annotated[int, Setting("most waiting invocations of all tasks; beyond it 429", ge=1)] = 16384
    output_limit_bytes: Annotated[int, Setting("largest result; of longer output its beginning and its end")] = (
        1 * 2**20
    )
    log_limit_bytes: Annotated[int, Setting("log kept of one invocation, from its beginning")] = 4 * 2**20
    retry: Annotated[RetrySpec, Setting("tries after a failure")] = RetrySpec()
    nodes: Annotated[
        Mapping[str, str], Setting("labels of the nodes that it may run on ({pool: big}); on all of them by default")
    ] = field(default_factory=dict)
    #: Whether every node is taken to be able to run it, as where there is but one; else each node says so itself.
    anywhere: bool = True
    #: The only node that it may run on, by name; empty for any. Of a trajectory that begins with what is kept there.
    on_node: str = ""
    sandbox: SandboxSpec | None = None
    pytest: PytestSpec | None = None
    handler: HandlerSpec | None = None
    model: ModelSpec | None = None
    request: RequestSpec | None = None

    @property
    def placement(self) -> NodeChoice:
        """Return which nodes are right for its actions."""
        if self.anywhere and not self.nodes and not self.on_node:
            return ANYWHERE
        return NodeChoice(tuple(sorted(self.nodes.items())), "" if self.anywhere else self.name, self.on_node)
