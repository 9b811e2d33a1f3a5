"""One name a thing: no class name twice. Private names, classes inside functions and generated code are aside."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.house.source import sources

#: One process reads the whole tree, for all of them.
pytestmark = pytest.mark.xdist_group("sources")


def test_no_class_name_serves_twice() -> None:
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for source in sources():
        for found in classes(source.tree):
            homes[found.name].append(f"{source.name}:{found.lineno}")
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Public classes of a module, those inside classes too."""
    within: list[ast.stmt] = list(tree.body)
    while within:
        node = within.pop()
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node
            within.extend(node.body)
