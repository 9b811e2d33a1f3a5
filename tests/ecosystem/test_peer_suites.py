"""The own test suites of other projects, against the facades that speak their protocols.

Each suite comes with its project's source archive. What a facade does not do is listed, with the reason, in
``peers/*.toml``; a test on the list that passes fails here too, so that the lists stay true.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tarfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tangram.types import INVOKE
from tests.e2e.gateway import GatewayProcess, document
from tests.ecosystem.environments import CLIENTS, KEPT, ClientEnvironment

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.docker, pytest.mark.far]
PEERS = Path(__file__).parent / "peers"
#: Seconds for the source archive, for one of its tests, and for all of them.
FETCH_S, TEST_S, SUITE_S = 120, 15, 600
#: What stands in docker-py's tests for images of the registry, and for a user that only those have.
REPLACED = {
    r"(['\"])(alpine|busybox)(:latest|:3\.10)?\1": r"\1tangram-base:bookworm\1",
    r"alpine:\.\*": "tangram-base:.*",
    r"postgres": "daemon",
}
#: Modules of docker-py's suite: the others are of what this facade has none of (see docs/CONNECT.md).
DOCKER_MODULES = (
    "api_client", "api_container", "api_exec", "client", "errors", "models_containers", "regression",
)  # fmt: skip
SWEREX_MODULES = ("execution", "remote_deployment", "runtime", "server")


async def test_docker_pys_own_suite_passes_but_for_what_is_listed(
    client: Callable[[str], ClientEnvironment], docker: object, tmp_path: Path
) -> None:
    environment = client("docker_py")
    place = await source(environment, "docker==7.0.0", tmp_path)
    for path in (place / "tests").rglob("*.py"):
        text = path.read_text()
        for old, new in REPLACED.items():
            text = re.sub(old, new, text)
        path.write_text(text)
    engine = tmp_path / "docker.sock"
    modules = [f"tests/integration/{name}_test.py" for name in DOCKER_MODULES]
    with serving(tmp_path / "gateway", {"docker": {"socket": str(engine), "function": "boxes"}}):
        results = await suite(environment, place, modules, {"DOCKER_HOST": f"unix://{engine}"})
    compare(results, "docker_py", at_least=150)


async def test_swe_rexs_own_suite_passes_but_for_what_is_listed(
    client: Callable[[str], ClientEnvironment], docker: object, tmp_path: Path
) -> None:
    environment = client("swerex_suite")
    place = await source(environment, "swe-rex==1.4.0", tmp_path)
    (place / "tests" / "conftest.py").write_text((CLIENTS / "swerex_suite.py").read_text())
    (place / "tests" / "__init__.py").touch()
    modules = [f"tests/test_{name}.py" for name in SWEREX_MODULES]
    facades = {"swerex": {"function": "boxes", "port": 0}}
    with serving(tmp_path / "gateway", facades, auth="token") as gateway:
        token = (gateway.directory / "state" / INVOKE).read_text().strip()
        announced = next(json.loads(line) for line in gateway.log if '"serving"' in line)
        port = str(announced["facades"]["swerex"]).rpartition(":")[2]
        variables = {"SWEREX_KEY": f"{token}.suite", "SWEREX_PORT": port}
        results = await suite(environment, place, modules, variables)
    compare(results, "swerex", at_least=60)


@contextmanager
def serving(directory: Path, facades: Mapping[str, object], auth: str = "none") -> Iterator[GatewayProcess]:
    """Serve, with containers whose function lets a trajectory choose what these suites choose."""
    sandbox = {"user": "root", "users": ["root", "daemon", "1000"], "capabilities": "default", "background": "run"}
    choices = {"trajectory": {"env": ["*"], "memory": "1Gi"}}
    boxes = {"runtime": "exec", "cost": {"cpu": 1}, "timeout": "5m", "output_limit": "16Mi"}
    described = document("container", directory / "state", boxes={**boxes, "sandbox": {**sandbox, **choices}})
    described["server"] |= {"body_limit": "128Mi", "auth": auth, "facades": dict(facades)}
    gateway = GatewayProcess(directory, described)
    gateway.start()
    try:
        yield gateway
    finally:
        gateway.stop()


async def source(environment: ClientEnvironment, package: str, directory: Path) -> Path:
    """Return the unpacked source archive of a package."""
    pip = ["-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", package, "-d", str(directory)]
    await output_of(environment, pip, directory, {}, FETCH_S)
    return await asyncio.to_thread(unpacked, directory)


def unpacked(directory: Path) -> Path:
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(directory / "source", filter="data")
    (result,) = (directory / "source").iterdir()
    return result


async def suite(
    environment: ClientEnvironment, place: Path, modules: list[str], variables: Mapping[str, str]
) -> dict[str, str]:
    """Run modules of a suite; return by test why it failed, empty where it passed."""
    report = place / "report.xml"
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", str(TEST_S), f"--junit-xml={report}"]
    out = await output_of(environment, [*words, *modules], place, variables, SUITE_S)
    assert report.exists(), out
    results: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{str(case.get('classname')).rpartition('.')[2]}.{case.get('name')}"
        failures = [*case.iter("failure"), *case.iter("error")]
        results[name] = "\n".join(f"{each.get('message')}" for each in failures)
    return results


async def output_of(
    environment: ClientEnvironment, words: list[str], cwd: Path, variables: Mapping[str, str], timeout_s: float
) -> str:
    env = {name: os.environ[name] for name in KEPT if name in os.environ} | dict(variables)
    python = environment.directory / "bin" / "python"
    process = await asyncio.create_subprocess_exec(
        python, *words, cwd=cwd, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(timeout_s):
            return (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def compare(results: Mapping[str, str], peer: str, *, at_least: int) -> None:
    """Assert that what fails is what is listed."""
    rows = tomllib.loads((PEERS / f"{peer}.toml").read_text())["not_done"]
    listed = {test for row in rows for test in row["tests"]}
    failed = {name: why[:300] for name, why in results.items() if why}
    assert len(results) >= at_least
    assert {name: why for name, why in failed.items() if name not in listed} == {}
    assert listed - failed.keys() == set(), "these pass, or are none of the suite's: take them off the list"
