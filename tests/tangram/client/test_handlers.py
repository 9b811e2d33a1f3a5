"""A handler beside a training script: what is sent stands by itself, what cannot is refused by name."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tangram import InvalidInputError
from tangram.client.handlers import MARK, captured, definition_of

SCRIPT = '''
"""A training script."""
from __future__ import annotations

import json
import re as regex
from pathlib import Path

import tangram
from tangram import handler

LIMIT = 3
TABLE = {"a": LIMIT}
trained = Path("/nonexistent/model").exists()
unrelated = open(__file__).close()


class Grader:
    """Grades."""

    def grade(self, text):
        return len(regex.findall("a", text)) + LIMIT


def helper(text):  # kept with its comment
    client = text.upper()
    return client


@handler(cost={"cpu": 1}, timeout="30s")
def reward(event, context):
    """Grade an answer."""
    def inner():
        return TABLE["a"]
    return {"score": Grader().grade(event["text"]), "upper": helper("x"), "inner": inner()}


@tangram.handler()
def plain(event, context):
    return json.loads(event["text"])


def closing():
    bound = 1
    def inside(event, context):
        return bound
    return inside


def lost(event, context):
    return not_there(event)


client = None
if __name__ == "__main__":
    not_there = 1
'''


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Import a script that lies in a directory of its own, which is on the path."""
    loaded: list[str] = []
    sys.path.insert(0, str(tmp_path))

    def load(text: str, name: str = "a_training_script") -> ModuleType:
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        loaded.append(name)
        spec.loader.exec_module(module)
        return module

    yield load
    sys.path.remove(str(tmp_path))
    for name in loaded:
        del sys.modules[name]


def ran(function: Any) -> dict[str, Any]:
    """Return what the sent module defines, run where nothing of the script is."""
    sent = captured(function)
    ((path, text),) = sent.sources.items()
    assert path == "registered.py" and sent.place == f"registered:{function.__name__}"
    space: dict[str, Any] = {"__name__": "registered"}
    exec(compile(text, path, "exec"), space)
    return space


def test_a_handler_is_sent_with_what_it_names_and_nothing_else(script: Callable[[str], ModuleType]) -> None:
    module = script(SCRIPT)
    space = ran(module.reward)
    assert space["reward"]({"text": "banana"}, None) == {"score": 6, "upper": "X", "inner": 3}
    assert not {"trained", "unrelated", "plain", "json", "client", "tangram", "handler"} & space.keys()
    (text,) = captured(module.reward).sources.values()
    assert "# kept with its comment" in text and "@handler" not in text
    assert ran(module.plain)["plain"]({"text": "[1]"}, None) == [1]


def test_a_decorated_function_stays_what_it_was(script: Callable[[str], ModuleType]) -> None:
    module = script(SCRIPT)
    assert module.reward({"text": "a"}, None)["score"] == 4
    assert getattr(module.reward, MARK) == {"cost": {"cpu": 1}, "timeout": "30s"}
    assert definition_of(module.reward, {"timeout": "1m"}) == {"cost": {"cpu": 1}, "timeout": "1m"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import beside\ndef f(event, context):\n    return beside.x", "imports beside, a file of yours"),
        ("from beside import x\ndef f(event, context):\n    return x", "imports beside, a file of yours"),
        ("from json import *\ndef f(event, context):\n    return loads(event)", "imports *"),
        ("def f(event, context):\n    return nowhere", "needs 'nowhere'"),
        ("f = lambda event, context: 1", "no method, lambda or inner function"),
        ("class C:\n    def m(self, event, context): ...\nf = C.m", "no method, lambda or inner function"),
        ("def g():\n    def f(event, context): ...\n    return f\nf = g()", "no method, lambda or inner function"),
        ("f = len", "top level of a module"),
        ("import functools\nf = functools.partial(print)", "top level of a module"),
    ],
)
def test_what_cannot_stand_by_itself_is_refused_with_the_reason(
    script: Callable[..., ModuleType], text: str, told: str
) -> None:
    script("x = 1", "beside")
    module = script(text)
    with pytest.raises(InvalidInputError, match="cannot be sent") as refused:
        captured(module.f)
    assert told in refused.value.message and "stand by itself" in refused.value.message


def test_a_function_without_a_file_is_refused() -> None:
    space: dict[str, Any] = {"__name__": "nowhere_at_all"}
    exec("def f(event, context): ...", space)
    with pytest.raises(InvalidInputError, match="source of its module"):
        captured(space["f"])
