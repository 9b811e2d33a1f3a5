"""A suite that cannot run, whatever the agent does, has no reward; one that the agent has broken is worth 0.0."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.attacks.play import FRESH, SAME, graded
from manager.function import FunctionSpec, PytestSpec, SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.environments import Environments, EnvironmentSettings
from runtimes.sandbox.files import put_archive
from runtimes.sandbox.provider import ProviderSettings, make_provider
from runtimes.sandbox.pytest.runtime import _is_the_environments
from tests.runtimes.sandbox.conftest import unique
from tests.runtimes.sandbox.pytest.conftest import ARGS, FUNCTION, SPEC, SuiteBench

TESTS = {"tests/test_calc.py": "import calc\ndef test_add(): assert calc.add(2, 2) == 4\n"}
GOOD = "def add(a, b): return a + b\n"


@pytest.mark.parametrize(
    "args",
    [
        ["--cov"],
        ["-p", "no_such_plugin"],
        ["-o", "minversion=99"],
        ["-o", "required_plugins=pytest-no-such-plugin"],
        ["-p", "no:xdist", "-n", "2"],
    ],
    ids=lambda args: args[-1],
)
async def test_what_the_caller_asks_for_and_the_sandbox_lacks_is_no_reward(bench: SuiteBench, args: list[str]) -> None:
    value = await bench.run({"calc.py": GOOD}, tests=TESTS, args=args)
    assert (value["reward"], value["resolved"], value["valid"]) == (None, None, False), value
    assert "cannot run, whatever the agent does" in value["reason"]


UPLOADED = {"calc.py": "", "helper.py": "", "tests/test_calc.py": TESTS["tests/test_calc.py"]}


@pytest.mark.promise(
    "A suite that cannot run whatever the agent does has no reward; one that the agent broke is worth 0.0."
)
@pytest.mark.parametrize(("grade", "way"), [("same_sandbox", "files"), ("fresh", "archive")])
@pytest.mark.parametrize(
    ("files", "acts", "reward"),
    [
        ({"pytest.ini": "[pytest]\naddopts = --cov\n"}, "true", None),
        ({"setup.cfg": "[tool:pytest]\nrequired_plugins = pytest-no-such-plugin\n"}, "true", None),
        ({"pyproject.toml": "[tool.pytest.ini_options]\nminversion = '99'\n"}, "true", None),
        ({"tests/conftest.py": "import no_such_module\n"}, "true", None),
        ({"pytest.ini": "[pytest]\naddopts = --cov\n"}, "echo broken >> pytest.ini", None),
        ({"pytest.ini": "[pytest]\n", "tests/conftest.py": "import helper\n"}, "true", 1.0),
        ({"pytest.ini": "[pytest]\n"}, "echo 'addopts = --cov' >> pytest.ini", 0.0),
        ({"tests/conftest.py": "import helper\n"}, "rm helper.py", 0.0),
        ({"tests/conftest.py": "import helper\n"}, "echo 'import no_such_module' > helper.py", 0.0),
        ({"tests/conftest.py": "from helper import name\n", "helper.py": "name = 1\n"}, "echo > helper.py", 0.0),
        ({}, "echo 'import no_such_module' > conftest.py", 0.0),
    ],
)
async def test_what_was_uploaded_before_the_agent_began_is_not_its_doing(
    bench: SuiteBench, files: dict[str, str], acts: str, reward: float | None, grade: Any, way: str
) -> None:
    sandbox = await bench.environments.ensure("t1", SPEC)
    if way == "files":
        for path, text in {**UPLOADED, **files}.items():
            await sandbox.write_file(path, text.encode())
    else:
        await put_archive(sandbox, ".", packed({**UPLOADED, **files}), limit_bytes=2**20)
    fixed = f"printf '{GOOD}' > calc.py"
    assert (await sandbox.run(Command(shell=f"{fixed}; {acts}"))).exit_code == 0
    function = replace(FUNCTION, pytest=PytestSpec(args=ARGS, grade=grade))
    value = await bench.run(function=function, fail_to_pass=["tests/test_calc.py::test_add"])
    assert (value["reward"], value["valid"]) == (reward, reward is not None), value
    assert bool(value["reason"]) == (reward is None)
    assert bool(value["note"]) == (reward == 0.0) or reward is None or grade == "fresh"


async def packed(files: dict[str, str]) -> AsyncIterator[bytes]:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for path, text in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    yield data.getvalue()


#: What is wrong with an image, and what an agent may do there.
IMAGES = {
    "option": {"pytest.ini": "[pytest]\naddopts = --cov\n"},
    "plugin": {"setup.cfg": "[tool:pytest]\nrequired_plugins = pytest-no-such-plugin\n"},
    "version": {"pyproject.toml": "[tool.pytest.ini_options]\nminversion = '99'\n"},
    "conftest": {"tests/conftest.py": "import no_such_module\n"},
    "warning": {
        "pytest.ini": "[pytest]\nfilterwarnings = error\n",
        "tests/test_old.py": "import old\ndef test_old(): pass\n",
        "/usr/lib/python3/dist-packages/old.py": "import warnings\nwarnings.warn('old', DeprecationWarning)\n",
    },
    "sound": {"pytest.ini": "[pytest]\n", "tests/conftest.py": ""},
    "bare": {},
}
#: What takes pytest out of an image, and what brings it back.
HIDDEN = "mkdir /kept; mv $(python3 -c 'import pytest, _pytest; print(*pytest.__path__, *_pytest.__path__)') /kept"
FOUND = "cp -r /kept/* $(dirname $(python3 -c 'import pluggy; print(*pluggy.__path__)'))"


@pytest.fixture(scope="module")
def images(docker: object) -> Iterator[dict[str, str]]:
    """An image for each of them, by name."""
    prefix = unique("tangram-test-cannot-run")
    names = {name: f"{prefix}-{name}:1" for name in IMAGES}
    try:
        for name, files in IMAGES.items():
            lines = ["FROM tangram-base:bookworm", "USER root", "RUN mkdir -p /project/tests"]
            for path, text in {"calc.py": "", **files}.items():
                quoted = text.replace("\\", "\\\\").replace("\n", "\\n").replace("'", "'\\''")
                lines.append(f"RUN printf '{quoted}' > {Path('/project', path)}")
            lines += [f"RUN {HIDDEN}"] if name == "bare" else []
            lines.append("RUN chmod -R a+rwX /project")
            done = subprocess.run(
                ["docker", "build", "-q", "-t", names[name], "-"],
                input="\n".join(lines).encode(),
                capture_output=True,
                check=False,
                timeout=120,
            )
            assert done.returncode == 0, done.stderr.decode()
        yield names
    finally:
        subprocess.run(["docker", "rmi", "-f", *names.values()], capture_output=True, check=False, timeout=60)


@pytest.fixture
async def environments(docker: object, tmp_path: Path) -> AsyncIterator[Environments]:
    provider = make_provider(ProviderSettings(kind="container", state_dir=tmp_path))
    environments = Environments(provider, EnvironmentSettings())
    yield environments
    await environments.close()
    await provider.close()


@pytest.mark.promise(
    "A suite that cannot run whatever the agent does has no reward; one that the agent broke is worth 0.0."
)
@pytest.mark.docker
@pytest.mark.parametrize("grade", ["same_sandbox", "fresh"])
@pytest.mark.parametrize(
    ("image", "acts", "reward"),
    [
        ("option", "true", None),
        ("plugin", "true", None),
        ("version", "true", None),
        ("conftest", "true", None),
        ("warning", "true", None),
        ("option", "echo broken >> pytest.ini", None),
        ("sound", "true", 1.0),
        ("sound", "echo 'addopts = --cov' >> pytest.ini", 0.0),
        ("sound", "echo 'minversion = 99' >> pytest.ini", 0.0),
        ("sound", "echo 'import no_such_module' > tests/conftest.py", 0.0),
        ("sound", "echo 'import pytest; pytest.exit(str(), 7)' > tests/conftest.py", 0.0),
    ],
)
async def test_who_has_broken_a_suite_is_seen_where_nobody_has_been(
    environments: Environments, images: dict[str, str], image: str, acts: str, reward: float | None, grade: Any
) -> None:
    assert SAME.pytest is not None
    spec = SandboxSpec(image=images[image], workdir="/project", memory_bytes=256 * 2**20)
    function: FunctionSpec = replace(SAME, sandbox=spec, pytest=PytestSpec(args=SAME.pytest.args, grade=grade))
    sandbox = await environments.ensure("t", spec)
    await sandbox.write_file("calc.py", GOOD.encode())
    assert (await sandbox.run(Command(shell=acts))).exit_code == 0
    given: dict[str, Any] = {"targets": ["tests/test_old.py"]} if image == "warning" else {"tests": TESTS}
    value = await graded(environments, function, "t", given)
    assert (value["reward"], value["valid"]) == (reward, reward is not None), value
    assert bool(value["reason"]) == (reward is None)
    assert bool(value["note"]) == (reward == 0.0) or reward is None


@pytest.mark.promise("A grade that needs a fork's snapshot says so, and checks nothing.")
@pytest.mark.docker
async def test_a_fork_whose_image_has_no_pytest_is_graded_in_its_snapshot_and_nothing_is_checked(
    environments: Environments, images: dict[str, str]
) -> None:
    spec = SandboxSpec(image=images["bare"], workdir="/project", memory_bytes=256 * 2**20, users=("root",), user="root")
    function = replace(FRESH, sandbox=spec)
    sandbox = await environments.ensure("t", spec)
    assert (await sandbox.run(Command(shell=FOUND))).exit_code == 0
    kept = await environments.snapshot("t")
    fork = await environments.ensure("fork", replace(spec, snapshot=kept.id))
    await fork.write_file("calc.py", GOOD.encode())
    value = await graded(environments, function, "fork", {"tests": TESTS})
    assert (value["reward"], value["graded"], value["checked"]) == (1.0, "snapshot", []), value
    assert "its image alone has no pytest" in str(value["note"])
    for trajectory in ("t", "fork"):
        await environments.end(trajectory)
    await environments.provider.snapshots.remove(kept.id)


@pytest.mark.parametrize(
    ("why", "expected"),
    [
        ('E     File "/w/tests/test_a.py", line 2\nE       match x:\nE   SyntaxError: invalid syntax', True),
        ('tests/test_a.py:1: in <module>\nE     File "/w/calc.py", line 2\nE   SyntaxError: invalid syntax', False),
        ("tests/test_a.py:1: in <module>\n    import old\n/usr/lib/old.py:3: in <module>\n    warn()\n"
         "E   DeprecationWarning: old", True),
        (".venv/lib/site-packages/old.py:3: in <module>\n    warn()\nE   old.Old4Warning: old", True),
        ("/usr/lib/old.py:3: in f\n    g()\ncalc.py:3: in <module>\n    warn()\nE   DeprecationWarning: calc", False),
        ("/usr/lib/old.py:3: in <module>\n    import x\nE   ModuleNotFoundError: No module named 'x'", False),
    ],
)  # fmt: skip
def test_a_file_that_this_environment_cannot_collect_is_told_apart(why: str, expected: bool) -> None:
    assert _is_the_environments("tests/test_a.py", why) is expected
