"""What the whole tree shares: a Docker engine, real inputs where they are given, and tests in random order."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
from _pytest.nodeid import NodeId
from hypothesis import HealthCheck, settings

from bench.inputs import VARIABLE, real_input

SCRIPTS = Path(__file__).parent.parent / "scripts"
BASE_IMAGE = "tangram-base:bookworm"
#: Seconds for the engine's start and for the base image, the first time made from a Debian mirror.
ENGINE_S, IMAGE_S = 90, 600
#: Examples of a property: the same few each time, or many, other ones each time (--hypothesis-profile=full). How long
#: one takes says nothing on a busy machine.
_UNTIMED = settings(deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("few", _UNTIMED, max_examples=25, derandomize=True)
settings.register_profile("full", _UNTIMED, max_examples=300, print_blob=True)
settings.load_profile("few")
#: When this process began to run tests.
_BEGAN_S = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data", metavar="DIRECTORY", help=f"real inputs for tests that take them (or {VARIABLE})")
    parser.addoption(
        "--begin-within",
        metavar="SECONDS",
        type=float,
        help="leave out, by name, the tests that have not begun by then",
    )
    parser.addoption("--order", metavar="SEED", help="play modules, and the tests of each, in the order of this seed")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", default=None):
        gc.disable()  # until all is imported and collected, which the controller of pytest-xdist leaves to its workers
    renderer = structlog.get_config()["processors"][-1]
    if isinstance(renderer, structlog.dev.ConsoleRenderer):  # a picture of every frame's locals takes a second each
        renderer.exception_formatter = structlog.dev.plain_traceback
    if config.getoption("--data"):
        os.environ[VARIABLE] = str(Path(config.getoption("--data")).resolve())


def pytest_report_header(config: pytest.Config) -> list[str]:
    seed = config.getoption("--order")
    return [
        "order: as written (--order SEED shuffles)" if seed is None else f"order: of seed {seed} (--order {seed})",
        f"real inputs: {os.environ.get(VARIABLE) or f'none (--data DIRECTORY or {VARIABLE})'}",
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what shares a fixture in one process, and shuffle if a seed was given.

    pytest groups by the fixtures of modules and sessions after this.
    """
    for item in items:
        if (shared := _shared_by(item)) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(shared))
    if (seed := config.getoption("--order")) is None:
        return
    chance = random.Random(seed)
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    order = list(modules)
    chance.shuffle(order)
    for path in order:
        chance.shuffle(modules[path])
    items[:] = [item for path in order for item in modules[path]]


def _shared_by(item: pytest.Item) -> str:
    """Name the module whose fixtures, made once for all its tests, the item uses; empty if it uses none of them.

    Each process of pytest-xdist makes them for itself, and tests that are scattered over all would make them often.
    """
    if not isinstance(item, pytest.Function):
        return ""
    made = {name: found[-1] for name, found in item._fixtureinfo.name2fixturedefs.items()}
    shared = {name for name, fixture in made.items() if fixture.scope == "module" and fixture.baseid}
    given = item.callspec.indices if hasattr(item, "callspec") else {}
    which = [f"{name}={given[name]}" for name in sorted(shared) if name in given]
    return " ".join([item.nodeid.partition("::")[0], *which]) if shared else ""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> Iterator[None]:
    """Tell pytest-xdist which tests belong to one process, as it wants to be told: by ``@group`` behind their ids.

    It writes that where pytest 9.2 no longer reads it (pytest-xdist#1386). Only what it sends to its scheduler has the
    groups, so that reports and ``--last-failed`` name the tests as ever.
    """
    plain: dict[pytest.Item, NodeId] = {}
    if hasattr(session.config, "workerinput"):
        for item in session.items:
            if (group := item.get_closest_marker("xdist_group")) is not None:
                plain[item], item._id = item._id, NodeId.parse(f"{item.nodeid}@{group.args[0]}")
    yield
    for item, kept in plain.items():
        item._id = kept
    # Nothing of half a million objects that were imported and collected is garbage, and every full collection would
    # look through them all again.
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave the test out if its turn comes after the seconds of ``--begin-within``."""
    bound_s = item.config.getoption("--begin-within")
    if bound_s is not None and time.monotonic() - _BEGAN_S > bound_s:
        pytest.skip(f"left out: not begun within {bound_s:g} s (--begin-within)")


@pytest.fixture
def real(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Where a file of the real inputs lies; the test is skipped, and the end of the run says so, if it is not given."""

    def find(name: str) -> Path:
        found = real_input(name)
        if found is None:
            pytest.skip(f"not run on real inputs: {name} (--data DIRECTORY or {VARIABLE})")
        return found

    return find


@pytest.fixture(scope="session")
def docker() -> str:
    """A Docker engine with the base image, started and made if that can be; returns the image's name.

    Without one the test is skipped with the reason, but fails where ``CI=true``.
    """
    for script, seconds in (("docker-up", ENGINE_S), ("base-image", IMAGE_S)):
        complaint = _run(SCRIPTS / script, seconds)
        if complaint:
            if os.environ.get("CI") == "true":
                pytest.fail(f"{script}: {complaint}")
            pytest.skip(f"no Docker engine with a base image: {complaint}")
    return BASE_IMAGE


def _run(script: Path, seconds: float) -> str:
    """Run a script, one process of pytest-xdist at a time; its complaint, or nothing."""
    with (Path(tempfile.gettempdir()) / f"tangram-{script.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            done = subprocess.run([script], capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return f"not done after {seconds} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["failed"])[-1]
