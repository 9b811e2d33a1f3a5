"""The runner's own JSON, without Python's module for it, and what it does without."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.sandbox.runner.client import ISOLATED, RUNNER
from runtimes.sandbox.runner.runner import _json_coders, as_json, from_json

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(st.dictionaries(st.text(), VALUES))
def test_what_it_writes_and_reads_is_what_pythons_module_does(value: dict[str, Any]) -> None:
    written = as_json(value)
    assert written == json.dumps(value, separators=(",", ":")).encode()
    assert from_json(written) == json.loads(written) == value
    assert from_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    "payload", [b"", b"x", b"{", b'{"a":1}{}', b'{"a":1} ', b"\xff", b'{"a" 1}', b"[1,]", b'"\\u12"']
)
def test_what_is_no_json_is_a_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError):
        from_json(payload)


def test_what_lies_too_deep_is_told() -> None:
    with pytest.raises(RecursionError):
        from_json(b"[" * 200_000)


def test_where_python_has_no_such_functions_its_module_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "_json", None)
    read, write = _json_coders()
    assert write({"a": [1, None, "\udc80"]}) == '{"a":[1,null,"\\udc80"]}'
    assert read('{"a":1.5}') == {"a": 1.5}


def test_a_runner_begins_without_the_modules_that_cost_half_of_its_start() -> None:
    source = f"import sys; exec(compile(open({str(RUNNER)!r}).read(), 'runner', 'exec'), {{'__name__': 'runner'}});"
    source += "print({'enum', 're', 'json', 'socket', 'signal', 'typing', 'collections'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, *ISOLATED, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
