"""YAML with positions: a document as plain values, and for every key path the file and line it came from.

Bounded and safe on hostile text: built from the parser's events without recursion, with limits on size, depth and
on what aliases expand to. Scalars are those of YAML 1.2 (``on`` is a string), duplicate keys are refused, and
``${VAR}`` and ``${VAR:-default}`` are replaced in values (``$${`` is a plain ``${``, ``${secret:NAME}`` stays).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
class Problem:
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
    """One parsed file. ``values`` holds what could be read, also where there are problems."""

    file: Path
    values: object
    positions: Mapping[KeyPath, Position]
    problems: tuple[Problem, ...] = ()


def show_path(path: KeyPath) -> str:
    """A key path for people: ``functions.shell.cost.cpu``, ``retry.on[0]``."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) and not isinstance(key, bool) else f".{key}"
    return text.removeprefix(".")


def parse(text: str, file: Path, env: Mapping[str, str]) -> YamlDocument:
    """Parse one document; never raises: what is wrong is in ``problems``."""
    if len(text.encode("utf-8", "surrogatepass")) > TEXT_LIMIT_BYTES:
        message = f"the file is larger than {TEXT_LIMIT_BYTES} bytes"
        return YamlDocument(
            file=file, values={}, positions={}, problems=(Problem(message=message, position=Position(file, 1)),)
        )
    builder = _Builder(file, env)
    try:
        builder.read(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        builder.refuse(f"not YAML: {error.problem or error.context}", line=1 if mark is None else mark.line + 1)
    except yaml.YAMLError as error:
        builder.refuse(f"not YAML: {' '.join(str(error).split())}", line=1)
    except _Stop as stop:
        builder.refuse(str(stop), line=stop.line)
    values, positions = builder.result()
    return YamlDocument(file=file, values=values, positions=positions, problems=tuple(builder.problems))


class _Stop(Exception):
    """A bound is exceeded: reading on could only cost more."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(slots=True)
class _Node:
    """One value of the document's graph; an alias is the very node of its anchor."""

    line: int
    scalar: object = None
    items: list[_Node] | None = None
    entries: dict[object, tuple[int, _Node]] | None = None


@dataclass(slots=True)
class _Open:
    """A collection that is being read; ``key`` waits for its value."""

    node: _Node
    key: object = None
    key_line: int = 0
    has_key: bool = False


@dataclass(slots=True)
class _Builder:
    """Turns parser events into nodes, then nodes into values with positions."""

    file: Path
    env: Mapping[str, str]
    problems: list[Problem] = field(default_factory=list)
    _root: _Node | None = None
    _stack: list[_Open] = field(default_factory=list)
    _anchors: dict[str, _Node] = field(default_factory=dict)

    def refuse(self, message: str, *, line: int, path: KeyPath = ()) -> None:
        self.problems.append(Problem(message=message, path=path, position=Position(self.file, line)))

    def read(self, text: str) -> None:
        """Build the graph; raises _Stop or yaml.YAMLError."""
        documents = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = 1 if event.start_mark is None else event.start_mark.line + 1
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _Stop("one document to a file: a second begins here", line)
            elif isinstance(event, yaml.AliasEvent):
                self._alias(event, line)
            elif isinstance(event, yaml.ScalarEvent):
                self._add(self._scalar_node(event, line), event.anchor)
            elif isinstance(event, yaml.MappingStartEvent):
                self._open(_Node(line, entries={}), event, line)
            elif isinstance(event, yaml.SequenceStartEvent):
                self._open(_Node(line, items=[]), event, line)
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                self._stack.pop()

    def result(self) -> tuple[object, dict[KeyPath, Position]]:
        """The values and the position of every key path."""
        positions: dict[KeyPath, Position] = {}
        if self._root is None:
            return {}, positions
        try:
            return self._value(self._root, (), positions, []), positions
        except _Stop as stop:
            self.refuse(str(stop), line=stop.line)
            return {}, positions

    def _open(self, node: _Node, event: yaml.CollectionStartEvent, line: int) -> None:
        self._refuse_tag(event.tag, line)
        if len(self._stack) >= DEPTH_MAX:
            raise _Stop(f"nested deeper than {DEPTH_MAX} levels", line)
        self._add(node, event.anchor)
        self._stack.append(_Open(node))

    def _alias(self, event: yaml.AliasEvent, line: int) -> None:
        node = self._anchors.get(str(event.anchor))
        if node is None:
            raise _Stop(f"alias *{event.anchor} has no anchor before it", line)
        if any(each.node is node for each in self._stack):
            raise _Stop(f"alias *{event.anchor} is inside its own anchor: a cycle", line)
        self._add(node, None)

    def _add(self, node: _Node, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = node
        if not self._stack:
            self._root = node
            return
        parent = self._stack[-1]
        if parent.node.items is not None:
            parent.node.items.append(node)
        elif not parent.has_key:
            self._take_key(parent, node)
        else:
            assert parent.node.entries is not None
            parent.has_key = False
            if parent.key not in parent.node.entries:
                parent.node.entries[parent.key] = (parent.key_line, node)

    def _take_key(self, parent: _Open, node: _Node) -> None:
        assert parent.node.entries is not None
        if node.items is not None or node.entries is not None:
            raise _Stop("a key must be a plain scalar", node.line)
        if node.scalar == "<<":
            raise _Stop(
                "merge keys (<<) are not supported: repeat the keys, or use an alias for the whole value", node.line
            )
        parent.key, parent.key_line, parent.has_key = node.scalar, node.line, True
        earlier = parent.node.entries.get(node.scalar)
        if earlier is not None:
            self.refuse(f"key {node.scalar!r} is given twice (first on line {earlier[0]})", line=node.line)

    def _scalar_node(self, event: yaml.ScalarEvent, line: int) -> _Node:
        self._refuse_tag(event.tag, line)
        parent = self._stack[-1] if self._stack else None
        is_key = parent is not None and parent.node.entries is not None and not parent.has_key
        text = event.value if is_key else self._interpolated(event.value, line)
        # What came from the environment is text: a token of digits stays one, and a number is read where one is wanted.
        plain = event.implicit[0] and text == event.value
        return _Node(line, scalar=resolve(text) if plain else text)

    def _refuse_tag(self, tag: str | None, line: int) -> None:
        if tag is not None:
            raise _Stop(f"tag {tag} is not supported", line)

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
                self.refuse(
                    f"{match[0]} is no variable: write ${{NAME}} or ${{NAME:-default}}, $${{ for a plain ${{", line=line
                )
            elif dash:
                return self.env.get(name) or default
            elif name in self.env:
                return self.env[name]
            else:
                self.refuse(f"variable {name} is not defined: set it, or give a default: ${{{name}:-...}}", line=line)
            return match[0]

        return _VARIABLE.sub(replace, text) if "${" in text else text

    def _value(self, node: _Node, path: KeyPath, positions: dict[KeyPath, Position], chain: list[_Node]) -> object:
        """The node as plain values. Recursion is bounded by DEPTH_MAX, the whole by NODES_MAX."""
        if len(positions) >= NODES_MAX:
            raise _Stop(f"the document has more than {NODES_MAX} values, aliases expanded", node.line)
        if len(chain) > DEPTH_MAX:
            raise _Stop(f"nested deeper than {DEPTH_MAX} levels, aliases expanded", node.line)
        positions.setdefault(path, Position(self.file, node.line))
        if node.items is not None:
            return [self._value(item, (*path, at), positions, [*chain, node]) for at, item in enumerate(node.items)]
        if node.entries is not None:
            values: dict[object, object] = {}
            for key, (line, child) in node.entries.items():
                positions[*path, key] = Position(self.file, line)
                values[key] = self._value(child, (*path, key), positions, [*chain, node])
            return values
        return node.scalar


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
