"""What `import tangram` offers, what the distribution `tangram-client` holds, and errors that survive a pickle."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tangram
from gateway.errors import ERROR_STATUSES
from tangram import InvocationFailed, MapFailed, NotFoundError, TangramError, errors, testing
from tangram.client.requests import result_of
from tangram.testing import ScriptedFailure
from tangram.types import Problem

#: Rooms of the server, and the heavy libraries of its runtimes.
STRANGERS = {"gateway", "manager", "runtimes", "torch", "numpy", "pydantic", "yaml", "starlette", "docker", "orjson"}
LISTING = """
import sys
import tangram, tangram.adapters, tangram.testing
print(*{name.partition(".")[0] for name in sys.modules})
"""

ROOT = Path(__file__).resolve().parents[2]


def project(directory: str) -> dict[str, Any]:
    """The project table of a pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / directory / "pyproject.toml").read_text())["project"]
    return found


@pytest.mark.xdist_group("distribution")
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


@pytest.mark.xdist_group("distribution")
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


@pytest.mark.xdist_group("distribution")
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


def failed() -> InvocationFailed:
    call = testing.ScriptedCall(
        function="f", input={}, record=testing.queued(0, "f", {}, mode="sync", task="t", trajectory=None)
    )
    call.end(None, ScriptedFailure("timeout", "too long", {"partial": [1]}))
    return InvocationFailed(result_of(call.record))


def every_error() -> list[TangramError]:
    own: list[TangramError] = [failed(), MapFailed([failed().invocation, NotFoundError("no f")])]
    plain: list[type[TangramError]] = [
        TangramError,
        *(kind for kind in kinds() if kind not in (InvocationFailed, MapFailed)),
    ]
    more: dict[str, Any] = {"component": "admission", "invocation_id": "i", "retry_after_s": 1.5, "detail": {"n": 1}}
    return own + [kind("why", **more) for kind in plain]


def kinds() -> list[type[TangramError]]:
    """Every class of errors but their base."""
    types = [value for value in vars(errors).values() if isinstance(value, type)]
    return [each for each in types if issubclass(each, TangramError) and each is not TangramError]


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_survives_a_pickle_whole(error: TangramError, protocol: int) -> None:
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is type(error)
    assert (str(again), again.args) == (str(error), error.args)
    assert {**vars(again), "results": None} == {**vars(error), "results": None}


def test_what_a_failed_map_holds_survives_a_pickle() -> None:
    error = MapFailed([failed().invocation, NotFoundError("no f")])
    again = pickle.loads(pickle.dumps(error))
    assert again.results[0] == error.results[0]
    assert [type(each) for each in again.failures.values()] == [NotFoundError]
    assert str(again) == "1 of 2 calls failed, the first with not_found: no f"


def test_every_code_of_the_gateway_has_its_class() -> None:
    unknown = ERROR_STATUSES.keys() - errors.BY_CODE.keys()
    # The codes of the base class, and of an invocation's end, which is no refusal.
    assert unknown == {"internal", "action_failed"}


@pytest.mark.parametrize("code", sorted(errors.BY_CODE))
def test_a_problem_becomes_the_class_of_its_code(code: str) -> None:
    error = errors.from_problem(problem(code, retry_after_s=2.0, errors={"path": "$"}))
    assert (type(error), error.code, error.message) == (errors.BY_CODE[code], code, "why")
    assert (error.component, error.retry_after_s, error.detail) == ("admission", 2.0, {"path": "$"})


def test_a_code_of_a_newer_gateway_is_a_plain_error() -> None:
    error = errors.from_problem(problem("unheard_of"), retry_after_s=3.0)
    assert (type(error), error.message, error.retry_after_s) == (TangramError, "why", 3.0)


def test_every_error_can_be_imported_from_the_top() -> None:
    assert [kind.__name__ for kind in kinds() if getattr(tangram, kind.__name__, None) is not kind] == []


def problem(code: str, **more: object) -> Problem:
    body = {"type": "t", "title": "T", "status": 409, "code": code, "detail": "why", "component": "admission"}
    return msgspec.convert(body | more, Problem)
