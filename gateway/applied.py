"""What was applied over a door: kept in the record, so that the next gateway has it beside its files.

The files of registered handlers are in the record too, beside those in the state directory that their instances see: a
record that is restored, or lies in another directory, has all that it needs.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import orjson

from gateway.config.uploads import HandlerUploads
from gateway.store.store import Store

DOCUMENT = "applied"
#: Begins the names of documents that hold a handler's files; the digest of these follows.
FILES = "handler:"


class AppliedDocument(NamedTuple):
    """A configuration as it was received, and the key paths (``functions.f``) of what is still its own."""

    body: bytes
    names: tuple[str, ...]


class AppliedConfigs:
    """The documents of which something is served, the newest last; a key path belongs to one of them at most."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.documents: tuple[AppliedDocument, ...] = ()

    def __contains__(self, name: str) -> bool:
        return any(name in each.names for each in self.documents)

    async def load(self) -> None:
        """Read what earlier gateways were given."""
        found = orjson.loads(await self._store.document(DOCUMENT) or "[]")
        self.documents = tuple(AppliedDocument(base64.b64decode(each["body"]), tuple(each["names"])) for each in found)

    def check(self) -> None:
        """Raise StorageUnavailable while the disk refuses: nothing is applied then that would not be kept."""
        self._store.check()

    def take(self, body: bytes, names: Collection[str], removed: Collection[str] = ()) -> None:
        """Keep a document that has made these key paths; an empty body stands for the gateway's own files.

        Of earlier documents stays what was neither made anew nor removed.
        """
        gone = {*names, *removed}
        kept = [
            AppliedDocument(each.body, tuple(name for name in each.names if name not in gone))
            for each in self.documents
        ]
        documents = (*kept, AppliedDocument(body, tuple(sorted(names))))
        found = tuple(each for each in documents if each.names and each.body.strip())
        if found != self.documents:
            self.documents = found
            saved = [{"body": base64.b64encode(each.body).decode(), "names": each.names} for each in found]
            self._store.save_document(DOCUMENT, orjson.dumps(saved).decode())

    def keep_files(self, digest: str, sources: Mapping[str, str]) -> None:
        """Note the files of a handler, by path; durable with the document that names them."""
        self._store.save_document(FILES + digest, orjson.dumps(sources).decode())

    async def restore_files(self, uploads: HandlerUploads) -> None:
        """Put back what files of handlers the state directory lacks, and remove those that no document names.

        Documents that were applied over another state directory name those of this one from now on.
        """
        names = [str(row["name"]) for row in await self._store.read("document_names", (FILES,))]
        kept = {name.removeprefix(FILES) for name in names}
        bodies = [each.body for each in self.documents]
        for digest in sorted(kept):
            if not any(digest.encode() in body for body in bodies):
                self._store.save_document(FILES + digest, None)
            elif not (uploads.root / digest).is_dir():
                sources = orjson.loads(await self._store.document(FILES + digest) or "{}")
                await asyncio.to_thread(uploads.keep, sources)
        await asyncio.to_thread(uploads.prune, bodies)
        self.documents = tuple(each._replace(body=_moved(each.body, uploads.root)) for each in self.documents)

    async def commit(self) -> None:
        """Return when what was taken is durable; raises StorageUnavailable."""
        await self._store.commit()


def _moved(body: bytes, root: Path) -> bytes:
    """Return a document with the places of registered handlers below this root."""
    try:
        document = orjson.loads(body)
        files = [(file, Path(file["path"])) for file in document["files"]]
    except (ValueError, TypeError, KeyError):
        return body  # one text, which names no place of a handler
    moved = False
    for file, path in files:
        directory = path.parent
        if directory.parent.name == root.name and directory.parent != root and (root / directory.name).is_dir():
            file["path"], moved = str(root / directory.name / path.name), True
    return orjson.dumps(document) if moved else body


class KeptFunctions(NamedTuple):
    """What of registered functions outlives a gateway: the documents, and the files of handlers."""

    documents: AppliedConfigs
    uploads: HandlerUploads
