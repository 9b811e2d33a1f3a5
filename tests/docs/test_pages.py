"""Pages are plain, their examples load, and what they name of the code and of tests exists."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from gateway.cli import main as server
from gateway.config.load import load
from scripts.house import GENERATED_DOCS
from scripts.promises import marks
from tangram.cli.main import command_line
from tests.house.source import ROOT, sources

SENTENCE_WORDS = 40
CELL_WORDS = 30
README_WORDS = 700
#: Of docs, README and CHANGELOG together, without generated tables.
DOCS_WORDS = 31_400
LINE_CHARACTERS = 120
ROOMS = ("gateway", "manager", "runtimes", "tangram", "bench", "scripts", "tests")
#: Pages that tell what was: they may name what is gone.
HISTORY = {"CHANGELOG.md"}

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "deploy" / "README.md"])

_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")

_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")

_CODE = re.compile(r"`[^`]*`")

_END = re.compile(r"(?<=[.!?])[\"')*]*\s+")


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs, headings and items of lists, each in one line; without blocks of code and tables."""
    held: list[str] = []
    for line in [*re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines(), ""]:
        is_apart = not line.strip() or line.startswith(("|", "#"))
        if (is_apart or _ITEM.match(line)) and held:
            yield " ".join(held)
            held = []
        if not is_apart:
            held.append(_ITEM.sub("", line, count=1).strip())


def words(text: str) -> int:
    """Count words; a piece of code is one, and of a link its text counts."""
    return len([word for word in _LINK.sub(r"\1", _CODE.sub("code", text)).split() if re.search(r"\w", word)])


def long_sentences(text: str) -> list[str]:
    """Sentences above the bound."""
    split = (sentence for each in paragraphs(text) for sentence in _END.split(_CODE.sub("`code`", each)))
    return [sentence for sentence in split if words(sentence) > SENTENCE_WORDS]


def long_cells(text: str) -> list[str]:
    """Cells of tables above the bound."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", _CODE.sub("`code`", row))]
    return [cell for cell in cells if words(cell) > CELL_WORDS]


def long_lines(text: str) -> list[str]:
    """Lines of prose above the bound; a piece of code or a link is not broken, and counts as its words do."""
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
    plain = {line: _LINK.sub(r"\1", _CODE.sub("`code`", line)) for line in prose if not line.startswith("|")}
    return [line for line, short in plain.items() if len(line) > LINE_CHARACTERS and len(short) > LINE_CHARACTERS // 2]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_sentences_and_cells_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert long_sentences(text) == []
    hand = GENERATED_DOCS.sub("", text)
    assert long_cells(hand) == []
    assert long_lines(hand) == []


def test_readme_is_short_and_docs_stay_within_their_bound() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= README_WORDS
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    hand = [GENERATED_DOCS.sub("", page.read_text(encoding="utf-8")) for page in pages]
    assert sum(len(text.split()) for text in hand) <= DOCS_WORDS


def test_the_menu_leads_to_every_page_and_to_no_other() -> None:
    menu = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    hooks = (ROOT / "scripts" / "site" / "hooks.py").read_text(encoding="utf-8")
    assert sorted(pages - menu) == [name for name in menu - pages if f'"{name}"' not in hooks] == []


def test_what_is_long_is_found() -> None:
    fine, long = "word " * 40, "word " * 41
    assert not long_sentences(f"{fine.strip()}. {fine.strip()}.\n\n```sh\n{long}\n```\n- {fine}\n- {fine}\n")
    assert len(long_sentences(f"One.\n\n{long}")) == 1
    assert len(long_cells(f"| a | {'word ' * 31}|")) == 1 and not long_cells(f"| a | {'word ' * 30}|")
    assert long_lines(fine) and not long_lines(f"`{'x' * 130}`") and not long_lines("short\n" * 200)
    assert words("[a link](to/a/page.md) of `some code`") == 4


CONNECT = sorted((ROOT / "docs" / "connect").glob("*.md"))
CONNECT_WORDS = 250
#: Modules of tangram.adapters that are no plug by themselves.
SHARED_BY_PLUGS = {"__init__", "aio", "provider", "rewards", "sync", "verl_reward"}
GUIDE = sorted(
    [*(ROOT / "docs" / "guide").glob("*.md"), *CONNECT, ROOT / "docs/reference/runtimes.md", ROOT / "deploy/README.md"]
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


def test_every_plug_has_a_short_page_that_can_be_typed() -> None:
    plugs = {path.stem for path in (ROOT / "tangram" / "adapters").glob("*.py")} - SHARED_BY_PLUGS
    pages = {page.stem: page.read_text(encoding="utf-8") for page in CONNECT}
    assert len(plugs) == len(pages)
    assert [plug for plug in plugs if not any(page.startswith(plug.replace("_", "-")) for page in pages)] == []
    assert [name for name, text in pages.items() if len(text.split()) > CONNECT_WORDS] == []
    assert [name for name, text in pages.items() if not re.search(r"^tangram serve", text, re.MULTILINE)] == []


@pytest.mark.parametrize(("name", "text"), blocks("yaml"), ids=[name for name, _ in blocks("yaml")])
def test_every_configuration_loads(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "tangram.yaml").write_text(text)
    assert load([tmp_path / "tangram.yaml"], {}, look=False) is not None


def parse(line: str) -> None:
    """Read a command line as far as its verb does before it begins."""
    command: click.Command | None = command_line(server.VERBS)
    words = shlex.split(line)[1:]
    while isinstance(command, click.Group):
        command = command.get_command(click.Context(command), words.pop(0))
    assert command is not None, line
    command.make_context("tangram", words)


@pytest.mark.parametrize("line", commands())
def test_every_command_is_one(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tangram.yaml", "coding.jsonl", "notes.txt", "tangram-2026-11-23.sqlite"):
        (tmp_path / name).touch()
    parse(line)


def verbs(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[tuple[str, click.Command]]:
    """Yield every verb that is no group, with its whole name."""
    context = click.Context(command, parent=parent)
    if not isinstance(command, click.Group):
        yield name, command
        return
    for each in command.list_commands(context):
        verb = command.get_command(context, each)
        assert verb is not None
        yield from verbs(verb, f"{name} {each}", context)


def test_the_examples_of_every_help_are_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tangram.sqlite").touch()
    for name, command in verbs(command_line(server.VERBS), "tangram"):
        examples = [line.strip() for line in (command.help or "").splitlines() if line.strip().startswith("tangram ")]
        assert examples or name.rpartition(" ")[2] in ("list", "show", "check", "tasks", "token", "completion"), name
        for line in examples:
            parse(line.partition(" > ")[0].partition(" && ")[0].partition("  #")[0])


@pytest.mark.parametrize(("name", "text"), blocks("python"), ids=[name for name, _ in blocks("python")])
def test_every_program_is_python(name: str, text: str) -> None:
    ast.parse(text)


def test_every_input_and_result_is_json() -> None:
    assert all(isinstance(json.loads(text), dict) for _, text in blocks("json"))


def test_every_promise_is_a_sentence_on_a_test() -> None:
    promises = dict(marks())
    assert len(promises) > 100
    assert [text for text in promises if not text.endswith(".") or words(text) > SENTENCE_WORDS] == []


_PATH = re.compile(rf"(?<![\w./-])((?:{'|'.join(ROOMS)})/[\w./-]*\w)")

#: A package of protobuf and a file in somebody's directory begin like ours.
_DOTTED = re.compile(r"`((?:gateway|manager|runtimes|bench|tangram(?!\.v1|\.yaml|\.sqlite))(?:\.\w+)+)")


def documents() -> Iterator[tuple[str, str]]:
    """Every page and every module, by name."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        if page.name not in HISTORY:
            yield page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")
    for source in sources():
        yield source.name, source.text


@pytest.mark.xdist_group("sources")
def test_every_path_that_a_page_names_is_there() -> None:
    pages = [(name, text) for name, text in documents() if name.endswith(".md")]
    gone = {f"{name}: {path}" for name, text in pages for path in _PATH.findall(text) if not _there(path)}
    assert not gone


@pytest.mark.xdist_group("sources")
def test_every_dotted_name_leads_somewhere() -> None:
    gone = {f"{name}: {dotted}" for name, text in documents() for dotted in _DOTTED.findall(text) if not _leads(dotted)}
    assert not gone


def _there(path: str) -> bool:
    """Return whether a file or folder of that path exists, with or without the ending of a module."""
    return any((ROOT / f"{path}{ending}").exists() for ending in ("", ".py", ".md"))


def _leads(dotted: str) -> bool:
    """Return whether the longest prefix that is a module or a folder defines what comes next."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:length])
        module = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
        rest = parts[length:]
        if module.is_file():
            return not rest or rest[0] in _names(module)
        if place.exists():
            return not rest
    return False


@cache
def _names(module: Path) -> frozenset[str]:
    """Everything that a module's text calls by a name of its own: definitions, assignments and imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found.update(alias.asname or alias.name for alias in node.names)
    return frozenset(found)
