"""Files in a sandbox, on the wire."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from tangram.types.values.scalars import Count


class FileWritten(Struct, frozen=True, kw_only=True):
    """A file that was written."""

    path: str
    size_bytes: Count


class FileEntry(Struct, frozen=True, kw_only=True):
    """A file or directory."""

    path: str
    size_bytes: Count
    directory: bool
    mode: Annotated[str, Meta(description="Permission bits in octal")]


class FileList(Struct, frozen=True, kw_only=True):
    """The entries of a directory."""

    files: tuple[FileEntry, ...]
