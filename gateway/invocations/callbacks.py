"""Callbacks: an ended record is posted to where its caller asked, signed, until it is taken or given up.

A target must be named by the configuration: by host, host and port, or as a block of addresses that every address
of the host lies in, so that no caller can make the gateway speak to a machine that only the gateway can reach.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

import httpx
import structlog

from gateway import wire
from gateway.config.sections import CallbacksSection
from gateway.invocations.record import Record
from gateway.store.store import Store
from manager.errors import InvalidInput, StorageUnavailable
from tangram.types.backoff import backoff_s

BACKOFF_MAX_S = 300.0
#: Seconds between two looks for callbacks that nobody holds.
SWEEP_S = 5.0
#: Deliveries in memory for each one that may be under way; the rest waits in the store.
HELD_PER_SLOT = 16


class CallbackSender:
    """Delivers at least once: a restart goes on with what is pending."""

    def __init__(
        self,
        spec: CallbacksSection,
        store: Store,
        *,
        wall: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._spec = spec
        self._store = store
        self._wall = wall
        self._chance = chance
        self._slots = asyncio.Semaphore(spec.concurrency)
        self._held: dict[int, asyncio.Task[None]] = {}
        self._client = httpx.AsyncClient(timeout=spec.timeout_s, follow_redirects=False, trust_env=False)
        self._log = structlog.get_logger("gateway.callbacks")
        self.delivered = 0
        self.failed = 0

    def check(self, url: str) -> None:
        """Raise InvalidInput unless the URL may be called."""
        self._parts(url)

    def url_pattern(self) -> str | None:
        """Return what matches the URLs that `check` lets pass, as a regular expression; None if it lets none."""
        if not self._spec.allow:
            return None
        if self._blocks():  # any name may have an address there
            hosts = r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?(:[0-9]{1,4})?"
        else:
            named = [re.escape(entry) + ("" if ":" in entry else "(:[0-9]{1,4})?") for entry in self._spec.allow]
            hosts = "|".join(named)
        return f"^https?://({hosts})(/[!-~]*)?$"

    def ended(self, record: Record) -> None:
        """Deliver a record that has ended, if its caller asked for it."""
        if record.callback == "pending" and len(self._held) < HELD_PER_SLOT * self._spec.concurrency:
            task = asyncio.get_running_loop().create_task(self._deliver(record))
            self._held[record.seq] = task
            task.add_done_callback(lambda _: self._held.pop(record.seq, None))

    async def sweep_for_ever(self) -> None:
        """Take up what is pending in the store and not held, until cancelled."""
        try:
            while True:
                with suppress(StorageUnavailable):  # the store tells of it; the next sweep tries again
                    await self._sweep()
                await asyncio.sleep(SWEEP_S)
        finally:
            for task in list(self._held.values()):
                task.cancel()
            await self._client.aclose()

    async def _sweep(self) -> None:
        for row in await self._store.read("pending_callbacks", (HELD_PER_SLOT * self._spec.concurrency,)):
            if row["seq"] in self._held:
                continue
            record = await self._store.get(row["seq"])
            if record is not None and record.callback == "pending":
                self.ended(record)

    async def _deliver(self, record: Record) -> None:
        url, body = str(record.options.get("callback_url", "")), wire.encode(record.as_wire())
        problem: str | None = None
        for attempt in range(1, self._spec.max_attempts + 1):
            async with self._slots:
                problem = await self._post(url, record, body)
            if problem is None:
                break
            if attempt < self._spec.max_attempts:
                await asyncio.sleep(backoff_s(attempt, self._spec.backoff_s, BACKOFF_MAX_S, self._chance()))
        record.callback = "delivered" if problem is None else "failed"
        self.delivered += problem is None
        self.failed += problem is not None
        self._store.save(record)
        if problem is not None:
            self._log.warning("callback given up", invocation=record.id, function=record.function, why=problem)

    async def _post(self, url: str, record: Record, body: bytes) -> str | None:
        """One try, bounded as a whole; None when it was taken, else why not. The answer's body is not read."""
        try:
            async with asyncio.timeout(self._spec.timeout_s):
                parts = self._parts(url)
                address = await self._address(parts)
                host = f"[{address}]" if ":" in address else address
                port = "" if parts.port is None else f":{parts.port}"
                target = parts._replace(netloc=host + port, fragment="").geturl()
                headers = self._headers(parts, record, body)
                async with self._client.stream(
                    "POST", target, content=body, headers=headers, extensions=_sni(parts)
                ) as answer:
                    return None if answer.is_success else f"status {answer.status_code}"
        except TimeoutError:
            return f"not taken within {self._spec.timeout_s:g} s"
        except (httpx.HTTPError, OSError, InvalidInput) as error:
            return f"{type(error).__name__}: {error}"

    def _headers(self, parts: SplitResult, record: Record, body: bytes) -> dict[str, str]:
        stamp = str(int(self._wall()))
        headers = {
            "Host": parts.netloc,
            "Content-Type": "application/json",
            "X-Invocation-Id": record.id,
            "X-Tangram-Timestamp": stamp,
        }
        if self._spec.secret:
            headers["X-Tangram-Signature"] = "sha256=" + sign(self._spec.secret, stamp, body)
        return headers

    def _parts(self, url: str) -> SplitResult:
        """The URL's parts; raises InvalidInput unless its host is allowed by name or may be by address."""
        try:
            parts = urlsplit(url)
            named = {parts.hostname, f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"}
        except ValueError:
            raise _refused(url, "it is no URL") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or not url.isprintable():
            raise _refused(url, "it must be http or https, with a host and without credentials")
        if not named & set(self._spec.allow) and not self._blocks():
            raise _refused(url, "server.callbacks.allow does not name its host")
        return parts

    async def _address(self, parts: SplitResult) -> str:
        """The address to call: resolved once and used, so that a name cannot change between check and call."""
        assert parts.hostname is not None
        port = parts.port or (443 if parts.scheme == "https" else 80)
        found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=1)
        addresses = [str(entry[4][0]) for entry in found]
        if {parts.hostname, f"{parts.hostname}:{port}"} & set(self._spec.allow):
            return addresses[0]
        blocks = self._blocks()
        for address in addresses:
            if not any(ipaddress.ip_address(address) in block for block in blocks):
                raise _refused(parts.geturl(), f"{address} lies in no block of server.callbacks.allow")
        return addresses[0]

    def _blocks(self) -> Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]:
        blocks = []
        for entry in self._spec.allow:
            try:
                blocks.append(ipaddress.ip_network(entry))
            except ValueError:
                continue  # a host name
        return blocks


def sign(secret: str, stamp: str, body: bytes) -> str:
    """HMAC-SHA256 of ``<timestamp>.<body>`` in hexadecimal: what a receiver compares ``X-Tangram-Signature`` with."""
    return hmac.new(secret.encode(), stamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def _sni(parts: SplitResult) -> dict[str, str]:
    return {"sni_hostname": parts.hostname or ""} if parts.scheme == "https" else {}


def _refused(url: str, why: str) -> InvalidInput:
    return InvalidInput(f"callback {url[:200]!r} is refused: {why}", detail={"path": "X-Callback-Url"})
