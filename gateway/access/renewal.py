"""The renewal of certificates: a door takes its files again when they have changed, and goes on serving."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import structlog

from gateway.access.tls import server_context
from gateway.config.sections import TlsSection
from manager.errors import InvalidConfig

#: Seconds between two looks at whether the files were renewed.
LOOK_S = 15.0


class RenewedContext:
    """The context of one door, which takes its files again when they were renewed, until `close`.

    Connections that begin from then on are shown the new certificate; the others go on.

    Of ``client_ca`` what is new is added; who is no longer in it is refused from the next start on.
    """

    def __init__(self, tls: TlsSection, protocols: Sequence[str], door: str) -> None:
        self._tls, self._door = tls, door
        self._taken = self._refused = self._identity()
        self.context = server_context(tls, protocols)
        self._log = structlog.get_logger("gateway.tls")
        self._looking = asyncio.get_running_loop().create_task(self._look_for_ever())

    def close(self) -> None:
        """Look no more."""
        self._looking.cancel()

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Take the files if they are others than before, and can be used; else go on with those of before."""
        found = self._identity()
        if found == self._taken:
            return
        tls = self._tls
        try:
            server_context(tls, ())  # half of a renewal must not get into the context that serves
            self.context.load_cert_chain(tls.cert, tls.key)
            if tls.client_ca is not None:
                self.context.load_verify_locations(tls.client_ca)
        except (InvalidConfig, OSError) as error:
            if found != self._refused:
                self._refused = found
                self._log.error("renewed files are not taken", door=self._door, why=str(error))
            return
        self._taken = self._refused = found
        self._log.info("a renewed certificate is served", door=self._door, file=str(tls.cert))

    def _identity(self) -> tuple[tuple[int, ...] | None, ...]:
        files = (self._tls.cert, self._tls.key, self._tls.client_ca)
        return tuple(None if file is None else _identity_of(file) for file in files)


def _identity_of(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
