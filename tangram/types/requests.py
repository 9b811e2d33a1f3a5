"""What requests say beside their bodies: the query and header parameters of each operation that has any.

A parameter that is absent is None, or has the value that is given here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from tangram.types.steps import StepNumber
from tangram.types.values.quantities import WAIT_PATTERN
from tangram.types.values.scalars import (
    LIST_LIMIT_MAX,
    InvocationId,
    Key,
    Limit,
    Mode,
    Name,
    Reason,
    SandboxUser,
    State,
    Timeout,
    Wait,
)
from tangram.types.values.wording import worded

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
