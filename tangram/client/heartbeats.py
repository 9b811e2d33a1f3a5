"""Heartbeats: a process that has opened trajectories says to the gateway that it lives.

They come from a thread with a connection of its own, so that neither a loop that computes nor a caller that waits for
its policy's next step falls silent. A process that dies does, and the gateway ends what it left behind.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Protocol

import httpx
import msgspec

from tangram.client.requests import Bearer, trust_of
from tangram.errors import InvalidInputError
from tangram.types import LEASE_MAX_S, LEASE_MIN_S, LEASES_MAX, LeaseRequest

#: Seconds for which a trajectory is held without a heartbeat.
LEASE_S = 300.0
#: Heartbeats in the time of a lease, so that some may be lost; and after a failed one how many more.
BEATS, BEATS_AFTER_FAILURE = 4, 20
#: Seconds in which trajectories that are opened one after another share a heartbeat.
GATHER_S = 0.2
_TIMEOUT_S = 10.0


class OpenHandle(Protocol):
    """A handle whose trajectory is held for as long as somebody refers to it."""

    id: str


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
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._handles: weakref.WeakSet[OpenHandle] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Heartbeats, self._given

    @property
    def lease_s(self) -> float | None:
        """Seconds for which the gateway is to hold what is opened, None if nobody renews it."""
        return self._lease_s

    def hold(self, handle: OpenHandle) -> None:
        """Hold its trajectory until it is let go, or nobody refers to the handle any more."""
        if self._lease_s is None:
            return
        if self._process != os.getpid():
            self._forget()
        if handle in self._handles:
            return
        with self._lock:
            self._handles.add(handle)
            self._wake.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat, name="tangram-heartbeats", daemon=True)
                self._thread.start()

    def let_go(self, handle: OpenHandle) -> None:
        """Hold it no more."""
        with self._lock:
            self._handles.discard(handle)

    def close(self) -> None:
        """Hold nothing any more."""
        with self._lock:
            self._handles.clear()
        self._wake.set()

    def _beat(self) -> None:
        """Say that the handles live, until there are none; what fails is tried again, sooner."""
        server, token, _, ca, cert = self._given
        trust = trust_of(server.startswith("https:"), ca, cert)
        with httpx.Client(base_url=server, auth=Bearer(token), timeout=_TIMEOUT_S, verify=trust) as http:
            while (trajectories := self._held()) is not None:
                self._wake.wait(self._lease_s_over(BEATS if self._told(http, trajectories) else BEATS_AFTER_FAILURE))
                if self._wake.is_set():
                    threading.Event().wait(GATHER_S)
                    self._wake.clear()

    def _lease_s_over(self, beats: int) -> float:
        return (self._lease_s or LEASE_S) / beats

    def _held(self) -> list[str] | None:
        """The trajectories to be held; None once there are none, and the thread ends."""
        with self._lock:
            held = sorted({handle.id for handle in self._handles})
            if not held:
                self._thread = None
            return held or None

    def _told(self, http: httpx.Client, trajectories: list[str]) -> bool:
        for first in range(0, len(trajectories), LEASES_MAX):
            some = tuple(trajectories[first : first + LEASES_MAX])
            body = msgspec.json.encode(LeaseRequest(trajectories=some, lease_s=self._lease_s or LEASE_S))
            try:
                answer = http.post("/v1/leases", content=body, headers={"Content-Type": "application/json"})
            except httpx.HTTPError:
                return False
            if answer.is_server_error:
                return False
        return True
