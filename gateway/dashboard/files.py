"""The page: one document with its style and its scripts in it, made once, named by what is in it.

One request brings all that is seen: on a loaded machine each further one costs a browser a tenth of a second. The
worker that tabs share comes after it, as a script of its own, which it has to be. The modules of
`page/` stay files of their own for who writes them; here each becomes a function that returns what it exports.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

INDEX, STYLE, MAIN, WORKER = "index.html", "app.css", "app.js", "worker.js"
QUOTE = '"'
_STYLE_TAG = '<link rel="stylesheet" href="app.css">'
_SCRIPT_TAG = '<script type="module" src="app.js"></script>'
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+\.js)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async function\*?|function|const|class) (\w+))", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file as it is sent."""

    data: bytes
    packed: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class PageDocument(PageFile):
    """The document, and the worker that it starts."""

    worker: PageFile
    #: What may run in it and dress it, by digest: the values of `script-src` and `style-src`.
    script: str
    style: str


@cache
def the_page() -> PageDocument:
    """Return the document with everything in it."""
    folder = resources.files("gateway.dashboard").joinpath("page")
    sources = {
        each.name: each.read_text(encoding="utf-8")
        for each in folder.iterdir()
        if each.name.endswith((".html", ".js", ".css"))
    }
    worker = _file(bundled(sources, WORKER))
    # Named by what is in it: tabs with another page share another worker.
    style, script = sources[STYLE], bundled(sources, MAIN)
    address = f'"/ui/{WORKER}"'
    assert script.count(address) == 1, f"the scripts name {address} once"
    script = script.replace(address, f'"/ui/{WORKER}?{worker.etag.strip(QUOTE)}"')
    text = sources[INDEX]
    for tag, result in (
        (_STYLE_TAG, f"<style>{style}</style>"),
        (_SCRIPT_TAG, f'<script type="module">{script}</script>'),
    ):
        assert text.count(tag) == 1, f"{INDEX} names {tag} once"
        text = text.replace(tag, result)
    page = _file(text)
    return PageDocument(page.data, page.packed, page.etag, worker, _digest(script), _digest(style))


def _file(text: str) -> PageFile:
    data = text.encode()
    digest = hashlib.sha256(data).hexdigest()[:16]
    return PageFile(data, gzip.compress(data, 9, mtime=0), f"{QUOTE}{digest}{QUOTE}")


def bundled(sources: dict[str, str], main: str) -> str:
    """Return one script of a module and all that it imports, each once and after what it imports itself.

    Modules import by name from a file beside them, one line each, and export declarations that are never assigned
    again; anything else is an AssertionError.
    """
    parts: list[str] = []
    state: dict[str, bool] = {}

    def add(name: str) -> None:
        assert state.get(name) is not False, f"{name} imports itself by way of others"
        if name in state:
            return
        state[name] = False
        text = sources[name]
        for _, needed in _IMPORT.findall(text):
            add(needed)
        state[name] = True
        exported = [result for _, result in _EXPORT.findall(text)]
        text = _IMPORT.sub(lambda result: f"const {{{result[1]}}} = {_variable(result[2])};", text)
        text = _EXPORT.sub(r"\1", text)
        stray = re.search(r"^\s*(import|export)\b.*$|</script", text, re.MULTILINE)
        if stray is not None:
            raise AssertionError(f"{name} says {stray[0].strip()!r}, which one document cannot hold")
        parts.append(f"const {_variable(name)} = (() => {{\n{text}\nreturn {{{', '.join(exported)}}};\n}})();\n")

    add(main)
    return "".join(parts)


def _variable(name: str) -> str:
    return f"$_{name.removesuffix('.js')}"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
