"""Every promise to users with the tests that fail if it is broken, read from ``@pytest.mark.promise`` on the tests.

``python -m scripts.promises`` prints the page; ``make site`` includes it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Promises, and the tests that hold them

`make test` plays most of these tests. `make test-all` plays those marked `slow` and those in tests/attacks,
tests/cluster, tests/ecosystem, tests/faults and tests/ray.
"""


def marks() -> Iterator[tuple[str, str]]:
    """(promise, test) for each mark, in the order of the files; raises ValueError where the text is no literal."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                        yield ast.literal_eval(mark.args[0]), f"{name}::{node.name}"


def page() -> str:
    """The page: a table for each folder of tests, a row for each promise."""
    promises: dict[str, list[str]] = {}
    for text, test in marks():
        promises.setdefault(text, []).append(test)
    folders: dict[str, list[str]] = {}
    for text, tests in promises.items():
        row = f"| {text} | {', '.join(f'`{test}`' for test in tests)} |"
        folders.setdefault(tests[0].split("/")[1], []).append(row)
    tables = (f"## {folder}\n\n| promise | tests |\n|---|---|\n" + "\n".join(rows) for folder, rows in folders.items())
    return "\n".join([HEAD, *(f"{table}\n" for table in tables)])


if __name__ == "__main__":
    print(page(), end="")
