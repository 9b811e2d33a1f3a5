"""Revisions: what each change of a function has changed, since the start of this gateway."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

import msgspec
import orjson

from gateway import wire
from gateway.functions import function_info
from manager.function import FunctionSpec
from tangram.types import RevisionChange, ValueChange

#: Changes that are kept of a function, keys that are told of one, and characters of a value.
KEPT, KEYS_MAX, VALUE_CHARS = 20, 100, 400
#: What is not of the definition, or differs with it anyway.
_LEFT_OUT = frozenset({"revision"})


class Revisions:
    """The changes of every function that is served. Use from one event loop."""

    def __init__(self, functions: Mapping[str, FunctionSpec], wall: Callable[[], float]) -> None:
        self._functions, self._wall = functions, wall
        self._changes: dict[str, deque[RevisionChange]] = {}

    def of(self, name: str) -> tuple[RevisionChange, ...]:
        """Return the changes of a function, the last one first."""
        return tuple(self._changes.get(name, ()))

    def switched(self, functions: Mapping[str, FunctionSpec]) -> None:
        """These are served from now on."""
        for name, new in functions.items():
            old = self._functions.get(name)
            if old is not None and old != new:
                told = RevisionChange(
                    at=wire.instant(self._wall()), was=old.revision, now=new.revision, values=_differing(old, new)
                )
                self._changes.setdefault(name, deque(maxlen=KEPT)).appendleft(told)
        self._changes = {name: changes for name, changes in self._changes.items() if name in functions}
        self._functions = functions


def _differing(old: FunctionSpec, new: FunctionSpec) -> dict[str, ValueChange]:
    """Return the keys that differ, by their path, with nothing of an environment's values."""
    was, now = dict(_flat(_shown(old))), dict(_flat(_shown(new)))
    keys = sorted(key for key in was.keys() | now.keys() if was.get(key) != now.get(key))
    return {key: ValueChange(was=was.get(key, ""), now=now.get(key, "")) for key in keys[:KEYS_MAX]}


def _shown(function: FunctionSpec) -> dict[str, object]:
    found: dict[str, object] = msgspec.to_builtins(function_info(function))
    return {key: value for key, value in found.items() if key not in _LEFT_OUT}


def _flat(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _flat(each, f"{path}.{key}" if path else str(key))
        return
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    yield path, text if len(text) <= VALUE_CHARS else f"{text[: VALUE_CHARS - 3]}..."
