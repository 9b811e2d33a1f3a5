"""YAML with positions: a document as plain values, and for every key path the file and line it came from.

Bounded and safe on hostile text: composed by PyYAML under our rules, with limits on size, depth and on what
aliases expand to. Scalars are those of YAML 1.2 (``on`` is a string), duplicate keys are refused, and
``${VAR}`` and ``${VAR:-default}`` are replaced in values (``$${`` is a plain ``${``, ``${secret:NAME}`` stays).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TEXT_LIMIT_BYTES = 1 * 2**20
DEPTH_MAX = 48
NODES_MAX = 100_000

#: A key path: mapping keys and list indices from the root.
KeyPath = tuple[object, ...]

_VARIABLE = re.compile(r"\$\$\{|\$\{(?P<body>[^}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEAN = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?[0-9]{1,300}")
_RADIX = re.compile(r"0(?:o[0-7]{1,100}|x[0-9a-fA-F]{1,100})")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a file, the line counted from 1."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigProblem:
    """One thing that is wrong with the configuration: where, at which key path, what, and the remedy."""

    message: str
    path: KeyPath = ()
    position: Position | None = None

    def __str__(self) -> str:
        place = [str(self.position)] if self.position is not None else []
        keys = [show_path(self.path)] if self.path else []
        return ": ".join([*place, *keys, self.message])


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlDocument:
    """One parsed file. ``values`` holds what could be read, also where there are problems.

    Where reading stops early these are the root's entries that were whole by then: half an entry only misleads.
    """

    file: Path
    values: object
    positions: Mapping[KeyPath, Position]
    problems: tuple[ConfigProblem, ...] = ()


def show_path(path: KeyPath) -> str:
    """A key path for people: ``functions.shell.cost.cpu``, ``retry.on[0]``."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) and not isinstance(key, bool) else f".{key}"
    return text.removeprefix(".")


def parse(text: str, file: Path, env: Mapping[str, str]) -> YamlDocument:
    """Parse one document; never raises: what is wrong is in ``problems``, in the order of the lines."""
    values: object = {}
    positions: dict[KeyPath, Position] = {}
    problems: list[ConfigProblem] = []

    def refuse(message: str, line: int) -> None:
        problems.append(ConfigProblem(message=message, position=Position(file, line)))

    try:
        if len(text.encode("utf-8", "surrogatepass")) > TEXT_LIMIT_BYTES:
            raise _Stop(f"the file is larger than {TEXT_LIMIT_BYTES} bytes", None)
        root = _Composer(text, env, refuse).read()
        if root is not None:
            values = _expand(root, (), file, positions)
    except _Stop as stop:
        refuse(str(stop.problem), _line(stop.problem_mark))
    except yaml.YAMLError as error:
        refuse(f"not YAML: {' '.join(str(error).split())}", 1)
    problems.sort(key=lambda each: 0 if each.position is None else each.position.line)
    return YamlDocument(file=file, values=values, positions=positions, problems=tuple(problems))


def _line(mark: Any) -> int:
    return 1 if mark is None else mark.line + 1


class _Stop(yaml.MarkedYAMLError):
    """YAML that is not for us, or too much of it: reading on could only cost more."""

    def __init__(self, message: str, mark: Any) -> None:
        super().__init__(problem=message, problem_mark=mark)


class _Composer(yaml.BaseLoader):
    """PyYAML's composer with our rules; a scalar's node holds its value, with the variables replaced."""

    def __init__(self, text: str, env: Mapping[str, str], refuse: Callable[[str, int], None]) -> None:
        super().__init__(text)
        self._env, self._refuse = env, refuse
        self._depth = self._nodes = 0
        self._root: yaml.Node | None = None

    def read(self) -> yaml.Node | None:
        """The root; where reading stops early, with those of its entries that were whole by then."""
        try:
            self._root = self.get_node() if self.check_node() else None
            if self.check_node():
                raise _Stop("one document to a file: a second begins here", self._next().start_mark)
        except yaml.MarkedYAMLError as error:
            kind = "" if isinstance(error, _Stop) else "not YAML: "
            self._refuse(f"{kind}{error.problem or error.context}", _line(error.problem_mark or error.context_mark))
            if isinstance(self._root, yaml.MappingNode):
                self._keep_first(self._root)
        return self._root

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        self._root = self._root or parent
        event = self._next()
        self._check(event)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        assert node is not None
        is_key = isinstance(parent, yaml.MappingNode) and index is None
        if isinstance(event, yaml.ScalarEvent):
            text = event.value if is_key else self._interpolated(event.value, _line(node.start_mark))
            # What came from the environment is text: digits stay one, and a number is read where one is wanted.
            node.value = resolve(text) if event.implicit[0] and text == event.value else text
        if is_key and not isinstance(node, yaml.ScalarNode):
            raise _Stop("a key must be a plain scalar", node.start_mark)
        if is_key and node.value == "<<":
            message = "merge keys (<<) are not supported: repeat the keys, or use an alias for the whole value"
            raise _Stop(message, node.start_mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        return self._keep_first(super().compose_mapping_node(anchor))

    def _keep_first(self, node: yaml.MappingNode) -> yaml.MappingNode:
        """The mapping with the first entry of each key; the others are problems."""
        entries: dict[object, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            line = _line(key.start_mark)
            if key.value in entries:
                first = _line(entries[key.value][0].start_mark)
                self._refuse(f"key {key.value!r} is given twice (first on line {first})", line)
            else:
                entries[key.value] = (key, value)
        node.value = list(entries.values())
        return node

    def _next(self) -> Any:
        return self.peek_event()  # type: ignore[no-untyped-call]

    def _check(self, event: Any) -> None:
        """Refuse what must not be composed."""
        self._nodes += 1
        if self._nodes > 2 * NODES_MAX:
            raise _Stop(f"the document has more than {NODES_MAX} values", event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            node = self.anchors.get(event.anchor)
            if node is None:
                raise _Stop(f"alias *{event.anchor} has no anchor before it", event.start_mark)
            if node.end_mark is None:
                raise _Stop(f"alias *{event.anchor} is inside its own anchor: a cycle", event.start_mark)
        elif event.tag is not None:
            raise _Stop(f"tag {event.tag} is not supported", event.start_mark)
        elif isinstance(event, yaml.CollectionStartEvent) and self._depth >= DEPTH_MAX:
            raise _Stop(f"nested deeper than {DEPTH_MAX} levels", event.start_mark)
        else:
            self.anchors.pop(event.anchor, None)  # YAML lets an anchor be given anew, PyYAML does not

    def _interpolated(self, text: str, line: int) -> str:
        """The text with its variables replaced; an undefined one is a problem and stays as it is."""

        def replace(match: re.Match[str]) -> str:
            body = match["body"]
            if body is None:
                return "${"
            if body.startswith("secret:"):
                return match[0]
            name, dash, default = body.partition(":-")
            if _NAME.fullmatch(name) is None:
                self._refuse(
                    f"{match[0]} is no variable: write ${{NAME}} or ${{NAME:-default}}, $${{ for a plain ${{", line
                )
            elif dash:
                return self._env.get(name) or default
            elif name in self._env:
                return self._env[name]
            else:
                self._refuse(f"variable {name} is not defined: set it, or give a default: ${{{name}:-...}}", line)
            return match[0]

        return _VARIABLE.sub(replace, text) if "${" in text else text


def _expand(node: yaml.Node, path: KeyPath, file: Path, positions: dict[KeyPath, Position]) -> object:
    """The node as plain values. Recursion is bounded by DEPTH_MAX, the whole by NODES_MAX."""
    if len(positions) >= NODES_MAX:
        raise _Stop(f"the document has more than {NODES_MAX} values, aliases expanded", node.start_mark)
    if len(path) > DEPTH_MAX:
        raise _Stop(f"nested deeper than {DEPTH_MAX} levels, aliases expanded", node.start_mark)
    positions.setdefault(path, Position(file, _line(node.start_mark)))
    if isinstance(node, yaml.SequenceNode):
        return [_expand(item, (*path, at), file, positions) for at, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        for key, _ in node.value:
            positions[*path, key.value] = Position(file, _line(key.start_mark))
        return {key.value: _expand(child, (*path, key.value), file, positions) for key, child in node.value}
    return node.value


def resolve(text: str) -> object:
    """The value of a plain scalar by YAML 1.2's core schema: null, boolean, number or string."""
    if text in _NULL:
        return None
    if text in _BOOLEAN:
        return _BOOLEAN[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _RADIX.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def walk_up(path: KeyPath) -> Iterator[KeyPath]:
    """The path and its ancestors, longest first, the root last."""
    for length in range(len(path), -1, -1):
        yield path[:length]
