"""Scalars of the wire: instants, names, states, reasons, and bounded numbers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from msgspec import Meta

from tangram.types.values.quantities import KEY_PATTERN, NAME_PATTERN, WAIT_PATTERN
from tangram.types.values.wording import worded

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
