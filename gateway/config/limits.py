"""The table of docs/reference/limits.md: every bound of the configuration, and what is told when it is reached."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.config.document import schema
from gateway.config.reference import CHAPTERS, _default, _kind, _mapping, _row

#: What makes a setting a bound: its key, or how its meaning begins.
_KEYS = re.compile(r"(^|_)(max|limit|timeout)($|_)")
_MEANINGS = ("most ", "largest ", "longest ")
_COUNTED = {"count", "size", "duration"}

#: What who reaches it is told, by key; of the others the meaning says what happens.
TOLD: Mapping[str, str] = {
    "functions.NAME.timeout": (
        "`timeout`: the command or suite `ran longer than timeout, 60 s`; what was printed until then is kept"
    ),
    "functions.NAME.queue_timeout": ("`queue_timeout`: `waited longer than queue_timeout, 600 s, for` what it lacked"),
    "functions.NAME.max_queued": "429 `quota_exceeded`, with Retry-After",
    "functions.NAME.output_limit": (
        "a handler's result ends it `output_limit`; of a command's output the middle is left out, a line "
        "there counts it, and `stdout_truncated` is true"
    ),
    "functions.NAME.log_limit": "a record `truncated` in the log",
    "functions.NAME.request.response_limit": "`output_limit`: the service's answer exceeds it",
    "tasks.NAME.max_queued": "429 `quota_exceeded`, with Retry-After",
    "sandbox.memory": "`out_of_memory`, with the peak: `sandbox.memory bounds it`",
    "sandbox.pids": (
        "the command sees `Resource temporarily unavailable` (EAGAIN); if it fails, a `system` line in the "
        "log counts the refusals"
    ),
    "sandbox.disk": (
        "the command sees `No space left on device`; a single file that grows to it in a process sandbox ends its "
        "writer by SIGXFSZ (`File size limit exceeded`); a file that is written from outside is 413 `too_large`; "
        "where the machine can bound no disk the sandbox is ended, `environment_lost`"
    ),
    "sandbox.shm": "the command sees `No space left on device` below /dev/shm",
    "sandbox.idle_ttl": "the trajectory ends: 410 `trajectory_ended` for who expects it to live",
    "server.body_limit": "413 `too_large`, RESOURCE_EXHAUSTED on gRPC; nothing more is read",
    "server.file_limit": "413 `too_large`, RESOURCE_EXHAUSTED on gRPC; nothing is left of an upload",
    "server.body_timeout": "408 `too_slow`, DEADLINE_EXCEEDED on gRPC",
    "server.batch_max": "413 `too_large`: no call of the batch is accepted",
    "server.inputs_max": "503 `capacity_exceeded`, with Retry-After",
    "server.connections_max": "503 `capacity_exceeded` on a connection that is closed then",
    "server.resets_max": "the connection is closed (ENHANCE_YOUR_CALM)",
    "server.free_min": "`/readyz` is 503 with the reason",
    "server.max_age": "`queue_timeout`: it was not started within its age",
    "server.logs.stall": "a record `dropped` with `next_offset`, from where to go on",
    "server.logs.followers_max": "503 `capacity_exceeded`",
    "server.sessions.living_max": "503 `capacity_exceeded`",
    "server.sessions.unattended": "`cancelled`: nobody was attached to it",
    "scheduler.max_queued": "503 `capacity_exceeded`, with Retry-After",
    "scheduler.trajectories_max": "503 `capacity_exceeded`, with Retry-After",
    "cluster.transfers_max": "503 `capacity_exceeded`, with Retry-After",
    "sandbox.snapshots.total_max": "the least used go; 413 for one that alone is larger, 503 if all are in use",
    "sandbox.snapshots.count_max": "the least used go; 503 if all are in use",
    "sandbox.disk_bound.images_max": "503 `capacity_exceeded`: no further sandbox is made",
    "sandbox.ids.blocks": "503 `capacity_exceeded`: no further sandbox is made",
}


def limits_markdown() -> str:
    """One row for each bound: key, default, what it bounds, what is told."""
    head = ("key", "default", "what it bounds", "when it is reached")
    rows = (
        _row((f"`{path}`", _default(node), str(node.get("description", "")), TOLD.get(path, "")))
        for path, node in bounds()
    )
    return "\n".join([_row(head), "|---|---|---|---|", *rows, ""])


def bounds() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place of each bound in the YAML, and what the schema says of it. Any: a schema nests without end."""
    definitions = _mapping(schema()["$defs"])
    seen = set[str]()
    for name, place in CHAPTERS:
        if name == "SandboxSpec":  # its defaults stand in the section `sandbox`, whose keys these are
            continue
        for key, node in _mapping(definitions[name]["properties"]).items():
            path = f"{place.partition(',')[0]}.{key}"
            if path not in seen and (path in TOLD or _is_bound(key, node)):
                seen.add(path)
                yield path, node


def _is_bound(key: str, node: Mapping[str, Any]) -> bool:
    said = str(node.get("description", ""))
    return _kind(node) in _COUNTED and (_KEYS.search(key) is not None or said.startswith(_MEANINGS))
