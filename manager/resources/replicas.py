"""Replicas: copies of services in use in free memory of idle devices, and how they have fared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from manager.chunk import Chunk
from manager.resources.residency import Residency, ResidentCopy

#: Uses in the last seconds, smoothed as `Demand` does, below which a service is not in use: one, a dozen seconds ago.
LEAST_RECENT = 0.1


class Replicas:
    """Copies count as resident from the moment that they are asked for; nothing goes for them, and they go first."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._under_way: set[ResidentCopy] = set()
        #: Copies that no action has used so far; those that are not resident any more never will be.
        self._unused: set[ResidentCopy] = set()
        #: Copies that an action has begun on while they were still under way.
        self._awaited: set[ResidentCopy] = set()
        #: Copies that failed: not tried again until an action has restored the service there itself.
        self._failed: set[ResidentCopy] = set()
        self._started = 0
        self._hits = 0
        self._wasted = 0
        self._failures = 0

    def begin(
        self,
        recent: Callable[[str], float],
        free: Iterable[Chunk],
        may_hold: Callable[[str, Chunk], bool] = lambda service, place: True,
    ) -> Iterator[ResidentCopy]:
        """Count on copies in ``free`` chunks from now on, and yield each; one at a time is under way to a device.

        ``recent`` says how often a service was used of late, ``may_hold`` whether the node of a place can have it.
        """
        for copy in self._wanted(recent, tuple(free), may_hold):
            if copy not in self._failed and self.reached().isdisjoint(copy.devices):
                self._residency.add_unused(copy)
                self._under_way.add(copy)
                self._unused.add(copy)
                self._started += 1
                yield copy

    def _wanted(
        self, recent: Callable[[str], float], free: tuple[Chunk, ...], may_hold: Callable[[str, Chunk], bool]
    ) -> Iterator[ResidentCopy]:
        """Yield copies for which there is room, the services most in use first, each at its present width.

        Lazy: one that is taken is resident before the next is looked for. Room is left for every service that is
        nowhere: if not all of them fit, copies would make those to come evict each other.
        """
        residency = self._residency
        spare_bytes = residency.spare_bytes()
        widths = residency.widths()
        used = [(recent(service), service) for service in widths if residency.is_replicable(service)]
        for uses, service in sorted(used, key=lambda one: (-one[0], one[1])):
            if uses < LEAST_RECENT:
                return
            size = widths[service]
            for chunk in [chunk for chunk in free if may_hold(service, chunk)]:
                for place in chunk.parts(size):
                    copy = ResidentCopy(service, place)
                    need_bytes = size * residency.size_bytes(copy)
                    if copy not in residency and need_bytes <= spare_bytes and residency.has_room(copy):
                        spare_bytes -= need_bytes
                        yield copy

    def end(self, copy: ResidentCopy, done: bool) -> None:
        """Note that what was under way has arrived, or has failed and is not counted on any more."""
        self._under_way.remove(copy)
        awaited, unused = copy in self._awaited, copy in self._unused
        self._awaited.discard(copy)
        if done:
            self._hits += awaited
            if copy not in self._residency and self._residency.has_room(copy):
                self._residency.restore(copy)  # it was given up meanwhile, and arrived all the same
            return
        self._failures += awaited or unused
        self._failed.add(copy)
        self._unused.discard(copy)
        if unused and copy in self._residency:
            self._residency.evict(copy)

    def use(self, copy: ResidentCopy, warm: bool) -> None:
        """Note that an action begins on ``copy``, which was resident (``warm``) or is restored for it."""
        if not warm:
            self._failed.discard(copy)
        if copy in self._unused:
            self._unused.discard(copy)
            if not warm:
                self._wasted += 1
            elif copy in self._under_way:
                self._awaited.add(copy)
            else:
                self._hits += 1

    def is_under_way(self, copy: ResidentCopy) -> bool:
        return copy in self._under_way

    def reached(self) -> set[int]:
        """Return the devices to which a copy is under way."""
        return {device for copy in self._under_way for device in copy.devices}

    def forget(self, devices: Iterable[int]) -> None:
        """Drop these devices, which are gone; call it when their copies are."""
        self._sweep()
        gone = set(devices)
        for copies in (self._under_way, self._awaited, self._failed):
            copies.difference_update([copy for copy in copies if not gone.isdisjoint(copy.devices)])

    def check(self) -> None:
        """Assert that at most one copy is under way to each device, and that each ends in one way only."""
        reached = [device for copy in self._under_way for device in copy.devices]
        assert len(reached) == len(set(reached)), f"two copies are under way to one device: {self._under_way}"
        ended = self._hits + self._wasted + self._failures
        assert ended <= self._started, f"{ended} copies ended, {self._started} began"

    def counts(self) -> dict[str, int]:
        """Return how many copies were begun, are under way, were used, were given up unused, and failed."""
        self._sweep()
        return {
            "started": self._started,
            "under_way": len(self._under_way),
            "hits": self._hits,
            "wasted": self._wasted,
            "failed": self._failures,
        }

    def _sweep(self) -> None:
        """Count as wasted what was evicted before anybody used it."""
        gone = {copy for copy in self._unused if copy not in self._residency}
        self._unused -= gone
        self._wasted += len(gone)
