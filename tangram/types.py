"""Types of the wire."""

from __future__ import annotations

import ast
import ipaddress
import os
import platform
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, ValidationError, field, structs

PATTERNS = ("tangram.yaml", "function.yaml", "*/function.yaml", "functions/*/function.yaml")


def files_of(path: Path) -> list[Path]:
    """Return a file as itself, of a directory its tangram.yaml and the function.yaml of it and of what is in it."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    return [file for pattern in PATTERNS for file in sorted(path.glob(pattern)) if file.is_file()]


def nothing_there(path: Path) -> str:
    """Return what is wrong with a path of which there are no files."""
    return "no tangram.yaml and no function.yaml in this directory" if path.is_dir() else "no such file"


class Health(Struct, frozen=True, kw_only=True):
    """Whether the process lives, or takes work."""

    status: Annotated[str, Meta(description="ok or ready; otherwise why no work is taken")]
    warnings: Annotated[Sequence[str], Meta(description="What does not stop it, and should be looked at")] = ()
    record: Annotated[
        str | UnsetType,
        Meta(description="After an unclean end: checking, ok, unfinished (out of time), or what is wrong"),
    ] = UNSET
    preparing: Annotated[
        tuple[str, ...] | UnsetType, Meta(description="Functions that are made ready: their actions queue")
    ] = UNSET
    unavailable: Annotated[
        tuple[str, ...] | UnsetType,
        Meta(description="Functions that cannot be made ready, and are tried again; the function tells why"),
    ] = UNSET


# Where a gateway of this machine leaves its tokens: one rule for the server and for the clients of its user.
#
# The state directory, which is its user's alone, holds a file for each token. A link below the user's home, named after
# this machine and the address, leads from an address of loopback to the state directory of whoever serves there.

#: Names of the files in the state directory: all of it, and all but what changes the gateway for everybody.
ADMIN, INVOKE = "admin.token", "invoke.token"
#: What is longer is no token.
TOKEN_BYTES_MAX = 4096
_LISTENS = "0A"


def links_dir() -> Path:
    """Return the directory of the links, of this user and this machine: a home may be shared by many."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "tangram" / "gateways" / (platform.node() or "localhost")


def is_loopback(host: str) -> bool:
    """Whether an address or host name can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def served_at(host: str, port: int) -> list[str]:
    """Return the loopback addresses, as names of links, at which who listens on ``host`` is reached."""
    reached = {"0.0.0.0": ["127.0.0.1"], "::": ["::1", "127.0.0.1"], "localhost": ["127.0.0.1", "::1"]}
    bare = host.strip("[]").lower()
    return [f"{each}:{port}" for each in reached.get(bare, [bare]) if is_loopback(each)]


def find_token(host: str, port: int, names: tuple[str, ...] = (ADMIN, INVOKE)) -> str | None:
    """Return the first of these tokens of the gateway that this user serves on loopback; None where there is none.

    Only what is this user's is believed: the link, the file (which nobody else may read), and whoever listens there,
    for a port that was left may be somebody else's by now.
    """
    user = os.geteuid() if hasattr(os, "geteuid") else None
    for address in served_at(host, port):
        link = links_dir() / address
        with suppress(OSError, UnicodeDecodeError):
            if link.lstat().st_uid != user or not _all_ours(port, user):
                continue
            for name in names:
                if token := _read(link / name, user):
                    return token
    return None


def lost_state_dir(host: str, port: int) -> Path | None:
    """Return the state directory that a gateway of this user left its tokens in, where they are no longer there."""
    user = os.geteuid() if hasattr(os, "geteuid") else None
    for address in served_at(host, port):
        link = links_dir() / address
        with suppress(OSError):
            if link.lstat().st_uid == user and _all_ours(port, user) and not _read(link / INVOKE, user):
                return link.readlink()
    return None


def served_by_us() -> list[str]:
    """Return the loopback addresses (``127.0.0.1:8080``, ``[::1]:8080``) at which gateways of this user serve now."""
    with suppress(OSError):
        named = sorted(each.name.rpartition(":") for each in links_dir().iterdir())
        serving = [(host, port) for host, _, port in named if port.isdigit() and find_token(host, int(port))]
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in serving]
    return []


def _read(file: Path, user: int) -> str | None:
    """The token in a file that is this user's, and nobody else's to read; None for any other."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, encoding="ascii") as opened:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != user or about.st_mode & 0o077:
            return None
        return opened.read(TOKEN_BYTES_MAX).strip() or None


def _all_ours(port: int, user: int) -> bool:
    """Whether somebody listens on the port, and nobody but this user; true where the system does not tell."""
    tables = [Path("/proc/net") / name for name in ("tcp", "tcp6")]
    if not any(table.exists() for table in tables):
        return True
    owners = {owner for table in tables if table.exists() for owner in _listeners(table, port)}
    return owners == {user}


def _listeners(table: Path, port: int) -> Iterator[int]:
    """Yield the users that listen on a port; the kernel lists those who listen before all connections."""
    with table.open(encoding="ascii") as lines:
        next(lines, None)
        for line in lines:
            fields = line.split()
            local, state = fields[1], fields[3]
            if state != _LISTENS:
                return
            if int(local.rpartition(":")[2], 16) == port:
                yield int(fields[7])


#: Doublings beyond which a wait grows no more, whatever its bound: 2.0 ** 1024 is no float.
_DOUBLINGS_MAX = 64


def backoff_s(attempt: int, first_s: float, most_s: float, chance: float = 1.0) -> float:
    """Return the seconds to wait after try ``attempt`` (from 1): ``first_s``, doubled each time, at most ``most_s``.

    ``chance`` is the part of it that is waited: drawn from [0, 1) it spreads those who failed together (full jitter).
    """
    return min(most_s, first_s * 2.0 ** min(attempt - 1, _DOUBLINGS_MAX)) * chance


#: Seconds by unit.
DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

#: Bytes by unit: decimal and binary, as in Kubernetes.
SIZE_UNITS = {"B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}

#: Patterns without anchors, to be matched whole.
DURATION_PATTERN = r"(\d{1,9}(\.\d{1,6})?(ms|s|m|h|d))+"
#: A duration of a request, which may also be a bare number of seconds.
WAIT_PATTERN = rf"(\d{{1,9}}(\.\d{{1,6}})?|{DURATION_PATTERN})"
SIZE_PATTERN = r"\d{1,15}(\.\d{1,6})?(B|K|M|G|T|Ki|Mi|Gi|Ti)"
#: What callers name: functions, tasks, trajectories, invocations.
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}"
#: Container images: registry, path, tag and digest, as engines write them.
IMAGE_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}"
#: Idempotency keys: visible ASCII.
KEY_PATTERN = r"[!-~]{1,255}"

_DURATION = re.compile(DURATION_PATTERN, re.ASCII)
_DURATION_PART = re.compile(r"([\d.]+)(ms|s|m|h|d)", re.ASCII)
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,6})?", re.ASCII)
_SIZE = re.compile(SIZE_PATTERN, re.ASCII)
#: The same with numbers of any length: what is wrong with these is told.
_LONG_DURATION = re.compile(r"(\d+(\.\d+)?(ms|s|m|h|d))+", re.ASCII)
_LONG_SIZE = re.compile(r"\d+(\.\d+)?(B|K|M|G|T|Ki|Mi|Gi|Ti)", re.ASCII)
_DIGITS = "a number has at most {} digits before the point and 6 behind it"
_SIZE_PART = re.compile(r"([\d.]+)(\w+)", re.ASCII)
_NAME = re.compile(NAME_PATTERN, re.ASCII)
_KEY = re.compile(KEY_PATTERN, re.ASCII)


def duration_s(text: object) -> float:
    """Return the seconds of a duration; a number without its unit is refused. Raises ValueError with the remedy."""
    if not isinstance(text, str) or _DURATION.fullmatch(text) is None:
        if isinstance(text, str) and _LONG_DURATION.fullmatch(text):
            raise ValueError(f"{_shown(text)} is no duration: {_DIGITS.format(9)}")
        raise ValueError(f"{_shown(text)} is no duration: write a number with its unit, for example 500ms, 30s or 2m")
    return sum(float(number) * DURATION_UNITS[unit] for number, unit in _DURATION_PART.findall(text))


def wait_s(text: object) -> float:
    """Return the seconds of a request's duration: as `duration_s`, or a bare number of seconds. Raises ValueError."""
    if isinstance(text, str) and _SECONDS.fullmatch(text) is not None:
        return float(text)
    return duration_s(text)


def size_bytes(text: object) -> int:
    """Return the bytes of a size; a whole number without a unit counts bytes. Raises ValueError with the remedy."""
    if isinstance(text, int) and not isinstance(text, bool) and 0 <= text < 2**63:
        return text
    if not isinstance(text, str) or _SIZE.fullmatch(text) is None:
        if isinstance(text, str) and _LONG_SIZE.fullmatch(text):
            raise ValueError(f"{_shown(text)} is no size: {_DIGITS.format(15)}")
        raise ValueError(f"{_shown(text)} is no size: write a number with its unit, for example 512Mi or 16Gi")
    ((number, unit),) = _SIZE_PART.findall(text)
    return int(float(number) * SIZE_UNITS[unit])


def is_name(text: str) -> bool:
    """Return whether it may name a function, a task, a trajectory or an invocation."""
    return _NAME.fullmatch(text) is not None


def is_key(text: str) -> bool:
    """Return whether it may be an idempotency key."""
    return _KEY.fullmatch(text) is not None


def show_duration(seconds: float) -> str:
    """Return a duration for people, three figures at most: ``12.3ms``, ``4.5s``, ``2m05s``, ``3h20m``, ``2d04h``."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g}ms" if seconds > 0 else "0s"
    if seconds < 59.95:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"


def write_duration(seconds: float) -> str:
    """Return a duration as `duration_s` reads it, exact to the millisecond: ``10m``, ``1500ms``."""
    milliseconds = round(seconds * 1000)
    unit, size = next(
        (unit, size)
        for unit, size in sorted(DURATION_UNITS.items(), key=lambda item: -item[1])
        if milliseconds % round(size * 1000) == 0
    )
    return f"{milliseconds // round(size * 1000)}{unit}"


def show_size(count_bytes: float) -> str:
    """Return a size for people: ``512Mi``, ``1.5Gi``."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if count_bytes >= SIZE_UNITS[unit]:
            return f"{count_bytes / SIZE_UNITS[unit]:.4g}{unit}"
    return f"{count_bytes:.0f}B"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


#: By pattern, as it was declared.
_WORDS: dict[str, str] = {}
_MISMATCH = re.compile(r"Expected `str` matching regex (?P<pattern>'.*'|\".*\")")


def declare(pattern: str, words: str) -> None:
    """Say what fits a pattern, in words that go on after "must be"."""
    _WORDS[pattern] = words


def mismatch(pattern: str) -> str:
    """Return what a text that does not fit a pattern is told."""
    words = _WORDS.get(pattern)
    return f"must match {pattern}" if words is None else f"must be {words}"


def worded(pattern: str, words: str, *, examples: Sequence[str] = (), description: str | None = None) -> Meta:
    """Return the constraint of a text of the wire, whose errors say ``words`` (`explained`)."""
    declare(pattern, words)
    return Meta(pattern=pattern, description=description, examples=list(examples) or None)


def explained(error: ValidationError) -> tuple[str, str]:
    """Return what an error says, a pattern in its words, and the path of what it is about (``.a[0]``)."""
    message, _, place = str(error).partition(" - at `")
    match = _MISMATCH.fullmatch(message)
    return message if match is None else mismatch(ast.literal_eval(match["pattern"])), place.removesuffix(
        "`"
    ).removeprefix("$")


State = Literal["queued", "running", "succeeded", "failed", "timed_out", "cancelled", "lost"]
#: Why an invocation ended otherwise than well.
Reason = Literal[
    "timeout",
    "queue_timeout",
    "out_of_memory",
    "cancelled",
    "environment_lost",
    "node_lost",
    "gateway_restart",
    "quota",
    "upstream",
    "handler_error",
    "model_error",
    "invalid_input",
    "output_limit",
    "internal",
]
#: How the caller attends to the result: it is the response; 202 at once; the response is the log, then the result.
Mode = Literal["sync", "async", "stream"]
#: Of a callback that was asked for.
Delivery = Literal["pending", "delivered", "failed"]

if TYPE_CHECKING:
    AnyState = State
    AnyReason = Reason
else:
    # What a server answers is read as text, so that an older client takes the word of a newer server for it.
    AnyState = Annotated[str, Meta(extra_json_schema={"enum": list(get_args(State))})]
    AnyReason = Annotated[str, Meta(extra_json_schema={"enum": list(get_args(Reason))})]

#: RFC 3339 with its zone, written in UTC.
Instant = Annotated[datetime, Meta(tz=True)]
#: Given by the gateway: place in the order of acceptance, and chance.
InvocationId = Annotated[
    str,
    worded("^[0-9a-f]{11}-[0-9a-f]{12}$", "the id of an invocation: 11 and 12 hexadecimal digits, a hyphen between"),
]
#: What a name may be, in words.
NAME_WORDS = "1 to 128 letters, digits or . _ : @ - that start with a letter or digit"
Name = Annotated[str, worded(f"^{NAME_PATTERN}$", NAME_WORDS)]
Key = Annotated[str, worded(f"^{KEY_PATTERN}$", "1 to 255 visible ASCII characters")]
#: A user inside a sandbox: name or id.
SandboxUser = Annotated[
    str, worded(r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$", "the name or id of a user, at most 64 characters")
]
#: A duration as text: ``500ms``, ``30s``, ``1h30m``, or a bare number of seconds.
Wait = Annotated[str, worded(f"^{WAIT_PATTERN}$", "a duration, for example 500ms, 30s or 1h30m", examples=["30s"])]
#: The same of something that has to end: not zero.
Timeout = Annotated[
    str,
    worded(
        f"^(?=[^1-9]*[1-9]){WAIT_PATTERN}$",
        "a duration above zero, for example 500ms, 30s or 1h30m",
        examples=["30s"],
    ),
]
Count = Annotated[int, Meta(ge=0)]
Milliseconds = Annotated[float, Meta(ge=0)]
#: Rows of a page.
LIST_LIMIT_MAX = 1000
Limit = Annotated[int, Meta(ge=1, le=LIST_LIMIT_MAX)]
#: Any JSON object.
JsonObject = Mapping[str, Any]


class ActSplit(Struct, frozen=True, kw_only=True):
    """The action completion time of what was completed in the last minute, in seconds.

    An action is completed that was started, and neither cancelled nor lost.
    """

    completed: Annotated[Count, Meta(description="Of so many actions")]
    queue_s: Annotated[float, Meta(description="Mean")]
    overhead_s: Annotated[float, Meta(description="Mean")]
    execution_s: Annotated[float, Meta(description="Mean")]
    p50_s: Annotated[float | None, Meta(description="Of the whole; null if nothing was completed")]
    p99_s: Annotated[float | None, Meta(description="Of the whole; null if nothing was completed")]


class FailureCount(Struct, frozen=True, kw_only=True):
    """Failures of one function and task for one reason in the last 15 minutes."""

    function: str
    reason: AnyReason
    task: str
    count: Count
    last_at_s: Annotated[float, Meta(description="Seconds since 1970 of the last of them")]


class FunctionActivity(Struct, frozen=True, kw_only=True):
    """How a function has fared of late."""

    ended: Annotated[Count, Meta(description="Ended in the last minute")]
    of: Annotated[
        Count, Meta(description="The last ends that the other fields are of, at most 200, none of them cancelled")
    ]
    failed: Annotated[Count, Meta(description="How many of them failed")]
    p50_s: Annotated[
        float | None, Meta(description="The action completion time of those that were completed; null if none was")
    ]
    p99_s: float | None


class ActivityInfo(Struct, frozen=True, kw_only=True):
    """Rates and times of the last minute, failures of the last 15; what was cancelled has not failed."""

    started_at_s: Annotated[float, Meta(description="Seconds since 1970 of the gateway's start")]
    uptime_s: float
    accepted: Annotated[Count, Meta(description="Accepted in the last minute")]
    ended: Annotated[Count, Meta(description="Ended in the last minute, however it ended")]
    failed: Annotated[Count, Meta(description="Failed in the last minute, timed out and lost ones included")]
    cancelled: Annotated[Count, Meta(description="Cancelled in the last minute")]
    act: ActSplit
    failures: Annotated[tuple[FailureCount, ...], Meta(description="The most frequent first, at most 24 rows")]
    failed_15min: Annotated[Count, Meta(description="All failures of the last 15 minutes")]
    ended_15min: Annotated[Count, Meta(description="All that ended in them")]
    cancelled_15min: Annotated[Count, Meta(description="How many of these were cancelled")]
    functions: Annotated[
        Mapping[str, FunctionActivity], Meta(description="Those of which something ended that was not cancelled")
    ] = {}


class FileWritten(Struct, frozen=True, kw_only=True):
    """A file that was written."""

    path: str
    size_bytes: Count


class FileEntry(Struct, frozen=True, kw_only=True):
    """A file or directory."""

    path: str
    size_bytes: Count
    directory: bool
    mode: Annotated[str, Meta(description="Permission bits in octal")]


class FileList(Struct, frozen=True, kw_only=True):
    """The entries of a directory."""

    files: tuple[FileEntry, ...]


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
        Meta(description="Function -> path of a key -> what it is and what it becomes"),
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


#: Header of an answer that a call with a known Idempotency-Key latched on to.
REPLAY = "X-Idempotent-Replay"


class Attempt(Struct, frozen=True, kw_only=True):
    """One finished try of an invocation that was tried more than once."""

    attempt: Annotated[int, Meta(ge=1, description="Its number")]
    state: AnyState
    reason: AnyReason | None
    message: str
    ended_at: Instant | None
    queue_ms: Annotated[Milliseconds | None, Meta(description="It waited so long, in milliseconds")]
    overhead_ms: Annotated[Milliseconds | None, Meta(description="It was made ready so long, in milliseconds")]
    execution_ms: Annotated[Milliseconds | None, Meta(description="It ran so long, in milliseconds")]


class Invocation(Struct, frozen=True, kw_only=True):
    """The record of an invocation, there from its acceptance on.

    ``act_ms`` is ``queue_ms + overhead_ms + execution_ms``, which is the time from ``accepted_at`` to its end, over
    all tries and gateways. Before its end the three stand as they are at the time of asking.
    """

    id: Annotated[Name, Meta(description="Given by the gateway; sorts by acceptance")]
    function: str
    revision: Annotated[str, Meta(description="Digest of the function's definition that it runs")]
    task: Annotated[str, Meta(description="The RL task that it belongs to")]
    trajectory: Annotated[str | None, Meta(description="The rollout whose environment it needs")]
    parent: Annotated[str | None, Meta(description="The invocation that made it")]
    mode: Mode
    state: AnyState
    reason: Annotated[AnyReason | None, Meta(description="Why it ended otherwise than well")]
    message: Annotated[str, Meta(description="The same for people")]
    component: Annotated[str, Meta(description="The part of the gateway that says so")]
    detail: Annotated[JsonObject, Meta(description="Particulars of a failure, such as a traceback")]
    retry_after_s: Annotated[float | None, Meta(description="Seconds after which another try may succeed")]
    accepted_at: Instant
    started_at: Annotated[Instant | None, Meta(description="When its last try was leased")]
    ended_at: Instant | None
    queue_ms: Annotated[Milliseconds | None, Meta(description="It waited so long, in milliseconds")]
    overhead_ms: Annotated[Milliseconds | None, Meta(description="It was made ready so long, in milliseconds")]
    execution_ms: Annotated[Milliseconds | None, Meta(description="It ran so long, in milliseconds")]
    act_ms: Annotated[Milliseconds | None, Meta(description="Action completion time in milliseconds, once ended")]
    node: Annotated[str | None, Meta(description="Where it runs, or ran")]
    units: Annotated[Mapping[str, int], Meta(description="Units that it holds or held, by resource kind")]
    usage: Annotated[Mapping[str, float], Meta(description="What it was measured to use; the unit ends each name")]
    attempt: Annotated[int, Meta(ge=1, description="Number of the present or last try")]
    attempts: Annotated[tuple[Attempt, ...], Meta(description="The tries before, if there were any")]
    dead: Annotated[bool, Meta(description="Whether it is in the dead-letter list")]
    callback: Annotated[Delivery | None, Meta(description="What became of the callback, if one was asked for")]
    timeout_capped_s: Annotated[
        float | UnsetType, Meta(description="The function's own bound, which holds in place of a longer one asked for")
    ] = UNSET
    # Any JSON value, or UNSET: as types these two are one, and callers look into them.
    input: Annotated[Any, Meta(description="What was sent; left out in listings")] = UNSET
    result: Annotated[Any, Meta(description="What the function returned, null before that; left out in listings")] = (
        UNSET
    )

    @property
    def ended(self) -> bool:
        """Whether its state is final."""
        return self.state not in ("queued", "running")

    @property
    def ok(self) -> bool:
        """Whether it succeeded."""
        return self.state == "succeeded"

    @property
    def queue_s(self) -> float:
        """Seconds that it waited; 0 before it is known."""
        return (self.queue_ms or 0.0) / 1000

    @property
    def overhead_s(self) -> float:
        """Seconds for which it was made ready; 0 before it is known."""
        return (self.overhead_ms or 0.0) / 1000

    @property
    def execution_s(self) -> float:
        """Seconds that it ran; 0 before it is known."""
        return (self.execution_ms or 0.0) / 1000

    @property
    def act_s(self) -> float:
        """Its action completion time in seconds, as far as it is known."""
        return self.queue_s + self.overhead_s + self.execution_s


class InvocationPage(Struct, frozen=True, kw_only=True):
    """Invocations without input and result, newest first."""

    invocations: tuple[Invocation, ...]
    next_cursor: Annotated[Name | None, Meta(description="The cursor of the next page; null on the last")]


class Purged(Struct, frozen=True, kw_only=True):
    """How many invocations left the dead-letter list."""

    purged: Count


#: Trajectories of one request.
LEASES_MAX = 1000
LEASE_MIN_S, LEASE_MAX_S = 1.0, 86400.0
#: Of what is opened for a client that renews leases.
OpeningLease = Annotated[
    Annotated[float, Meta(ge=LEASE_MIN_S, le=LEASE_MAX_S)] | None,
    Meta(
        description="Seconds for which it is held from now on for a client that renews its lease; without, and "
        "without a renewal, until its idle_ttl"
    ),
]


Holder = Annotated[
    Name | None,
    Meta(
        description="What the client calls itself: it lets go of what it holds by this name; and what is opened for it "
        "ends with the connection, unless it renews the lease"
    ),
]


class LeaseRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Trajectories whose client lives. Each ends when for ``lease_s`` no such request came and no action used it."""

    trajectories: Annotated[tuple[Name, ...], Meta(max_length=LEASES_MAX)] = ()
    lease_s: Annotated[float, Meta(ge=LEASE_MIN_S, le=LEASE_MAX_S, description="Seconds")] = 300.0
    holder: Holder = None
    released: Annotated[
        tuple[Name, ...], Meta(max_length=LEASES_MAX, description="Which it lets go: those that no other holds end")
    ] = ()
    known: Annotated[
        tuple[Name, ...],
        Meta(max_length=LEASES_MAX, description="Snapshots and sessions made for this holder whose answers have come"),
    ] = ()


class LeaseAnswer(Struct, frozen=True, kw_only=True):
    """What became of them."""

    gone: Annotated[tuple[Name, ...], Meta(description="Those that do not live (any more)")]


Offset = Annotated[Count, Meta(description="Number of the record from 0; offset + 1 is where to go on reading")]


class LogLine(Struct, frozen=True, kw_only=True):
    """One record of a log: output, or what of it is missing (``truncated``, ``dropped``, ``expired``)."""

    offset: Offset
    time: Instant
    stream: Annotated[
        str,
        Meta(
            description="stdout and stderr, log (structured), system (the gateway's own), or what is missing",
            extra_json_schema={
                "enum": ["stdout", "stderr", "log", "system", "truncated", "dropped", "expired"],
            },
        ),
    ]
    data: str

    @property
    def text(self) -> str:
        """What was said."""
        return self.data


class LogHeartbeat(Struct, frozen=True, kw_only=True):
    """Nothing was said for a while; the stream goes on."""

    stream: Literal["heartbeat"]


class LogEnd(Struct, frozen=True, kw_only=True):
    """The last record of a log; ``offset`` is how many there were."""

    stream: Literal["eof"]
    offset: Count
    state: AnyState
    reason: AnyReason | None
    queue_ms: Milliseconds | None = None
    overhead_ms: Milliseconds | None = None
    execution_ms: Milliseconds | None = None


class LogLag(Struct, frozen=True, kw_only=True):
    """The last record for a follower that was too slow; ``next_offset`` is where to go on reading."""

    stream: Literal["dropped"]
    next_offset: Count
    data: str


class LogAccepted(Struct, frozen=True, kw_only=True):
    """The first record of an invocation in mode ``stream``; input and result are left out."""

    stream: Literal["accepted"]
    invocation: Invocation


class LogResult(Struct, frozen=True, kw_only=True):
    """The last record of an invocation in mode ``stream``; ``offset`` is how many log records there were."""

    stream: Literal["result"]
    offset: Count
    invocation: Invocation


LogRecord = LogLine | LogHeartbeat | LogEnd | LogLag | LogAccepted | LogResult


class _Kind(Struct):
    """What tells the records apart."""

    stream: str
    next_offset: int | None = None


_MARKS: dict[str, msgspec.json.Decoder[LogHeartbeat | LogEnd | LogAccepted | LogResult]] = {
    "heartbeat": msgspec.json.Decoder(LogHeartbeat),
    "eof": msgspec.json.Decoder(LogEnd),
    "accepted": msgspec.json.Decoder(LogAccepted),
    "result": msgspec.json.Decoder(LogResult),
}
_KIND, _LAG, _LINE = (msgspec.json.Decoder(_Kind), msgspec.json.Decoder(LogLag), msgspec.json.Decoder(LogLine))


def read_log_record(text: bytes | str) -> LogRecord:
    """Return one record of NDJSON; raises `msgspec.DecodeError` for what is none."""
    kind = _KIND.decode(text)
    if kind.next_offset is not None:
        return _LAG.decode(text)
    mark = _MARKS.get(kind.stream)
    return _LINE.decode(text) if mark is None else mark.decode(text)


class Problem(Struct, frozen=True, kw_only=True):
    """Why a request was refused, or how an invocation that was waited for ended; ``code`` is stable."""

    type: Annotated[str, Meta(description="urn:tangram:error:CODE, or urn:tangram:reason:REASON")]
    title: Annotated[str, Meta(description="What kind of problem it is, in a few words")]
    status: Annotated[int, Meta(ge=100, le=599, description="The HTTP status")]
    code: Annotated[str, Meta(description="Stable name of the error, or the reason of the invocation")]
    detail: Annotated[str, Meta(description="What is wrong here, for people")]
    component: Annotated[str, Meta(description="The part of the gateway that says so")]
    invocation_id: Annotated[Name | UnsetType, Meta(description="The invocation that it is about")] = UNSET
    retry_after_s: Annotated[
        float | UnsetType | None, Meta(description="Seconds after which the same request may be granted")
    ] = UNSET
    errors: Annotated[
        JsonObject | UnsetType, Meta(description="Particulars; path is the JSON path of an odd value")
    ] = UNSET
    invocation: Annotated[Invocation | UnsetType, Meta(description="The invocation that ended badly")] = UNSET


ChunkPair = Annotated[tuple[int, int], Meta(description="First device, and how many")]


class NodeInfo(Struct, frozen=True, kw_only=True):
    """A machine that actions run on."""

    node: str
    cores: Count
    devices: Count
    memory_bytes: Count
    held_bytes: Annotated[Count, Meta(description="Held by trajectories and actions")]
    trajectories: Annotated[Count, Meta(description="How many hold memory here")]


class RegionInfo(Struct, frozen=True, kw_only=True):
    """The devices of one node within a pool."""

    start: Count
    devices: Count


class ResidentInfo(Struct, frozen=True, kw_only=True):
    """A service on a device, as the scheduler believes."""

    service: str
    dop: Annotated[int, Meta(ge=1, description="On how many devices it lies")]
    bytes: Annotated[Count, Meta(description="What it takes of this device")]


class DeviceInfo(Struct, frozen=True, kw_only=True):
    """A device, as the scheduler believes."""

    device: Count
    memory_bytes: Count
    used_bytes: Count
    resident: tuple[ResidentInfo, ...]


class ServiceInfo(Struct, frozen=True, kw_only=True):
    """What a service takes of each device, and how long it takes to restore, by degree of parallelism."""

    bytes_by_dop: Mapping[str, int]
    restore_s_by_dop: Mapping[str, float]
    restore_s_by_node: Annotated[
        Mapping[str, Mapping[str, float]], Meta(description="The same as each node has measured it that can hold it")
    ] = msgspec.field(default_factory=dict)


class HolderInfo(Struct, frozen=True, kw_only=True):
    """Who holds units of a pool."""

    function: str
    task: str
    trajectory: str | None
    running_s: Annotated[float, Meta(description="Seconds since it was leased")]


class PoolInfo(Struct, frozen=True, kw_only=True):
    """A pool of one resource, and who holds what of it; the last fields are there if its kind has them."""

    kind: str
    node: Annotated[str, Meta(description="Whose units they are; empty for those of no node")]
    total: Count
    free: int
    held: Annotated[Mapping[str, int], Meta(description="Units by invocation")]
    policy: Annotated[str, Meta(description="The scheduling policy of its kind")]
    utilisation: Annotated[float, Meta(description="Smoothed share in use")]
    arrivals_per_s: Annotated[float, Meta(description="Smoothed rate of actions that need it")]
    holders: Annotated[
        Mapping[str, HolderInfo] | UnsetType, Meta(description="Who that is, by invocation; a batch by its first")
    ] = UNSET
    cores: Annotated[
        Mapping[str, tuple[int, ...]] | UnsetType, Meta(description="CPU: numbers of the cores by invocation")
    ] = UNSET
    regions: Annotated[Mapping[str, RegionInfo] | UnsetType, Meta(description="Devices: those of each node")] = UNSET
    chunks: Annotated[Mapping[str, ChunkPair] | UnsetType, Meta(description="Devices: chunk by invocation")] = UNSET
    devices: Annotated[tuple[DeviceInfo, ...] | UnsetType, Meta(description="Devices: what is resident")] = UNSET
    services: Annotated[Mapping[str, ServiceInfo] | UnsetType, Meta(description="Devices: known services")] = UNSET
    restores: Annotated[int | UnsetType, Meta(description="Devices: actions that had to wait for a restore")] = UNSET
    hits: Annotated[int | UnsetType, Meta(description="Devices: actions that found their service resident")] = UNSET
    prefetches: Annotated[
        Mapping[str, int] | UnsetType, Meta(description="Devices: how services that were brought in ahead fared")
    ] = UNSET
    period_s: Annotated[float | UnsetType, Meta(description="Quota: its period in seconds")] = UNSET
    next_return_s: Annotated[float | UnsetType | None, Meta(description="Quota: seconds until units return")] = UNSET


class SandboxesInfo(Struct, frozen=True, kw_only=True):
    """Which kind of sandbox is used, and what it promises, in plain words."""

    kind: Annotated[str, Meta(description="container, process (bubblewrap), plain or none")]
    engine: str
    isolation: str
    runtime: Annotated[str, Meta(description="What containers are run with, unless a function says otherwise")]
    runtimes: Annotated[tuple[str, ...], Meta(description="What sandbox.runtime may be; empty without containers")]
    limits: Annotated[Mapping[str, bool], Meta(description="Promise -> whether it is kept")]
    weakenings: Annotated[Sequence[str], Meta(description="In what they are weaker than they could be")]
    disk: Annotated[
        Literal["image", "walk"],
        Meta(description="What bounds the disk: an image for each, or walks that end a sandbox"),
    ] = "walk"


class PlacedModel(Struct, frozen=True, kw_only=True):
    """A model on its chunk of devices."""

    service: str
    chunk: ChunkPair
    bytes: Annotated[Count | UnsetType, Meta(description="What it takes of this device")] = UNSET


class ModelDevice(Struct, frozen=True, kw_only=True):
    """One device's process, and what is really there."""

    index: Count
    kind: str
    name: str
    alive: bool
    pid: int | None
    restarts: Count
    running: Annotated[PlacedModel | None, Meta(description="What it computes now")]
    executions: Count
    swaps: Count
    hit_rate: Annotated[float, Meta(description="Share of the executions that found their model in place")]
    arena_bytes: Annotated[Count, Meta(description="Memory for models")]
    resident_bytes: Annotated[Count, Meta(description="What of it is taken")]
    used_bytes: Annotated[int | None, Meta(description="Memory of the device in use; null where it is not known")]
    resident: tuple[PlacedModel, ...]


class HostImagesInfo(Struct, frozen=True, kw_only=True):
    """Models in the host's memory; empty while no device was used."""

    bytes: Count | UnsetType = UNSET
    bound_bytes: Count | UnsetType = UNSET
    count: Count | UnsetType = UNSET
    reads: Annotated[Count | UnsetType, Meta(description="Times that a checkpoint was read from the disk")] = UNSET


class ModelsInfo(Struct, frozen=True, kw_only=True):
    """The model devices, and the counts of swaps since the start."""

    actions: Count
    executions: Count
    swaps: Count
    hit_rate: Annotated[float, Meta(description="Share of the executions that found their model in place")]
    evictions: Count
    restore_s: Annotated[float, Meta(description="Seconds of all restores")]
    restored_bytes: Count
    devices: tuple[ModelDevice, ...]
    services: Annotated[Mapping[str, tuple[ChunkPair, ...]], Meta(description="Where each service is resident")]
    host_images: HostImagesInfo


class ResourcesInfo(Struct, frozen=True, kw_only=True):
    """Nodes, pools by name, what the sandboxes are, and the model devices."""

    nodes: tuple[NodeInfo, ...]
    pools: Mapping[str, PoolInfo]
    sandboxes: SandboxesInfo
    models: ModelsInfo


NodeCondition = Literal["joining", "ready", "unfit", "suspect", "draining", "drained", "lost"]


class NodeStatus(Struct, frozen=True, kw_only=True):
    """One machine."""

    node: str
    state: NodeCondition
    why: Annotated[str, Meta(description="Of any state but ready")]
    since_s: Annotated[float, Meta(description="Seconds for which it has been so")]
    local: Annotated[bool, Meta(description="Whether it is the gateway's own machine")]
    cores: Count
    devices: Count
    device_kind: Annotated[
        Literal["", "cpu", "cuda"], Meta(description="What its devices are; empty where it has none, or has not said")
    ]
    memory_bytes: Count
    labels: Mapping[str, str]
    running: Annotated[Count, Meta(description="Actions that run there")]
    trajectories: Annotated[Count, Meta(description="Trajectories, and actions of none, that hold memory there")]
    able: Annotated[tuple[str, ...], Meta(description="Functions that it can run")]
    unable: Annotated[Mapping[str, str], Meta(description="Functions that it cannot run, and why")]
    resident: Annotated[
        Mapping[str, tuple[ChunkPair, ...]], Meta(description="Model service -> the devices on which it is there")
    ] = msgspec.field(default_factory=dict)
    peer: Annotated[str, Meta(description="Where it joins from")] = ""
    version: str = ""
    isolation: Annotated[str, Meta(description="What its sandboxes are")] = ""
    losses: Annotated[Count, Meta(description="How often it was lost of late")] = 0
    refused_s: Annotated[float, Meta(description="Seconds for which it may not join, as it was lost too often")] = 0.0


RayMachineState = Literal["found", "waiting", "starting", "serving", "failed", "draining", "released"]


class RayMachineStatus(Struct, frozen=True, kw_only=True):
    """One machine of a Ray cluster that is to be a node, and how far that has come."""

    machine: Annotated[str, Meta(description="Ray's id of it")]
    node: Annotated[str, Meta(description="As it joins")]
    address: str
    state: RayMachineState
    why: Annotated[str, Meta(description="Of any state but serving")]
    since_s: Annotated[float, Meta(description="Seconds for which it has been so")]


class NodeStatusList(Struct, frozen=True, kw_only=True):
    """All machines."""

    nodes: tuple[NodeStatus, ...]
    storm_s: Annotated[
        float,
        Meta(description="Seconds for which none is counted lost, because too many were silent within a short time"),
    ] = 0.0
    ray: Annotated[tuple[RayMachineStatus, ...], Meta(description="Machines of a Ray cluster (cluster.ray)")] = ()


class DrainWanted(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a machine is to take no new work."""

    why: Annotated[str, Meta(max_length=500)] = "an operator asked for it"


class TicketWanted(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is to join."""

    name: Name


class NodeTicket(Struct, frozen=True, kw_only=True):
    """What admits one machine once."""

    name: str
    ticket: str
    expires_in_s: float
    gateway: Annotated[str, Meta(description="Where nodes join, host:port")]
    fingerprint: Annotated[str, Meta(description="SHA-256 of the gateway's certificate there")]


class PageKey(Struct, frozen=True, kw_only=True):
    """What opens the page in one browser, once."""

    key: str
    expires_in_s: float


Side = Annotated[int, Meta(ge=1, le=1000)]
SignalName = Literal["HUP", "INT", "QUIT", "KILL", "USR1", "USR2", "TERM", "CONT", "TSTP"]


class SessionTerminal(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size of a terminal."""

    rows: Side = 24
    columns: Side = 80


class SessionOpening(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command that somebody types to."""

    argv: Annotated[tuple[str, ...], Meta(min_length=1, description="Program and arguments, run without a shell")]
    function: Annotated[Name, Meta(description="The exec function whose sandbox and cores it has")] = "shell"
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    user: str | None = None
    terminal: Annotated[
        SessionTerminal | None, Meta(description="A terminal of its own, so large; without, it has three pipes")
    ] = None
    holder: Holder = None


class SessionSteering(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a session is told beside its input."""

    terminal: Annotated[SessionTerminal | None, Meta(description="Its terminal is so large from now on")] = None
    signal: Annotated[SignalName | None, Meta(description="What runs in its foreground gets this signal")] = None


class PortOpening(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A port of a trajectory that is to be reached."""

    port: Annotated[int, Meta(ge=1, le=65535, description="Where the server listens on the sandbox's loopback")]
    function: Annotated[Name, Meta(description="The exec function whose cores the server has while it answers")] = (
        "shell"
    )
    ttl_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Seconds after which it is withdrawn; by default with the trajectory"),
    ] = None


class PortInfo(Struct, frozen=True, kw_only=True):
    """A port of a trajectory that can be reached."""

    id: Annotated[str, Meta(description="Names it; it is withdrawn by it")]
    trajectory: Name
    port: int
    function: Name
    expires_at: Annotated[Instant | None, Meta(description="When it is withdrawn by itself; null with its trajectory")]
    url: Annotated[
        str | UnsetType, Meta(description="Whoever has it reaches the server; told once, when the port is opened")
    ] = UNSET


class PortList(Struct, frozen=True, kw_only=True):
    """The ports of a trajectory that can be reached, without their URLs."""

    ports: tuple[PortInfo, ...]


class SessionFed(Struct, frozen=True, kw_only=True):
    """How much input a session has been passed."""

    input_offset: Annotated[Count, Meta(description="Bytes passed on since its beginning; send on from there")]
    reads: Annotated[bool, Meta(description="Whether its command still reads; if not, more input is dropped")]


class SessionAttached(Struct, frozen=True, kw_only=True):
    """The first record of an attachment, once the command runs or has ended."""

    stream: Literal["attached"]
    offset: Annotated[Count, Meta(description="First byte of its output that is still kept")]
    input_offset: Annotated[Count, Meta(description="Bytes of input that it was passed so far")]


class SessionOutput(Struct, frozen=True, kw_only=True):
    """A piece of what a session said. Bytes before ``offset`` that were not sent are no longer kept."""

    stream: Annotated[str, Meta(extra_json_schema={"enum": ["stdout", "stderr"]})]
    offset: Annotated[Count, Meta(description="Its first byte, counted over both streams")]
    data: Annotated[bytes, Meta(description="The bytes, in base64")]


class SessionSilence(Struct, frozen=True, kw_only=True):
    """Nothing was said for a while; the session goes on."""

    stream: Literal["heartbeat"]


class SessionTaken(Struct, frozen=True, kw_only=True):
    """The last record for who was attached when another caller attached."""

    stream: Literal["detached"]


class SessionEnd(Struct, frozen=True, kw_only=True):
    """The last record of a session."""

    stream: Literal["eof"]
    offset: Annotated[Count, Meta(description="Bytes that it said, as far as they are known")]
    state: AnyState
    reason: AnyReason | None
    message: str
    exit_code: Annotated[int | None, Meta(description="Exit status of the command; null if it has none")]
    signal: Annotated[int | None, Meta(description="The signal that ended it, else null")]


SessionRecord = SessionAttached | SessionOutput | SessionSilence | SessionTaken | SessionEnd


class _SessionKind(Struct):
    """What tells the records apart."""

    stream: str


_SESSIONS_KIND = msgspec.json.Decoder(_SessionKind)
_OUTPUT = msgspec.json.Decoder(SessionOutput)
_SESSIONS_MARKS: dict[str, msgspec.json.Decoder[SessionAttached | SessionSilence | SessionTaken | SessionEnd]] = {
    "attached": msgspec.json.Decoder(SessionAttached),
    "heartbeat": msgspec.json.Decoder(SessionSilence),
    "detached": msgspec.json.Decoder(SessionTaken),
    "eof": msgspec.json.Decoder(SessionEnd),
}


def read_session_record(text: bytes | str) -> SessionRecord:
    """Return one record of NDJSON; raises `msgspec.DecodeError` for what is none."""
    mark = _SESSIONS_MARKS.get(_SESSIONS_KIND.decode(text).stream)
    return _OUTPUT.decode(text) if mark is None else mark.decode(text)


#: As the trainer numbers them.
StepNumber = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class StepPath(Struct, frozen=True, kw_only=True):
    """Which step of which task is meant."""

    task: Name
    step: StepNumber


class StepExpectation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trainer tells of a step."""

    expected: Annotated[
        int, Meta(ge=1, le=10**6, description="How many rollouts it is to have: trajectories, and calls of none")
    ]


class StepInfo(Struct, frozen=True, kw_only=True):
    """A step of a task. Its rollouts are the trajectories opened under it, and calls of no trajectory that name it."""

    task: Name
    step: StepNumber
    expected: Annotated[int | None, Meta(description="How many rollouts it is to have; null until that is told")]
    living: Annotated[Count, Meta(description="Rollouts that have begun and not ended")]
    ended: Annotated[Count, Meta(description="Rollouts that have ended, however")]
    waiting: Annotated[Count, Meta(description="Trajectories that are being opened: most wait for memory")] = 0
    opened_at: Instant
    ended_at: Annotated[Instant | None, Meta(description="When the last expected rollout ended; null before")]
    ends_in_s: Annotated[
        float | None, Meta(description="Seconds until it is expected to end; null if nothing tells, or it has")
    ]


class StepList(Struct, frozen=True, kw_only=True):
    """The steps of a task that are kept, that opened last first."""

    steps: tuple[StepInfo, ...]


class BatchItem(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One asynchronous call of a batch."""

    function: Annotated[Name, Meta(description="A registered function")]
    input: Annotated[JsonObject, Meta(description="What the function is given")] = field(default_factory=dict)
    task: Annotated[Name | None, Meta(description="The RL task that it belongs to; default without")] = None
    trajectory: Annotated[Name | None, Meta(description="The rollout whose environment it needs")] = None
    step: Annotated[StepNumber | None, Meta(description="The step of the task that it belongs to")] = None
    timeout: Annotated[Timeout | None, Meta(description="Bound of the execution, at most the function's")] = None
    max_age: Annotated[Wait | None, Meta(description="It is given up if it still waits at this age")] = None
    key: Annotated[Key | None, Meta(description="The same key and body latch on to the first invocation")] = None


class BatchRequest(Struct, frozen=True, kw_only=True):
    """Calls that are accepted with one commit."""

    calls: tuple[BatchItem, ...]


class BatchVerdict(Struct, frozen=True, kw_only=True):
    """What became of one call: either its invocation or its problem."""

    status: Annotated[int, Meta(description="200 ended, 202 accepted, otherwise that of the problem")]
    invocation: Invocation | UnsetType = UNSET
    problem: Problem | UnsetType = UNSET
    replayed: Annotated[
        bool | UnsetType, Meta(description="The key was known: nothing was run, this is the first call's invocation")
    ] = UNSET


class BatchAnswer(Struct, frozen=True, kw_only=True):
    """The verdicts, in the order of the calls."""

    results: tuple[BatchVerdict, ...]


# What requests say beside their bodies: the query and header parameters of each operation that has any.
#
# A parameter that is absent is None, or has the value that is given here.

Expectation = Literal["living"]
LIVING = "living: if the trajectory has ended the request is refused with 410, where otherwise a new one would begin"
#: Number of a log record.
Position = Annotated[int, Meta(ge=0, le=2**53)]
#: The same as an event source sends it, which is empty before the first.
EventId = Annotated[str, worded("^[0-9]{0,15}$", "the number of a record")]
#: An instant of RFC 3339 with its zone; a day that the month lacks is taken for one of the next.
INSTANT_PATTERN = (
    r"(19[7-9][0-9]|2[0-9]{3})-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
    r"T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
#: An instant, or a duration before now.
Moment = Annotated[
    str,
    worded(
        f"^({WAIT_PATTERN}|{INSTANT_PATTERN})$",
        "a duration before now, for example 15m, or an instant with its zone, for example 2026-11-22T08:53:10Z",
        examples=["15m", "2026-11-22T08:53:10Z"],
    ),
]
#: HTTP or HTTPS, with a host and without credentials.
CallbackUrl = Annotated[
    str, Meta(extra_json_schema={"pattern": r"^https?://[a-z0-9][a-z0-9.-]*(:[0-9]{1,4})?(/[!-~]*)?$"})
]
#: A place in the order of service.
QueueCursor = Annotated[str, worded("^[0-9a-f]{64}$", "the next_cursor of the page before")]


class CallHeaders(
    Struct,
    frozen=True,
    kw_only=True,
    rename={
        "key": "Idempotency-Key",
        "trajectory": "X-Trajectory-Id",
        "expect": "X-Trajectory-Expect",
        "task": "X-Task",
        "step": "X-Step",
        "timeout": "X-Timeout",
        "max_age": "X-Max-Age",
        "parent": "X-Parent-Id",
        "callback_url": "X-Callback-Url",
        "on_disconnect": "X-On-Disconnect",
    },
):
    """Headers of an invocation."""

    key: Annotated[Key | None, Meta(description="The same key and body latch on to the first invocation")] = None
    trajectory: Annotated[Name | None, Meta(description="The rollout whose environment it needs")] = None
    expect: Annotated[Expectation | None, Meta(description=LIVING)] = None
    task: Annotated[Name | None, Meta(description="The RL task it belongs to; default without")] = None
    step: Annotated[StepNumber | None, Meta(description="The step of the task that it belongs to")] = None
    timeout: Annotated[Timeout | None, Meta(description="Bound of the execution, at most the function's")] = None
    max_age: Annotated[Wait | None, Meta(description="Asynchronous work that still waits at this age is given up")] = (
        None
    )
    parent: Annotated[Name | None, Meta(description="The living invocation that makes this one")] = None
    callback_url: Annotated[
        CallbackUrl | None,
        Meta(
            description="Where the ended record is posted to, if server.callbacks.allow names it. With a secret, "
            "X-Tangram-Signature is sha256= and the HMAC-SHA256 of X-Tangram-Timestamp, a dot and the body"
        ),
    ] = None
    on_disconnect: Annotated[
        Literal["cancel", "continue"] | None, Meta(description="What happens when the caller goes away")
    ] = None
    traceparent: Annotated[str | None, Meta(description="W3C trace context, passed on")] = None
    tracestate: Annotated[str | None, Meta(description="What vendors add to traceparent, passed on with it")] = None


class OpeningHeaders(Struct, frozen=True, kw_only=True, rename={"step": "X-Step"}):
    """Headers of the opening of a trajectory."""

    step: Annotated[StepNumber | None, Meta(description="The step of its task, if the body names none")] = None


class InvokeQuery(Struct, frozen=True, kw_only=True):
    """Query of an invocation."""

    mode: Annotated[Mode, Meta(description="How to attend to the result")] = "sync"
    wait: Annotated[
        Wait | None, Meta(description="sync: answer 202 when it takes longer; async: wait so long first")
    ] = None


# What a call says beside its function and its input where it is no request of its own (`tangram.stream`): the fields of
# its headers and of its query. Any: there is one declaration of them, and it is not here.
if TYPE_CHECKING:
    CallOptions = Any
else:
    CallOptions = msgspec.defstruct(
        "CallOptions",
        [(each.name, each.type, each.default) for kind in (CallHeaders, InvokeQuery) for each in structs.fields(kind)],
        frozen=True,
        kw_only=True,
        omit_defaults=True,
        forbid_unknown_fields=True,
        module=__name__,
    )


class WaitQuery(Struct, frozen=True, kw_only=True):
    """Query for one invocation."""

    wait: Annotated[Wait | None, Meta(description="Wait so long for the end before answering")] = None


class InvocationQuery(Struct, frozen=True, kw_only=True):
    """Which invocations to list: those that pass all that is given."""

    function: Annotated[Name | None, Meta(description="Only those of this function")] = None
    task: Annotated[Name | None, Meta(description="Only those of this task")] = None
    trajectory: Annotated[Name | None, Meta(description="Only those of this trajectory")] = None
    parent: Annotated[Name | None, Meta(description="Only those that this invocation made")] = None
    state: Annotated[State | None, Meta(description="Only those in this state")] = None
    reason: Annotated[Reason | None, Meta(description="Only those that ended for this reason")] = None
    since: Annotated[
        Moment | None, Meta(description="Only those accepted from then on: an instant, or so long ago (15m)")
    ] = None
    until: Annotated[Moment | None, Meta(description="Only those accepted before")] = None
    order: Annotated[Literal["newest", "oldest"], Meta(description="Which come first")] = "newest"
    dead: Annotated[bool | None, Meta(description="Only those in (or not in) the dead-letter list")] = None
    cursor: Annotated[InvocationId | None, Meta(description="next_cursor of the page before")] = None
    limit: Annotated[Limit, Meta(description="Records of a page")] = 100


class LogQuery(Struct, frozen=True, kw_only=True):
    """Which part of a log to read."""

    follow: Annotated[bool, Meta(description="Go on until it has ended, with heartbeats")] = False
    offset: Annotated[Position | None, Meta(description="First record to send")] = None


class SessionReadQuery(Struct, frozen=True, kw_only=True):
    """Where to go on reading a session's output."""

    offset: Annotated[Position, Meta(description="First byte to send")] = 0


class SessionWriteQuery(Struct, frozen=True, kw_only=True):
    """Where a session's input belongs."""

    offset: Annotated[
        Position | None, Meta(description="Bytes of input before the body; what was passed on already is passed over")
    ] = None
    end: Annotated[bool, Meta(description="There is no more input after the body")] = False


class WatchQuery(Struct, frozen=True, kw_only=True):
    """Which part of the page's stream."""

    bars: Annotated[bool, Meta(description="With the bars of the timeline")] = False
    since: Annotated[
        Annotated[str, worded("^[0-9a-f]{8}\\.[0-9]{1,15}$", "the id of an event of this stream")] | None,
        Meta(description="The id of the last event that was received: goes on behind it, if it is kept"),
    ] = None
    history: Annotated[
        Annotated[int, Meta(ge=1, le=1800)], Meta(description="Seconds of past bars that the state comes with")
    ] = 120


class LogHeaders(Struct, frozen=True, kw_only=True, rename={"last_event_id": "Last-Event-ID"}):
    """Where a reconnecting event source goes on."""

    last_event_id: Annotated[
        EventId | None, Meta(description="The last offset that was received (Server-Sent Events)")
    ] = None


class BatchQuery(Struct, frozen=True, kw_only=True):
    """How long to wait for the ends of a batch."""

    wait: Annotated[Literal["none", "any", "all"], Meta(description="Wait for the ends of none, any or all")] = "none"
    timeout: Annotated[Wait | None, Meta(description="Wait no longer")] = None


class PurgeQuery(Struct, frozen=True, kw_only=True):
    """Which dead letters to take off the list."""

    function: Annotated[Name | None, Meta(description="Only those of this function")] = None


class QueueQuery(Struct, frozen=True, kw_only=True):
    """Which page of the queue."""

    cursor: Annotated[QueueCursor | None, Meta(description="next_cursor of the page before")] = None
    limit: Annotated[Limit, Meta(description="Actions of a page")] = 100


class TrajectoryQuery(Struct, frozen=True, kw_only=True):
    """Which page of the living trajectories."""

    cursor: Annotated[Name | None, Meta(description="next_cursor of the page before")] = None
    limit: Annotated[Limit, Meta(description="Trajectories of a page")] = LIST_LIMIT_MAX


#: At most 4095 bytes: characters of one byte, or so few of others that they cannot be more.
SandboxPath = Annotated[
    str,
    worded(
        r"^([\x01-\x7f]{1,4095}|[^\x00]{1,1023})$",
        "a path of at most 4095 bytes without NUL",
        description="Path in the sandbox; a relative one begins at the sandbox's own working directory",
    ),
]


class FileHeaders(Struct, frozen=True, kw_only=True, rename={"expect": "X-Trajectory-Expect"}):
    """Headers of what is done with a file."""

    expect: Annotated[Expectation | None, Meta(description=LIVING)] = None


WHOSE = "Whose rights it has, one of sandbox.users; the sandbox's user without"
FileMode = Annotated[str, worded("^[0-7]{3,4}$", "three or four octal digits, for example 755")]


class FileWriteQuery(Struct, frozen=True, kw_only=True):
    """How to write a file."""

    mode: Annotated[
        FileMode | None,
        Meta(description="Permission bits in octal; without, those of the file that is there, or 644"),
    ] = None
    user: Annotated[SandboxUser | None, Meta(description=WHOSE)] = None


class FileReadQuery(Struct, frozen=True, kw_only=True):
    """What to read."""

    list: Annotated[bool, Meta(description="List the directory instead")] = False
    user: Annotated[SandboxUser | None, Meta(description=WHOSE)] = None


class ArchiveWriteQuery(Struct, frozen=True, kw_only=True):
    """Where an archive is unpacked."""

    path: SandboxPath
    user: Annotated[SandboxUser | None, Meta(description=WHOSE)] = None


class ArchiveReadQuery(Struct, frozen=True, kw_only=True):
    """What is packed."""

    path: SandboxPath
    user: Annotated[SandboxUser | None, Meta(description=WHOSE)] = None
    base: Annotated[bool, Meta(description="Names begin with the directory's own, as the Docker engine's do")] = False


class FileWriteAtQuery(FileWriteQuery, frozen=True, kw_only=True):
    """Which file to write, and how."""

    path: SandboxPath


class FileReadAtQuery(FileReadQuery, frozen=True, kw_only=True):
    """What to read, and from where."""

    path: SandboxPath


class FunctionQuery(Struct, frozen=True, kw_only=True):
    """What to do with one function."""

    dry_run: Annotated[bool, Meta(description="Only tell the differences")] = False


class ConfigQuery(Struct, frozen=True, kw_only=True):
    """What to do with a configuration."""

    dry_run: Annotated[bool, Meta(description="Only tell the differences")] = False
    prune: Annotated[bool, Meta(description="Remove what is not named; without it that stays")] = False


class WaitCause(Struct, frozen=True, kw_only=True):
    """What a waiting action lacks; ``need`` and ``free`` count units of the pool, or bytes of memory."""

    kind: Annotated[
        str,
        Meta(
            description="units, devices, quota, memory, trajectory (an earlier action of it), task_cap, hold (the "
            "policy waits on purpose), turn (what is free is kept for earlier actions), or what is being made: image, "
            "requirements or function"
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
    function: Annotated[str, Meta(description="Or (opening), (snapshot), (registration), (pull)")]
    task: Annotated[str, Meta(description="Empty for an operator's")]
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
    holder: Holder = None
    opening: Annotated[
        Name | None, Meta(description="What this request is called: sent again it joins what it has made")
    ] = None
    new: Annotated[bool, Meta(description="409 if it lives already, instead of joining it")] = False


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
    joined: Annotated[
        bool | UnsetType, Meta(description="Whether it lived before it was opened; in the answer of an opening")
    ] = UNSET


class TrajectoryPage(Struct, frozen=True, kw_only=True):
    """Living trajectories, by name."""

    trajectories: tuple[TrajectoryInfo, ...]
    next_cursor: Annotated[Name | None, Meta(description="The cursor of the next page; null on the last")]


class ImageInfo(Struct, frozen=True, kw_only=True):
    """A container image of the engine, or one that is being pulled or could not be."""

    image: str
    state: Annotated[str, Meta(extra_json_schema={"enum": ["pulling", "present", "failed"]})]
    size_bytes: Annotated[Count, Meta(description="On the disk, with layers that others share; 0 before it is there")]
    done_bytes: Annotated[Count, Meta(description="Of a pull: what has arrived")]
    total_bytes: Annotated[Count, Meta(description="Of a pull: what is known to come")]
    pulled: Annotated[bool, Meta(description="Whether this gateway has pulled it, and may remove it")]
    kept: Annotated[bool, Meta(description="Whether a function has it, or a sandbox that is being made")]
    used_at: Annotated[Instant | None, Meta(description="Its last use, of one that was pulled")]
    problem: Annotated[str, Meta(description="Why its last pull failed, in the registry's words")]


class ImageList(Struct, frozen=True, kw_only=True):
    """The images, by name."""

    images: tuple[ImageInfo, ...]
    bound_bytes: Annotated[Count, Meta(description="Most bytes of those that were pulled; 0 without a bound")]


class ImagesWanted(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images to be pulled ahead of a run."""

    images: Annotated[tuple[Image, ...], Meta(min_length=1, max_length=10_000)]


class SnapshotQuery(Struct, frozen=True, kw_only=True):
    """Parameters of a snapshot that is to be taken."""

    holder: Holder = None


class SnapshotInfo(Struct, frozen=True, kw_only=True):
    """The files of a trajectory's sandbox as they were at a moment."""

    snapshot: SnapshotId
    trajectory: Annotated[Name, Meta(description="Whose files they were")]
    task: Name
    provider: Annotated[str, Meta(description="The kind of sandbox that can begin with it")]
    image: Annotated[str, Meta(description="The image below it; of no meaning where sandboxes are processes")]
    size_bytes: Annotated[Count, Meta(description="On the disk, beside the image")]
    made_at: Instant
    used_at: Annotated[Instant, Meta(description="When a sandbox began with it last, or it was taken")]
    in_use: Annotated[bool, Meta(description="Whether a living trajectory began with it: then it is not removed")]
    node: Annotated[str, Meta(description="The machine that has it; what begins with it begins there")] = ""
    lost: Annotated[str | None, Meta(description="Why it cannot be had before its node is back, or null")] = None


class SnapshotList(Struct, frozen=True, kw_only=True):
    """The snapshots, the oldest first."""

    snapshots: tuple[SnapshotInfo, ...]
    count_max: Annotated[
        Count, Meta(description="Most on the gateway's machine; beyond it those used least recently go")
    ]
    total_max_bytes: Annotated[Count, Meta(description="Most bytes of all of them; likewise")]


class ForkRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for trajectories that begin with another's files as they are now."""

    function: Annotated[Name, Meta(description="The registered function whose sandbox it is, as when one is opened")]
    to: Annotated[
        tuple[Name, ...], Meta(min_length=1, max_length=256, description="Names of trajectories that do not live yet")
    ]
    task: Annotated[Name | None, Meta(description="The RL task that they belong to, by default the other's")] = None
    step: Annotated[StepNumber | None, Meta(description="The step of the task that they belong to")] = None
    lease_s: OpeningLease = None
    holder: Holder = None


class ForkAnswer(Struct, frozen=True, kw_only=True):
    """What was forked, and with which snapshot it began."""

    snapshot: SnapshotInfo
    trajectories: tuple[TrajectoryInfo, ...]


# The wire types: one declaration for each noun that crosses the wire; JSON, documents and results come from them.
#
# Answers may hold fields that are not named here: a newer server tells more. A field that may be left out is `UNSET`,
# which is false, where it was; null is None.

__all__ = [
    "UNSET",
    "ActSplit",
    "ActivityInfo",
    "Attempt",
    "BatchAnswer",
    "BatchItem",
    "BatchRequest",
    "BatchVerdict",
    "CauseCount",
    "ChoicesInfo",
    "ConfigDiff",
    "ConfigFile",
    "ConfigFiles",
    "DeviceInfo",
    "DurationInfo",
    "FailureCount",
    "FileEntry",
    "FileList",
    "FileWritten",
    "ForkAnswer",
    "ForkRequest",
    "FunctionActivity",
    "FunctionInfo",
    "FunctionList",
    "FunctionUpload",
    "Health",
    "HolderInfo",
    "HostImagesInfo",
    "ImageInfo",
    "ImageList",
    "ImagesWanted",
    "Invocation",
    "InvocationPage",
    "LearnedInfo",
    "LeaseAnswer",
    "LeaseRequest",
    "LivingSandbox",
    "LogAccepted",
    "LogEnd",
    "LogHeartbeat",
    "LogLag",
    "LogLine",
    "LogRecord",
    "LogResult",
    "Mode",
    "ModelDevice",
    "ModelsInfo",
    "NodeInfo",
    "PlacedModel",
    "PoolInfo",
    "Problem",
    "Purged",
    "QueueEntry",
    "QueuePage",
    "Reason",
    "RegionInfo",
    "ResidentInfo",
    "ResourcesInfo",
    "RetryInfo",
    "RevisionChange",
    "SandboxChoice",
    "SandboxInfo",
    "SandboxesInfo",
    "ServiceInfo",
    "SessionAttached",
    "SessionEnd",
    "SessionFed",
    "SessionOpening",
    "SessionOutput",
    "SessionRecord",
    "SessionSilence",
    "SessionSteering",
    "SessionTaken",
    "SessionTerminal",
    "SnapshotInfo",
    "SnapshotList",
    "State",
    "StepExpectation",
    "StepInfo",
    "StepList",
    "TaskInfo",
    "TaskList",
    "TrajectoryInfo",
    "TrajectoryOpening",
    "TrajectoryPage",
    "UnitsInfo",
    "UnsetType",
    "ValueChange",
    "WaitCause",
    "WarmInfo",
    "read_log_record",
    "read_session_record",
]
