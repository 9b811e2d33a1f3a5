"""What a kind of runtime declares, and what it is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from manager.function import FunctionSpec, SandboxSpec
from runtimes.model.request import ModelSettings
from runtimes.runtime import Runtime
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.handler.sources import HandlerCopies, RequirementSettings
from runtimes.sandbox.sandbox import Provider
from runtimes.secrets import Secrets


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeDeps:
    """What the runtimes of a machine are made from: its rooms, and the settings of its configuration."""

    provider: Provider
    environments: Environments
    #: What a sandbox is where its function says nothing.
    sandbox: SandboxSpec
    models: ModelSettings
    secrets: Secrets
    requirements: RequirementSettings
    #: Where layers of requirements are kept.
    layers_dir: Path
    #: What handlers run in place of their directories.
    copies: HandlerCopies


#: A JSON Schema.
Schema = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclarationSite:
    """Where a function is declared, and what is found wrong with it there."""

    #: Directory of its YAML file, where a handler's module stands.
    directory: Path
    #: Where relative paths of models begin; the directory if None.
    models_dir: Path | None
    #: Whether handlers and checkpoints must exist on this machine.
    look: bool
    #: Whether checkpoints may lie on other machines alone: each node looks itself.
    models_elsewhere: bool = False
    #: Of this machine nothing is looked at outside of these directories; None for no such bound.
    roots: tuple[Path, ...] | None = None
    #: (key path in the function, what is wrong there).
    problems: list[tuple[tuple[object, ...], str]] = field(default_factory=list)

    def may_look_at(self, file: Path) -> bool:
        """Whether an absolute path, without links in it, lies where this declaration may point to."""
        return self.roots is None or any(file.is_relative_to(root) for root in self.roots)

    def refuse(self, path: tuple[object, ...], message: str) -> None:
        self.problems.append((path, message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One runtime kind. A new one is its folder, its row in `runtimes.kinds`, and its tests."""

    #: As the YAML's ``runtime`` names it.
    name: str
    #: What it does, in a line for people.
    meaning: str
    #: Makes its runtime; imports it only then if that takes long.
    make: Callable[[RuntimeDeps], Runtime]
    #: Whether its actions work in their trajectory's environment, or in a sandbox made for them.
    works_in_sandbox: bool = False
    #: A frozen dataclass whose settings are the keys that functions of this kind alone have.
    section: type | None = None
    #: What the ``sandbox`` of such a function is to it; without one there is no such key.
    sandbox: str = ""
    #: The resource of which it takes one unit if its cost says nothing; None for nothing.
    cost: str | None = "cpu"
    #: The class of its functions, where they have fields that no other kind's have.
    function: type[FunctionSpec] = FunctionSpec
    #: The fields of its ``function`` from its section. Any: an instance of ``section``.
    spec: Callable[[Any, DeclarationSite], Mapping[str, object]] = lambda section, place: {}
    #: A digest of what the definition points to on disk, part of the revision; raises OSError or ValueError.
    source: Callable[[FunctionSpec], str] = lambda function: ""
    #: What a function of this kind takes; None if any JSON object will do.
    input_schema: Callable[[FunctionSpec], Schema | None]
    #: Fields of an input that the gateway adds; what a function declares of its input says nothing of them.
    added_fields: frozenset[str] = frozenset()
    #: What a function of this kind returns; None if that is the function's own affair.
    result_schema: Callable[[FunctionSpec], Schema | None]
    #: (input, result) by variant, for people: the model's actions, or one of no name; None stands for what varies.
    shown: Mapping[str, tuple[Schema | None, Schema | None]]


def schema_of(type_: type, **also: object) -> Schema:
    """Return the JSON Schema of a TypedDict, complete in itself, with the keywords of ``also`` added to it."""
    _, components = msgspec.json.schema_components([type_], ref_template="{name}")
    inlined = _inline(components[type_.__name__], components)
    assert isinstance(inlined, dict)
    return {**inlined, **also}


def _inline(node: object, components: Mapping[str, Schema]) -> object:
    if isinstance(node, list):
        return [_inline(each, components) for each in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline({**components[node["$ref"]], **{key: node[key] for key in node if key != "$ref"}}, components)
    return {key: _inline(value, components) for key, value in node.items()}
