"""The files of the page: read once, packed once, named by what is in them."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
INDEX = "index.html"


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is sent."""

    media_type: str
    data: bytes
    packed: bytes
    etag: str


def page_files() -> Mapping[str, PageFile]:
    """Return every file of the page by name."""
    found: dict[str, PageFile] = {}
    for each in resources.files("gateway.dashboard").joinpath("page").iterdir():
        kind = each.name.rpartition(".")[2]
        if kind in TYPES:
            data = each.read_bytes()
            etag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
            found[each.name] = PageFile(TYPES[kind], data, gzip.compress(data, 9, mtime=0), etag)
    return found
