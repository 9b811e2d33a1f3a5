"""What a handler may require, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtimes.sandbox.handler.sources import LINES_MAX, requirement_lines

HASH = f"--hash=sha256:{'0a' * 32}"


def test_requirements_are_taken_in_the_words_of_pip(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(
        f"# of the reward\nsympy==1.13.3   # pinned\n\nlatex2sympy2 \\\n    {HASH} \\\n    {HASH}\n"
    )
    lines = requirement_lines(
        ["regex>=2024", f"tiny==1 {HASH}", 'tomli; python_version < "3.11"', "-r requirements.txt"], tmp_path, True
    )
    assert lines == (
        "regex>=2024",
        f"tiny==1 {HASH}",
        'tomli; python_version < "3.11"',
        "sympy==1.13.3",
        f"latex2sympy2 {HASH} {HASH}",
    )
    assert requirement_lines(["-r elsewhere.txt"], tmp_path, False) == ("-r elsewhere.txt",)


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        ("two words", "no requirement such as"),
        ("tiny @ https://example.invalid/tiny.whl", "names an address"),
        ("--index-url=https://example.invalid/", "of pip's options only -r FILE and --hash"),
        ("-e .", "of pip's options only"),
        ("tiny==1 --hash=md5:00", "--hash=md5:00 is no sha256:"),
        ("./tiny.whl", "no requirement such as"),
        ("tiny\n--index-url https://example.invalid/", "no requirement such as"),
        ("x" * 5000, "longer than 4000 characters"),
        ("-r ../outside.txt", "outside of the function's directory"),
        ("-r none.txt", "cannot be read"),
        ("-r bad.txt", "bad.txt:2: '-e .'"),
    ],
)
def test_what_else_pip_would_take_is_refused_by_its_place(tmp_path: Path, listed: str, told: str) -> None:
    (tmp_path / "bad.txt").write_text("tiny\n-e .\n")
    with pytest.raises(ValueError, match=told.replace("(", r"\(")):
        requirement_lines([listed], tmp_path, True)


def test_their_number_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"more than {LINES_MAX}"):
        requirement_lines(["tiny"] * (LINES_MAX + 1), tmp_path, True)
