"""Pages that lie outside docs/ become part of the site, and links into the repository lead there or are plain words."""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
#: What the site shows of the repository besides docs/, by its path there.
OUTSIDE = {
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "deploy/README.md": "deploy.md",
}
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside."""
    for source, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "PROMISES.md", content=_promises()))
    return files


def _promises() -> str:
    """The page of promises, made from the marks on the tests."""
    command = [sys.executable, "-m", "scripts.promises"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Each relative link: from its place in the repository to its place in the site."""
    shown = page.file.src_uri
    source = next((path for path, name in OUTSIDE.items() if name == shown), f"docs/{shown}")

    def moved(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, mark, anchor = target.partition("#")
        there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / there).exists():
            return match[0]  # told by mkdocs
        name = OUTSIDE.get(there, there.removeprefix("docs/") if there.startswith("docs/") else "")
        if not name or (ROOT / there).is_dir():
            return words
        return f"[{words}]({posixpath.relpath(name, posixpath.dirname(shown) or '.')}{mark}{anchor})"

    return _LINK.sub(moved, markdown)
