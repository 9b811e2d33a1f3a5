"""Idempotency keys: which invocation a call with a known key latches on to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.invocations.invocation import InvocationRequest, LiveInvocation, ended
from gateway.store.store import Store
from manager.errors import KeyReused


class Keys:
    """The keys of living invocations, before those of the store."""

    def __init__(self, store: Store, ttl_s: float, wall: Callable[[], float]) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._wall = wall
        self._living: dict[str, tuple[bytes, LiveInvocation]] = {}

    async def latch(self, request: InvocationRequest, living: Mapping[int, LiveInvocation]) -> LiveInvocation | None:
        """The invocation that has this key already; raises KeyReused when its body was another."""
        key = request.scoped_key
        claim = self._living.get(key)
        if claim is None:
            stored = await self._store.key(key)
            claim = self._living.get(key)  # somebody may have claimed it while the store was read
            if claim is None and stored is not None:
                digest, seq = stored
                record = await self._store.get(seq)
                if record is not None:
                    claim = (digest, living.get(seq) or ended(record))
        if claim is None:
            return None
        digest, invocation = claim
        if digest != request.digest:
            raise KeyReused(
                f"Idempotency-Key {request.key!r} was used with another body, or in another trajectory",
                invocation_id=invocation.record.id,
            )
        return invocation

    def claim(self, request: InvocationRequest, invocation: LiveInvocation) -> None:
        """Give a fresh invocation its key."""
        invocation.key = request.scoped_key
        self._living[invocation.key] = (request.digest, invocation)
        self._store.save_key(invocation.key, request.digest, invocation.record.seq, self._wall() + self._ttl_s)

    def refuse(self, invocation: LiveInvocation) -> None:
        """It was not accepted after all: nobody latches on to it any more."""
        if invocation.key is not None:
            self._store.drop_key(invocation.key, invocation.record.seq)

    def leave(self, invocation: LiveInvocation) -> None:
        """It has ended: from now on the store tells."""
        if invocation.key is not None:
            self._living.pop(invocation.key, None)
