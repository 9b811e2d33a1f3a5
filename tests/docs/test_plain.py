"""Pages are plain: no sentence above 40 words, no table cell above 30, and the menu of the site leads to every page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.source import ROOT

SENTENCE_WORDS = 40
CELL_WORDS = 30
README_WORDS = 700
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "deploy" / "README.md"])
#: Pages whose tables are made from the code, which has checks of its own.
GENERATED = {"yaml.md", "metrics.md", "runtimes.md"}
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s+")
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


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_sentences_and_cells_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert long_sentences(text) == []
    assert path.name in GENERATED or long_cells(text) == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= README_WORDS


def test_the_menu_leads_to_every_page() -> None:
    menu = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages - menu) == []


def test_what_is_long_is_found() -> None:
    fine, long = "word " * 40, "word " * 41
    assert not long_sentences(f"{fine.strip()}. {fine.strip()}.\n\n```sh\n{long}\n```\n- {fine}\n- {fine}\n")
    assert len(long_sentences(f"One.\n\n{long}")) == 1
    assert len(long_cells(f"| a | {'word ' * 31}|")) == 1 and not long_cells(f"| a | {'word ' * 30}|")
    assert words("[a link](to/a/page.md) of `some code`") == 4
