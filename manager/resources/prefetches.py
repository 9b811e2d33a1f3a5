"""Copies that are brought in beside what computes: under way, waiting for their first use, and how they fared."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from manager.resources.residency import Residency, ResidentCopy


class Prefetches:
    """Ahead of their use copies count as resident from the moment that their restore is asked for."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._under_way: set[ResidentCopy] = set()
        #: Copies that no action has used so far; those that are not resident any more never will be.
        self._unused: set[ResidentCopy] = set()
        #: Copies that an action has begun on while they were still under way.
        self._awaited: set[ResidentCopy] = set()
        #: Copies whose restore failed: not tried again until an action has brought them in itself.
        self._failed: set[ResidentCopy] = set()
        self.started = 0
        self.hits = 0
        self._wasted = 0
        self.failures = 0

    def begin(self, copy: ResidentCopy, kept: Callable[[ResidentCopy], bool]) -> list[ResidentCopy] | None:
        """Make room for ``copy`` and count on it: the copies that went; None where it may not be brought in.

        That is so where it is resident or failed before, where another one is under way to one of its devices, and
        where what is ``kept`` leaves no room.
        """
        if copy in self._residency or copy in self._failed or not self.reached().isdisjoint(copy.devices):
            return None
        victims = self._residency.victims_beside(copy, kept)
        if victims is None:
            return None
        self._sweep()
        for victim in victims:
            self._residency.evict(victim)
        self._residency.restore(copy)
        self._begun(copy)
        return victims

    def begin_spare(self, copy: ResidentCopy) -> bool:
        """Count on ``copy`` where nothing goes for it, as the first one to go for others; False where it may not be."""
        if copy in self._residency or copy in self._failed or not self.reached().isdisjoint(copy.devices):
            return False
        self._residency.add_unused(copy)
        self._begun(copy)
        return True

    def _begun(self, copy: ResidentCopy) -> None:
        self._under_way.add(copy)
        self._unused.add(copy)
        self.started += 1

    def end(self, copy: ResidentCopy, done: bool) -> None:
        """What was under way has arrived, or has failed and is not counted on any more."""
        self._under_way.remove(copy)
        awaited, unused = copy in self._awaited, copy in self._unused
        self._awaited.discard(copy)
        if done:
            self.hits += awaited
            if copy not in self._residency and self._residency.victims_beside(copy, lambda _: True) is not None:
                self._residency.restore(copy)  # it was given up meanwhile, and arrived all the same
            return
        self.failures += awaited or unused
        self._failed.add(copy)
        self._unused.discard(copy)
        if unused and copy in self._residency:
            self._residency.evict(copy)

    def use(self, copy: ResidentCopy, warm: bool) -> None:
        """An action begins on ``copy``, which was resident (``warm``) or is restored for it."""
        if not warm:
            self._failed.discard(copy)
        if copy in self._unused:
            self._unused.discard(copy)
            if not warm:
                self._wasted += 1
            elif copy in self._under_way:
                self._awaited.add(copy)
            else:
                self.hits += 1

    def under_way(self, copy: ResidentCopy) -> bool:
        return copy in self._under_way

    def reached(self) -> set[int]:
        """The devices to which a copy is under way."""
        return {device for copy in self._under_way for device in copy.devices}

    def forget(self, devices: Iterable[int]) -> None:
        """These devices are gone; to be told when their copies are."""
        self._sweep()
        gone = set(devices)
        for copies in (self._under_way, self._awaited, self._failed):
            copies.difference_update([copy for copy in copies if not gone.isdisjoint(copy.devices)])

    def check(self) -> None:
        """Assert that at most one copy is under way to each device, and that each ends in one way only."""
        reached = [device for copy in self._under_way for device in copy.devices]
        assert len(reached) == len(set(reached)), f"two copies are under way to one device: {self._under_way}"
        ended = self.hits + self._wasted + self.failures
        assert ended <= self.started, f"{ended} prefetches ended, {self.started} began"

    def counts(self) -> dict[str, int]:
        self._sweep()
        return {
            "started": self.started,
            "under_way": len(self._under_way),
            "hits": self.hits,
            "wasted": self._wasted,
            "failed": self.failures,
        }

    def _sweep(self) -> None:
        """Count as wasted what was evicted before anybody used it."""
        gone = {copy for copy in self._unused if copy not in self._residency}
        self._unused -= gone
        self._wasted += len(gone)
