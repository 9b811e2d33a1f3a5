"""Tables of docs/reference, made from what the code declares.

``python -m scripts.reference`` writes gateway/config/schema.json and the tables at the ends of the pages that need no
running gateway; tests/docs requires those of metrics.md too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args

from prometheus_client import CollectorRegistry

from gateway.config.schema import ClusterConfig, NodeConfig, SandboxConfig, ServerConfig, form_name, key_of, schema
from gateway.errors import ERROR_STATUSES, REASON_STATUSES
from manager.function import settings_of
from manager.resources.pools import KINDS as RESOURCE_KINDS
from runtimes.kind import Kind, Schema
from runtimes.kinds import KINDS
from tangram import errors

ROOT = Path(__file__).resolve().parents[1]
#: What is above it in a page is written by hand.
MARK = "<!-- generated: python -m scripts.reference -->\n\n"
_FUNCTION = "functions.NAME"


def _own_keys(kind: Kind) -> tuple[str, ...]:
    """Return the keys that functions of this kind alone have."""
    return (
        () if kind.section is None else tuple(key_of(name, setting) for name, _, setting in settings_of(kind.section))
    )


def _sections(noun: type, path: str) -> Iterator[tuple[str, str]]:
    """Yield the sections within a noun's own, outer ones first: (name in the schema, where it stands)."""
    for name, hint, setting in settings_of(noun):
        bare = get_args(hint)[0]
        inner = path if setting.inline else f"{path}.{key_of(name, setting)}"
        for section in (each for each in (bare, *get_args(bare)) if isinstance(each, type) and is_dataclass(each)):
            if not setting.inline:
                yield section.__name__, inner
            yield from _sections(section, inner)


def _kind_chapters(kind: Kind) -> Iterator[tuple[str, str]]:
    """Yield the chapters of a kind: one of its functions if some key holds a plain value, and those of its sections."""
    sections = [] if kind.section is None else list(_sections(kind.section, _FUNCTION))
    if {f"{_FUNCTION}.{key}" for key in _own_keys(kind)} - {path for _, path in sections}:
        yield form_name(kind), f"{_FUNCTION}, runtime {kind.name}"
    for name, path in sections:
        at_top = path.removeprefix(f"{_FUNCTION}.") in _own_keys(kind)
        yield name, f"{path}, runtime {kind.name}" if at_top else path


def _whole(noun: type, path: str) -> Iterator[tuple[str, str]]:
    """Yield the chapter of a section and those of the sections within it."""
    yield noun.__name__, path
    yield from _sections(noun, path)


#: Of the section ``sandbox``: chapters of functions, which are its defaults.
_OF_FUNCTIONS = ("TrajectoryChoices", "Warm")
#: Definitions in reading order: (name in the schema, where it stands in the YAML).
CHAPTERS = (
    ("ExecFunction", "functions.NAME"),
    ("SandboxSpec", "functions.NAME.sandbox"),
    ("TrajectoryChoices", "functions.NAME.sandbox.trajectory"),
    ("Warm", "functions.NAME.sandbox.warm"),
    *(chapter for kind in KINDS.values() for chapter in _kind_chapters(kind)),
    ("UnitRange", "functions.NAME.cost.RESOURCE, a range"),
    ("UnitChoices", "functions.NAME.cost.RESOURCE, some counts"),
    ("ElasticitySection", "functions.NAME.elasticity"),
    ("DurationSpec", "functions.NAME.duration"),
    ("RetrySpec", "functions.NAME.retry"),
    *((spec.__name__, f"resources.NAME, kind {spec.kind}") for spec in RESOURCE_KINDS),
    ("TaskSpec", "tasks.NAME"),
    *_whole(ServerConfig, "server"),
    *_whole(NodeConfig, "node"),
    *_whole(ClusterConfig, "cluster"),
    *((name, path) for name, path in _whole(SandboxConfig, "sandbox") if name not in _OF_FUNCTIONS),
    ("ModelSettings", "models"),
    ("SchedulerConfig", "scheduler"),
    ("PolicySection", "scheduler.policy, with constants"),
)
#: Definitions whose other keys another chapter holds: only these are shown.
_ONLY = {
    **{form_name(kind): ("runtime", *_own_keys(kind)) for kind in KINDS.values() if kind.section is not None},
    "SandboxConfig": (
        "provider",
        "plain_as_root",
        "engine_silence",
        "seccomp",
        "path",
        "ids",
        "name_servers",
        "docker",
        "disk_bound",
        "requirements",
    ),
}

#: What happens when a bound is reached, by key; of the others the meaning says it.
REACHED: Mapping[str, str] = {
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
    "functions.NAME.sandbox.memory": "`out_of_memory`, with the peak: `sandbox.memory bounds it`",
    "functions.NAME.sandbox.pids": (
        "the command sees `Resource temporarily unavailable` (EAGAIN); if it fails, a `system` line in the "
        "log counts the refusals"
    ),
    "functions.NAME.sandbox.disk": (
        "the command sees `No space left on device`; a single file that grows to it in a process sandbox ends its "
        "writer by SIGXFSZ (`File size limit exceeded`); a file that is written from outside is 413 `too_large`; "
        "where the machine can bound no disk the sandbox is ended, `environment_lost`"
    ),
    "functions.NAME.sandbox.shm": "the command sees `No space left on device` below /dev/shm",
    "functions.NAME.sandbox.idle_ttl": "the trajectory ends: 410 `trajectory_ended` for who expects it to live",
    "server.body_limit": "413 `too_large`, RESOURCE_EXHAUSTED on gRPC; nothing more is read",
    "server.file_limit": "413 `too_large`, RESOURCE_EXHAUSTED on gRPC; nothing is left of an upload",
    "server.stream_message": "the stream is closed with 1009",
    "server.stream_calls_max": "429 `quota_exceeded`, with `retry_after_s`, as the answer of that call",
    "server.inputs_max": "503 `capacity_exceeded`, with Retry-After",
    "server.connections_max": "503 `capacity_exceeded` on a connection that is closed then",
    "server.free_min": "`/readyz` is 503 with the reason",
    "server.max_age": "`queue_timeout`: it was not started within its age",
    "server.sessions.living_max": "503 `capacity_exceeded`",
    "server.sessions.unattended": "`cancelled`: nobody was attached to it",
    "scheduler.max_queued": "503 `capacity_exceeded`, with Retry-After",
    "scheduler.trajectories_max": "503 `capacity_exceeded`, with Retry-After",
    "sandbox.snapshots.total_max": "the least used go; 413 for one that alone is larger, 503 if all are in use",
    "sandbox.snapshots.count_max": "the least used go; 503 if all are in use",
}


def markdown() -> str:
    """One table for each section of the YAML."""
    definitions = _mapping(schema()["$defs"])
    # What a function's sandbox leaves out has the default of the server's section.
    defaults = _mapping(definitions["SandboxConfig"]["properties"])
    chapters = {name: _mapping(definitions[name]) for name, _ in CHAPTERS}
    own = chapters["SandboxSpec"]
    chapters["SandboxSpec"] = {**own, "properties": {key: defaults[key] for key in own["properties"]}}
    return "\n".join(_chapter(place, chapters[name], _ONLY.get(name)) for name, place in CHAPTERS)


def runtimes_markdown() -> str:
    """Tables of what each runtime kind takes and returns."""
    return "\n".join(
        _schema_table(" ".join(filter(None, (name, variant))), what, schema)
        for name, kind in KINDS.items()
        for variant, pair in kind.shown.items()
        for what, schema in zip(("input", "result"), pair, strict=True)
        if schema is not None
    )


def errors_markdown() -> str:
    """Tables of the client's errors, and of the reasons of invocations that ended badly."""
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.TangramError)]
    lines = [_row(("class", "code", "HTTP", "meaning")), "|---|---|---|---|"]
    for kind in kinds:
        status = ERROR_STATUSES.get(kind.code)
        meaning = " ".join((kind.__doc__ or "").partition("\n\n")[0].replace("``", "`").split())
        lines.append(_row((f"`{kind.__name__}`", f"`{kind.code}`", str(status.http) if status else "", meaning)))
    lines += ["", _row(("reason", "HTTP", "meaning")), "|---|---|---|"]
    lines += [_row((f"`{reason}`", str(each.http), each.title)) for reason, each in REASON_STATUSES.items()]
    return "\n".join([*lines, ""])


def metrics_markdown(registry: CollectorRegistry) -> str:
    """The table of every metric of a gateway that has counted one of each."""
    rows = []
    for family in registry.collect():
        labels = {name: None for sample in family.samples for name in sample.labels if name != "le"}
        names = list(labels) or list(getattr(family, "_labelnames", ()))
        shown = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(f"| `{shown}` | {family.type} | {', '.join(names)} | {family.documentation} |\n")
    return "| metric | kind | labels | meaning |\n|---|---|---|---|\n" + "".join(sorted(rows))


def _chapter(place: str, definition: Schema, only: tuple[str, ...] | None) -> str:
    where, comma, rest = place.partition(",")
    keys = set(_mapping(definition["properties"]) if only is None else only)
    required = _list(definition, "required")
    rows = [
        (
            key,
            _kind(node),
            "required" if key in required else _default(node),
            node.get("description", ""),
            REACHED.get(f"{where}.{key}", ""),
        )
        for key, node in _mapping(definition["properties"]).items()
        if key in keys
    ]
    head = ("key", "value", "default", "meaning", "when it is reached")
    columns = len(head) if any(reached for *_, reached in rows) else len(head) - 1
    return _table(f"`{where}`{comma}{rest}", definition, head[:columns], [row[:columns] for row in rows])


def _schema_table(title: str, what: str, schema: Schema) -> str:
    optional = set(_mapping(schema["properties"])) - set(_list(schema, "required"))
    rows = [
        (key, _kind(node), "yes" if key in optional else "", node.get("description", ""))
        for key, node in _mapping(schema["properties"]).items()
    ]
    return _table(f"{title}: {what}", schema, ("key", "value", "optional", "meaning"), rows)


def _table(title: str, described: Schema, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"### {title}", "", str(described["description"]), "", _row(head), f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(_row((f"`{key}`", *rest)) for key, *rest in rows), ""])


def _row(cells: Iterable[str]) -> str:
    return " ".join(["|", *(f"{cell} |" for cell in cells)])


def _kind(node: Mapping[str, Any]) -> str:
    """What may stand there, in a word."""
    if "$ref" in node:
        definition = _mapping(_mapping(schema()["$defs"])[node["$ref"].rpartition("/")[2]])
        return "section" if definition["type"] == "object" else _kind(definition)
    if node.get("examples") in (["30s"], ["512Mi"]):
        return "duration" if node["examples"] == ["30s"] else "size"
    if "const" in node:
        return f"`{node['const']}`"
    if "enum" in node:
        return (
            " ".join(f"`{each}`" for each in node["enum"] if each != "") if len(node["enum"]) < 10 else "name or status"
        )
    alternatives = node.get("anyOf", node.get("oneOf"))
    if alternatives is not None:
        kinds = [_kind(each) for each in alternatives if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    kind = node.get("type", "any")
    if kind == "array":
        return f"list of {_kind(node['items'])}" if "items" in node else "list"
    if kind == "object" and "properties" in node:
        return " ".join(f"`{key}`" for key in node["properties"])
    first = kind[0] if isinstance(kind, list) else kind
    return {"string": "text", "integer": "count", "object": "mapping"}.get(first, str(first))


def _default(node: Mapping[str, Any]) -> str:
    default = node.get("default", "")
    if default == "":
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _list(schema: Schema, key: str) -> list[str]:
    result = schema.get(key, [])
    assert isinstance(result, list)
    return result


def _mapping(value: object) -> Mapping[str, Any]:
    assert isinstance(value, Mapping)
    return value


if __name__ == "__main__":
    text = json.dumps(schema(), indent=2, sort_keys=True) + "\n"
    (ROOT / "gateway/config/schema.json").write_text(text, encoding="utf-8")
    for name, tables in {"yaml": markdown, "runtimes": runtimes_markdown, "errors": errors_markdown}.items():
        page = ROOT / f"docs/reference/{name}.md"
        page.write_text(page.read_text(encoding="utf-8").partition(MARK)[0] + MARK + tables(), encoding="utf-8")
