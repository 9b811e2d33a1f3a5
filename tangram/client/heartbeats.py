"""Heartbeats: a process that has opened trajectories says to the gateway that it lives, and what it lets go.

They come from a thread with a connection of its own, so that neither a loop that computes nor a caller that waits for
its policy's next step falls silent. A process that dies does, and the gateway ends what it left behind. One that ends,
or closes its client, lets go at once of what it still holds.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol

import httpx
import msgspec

from tangram.client.requests import Bearer, trust_of
from tangram.errors import InvalidInputError, TangramError
from tangram.types import LEASE_MAX_S, LEASE_MIN_S, LEASES_MAX, LeaseRequest

#: Seconds for which a trajectory is held without a heartbeat.
LEASE_S = 300.0
#: Heartbeats in the time of a lease, so that some may be lost; and after a failed one how many more.
BEATS, BEATS_AFTER_FAILURE = 4, 20
#: Seconds in which trajectories that are opened one after another share a heartbeat.
GATHER_S = 0.2
_TIMEOUT_S = 10.0
#: The same where a process or a client ends, which waits for it.
_END_TIMEOUT_S = 3.0


class OpenHandle(Protocol):
    """A handle whose trajectory is held for as long as somebody refers to it."""

    id: str
    #: Whether it was pickled: another process may go on with it when this one ends.
    shared: bool


class Heartbeats:
    """The heartbeats of one client; without ``lease_s`` there are none.

    Copies, by pickle or fork, send their own once their handles are used. Raises InvalidInputError for a lease that the
    gateway would refuse.
    """

    def __init__(self, server: str, token: str | None, lease_s: float | None, ca: str | None, cert: str | None) -> None:
        if lease_s is not None and not LEASE_MIN_S <= lease_s <= LEASE_MAX_S:
            raise InvalidInputError(f"lease_s must be from {LEASE_MIN_S:g} to {LEASE_MAX_S:g}, not {lease_s:g}")
        self._given = (server, token, lease_s, ca, cert)
        self._lease_s = lease_s
        self._forget()

    def _forget(self) -> None:
        self._process = os.getpid()
        #: What the gateway calls this client in this process; nobody where no lease is wanted.
        self._holder = None if self._lease_s is None else f"client-{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._handles: weakref.WeakSet[OpenHandle] = weakref.WeakSet()
        #: What is to be let go: nobody knows whether it was opened. And what else is known to have been made.
        self._given_up: set[str] = set()
        self._made: set[str] = set()
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Heartbeats, self._given

    @property
    def lease_s(self) -> float | None:
        """Seconds for which the gateway is to hold what is opened, None if nobody renews it."""
        return self._lease_s

    @property
    def holder(self) -> str | None:
        """What the gateway calls whoever holds what is opened here."""
        if self._process != os.getpid():
            self._forget()
        return self._holder

    def hold(self, handle: OpenHandle) -> None:
        """Hold its trajectory until it is let go, or nobody refers to the handle any more."""
        if self.holder is None or handle in self._handles:
            return
        with self._lock:
            self._handles.add(handle)
            self._made.add(handle.id)  # also if the handle is gone before the next beat
            self._given_up.discard(handle.id)
            self._beat_soon()

    def let_go(self, handle: OpenHandle) -> None:
        """Hold it no more: it was ended."""
        with self._lock:
            self._handles.discard(handle)

    def give_up(self, names: Iterable[str]) -> None:
        """Let go of what may have been opened: its answer is lost. What another handle holds stays."""
        if self.holder is None:
            return
        with self._lock:
            self._given_up.update(set(names) - {handle.id for handle in self._handles})
            if self._given_up:
                self._beat_soon()

    def know(self, name: str) -> None:
        """Say soon that the answer came which told of a snapshot, or of a session."""
        if self.holder is not None:
            with self._lock:
                self._made.add(name)
                self._beat_soon()

    def _beat_soon(self) -> None:
        _ENDING.add(self)
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="tangram-heartbeats", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Let go of everything that is held, in one request; what was pickled is others', until its lease ends."""
        if self._process != os.getpid():
            return
        with self._lock:
            released = self._given_up | {handle.id for handle in self._handles if not handle.shared}
            known = sorted(self._made)
            self._handles.clear()
            self._given_up, self._made = set(), set()
        self._wake.set()
        if released or known:
            with suppress(httpx.HTTPError, TangramError), self._connected(_END_TIMEOUT_S) as http:
                self._told(http, [], sorted(released), known)

    def _connected(self, timeout_s: float) -> httpx.Client:
        server, token, _, ca, cert = self._given
        trust = trust_of(server.startswith("https:"), ca, cert)
        return httpx.Client(base_url=server, auth=Bearer(token), timeout=timeout_s, verify=trust)

    def _beat(self) -> None:
        """Say that the handles live, until there are none; what fails is tried again, sooner."""
        with self._connected(_TIMEOUT_S) as http:
            while (named := self._named()) is not None:
                told = self._told(http, *named)
                if told:
                    with self._lock:
                        self._given_up.difference_update(named[1])
                        self._made.difference_update(named[2])
                self._wake.wait(self._lease_s_over(BEATS if told else BEATS_AFTER_FAILURE))
                if self._wake.is_set():
                    threading.Event().wait(GATHER_S)
                    self._wake.clear()

    def _lease_s_over(self, beats: int) -> float:
        return (self._lease_s or LEASE_S) / beats

    def _named(self) -> tuple[list[str], list[str], list[str]] | None:
        """What is to be held, let go and known; None once there is nothing, and the thread ends."""
        with self._lock:
            held = sorted({handle.id for handle in self._handles})
            if not held and not self._given_up and not self._made:
                self._thread = None
                return None
            return held, sorted(self._given_up), sorted(self._made)

    def _told(self, http: httpx.Client, held: list[str], released: list[str], known: list[str]) -> bool:
        for first in range(0, max(len(held), len(released), len(known)), LEASES_MAX):
            body = msgspec.json.encode(
                LeaseRequest(
                    trajectories=tuple(held[first : first + LEASES_MAX]),
                    lease_s=self._lease_s or LEASE_S,
                    holder=self._holder,
                    released=tuple(released[first : first + LEASES_MAX]),
                    known=tuple(known[first : first + LEASES_MAX]),
                )
            )
            try:
                answer = http.post("/v1/leases", content=body, headers={"Content-Type": "application/json"})
            except httpx.HTTPError:
                return False
            if answer.is_server_error:
                return False
        return True


#: Those that may hold something when the interpreter ends.
_ENDING: weakref.WeakSet[Heartbeats] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    for heartbeats in list(_ENDING):
        heartbeats.close()
