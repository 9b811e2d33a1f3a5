"""Examples of the guide: configurations load, commands parse, programs are Python; the site shows every page."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import click
import pytest

from gateway.cli import main as server
from gateway.config.load import load
from tangram.cli.main import command_line
from tests.house.source import ROOT

GUIDE = sorted(
    [*(ROOT / "docs" / "guide").glob("*.md"), ROOT / "docs/reference/runtimes.md", ROOT / "deploy/README.md"]
)


def blocks(language: str) -> list[tuple[str, str]]:
    """(page and number, text) of every example in a language."""
    found = []
    for page in GUIDE:
        texts = re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        found += [(f"{page.stem}-{number}", text) for number, text in enumerate(texts)]
    return found


def commands() -> list[str]:
    """Every line of the guide that calls the command, those after ``&&`` by themselves."""
    lines = [line.partition("  #")[0] for _, text in blocks("sh") for line in text.splitlines()]
    return [part.strip() for line in lines for part in line.split("&&") if part.strip().startswith("tangram ")]


@pytest.mark.parametrize(("name", "text"), blocks("yaml"), ids=[name for name, _ in blocks("yaml")])
def test_every_configuration_loads(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "tangram.yaml").write_text(text)
    assert load([tmp_path / "tangram.yaml"], {}, look=False) is not None


@pytest.mark.parametrize("line", commands())
def test_every_command_is_one(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tangram.yaml", "coding.jsonl", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "tangram-2026-11-23.sqlite").touch()
    command: click.Command | None = command_line(server.VERBS)
    words = shlex.split(line)[1:]
    while isinstance(command, click.Group):
        command = command.get_command(click.Context(command), words.pop(0))
    assert command is not None, line
    command.make_context("tangram", words)


@pytest.mark.parametrize(("name", "text"), blocks("python"), ids=[name for name, _ in blocks("python")])
def test_every_program_is_python(name: str, text: str) -> None:
    ast.parse(text)


def test_every_input_and_result_is_json() -> None:
    assert all(isinstance(json.loads(text), dict) for _, text in blocks("json"))


def test_every_page_that_the_site_names_is_there() -> None:
    named = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    hooks = (ROOT / "scripts" / "site" / "hooks.py").read_text(encoding="utf-8")
    assert [name for name in named if not (ROOT / "docs" / name).is_file() and f'"{name}"' not in hooks] == []


def test_links_of_the_deployment_lead_to_files() -> None:
    page = ROOT / "deploy" / "README.md"
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert targets and [target for target in targets if not (page.parent / target).exists()] == []
