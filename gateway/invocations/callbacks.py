"""Callbacks: an ended record is posted to where its caller asked, signed, until it is taken or given up.

What is to be delivered stands in the store, noted with the end that it tells, and is read from there: nothing is told
that a restart could take back. Each host has slots of its own, so that one that is dead holds up no other; within a
host, and for the slots of all, the one that is due first comes first.

A target must be named by the configuration: by host, host and port, or as a block of addresses that every address
of the host lies in, so that no caller can make the gateway speak to a machine that only the gateway can reach.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from urllib.parse import SplitResult, urlsplit

import httpx
import structlog

from gateway import serialization
from gateway.config.schema import CallbacksSection
from gateway.invocations.record import Record
from gateway.store.store import Store
from manager.errors import InvalidInput, StorageUnavailable
from tangram.types import backoff_s

#: Of the kernel: numbers of the process itself may be somebody's who wants them again, and are alike after a fork.
CHANCE = random.SystemRandom()
#: The wait after the first try, doubled after each.
BACKOFF_S, BACKOFF_MAX_S = 1.0, 300.0
#: Most deliveries at once, and to one host and port: one that is dead holds up no other.
AT_ONCE, PER_HOST = 64, 4
#: Longest time between two looks for callbacks that are due.
LOOK_S = 5.0


class CallbackSender:
    """Delivers at least once: a restart goes on with what is pending."""

    def __init__(
        self,
        spec: CallbacksSection,
        store: Store,
        *,
        wall: Callable[[], float] = time.time,
        chance: Callable[[], float] = CHANCE.random,
    ) -> None:
        self._spec = spec
        self._store = store
        self._wall = wall
        self._chance = chance
        #: What is under way, and to which host.
        self._held: dict[int, asyncio.Task[None]] = {}
        self._busy: Counter[str] = Counter()
        self._look = asyncio.Event()
        self._log = structlog.get_logger("gateway.callbacks")
        self.delivered = 0
        self.failed = 0

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        """Made when the first callback is due: reading the machine's certificates is no part of a start."""
        return httpx.AsyncClient(timeout=self._spec.timeout_s, follow_redirects=False, trust_env=False)

    def check(self, url: str) -> None:
        """Raise InvalidInput unless the URL may be called."""
        self._parts(url)

    def ended(self, record: Record) -> None:
        """Note, with the end of a record, that its caller asked to be told."""
        if record.callback == "pending":
            host = urlsplit(_url(record)).netloc.lower()
            self._store.note("save_delivery", record.seq, host, self._wall(), 0)
            self._look.set()

    async def deliver_for_ever(self) -> None:
        """Deliver what is due, until cancelled."""
        try:
            while True:
                wait_s = LOOK_S
                self._look.clear()
                with suppress(StorageUnavailable):  # the store tells of it; the next look tries again
                    wait_s = await self._begin_due()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._look.wait(), wait_s)
        finally:
            for task in list(self._held.values()):
                task.cancel()
            if "_client" in vars(self):
                await self._client.aclose()

    async def _begin_due(self) -> float:
        """Begin as many as there are slots for; seconds until more are due."""
        now_s, wait_s = self._wall(), LOOK_S
        held = set(self._held)  # one that ends while the store is read is read as it was before its try
        due = await self._store.read("deliveries", (PER_HOST,))
        if self._store.failure is not None:  # what became of a try cannot be noted: it would be made again at once
            return LOOK_S
        for seq, host, due_s, tries in due:
            if seq in held or self._busy[host] >= PER_HOST:
                continue
            if now_s < due_s <= now_s + BACKOFF_MAX_S:  # one that is due later is so by a clock that was put back
                wait_s = min(wait_s, due_s - now_s)
            elif len(self._held) < AT_ONCE:
                self._begin(seq, host, tries)
        return wait_s

    def _begin(self, seq: int, host: str, tries: int) -> None:
        task = self._held[seq] = asyncio.get_running_loop().create_task(self._deliver(seq, host, tries + 1))
        self._busy[host] += 1

        def over(done: asyncio.Task[None]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                self._log.error("a callback could not be tried", why=repr(error))
                self._store.note("save_delivery", seq, host, self._wall() + LOOK_S, tries + 1)
            del self._held[seq]
            self._busy[host] -= 1
            if not self._busy[host]:
                del self._busy[host]
            self._look.set()

        task.add_done_callback(over)

    async def _deliver(self, seq: int, host: str, attempt: int) -> None:
        """One try, and what follows from it."""
        record = await self._store.get(seq)
        if record is None or record.callback != "pending":
            self._store.note("delete_delivery", seq)
            return
        problem = await self._post(_url(record), record, serialization.encode(record.as_wire()))
        if problem is not None and attempt < self._spec.max_attempts:
            wait_s = backoff_s(attempt, BACKOFF_S, BACKOFF_MAX_S, self._chance())
            self._store.note("save_delivery", seq, host, self._wall() + wait_s, attempt)
            return
        self._store.note("set_callback", "delivered" if problem is None else "failed", seq)
        self._store.note("delete_delivery", seq)
        self.delivered += problem is None
        self.failed += problem is not None
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
        result = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=1)
        addresses = [str(entry[4][0]) for entry in result]
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


def _url(record: Record) -> str:
    return str(record.options.get("callback_url", ""))


def _sni(parts: SplitResult) -> dict[str, str]:
    return {"sni_hostname": parts.hostname or ""} if parts.scheme == "https" else {}


def _refused(url: str, why: str) -> InvalidInput:
    return InvalidInput(f"callback {url[:200]!r} is refused: {why}", detail={"path": "X-Callback-Url"})
