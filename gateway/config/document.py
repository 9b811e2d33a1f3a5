"""The whole document of the YAML: its sections, its JSON Schema, and one section checked with every error placed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, cast

from pydantic import Field, TypeAdapter, ValidationError, create_model
from pydantic_core import ErrorDetails

from gateway.config.declared import RESOURCE
from gateway.config.derive import Section, section_of
from gateway.config.forms import Name, Scheduler
from gateway.config.functions import Function
from gateway.config.sections import ClusterConfig, NodeConfig, SandboxConfig, SchedulerConfig, ServerConfig
from gateway.config.yaml import ConfigProblem, KeyPath, Position, walk_up
from manager.config import TaskSpec
from runtimes.model.request import ModelSettings
from tangram import types
from tangram.types import mismatch

#: Kinds that the machine itself has; a cost may name them without a declaration.
MACHINE_KINDS = ("cpu", "gpu")

FunctionName = Annotated[str, Field(pattern=f"^{types.NAME_PATTERN}$")]

#: Checks one kind of value. Any: what comes out is told by its class.
Adapter = TypeAdapter[Any]

#: Sections that one file holds: form, default and meaning.
_SECTIONS: Mapping[str, tuple[Any, object, str]] = {
    "version": (Literal[1], 1, "version of this format"),
    "server": (section_of(ServerConfig), ServerConfig(), "doors, record and their bounds"),
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
    found: dict[str, Any] = {
        name: (form, Field(default=default, description=meaning))
        for name, (form, default, meaning) in _SECTIONS.items()
    } | {
        name: (dict[key, form], Field(default={}, description=meaning))  # type: ignore[valid-type]  # made at run time
        for name, (key, form, meaning) in _MAPS.items()
    }
    doc = "Any of the files: they are merged, and nothing may be given twice."
    document = create_model("ConfigDocument", __base__=Section, __doc__=doc, **found)
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
    near = difflib.get_close_matches(str(word), names, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known here: {', '.join(names)}" if names else ""


def _problem(
    detail: ErrorDetails, value: object, path: KeyPath, positions: Mapping[KeyPath, Position]
) -> ConfigProblem:
    """One of pydantic's errors in our words, at the nearest key path that stands in the file."""
    found: KeyPath = path
    # A function's own tag comes first, and may be spelled like one of its keys (``model``).
    for key in detail["loc"][1:] if path[:1] == ("functions",) else detail["loc"]:
        # Union tags are in pydantic's path, not in the file's.
        if (*found, key) in positions:
            found = (*found, key)
    if detail["type"] == "missing":
        found = (*found, detail["loc"][-1])
    message = _message(detail, value, found[len(path) :], path)
    place = next((positions[each] for each in walk_up(found) if each in positions), None)
    return ConfigProblem(message=message, path=found, position=place)


def _message(detail: ErrorDetails, value: object, inner: KeyPath, path: KeyPath) -> str:
    context: Mapping[str, object] = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            return f"unknown key {inner[-1]!r}" + suggestion(inner[-1], known_keys(path, value, inner[:-1]))
        case "missing":
            return "is required"
        case "union_tag_not_found":
            return f"{str(context['discriminator']).strip(chr(39))} is required"
        case "union_tag_invalid":
            expected = re.findall(r"'([^']*)'", str(context["expected_tags"]))
            return f"{context['tag']!r} is none of {', '.join(expected)}{_near(context['tag'], expected)}"
        case "literal_error" | "enum":
            expected = re.findall(r"'([^']*)'", str(context["expected"]))
            given = inner[-1] if detail["loc"][-1:] == ("[key]",) else _at(value, inner)
            return f"{given!r} is none of {context['expected']}{_near(given, expected)}"
        case "value_error":
            return str(context["error"])
        case "string_pattern_mismatch":
            return mismatch(str(context["pattern"]))
        case _:
            return detail["msg"].replace("Input should", "should")


def _near(word: object, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


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
    found = []
    for each in _flat(node, value):
        patterns = [*_mapping(each, "patternProperties").values(), each.get("additionalProperties"), each.get("items")]
        candidates = [_mapping(each, "properties").get(str(key)), *patterns]
        found.append(next((child for child in candidates if isinstance(child, dict)), {}))
    return found


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
