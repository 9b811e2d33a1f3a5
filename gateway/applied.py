"""What was applied over a door: kept in the record, so that the next gateway has it beside its files."""

from __future__ import annotations

import base64
from collections.abc import Collection
from typing import NamedTuple

import orjson

from gateway.config.uploads import HandlerUploads
from gateway.store.store import Store

DOCUMENT = "applied"


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

    async def commit(self) -> None:
        """Return when what was taken is durable; raises StorageUnavailable."""
        await self._store.commit()


class KeptFunctions(NamedTuple):
    """What of registered functions outlives a gateway: the documents, and the files of handlers."""

    documents: AppliedConfigs
    uploads: HandlerUploads
