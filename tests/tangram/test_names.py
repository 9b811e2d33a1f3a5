"""What `import tangram` offers, and what it does not load before it is asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tangram

STUB = Path(tangram.__file__).with_suffix(".pyi")


def test_type_checkers_are_told_the_names_that_there_are() -> None:
    told = {
        (node.module, alias.name)
        for node in ast.parse(STUB.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert told == {(module, name) for name, module in vars(tangram)["_HOME"].items()}


def test_every_name_is_there_and_a_wrong_one_is_an_attribute_error() -> None:
    missing = [name for name in vars(tangram)["__all__"] if not hasattr(tangram, name)]
    assert missing == []
    with pytest.raises(AttributeError, match="Klient"):
        _ = tangram.Klient  # type: ignore[attr-defined]


def test_the_types_alone_load_no_http_library() -> None:
    script = "import sys, tangram.types; print(sorted({'httpx', 'click', 'rich'} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
