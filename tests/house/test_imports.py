"""The direction of the house (docs/ARCHITECTURE.md), one name a thing, and what every file has and has not."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest

from tests.house.source import Source, sources, within

#: One process reads the whole tree, for all of them.
pytestmark = pytest.mark.xdist_group("sources")
#: Heavy libraries, and the only places that may name them.
ROOMS = {
    "docker": ("runtimes/sandbox/docker/",),
    "torch": ("runtimes/model/",),
    "safetensors": ("runtimes/model/",),
    "transformers": ("runtimes/model/",),
    "pynvml": ("runtimes/model/engine.py",),
    "ray": ("runtimes/node/ray/",),
    "starlette": ("gateway/http/", "gateway/facades/"),
    "hypercorn": ("gateway/http/",),
    "grpclib": ("gateway/grpc/",),
    "opentelemetry": ("gateway/tracing.py",),
    "mcp": ("gateway/facades/mcp.py",),
    "mcp_types": ("gateway/facades/mcp.py",),
    # A gateway's record, and that of a node's daemon, which imports nothing of the gateway.
    "sqlite3": ("gateway/store/", "runtimes/node/journal.py"),
    # Inspect asks for a model of the configuration, and its files are YAML.
    "yaml": ("gateway/config/", "tangram/adapters/inspect.py"),
    "pydantic": ("gateway/config/", "gateway/facades/mcp.py", "tangram/adapters/inspect.py"),
    "click": ("gateway/cli/", "tangram/cli/"),
    "rich": ("tangram/cli/",),
}
#: What the runtimes may know of the manager: its nouns.
NOUNS = tuple(f"manager.{noun}" for noun in ("errors", "clock", "action", "function", "executor", "config"))
#: The shell of the manager that waits: it alone may import asyncio.
ASYNC_SHELL = "manager/engine.py"


def test_the_manager_imports_the_standard_library_and_numpy_only() -> None:
    allowed = sys.stdlib_module_names | {"numpy", "manager"}
    strangers = [
        f"{source.name}:{found.line} imports {found.module}"
        for source in of("manager")
        for found in source.imports()
        if found.module.split(".")[0] not in allowed
    ]
    assert not strangers


def test_the_runtimes_know_the_manager_by_its_nouns_only() -> None:
    strangers = [
        f"{source.name}:{found.line} imports {found.module}"
        for source in of("runtimes")
        for found in source.imports()
        if found.module == "gateway"
        or within(found.module, "gateway")
        or (within(found.module, "manager") and not any(within(found.module, noun) for noun in NOUNS))
    ]
    assert not [line for line in strangers if not line.endswith("imports manager")]


def test_the_client_imports_nothing_of_the_server() -> None:
    server = ("gateway", "manager", "runtimes", "bench", "scripts", "tests")
    assert not [
        f"{source.name}:{found.line} imports {found.module}"
        for source in of("tangram")
        for found in source.imports()
        if any(within(found.module, package) for package in server)
    ]


def test_of_the_client_the_runtimes_know_its_types_and_how_it_lays_out_archives_and_frames_only() -> None:
    assert not [
        f"{source.name}:{found.line} imports {found.module}"
        for source in of("runtimes")
        for found in source.imports()
        if within(found.module, "tangram")
        and found.module != "tangram"
        and not any(within(found.module, part) for part in ("tangram.types", "tangram.archive", "tangram.frames"))
    ]


def test_no_two_modules_import_each_other_round_a_circle() -> None:
    modules = {source.module: source for source in sources()}
    graph = {
        name: {found.module for found in source.imports() if found.module in modules} - {name}
        for name, source in modules.items()
    }
    for name, targets in graph.items():  # an import of a package's own parts, and of a package by its parts, is none
        graph[name] = {target for target in targets if not within(name, target) and not within(target, name)}
    while leaves := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert {name: sorted(targets & graph.keys()) for name, targets in graph.items()} == {}


def test_no_two_rooms_of_the_manager_import_each_other() -> None:
    ways = {
        (source.room, ".".join(found.module.split(".")[:2]))
        for source in of("manager")
        for found in source.imports()
        if source.room.count(".") == 1 and found.module.count(".") >= 2 and within(found.module, "manager")
    }
    assert not [pair for pair in ways if pair[0] != pair[1] and pair[::-1] in ways]


def test_time_is_passed_in_to_the_thinking() -> None:
    clocks = [
        f"{source.name}:{found.line}"
        for source in of("manager")
        for found in source.imports()
        if found.module.split(".")[0] in {"time", "datetime"} and source.name != "manager/clock.py"
    ]
    assert not clocks


def test_only_the_shell_of_the_manager_waits() -> None:
    waiting = [
        f"{source.name}:{found.line}"
        for source in of("manager")
        for found in source.imports()
        if found.module.split(".")[0] == "asyncio" and source.name != ASYNC_SHELL
    ]
    assert not waiting


@pytest.mark.parametrize("library", sorted(ROOMS))
def test_a_heavy_library_has_one_room(library: str) -> None:
    elsewhere = [
        f"{source.name}:{found.line}"
        for package in ("manager", "runtimes", "gateway", "tangram")
        for source in of(package)
        for found in source.imports()
        if found.module.split(".")[0] == library and not source.name.startswith(ROOMS[library])
    ]
    assert not elsewhere


def test_the_core_and_the_scheduler_never_name_a_kind_of_resource() -> None:
    thinking = [s for s in of("manager") if s.name == "manager/core/core.py" or s.name.startswith("manager/scheduler/")]
    naming = [
        f"{source.name}:{number}: {line.strip()}"
        for source in thinking
        for number, line in enumerate(source.text.splitlines(), start=1)
        if '"cpu"' in line or '"gpu"' in line or "'cpu'" in line or "'gpu'" in line
    ]
    assert thinking
    assert not naming


def test_nothing_is_imported_for_the_type_checker_alone() -> None:
    """A cycle that needs TYPE_CHECKING means that a noun stands too high."""
    assert not [
        source.name
        for source in sources()
        if source.package != "tests" and "TYPE_CHECKING" in source.text
        for node in ast.walk(source.tree)
        if isinstance(node, ast.If)
        and "TYPE_CHECKING" in ast.unparse(node.test)
        and any(isinstance(each, ast.Import | ast.ImportFrom) for each in ast.walk(node))
    ]


def of(package: str) -> Iterable[Source]:
    return [source for source in sources() if source.package == package]


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


def test_every_file_says_what_lives_there() -> None:
    silent = [
        source.name
        for source in sources()
        if source.tree.body and not (source.path.name == "__init__.py" and source.package == "tests")
        if (source.tree.body and not source.text.startswith(('"""', "#!")))
    ]
    assert not silent


def test_nothing_is_left_for_later() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X:")
    assert not [source.name for source in sources() if any(mark in source.text for mark in marks)]


def test_no_file_is_a_drawer() -> None:
    drawers = {"utils.py", "helpers.py", "common.py", "misc.py"}
    assert not [source.name for source in sources() if source.path.name in drawers]
