"""The distribution `tangram-client`: what it holds, what it needs, and that it brings nothing of the server."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Building writes beside the project: one process does it.
pytestmark = pytest.mark.xdist_group("distribution")
#: Rooms of the server, and the heavy libraries of its runtimes.
STRANGERS = {"gateway", "manager", "runtimes", "torch", "numpy", "pydantic", "yaml", "starlette", "docker", "orjson"}
LISTING = """
import sys
import tangram, tangram.adapters, tangram.testing
print(*{name.partition(".")[0] for name in sys.modules})
"""


def project(directory: str) -> dict[str, Any]:
    """The project table of a pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / directory / "pyproject.toml").read_text())["project"]
    return found


def test_it_needs_httpx_and_msgspec_and_the_server_needs_it() -> None:
    client, server = project("client"), project(".")
    assert [each.partition(">")[0] for each in client["dependencies"]] == ["httpx", "msgspec"]
    assert f"{client['name']}[cli]=={client['version']}" in server["dependencies"]
    assert client["scripts"] == server["scripts"]


def test_importing_it_brings_nothing_of_the_server() -> None:
    done = subprocess.run([sys.executable, "-c", LISTING], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) & STRANGERS == set()


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive of the checkout, and the wheel that is built from it."""
    directory = tmp_path_factory.mktemp("dist")
    source = built("sdist", ROOT / "client", directory)
    with tarfile.open(source) as archive:
        archive.extractall(directory, filter="data")
    return source, built("wheel", directory / source.name.removesuffix(".tar.gz"), directory)


def built(kind: str, project: Path, directory: Path) -> Path:
    code = f"import setuptools.build_meta as backend; print(backend.build_{kind}({str(directory)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True)
    return directory / done.stdout.splitlines()[-1]


def test_both_archives_hold_the_package_whole_and_nothing_else(archives: tuple[Path, Path]) -> None:
    modules = [*(ROOT / "tangram").rglob("*.py"), *(ROOT / "tangram").rglob("*.pyi")]
    package = {path.relative_to(ROOT).as_posix() for path in modules} | {"tangram/py.typed"}
    source, wheel = archives
    with tarfile.open(source) as archive:
        files = {each.name.partition("/")[2] for each in archive.getmembers() if each.isfile()}
    beside = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    assert {name for name in files if not name.startswith("tangram_client.egg-info/")} == package | beside
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == package
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_works_by_itself(archives: tuple[Path, Path], tmp_path: Path) -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import tangram
from tangram.testing import ScriptedGateway
assert tangram.__file__.startswith(sys.argv[1]), tangram.__file__
with tangram.Client(transport=ScriptedGateway({"f": {"reward": 1.0}})) as client:
    print(client.invoke("f", {}).result["reward"])
"""
    arguments = [sys.executable, "-c", code, str(archives[1])]
    assert subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=True).stdout == "1.0\n"
