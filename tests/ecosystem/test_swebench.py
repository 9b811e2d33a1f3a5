"""The SWE-bench harness, as it is on the registry, gives over the door the verdicts that it gives over the engine."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import docker as docker_py
import pytest

from tests.e2e.gateway import GatewayProcess
from tests.ecosystem.environments import ClientEnvironment

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.docker]
ENGINE = "unix:///var/run/docker.sock"
IMAGE = "swebench/sweb.eval.x86_64.tiny_1776_tiny-1"
WRONG = "def double(x):\n    return x + 2\n"
TESTS = """import tiny


def test_two():
    assert tiny.double(2) == 4


def test_three():
    assert tiny.double(3) == 6
"""
#: What each instance's prediction makes of the program, and what the harness is to say of it.
PREDICTIONS = {
    "tiny__tiny-right": WRONG.replace("x + 2", "x * 2"),
    "tiny__tiny-wrong": WRONG.replace("x + 2", "x + 3"),
    "tiny__tiny-late": WRONG.replace("return", "while True: pass\n    return"),
    "tiny__tiny-nowhere": "",
}
EVALUATION = """#!/bin/bash
set -uxo pipefail
cd /testbed
git status
: '>>>>> Start Test Output'
python3 -m pytest -rA -p no:cacheprovider test_tiny.py
: '>>>>> End Test Output'
git checkout -- test_tiny.py
"""


@pytest.fixture(scope="module")
def image(docker: str) -> Iterator[str]:
    """An instance's image as the harness expects it: the base image, a repository in /testbed, the host's own git."""
    git = shutil.which("git")
    if git is None:
        pytest.skip("this machine has no git to lay into the image")
    engine = docker_py.DockerClient(base_url=ENGINE)
    made = engine.containers.create(docker, ["sh", "-c", SETUP], user="root")
    try:
        made.put_archive("/", laid_out(Path(git)))
        made.start()
        assert made.wait()["StatusCode"] == 0, made.logs().decode()
        made.commit(IMAGE, "latest", conf={"WorkingDir": "/testbed"})
        yield IMAGE
    finally:
        made.remove(force=True)
        engine.images.remove(IMAGE, force=True)
        engine.close()


SETUP = """cd /testbed && git config --global user.name t && git config --global user.email t@t &&
git config --global --add safe.directory /testbed && git init -q . && git add -A && git commit -q -m one"""


def laid_out(git: Path) -> bytes:
    """Return a tar of the repository's files, and of git with the libraries that the base image lacks."""
    libraries = subprocess.run(["ldd", str(git)], capture_output=True, text=True, check=True).stdout
    found = [line.split()[2] for line in libraries.splitlines() if "libpcre" in line or "libz" in line]
    files = {path: (Path(path).read_bytes(), 0o755) for path in (str(git), *found)}
    files |= {"/testbed/tiny.py": (WRONG.encode(), 0o644), "/testbed/test_tiny.py": (TESTS.encode(), 0o644)}
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, (data, mode) in files.items():
            entry = tarfile.TarInfo(name.lstrip("/"))
            entry.size, entry.mode = len(data), mode
            tar.addfile(entry, io.BytesIO(data))
    return made.getvalue()


def written(directory: Path) -> tuple[Path, Path]:
    """Write a data set and its predictions, as the harness reads them; return where they lie."""
    directory.mkdir()
    instances = [
        {
            "instance_id": name, "image": f"{IMAGE}:latest", "repo": "tiny/tiny", "version": "1",
            "FAIL_TO_PASS": ["test_tiny.py::test_three"], "PASS_TO_PASS": ["test_tiny.py::test_two"],
            "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail", "eval_script": EVALUATION,
        }
        for name in PREDICTIONS
    ]  # fmt: skip
    predictions = [
        {"instance_id": name, "model_name_or_path": "tests", "model_patch": patch(code)}
        for name, code in PREDICTIONS.items()
    ]
    places = directory / "dataset.json", directory / "predictions.json"
    for place, value in zip(places, (instances, predictions), strict=True):
        place.write_text(json.dumps(value))
    return places


def patch(code: str) -> str:
    """Return what makes the program this one; of a file that is not there, for none."""
    name = "tiny.py" if code else "nowhere.py"
    old, new = WRONG.splitlines(), (code or "x = 1\n").splitlines()
    lines = [f"--- a/{name}", f"+++ b/{name}", f"@@ -1,{len(old)} +1,{len(new)} @@"]
    return "\n".join([f"diff --git a/{name} b/{name}", *lines, *(f"-{line}" for line in old),
                      *(f"+{line}" for line in new), ""])  # fmt: skip


@pytest.mark.promise("The SWE-bench harness gives the same verdicts over Docker's facade as over the real engine.")
async def test_the_harness_gives_the_verdicts_that_it_gives_over_the_engine(
    boxes: GatewayProcess, client: Callable[[str], ClientEnvironment], image: str, tmp_path: Path
) -> None:
    if "process" in boxes.directory.name:
        pytest.skip("an instance is an image, and process sandboxes have none")
    harness, told = client("swebench"), {}
    for name, host in (("engine", ENGINE), ("door", f"unix://{boxes.directory / 'docker.sock'}")):
        dataset, predictions = written(tmp_path / name)
        told[name] = await harness.run("swebench_harness", str(dataset), str(predictions), "run", DOCKER_HOST=host)
    assert told["door"] == told["engine"]
    summary = told["door"]["summary"]
    assert summary["resolved_ids"] == ["tiny__tiny-right"]
    assert summary["unresolved_ids"] == ["tiny__tiny-wrong"]
    assert summary["error_ids"] == ["tiny__tiny-late", "tiny__tiny-nowhere"]
