"""What comes over into a fresh sandbox: decided where it arrives, whatever the trajectory's sandbox says."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from runtimes.sandbox.pytest import changes

SOURCE = Path(changes.__file__).read_text(encoding="utf-8")
RULES: dict[str, object] = {"paths": [], "left_out": [], "kept": [], "ignore": True, "limit_bytes": 2**20}
LINK = object()
#: Of what is asked for; another place counts for nothing.
ASKED = [
    "conftest.py", "pytest.ini", "sitecustomize.py", "x.pth", ".git", "pkg", "site-packages", "tests",
]  # fmt: skip


def applied(
    tree: Path, files: Mapping[str, object], *, deleted: tuple[str, ...] = (), head: object = None, **rules: object
) -> tuple[int, dict[str, Any], str]:
    """Apply what a sandbox may claim to have changed; return the status, the answer and standard error."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            if text is LINK:
                entry.type, entry.linkname = tarfile.SYMTYPE, "elsewhere"
                tar.addfile(entry)
            else:
                entry.size = len(str(text))
                tar.addfile(entry, io.BytesIO(str(text).encode()))
    told = head if head is not None else {"deleted": deleted, "changed": len(files), "left_out": []}
    line = told if isinstance(told, bytes) else json.dumps(told).encode()
    given = json.dumps({**RULES, **rules}).encode() + b"\n" + line + b"\n" + packed.getvalue()
    argv = [sys.executable, "-I", "-S", "-c", SOURCE, "apply"]
    done = subprocess.run(argv, input=given, cwd=tree, capture_output=True, check=False, timeout=60)
    said = json.loads(done.stdout or b"{}")
    brought = said.pop("brought", {})
    for name in brought:
        assert os.path.lexists(tree / name), "what came over is there"
    return done.returncode, said, done.stderr.decode()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A fresh sandbox's working directory."""
    made = tmp_path / "work"
    (made / "pkg").mkdir(parents=True)
    for name in ("conftest.py", "pkg/conftest.py", "pkg/code.py"):
        (made / name).write_text("of the image")
    return made


@pytest.mark.promise("The fresh sandbox decides which files are copied into it, whatever the agent's sandbox reports.")
@pytest.mark.parametrize(
    "name",
    [
        "conftest.py", "pkg/conftest.py", "pytest.ini", "pkg/../conftest.py", "./conftest.py", "sitecustomize.py",
        "x.pth", ".git/hooks/post-checkout", "pkg/__pycache__/code.cpython-311.pyc", "site-packages/evil.py",
        "tests/test_a.py", "tests", "elsewhere/code.py", "tests/test_a/__init__.py", "tests/test_a.abi3.so",
        "tests/conftest/__init__.py", "tests/conftest.so", "pkg/.coveragerc",
    ],
)  # fmt: skip
def test_what_may_not_come_over_does_not_whatever_is_said(tree: Path, name: str) -> None:
    (tree / "elsewhere").mkdir()
    status, said, _ = applied(tree, {name: "evil"}, left_out=["tests/test_a.py"], paths=ASKED)
    plain = os.path.normpath(name)
    assert (status, said) == (0, {"left_out": [plain], "failed": []})
    place = tree / plain
    assert not place.exists() or place.read_text() == "of the image"


@pytest.mark.parametrize("text", ["import os", "x = 1", "(", LINK], ids=["import", "name", "error", "link"])
@pytest.mark.parametrize("name", ["__init__.py", "tests/__init__.py", "tests/unit/__init__.py"])
def test_no_code_of_a_package_comes_over_in_which_given_tests_lie(tree: Path, name: str, text: object) -> None:
    status, said, _ = applied(tree, {name: text}, left_out=["tests/unit/test_a.py"])
    assert (status, said) == (0, {"left_out": [name], "failed": []})
    assert not (tree / name).exists()


def test_a_package_without_code_comes_over_and_so_does_the_solutions(tree: Path) -> None:
    files = {"tests/__init__.py": '"""Tests."""\n', "pkg/__init__.py": "x = 1"}
    status, said, _ = applied(tree, files, left_out=["tests/test_a.py", "pkg/tests/test_b.py"])
    assert (status, said) == (0, {"left_out": [], "failed": []})
    assert (tree / "pkg/__init__.py").read_text() == "x = 1"


def test_the_code_of_a_package_with_code_and_tests_comes_over(tree: Path) -> None:
    status, said, _ = applied(tree, {"pkg/__init__.py": "x = 1"}, left_out=["pkg/test_a.py"])
    assert (status, said) == (0, {"left_out": [], "failed": []})


def test_what_may_comes_over(tree: Path) -> None:
    status, said, _ = applied(tree, {"pkg/code.py": "new", "a/b/c.py": "new", "link": LINK}, deleted=("gone",))
    assert (status, said) == (0, {"left_out": [], "failed": []})
    assert ((tree / "pkg/code.py").read_text(), (tree / "a/b/c.py").read_text()) == ("new", "new")
    assert (tree / "link").is_symlink()


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out", "..", "."])
def test_nothing_leaves_the_working_directory(tree: Path, name: str) -> None:
    status, said, _ = applied(tree, {name: "evil"}, deleted=(name,))
    assert (status, said["failed"]) == (0, [name, name])
    assert sorted(path.name for path in tree.parent.iterdir()) == ["work"]


@pytest.mark.parametrize("what", ["text", LINK], ids=["file", "link"])
def test_a_directory_with_the_images_options_is_not_replaced_nor_deleted(tree: Path, what: object) -> None:
    status, said, _ = applied(tree, {"pkg": what}, deleted=("pkg", "conftest.py", "pkg/code.py"))
    assert (status, said) == (0, {"left_out": ["conftest.py"], "failed": ["pkg", "pkg"]})
    assert sorted(path.name for path in tree.rglob("*")) == ["conftest.py", "conftest.py", "pkg"]


@pytest.mark.parametrize(
    "head",
    [
        b"", b"[" * 100_000, b"null", b"[]", b"{}", b'{"deleted": 1, "left_out": []}',
        b'{"deleted": [1], "left_out": []}', b'{"error": "more than 1 bytes have changed"}',
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_told_by_its_status(tree: Path, head: bytes) -> None:
    status, _, err = applied(tree, {}, head=head)
    assert status != 0
    assert err.strip()


def test_more_than_may_change_is_refused_where_it_arrives(tree: Path) -> None:
    status, _, err = applied(tree, {"big": "x" * 2000}, limit_bytes=1000)
    assert (status, "more than 1000 bytes" in err) == (1, True)
    assert not (tree / "big").exists()
