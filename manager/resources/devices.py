"""Pools of devices: chunks, residency, replicas."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from manager.action import Chunk, Grant, outside, power_at_least
from manager.config import NodeSpec, ServiceSpec
from manager.resources.cores import Demand, PlacedPool, Replica
from manager.resources.pools import Headroom, PoolRequest
from manager.scheduler.policy import ChunkView


def split(start: int, count: int) -> Iterator[Chunk]:
    """Yield the fewest aligned chunks that make up the interval; ``start`` is aligned for the largest."""
    assert count >= 0, f"{count} devices"
    while count:
        size = 1 << (count.bit_length() - 1)
        yield Chunk(start, size)
        start, count = start + size, count - size


class Chunks:
    """The free chunks of some regions (nodes) in one index space; a chunk never crosses a region.

    A region of 6 devices is a chunk of 4 and one of 2: buddies merge only while they stay inside it.
    """

    def __init__(self) -> None:
        self._free: set[Chunk] = set()
        self._ends: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self.total = 0
        self.free_units = 0

    def add_region(self, start: int, count: int) -> None:
        """Add devices [start, start + count); ``start`` is a multiple of the power of two not below ``count``."""
        assert start % power_at_least(count) == 0, f"region [{start}, {start + count}) is not aligned"
        for device in range(start, start + count):
            self._start_of[device] = start
        self._ends[start] = start + count
        self._free.update(split(start, count))
        self.total += count
        self.free_units += count

    def remove_region(self, start: int) -> None:
        """Remove a region of which nothing is allocated."""
        end = self._ends.pop(start)
        gone = {chunk for chunk in self._free if start <= chunk.start < end}
        assert sum(size for _, size in gone) == end - start, f"region [{start}, {end}) is in use"
        self._free -= gone
        self.total -= end - start
        self.free_units -= end - start
        for device in range(start, end):
            del self._start_of[device]

    @property
    def free(self) -> tuple[Chunk, ...]:
        """Free chunks, merged as far as possible, ascending."""
        return tuple(sorted(self._free))

    def host(self, chunk: Chunk) -> Chunk | None:
        """Return the free chunk that contains ``chunk``; None if it is not free or not aligned."""
        start, size = chunk
        if size <= 0 or size & (size - 1) or start % size:
            return None
        while size <= self.total:
            if (start, size) in self._free:
                return Chunk(start, size)
            size *= 2
            start -= start % size
        return None

    def allocate(self, chunk: Chunk) -> None:
        """Take a free aligned chunk, splitting the one that holds it."""
        host = self.host(chunk)
        assert host is not None, f"chunk {chunk} is not free: {self.free}"
        self._free.remove(host)
        self._free.update(host.without(chunk))
        self.free_units -= chunk.size

    def release(self, chunk: Chunk) -> None:
        """Give a chunk back and merge it with its buddies."""
        start, size = chunk
        self.free_units += size
        region = self._start_of[start]
        end = self._ends[region]
        while (buddy := Chunk(start ^ size, size)) in self._free and region <= min(start, buddy.start):
            if min(start, buddy.start) + 2 * size > end:
                break
            self._free.remove(buddy)
            start, size = min(start, buddy.start), 2 * size
        self._free.add(Chunk(start, size))

    def check(self, held: Iterable[Chunk]) -> None:
        """Assert that free and held chunks cover every device exactly once."""
        devices = [device for chunk in (*self._free, *held) for device in chunk.devices]
        assert sorted(devices) == sorted(self._start_of), f"free {self.free}, held {sorted(held)}"


@dataclass(frozen=True, slots=True)
class ResidentCopy:
    """A service at the DoP of its chunk; each DoP is a service of its own (paper, GPU Manager via EOE)."""

    service: str
    chunk: Chunk

    @property
    def devices(self) -> range:
        return self.chunk.devices


class Residency:
    """Copies by device, with the bytes of each device. Evicting one shard evicts its whole copy."""

    def __init__(self, services: Mapping[str, ServiceSpec]) -> None:
        self._services = dict(services)
        self._capacity: dict[int, int] = {}
        #: Every resident copy and its place in the order of use; the lowest was used least recently.
        self._copies: dict[ResidentCopy, int] = {}
        self._on_device: dict[int, dict[ResidentCopy, None]] = {}
        self._used_bytes: dict[int, int] = {}
        #: The places that were given last, to what was used and to what never was.
        self._latest = self._earliest = 0

    def add_device(self, device: int, capacity_bytes: int) -> None:
        self._capacity[device] = capacity_bytes
        self._on_device[device] = {}
        self._used_bytes[device] = 0

    def learn(self, services: Mapping[str, ServiceSpec]) -> None:
        """Take up new descriptions; where one has grown, the least recently used copies no longer count as resident."""
        self._services.update(services)
        for device, capacity in self._capacity.items():
            self._used_bytes[device] = sum(self.size_bytes(copy) for copy in self._on_device[device])
            if self._used_bytes[device] > capacity:
                self._evict_until(device, capacity)

    def _evict_until(self, device: int, capacity: int) -> None:
        """Have the copies on a device that were used least recently go, until the others fit."""
        for copy in sorted(self._on_device[device], key=self._copies.__getitem__):
            if self._used_bytes[device] <= capacity:
                return
            self.evict(copy)

    def remove_device(self, device: int) -> None:
        for copy in tuple(self._on_device[device]):
            self.evict(copy)
        del self._on_device[device], self._capacity[device], self._used_bytes[device]

    def __contains__(self, copy: ResidentCopy) -> bool:
        return copy in self._copies

    def chunks_of(self) -> dict[str, tuple[Chunk, ...]]:
        """Chunks by service, ascending."""
        by_service: dict[str, list[Chunk]] = {}
        for copy in self._copies:
            by_service.setdefault(copy.service, []).append(copy.chunk)
        return {service: tuple(sorted(chunks)) for service, chunks in sorted(by_service.items())}

    def of_service(self, service: str) -> list[Chunk]:
        return sorted(copy.chunk for copy in self._copies if copy.service == service)

    def size_bytes(self, copy: ResidentCopy) -> int:
        """Bytes on each of its devices, no more than these have; 0 where the service is not described.

        Nodes tell what a service takes: one whose files are larger elsewhere is no reason to fail here.
        """
        spec = self._services.get(copy.service)
        needed = 0 if spec is None else spec.bytes_by_dop.get(copy.chunk.size, 0)
        return min(needed, *[self._capacity.get(device, needed) for device in copy.devices])

    def restore_s(self, service: str, size: int) -> float:
        """Seconds to restore a service on a chunk of ``size`` devices; 0 where it is not described."""
        spec = self._services.get(service)
        return 0.0 if spec is None else spec.restore_s_by_dop.get(size, 0.0)

    def restore_s_on(self, node: str, service: str, size: int) -> float:
        """Return the seconds to restore a service there, as that node has measured them if it has."""
        spec = self._services.get(service)
        known = {} if spec is None else spec.restore_s_by_node.get(node, {})
        return known[size] if size in known else self.restore_s(service, size)

    @property
    def nodes_differ(self) -> bool:
        """Whether some node has measured restores of its own."""
        return any(spec.restore_s_by_node for spec in self._services.values())

    def may_hold(self, node: str, service: str) -> bool:
        """Return whether a node can hold a service at all."""
        spec = self._services.get(service)
        return spec is None or not spec.restore_s_by_node or node in spec.restore_s_by_node

    def batch_tokens(self, service: str) -> int:
        """Tokens that its queued actions may add up to in one batch; 0 where each runs alone."""
        spec = self._services.get(service)
        return 0 if spec is None else spec.batch_tokens

    def victims(self, copy: ResidentCopy) -> list[ResidentCopy]:
        """The least recently used copies whose eviction makes room for ``copy`` on each of its devices."""
        size = self.size_bytes(copy)
        short = {device: self._used(device) + size - self._capacity[device] for device in copy.devices}
        victims: list[ResidentCopy] = []
        if all(missing <= 0 for missing in short.values()):
            return victims
        touching = {other for device in copy.devices for other in self._on_device[device]}
        for other in sorted(touching, key=self._copies.__getitem__):
            if any(short.get(device, 0) > 0 for device in other.devices):
                victims.append(other)
                for device in other.devices:
                    if device in short:
                        short[device] -= self.size_bytes(other)
        assert all(missing <= 0 for missing in short.values()), f"{copy} is larger than its devices"
        return victims

    def has_room(self, copy: ResidentCopy) -> bool:
        """Return whether ``copy`` fits into the free bytes of each of its devices."""
        size_bytes = self.size_bytes(copy)
        return all(self._room_bytes(device) >= size_bytes for device in copy.devices)

    def restore(self, copy: ResidentCopy) -> None:
        """Note that ``copy`` is resident, as the most recently used one."""
        self._latest += 1
        self._place(copy, self._latest)

    def add_unused(self, copy: ResidentCopy) -> None:
        """Note that ``copy`` is resident, to go before every one that was used."""
        self._earliest -= 1
        self._place(copy, self._earliest)

    def _place(self, copy: ResidentCopy, place: int) -> None:
        if copy not in self._copies:
            size_bytes = self.size_bytes(copy)
            for device in copy.devices:
                self._on_device[device][copy] = None
                self._used_bytes[device] += size_bytes
        self._copies[copy] = place

    def widths(self) -> dict[str, int]:
        """Each resident service with the size of its most recently used chunk."""
        return {copy.service: copy.chunk.size for copy in sorted(self._copies, key=self._copies.__getitem__)}

    def spare_bytes(self) -> int:
        """Free bytes of all devices beyond what one copy of each known service that is nowhere will need."""
        resident = {copy.service for copy in self._copies}
        absent = (spec.bytes_by_dop for name, spec in self._services.items() if name not in resident)
        coming = sum(min((dop * size for dop, size in by_dop.items()), default=0) for by_dop in absent)
        return sum(self._room_bytes(device) for device in self._capacity) - coming

    def is_replicable(self, service: str) -> bool:
        """Whether it may be resident on several chunks at once."""
        spec = self._services.get(service)
        return spec is not None and spec.replicable

    def evict(self, copy: ResidentCopy) -> None:
        del self._copies[copy]
        size_bytes = self.size_bytes(copy)
        for device in copy.devices:
            del self._on_device[device][copy]
            self._used_bytes[device] -= size_bytes

    def on(self, devices: Iterable[int]) -> tuple[ResidentCopy, ...]:
        """The copies that touch any of these devices."""
        return tuple(dict.fromkeys(copy for device in devices for copy in self._on_device[device]))

    def believe(self, copies: Iterable[ResidentCopy], known: set[ResidentCopy]) -> None:
        """Replace the copies in ``known`` by those reported; the order of use is kept where it can be.

        A copy that reaches beyond ``known`` cannot be there any more where the reported ones leave it no room.
        """
        reported = list(copies)
        for copy in sorted(known - set(reported), key=lambda copy: (copy.chunk, copy.service)):
            self.evict(copy)
        for copy in reported:
            if copy not in known:
                for victim in self.victims(copy):
                    self.evict(victim)
                self.restore(copy)

    def describe_services(self) -> dict[str, object]:
        """What each service takes of a device and how long its restore takes, by DoP."""
        return {
            name: {
                "bytes_by_dop": {str(dop): size for dop, size in spec.bytes_by_dop.items()},
                "restore_s_by_dop": _by_dop(spec.restore_s_by_dop),
                "restore_s_by_node": {node: _by_dop(each) for node, each in sorted(spec.restore_s_by_node.items())},
            }
            for name, spec in sorted(self._services.items())
        }

    def describe(self) -> list[dict[str, object]]:
        return [
            {
                "device": device,
                "memory_bytes": capacity,
                "used_bytes": self._used(device),
                "resident": [
                    {"service": copy.service, "dop": copy.chunk.size, "bytes": self.size_bytes(copy)}
                    for copy in self._on_device[device]
                ],
            }
            for device, capacity in sorted(self._capacity.items())
        ]

    def check(self) -> None:
        for device, capacity in self._capacity.items():
            used = sum(self.size_bytes(copy) for copy in self._on_device[device])
            assert used == self._used(device) <= capacity, f"device {device} holds {used} of {capacity} bytes"

    def _room_bytes(self, device: int) -> int:
        return self._capacity[device] - self._used(device)

    def _used(self, device: int) -> int:
        return self._used_bytes[device]


def _by_dop(seconds: Mapping[int, float]) -> dict[str, float]:
    return {str(dop): each for dop, each in seconds.items()}


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


class ChunkHeadroom(Headroom):
    """Free chunks by node: what fits is a matter of shapes, and what is reserved is a place, not a number.

    A number of devices would never come together: each that comes free beside the reserved ones would be taken.
    """

    __slots__ = ("_free", "_places", "_regions")

    def __init__(self, regions: Mapping[str, Chunk], free: Iterable[Chunk]) -> None:
        self._regions = regions
        #: What is reserved, busy parts and all; ``kept`` has what is free of it.
        self._places: list[Chunk] = []
        self._free = {name: [chunk for chunk in free if region.contains(chunk)] for name, region in regions.items()}
        super().__init__(sum(chunk.size for chunks in self._free.values() for chunk in chunks))

    def fits(self, units: int, node: str = "", among: frozenset[str] = frozenset()) -> bool:
        size = power_at_least(units)
        return any(chunk.size >= size for name in self._names(node, among) for chunk in self._free[name])

    def take(self, units: int, node: str = "", among: frozenset[str] = frozenset()) -> None:
        place = self._best_fit(power_at_least(units), self._names(node, among))
        assert place is not None, f"no chunk of {units} is left"
        self._remove(*place)

    def reserve(self, units: int, node: str = "", among: frozenset[str] = frozenset()) -> None:
        """Hold back the whole chunk that fits best, else the place of which least is in use or reserved already.

        What is in use of a reserved place only falls, so it comes free within the longest action that runs there.
        """
        size, names = power_at_least(units), self._names(node, among)
        fit = self._best_fit(size, names) or self._least_used(size, names)
        if fit is not None:
            name, place = fit
            self._places.append(place)
            inside = (
                [place] if self.fits(units, node, among) else [one for one in self._free[name] if place.contains(one)]
            )
            self.kept += inside
            self._remove(name, place)

    def _names(self, node: str, among: frozenset[str]) -> Collection[str]:
        if node:
            return (node,) if node in self._free else ()
        return self._free if not among else [name for name in self._free if name in among]

    def _remove(self, name: str, place: Chunk) -> None:
        self._free[name] = outside(self._free[name], (place,))
        self.free = sum(chunk.size for chunks in self._free.values() for chunk in chunks)

    def _best_fit(self, size: int, names: Iterable[str]) -> tuple[str, Chunk] | None:
        fits = [(chunk.size, chunk.start, name) for name in names for chunk in self._free[name] if chunk.size >= size]
        if not fits:
            return None
        _, start, name = min(fits)
        return name, Chunk(start, size)

    def _least_used(self, size: int, names: Iterable[str]) -> tuple[str, Chunk] | None:
        regions = []
        for name in names:
            region = self._regions[name]
            for place in region.parts(size):
                free = sum(chunk.size for chunk in self._free[name] if place.contains(chunk))
                reserved = any(place.meets(other) for other in self._places)
                regions.append((reserved, size - free, place.start, name))
        if not regions:
            return None
        _, _, start, name = min(regions)
        return name, Chunk(start, size)


class GpuPool(PlacedPool):
    """All devices. A chunk serves one action, or one batch of the same service, at a time.

    Nodes lie one after the other in the pool's index space, aligned, and no chunk crosses a node: the policy sees
    warm and free chunks everywhere, and the grant names the node and counts the devices there.
    """

    measure = "gpu_s"

    def __init__(self, nodes: Iterable[NodeSpec], services: Mapping[str, ServiceSpec]) -> None:
        super().__init__("gpu", "gpu")
        self._chunks = Chunks()
        self._residency = Residency(services)
        self._replicas = Replicas(self._residency)
        self._demand = Demand()
        self._by_holder: dict[str, Chunk] = {}
        #: Node name -> its devices in the pool's indices.
        self._regions: dict[str, Chunk] = {}
        #: The same as first indices, ascending, and the names that belong to them.
        self._starts: list[int] = []
        self._names: list[str] = []
        #: Nodes whose free chunks are not given.
        self._closed: set[str] = set()
        #: What each node said last, and the devices for which that is still news.
        self._told: dict[str, tuple[list[ResidentCopy], set[int]]] = {}
        self._next_start = 0
        self.restores = 0
        self.hits = 0
        for node in nodes:
            self.join(node)

    @property
    def total(self) -> int:
        return self._chunks.total

    @property
    def free(self) -> int:
        return sum(chunk.size for chunk in self._free) if self._closed else self._chunks.free_units

    @property
    def idle(self) -> int:
        return self._chunks.free_units

    @property
    def _free(self) -> tuple[Chunk, ...]:
        """Free chunks of the nodes that are open."""
        free = self._chunks.free
        return tuple(chunk for chunk in free if self.node_of(chunk) not in self._closed) if self._closed else free

    def admits(self, units: int) -> bool:
        return any(power_at_least(units) <= region.size for region in self._regions.values())

    def join(self, node: NodeSpec) -> None:
        if not node.devices:
            return
        alignment = power_at_least(node.devices)
        start = -(-self._next_start // alignment) * alignment
        self._next_start = start + alignment
        self.replicas_due = True
        region = self._regions[node.name] = Chunk(start, node.devices)
        self._starts.append(start)
        self._names.append(node.name)
        self._chunks.add_region(*region)
        for device in region.devices:
            self._residency.add_device(device, node.device_bytes)
        self._note_change()

    def close(self, node: str) -> None:
        if node in self._regions:
            self._closed.add(node)
            self.replicas_due = True
            self._note_change()

    def open(self, node: str) -> None:
        if node in self._closed:
            self._closed.remove(node)
            self.replicas_due = True
            self._note_change()

    def leave(self, node: str) -> None:
        self._closed.discard(node)
        region = self._regions.pop(node, None)
        if region is None:
            return
        self._told.pop(node, None)
        place = self._names.index(node)
        del self._names[place], self._starts[place]
        self._chunks.remove_region(region.start)
        for device in region.devices:
            self._residency.remove_device(device)
        self._replicas.forget(region.devices)

    def headroom(self) -> Headroom:
        return ChunkHeadroom(self._regions, self._free)

    def accepts(self, ask: PoolRequest) -> bool:
        size = power_at_least(ask.units)
        if ask.chunk is not None and self._allowed(ask.chunk, ask):
            closed = self.node_of(ask.chunk) in self._closed
            return ask.chunk.size == size and not closed and self._chunks.host(ask.chunk) is not None
        return any(host.size >= size and self._allowed(host, ask) for host in self._open(ask))

    def node_of(self, chunk: Chunk) -> str:
        return self._names[bisect_right(self._starts, chunk.start) - 1]

    def acquire(self, holder: str, ask: PoolRequest, now_s: float) -> Grant:
        size = power_at_least(ask.units)
        chunk = self._chosen(ask, size) or self._place(ask, size)
        self._chunks.allocate(chunk)
        self._enter(holder, size)
        self.replicas_due = True
        self._by_holder[holder] = chunk
        self._told.get(self.node_of(chunk), ([], set()))[1].difference_update(chunk.devices)
        if ask.service is not None:
            self._demand.use(ask.service, now_s)
        restore, evicted = self._evict_and_restore(ask.service, chunk)
        node = self.node_of(chunk)
        return Grant(
            pool=f"gpu:{node}",
            units=ask.units,
            chunk=self._on_node(chunk, node),
            restore=restore,
            evict=evicted,
        )

    def release(self, holder: str, now_s: float) -> None:
        self._leave(holder)
        self.replicas_due = True
        chunk = self._by_holder.pop(holder)
        self._chunks.release(chunk)
        self._believe(self.node_of(chunk))

    def report(self, node: str, resident: Mapping[str, Iterable[Chunk]]) -> None:
        """Believe what a node says is resident: where something computes or arrives, once that is over."""
        region = self._regions.get(node)
        if region is None:
            return
        self.replicas_due = True
        pairs = [(service, chunk) for service, chunks in resident.items() for chunk in chunks]
        copies = [ResidentCopy(service, chunk.moved(region.start)) for service, chunk in pairs]
        self._told[node] = copies, set(region.devices)
        self._believe(node)
        self._note_change()

    def learn(self, services: Mapping[str, ServiceSpec]) -> None:
        self._residency.learn(services)
        self.replicas_due = True
        self._note_change()

    def restore_s(self, service: str, units: int, node: str = "") -> float:
        return self._residency.restore_s_on(node, service, power_at_least(units))

    @property
    def replicas(self) -> Mapping[str, int]:
        return self._replicas.counts()

    def replicate(self, now_s: float) -> Sequence[Replica]:
        self.replicas_due = False
        if not self.free:
            return ()  # what comes free calls for another look
        replicas = []
        recent = partial(self._demand.recent, now_s=now_s)
        for copy in self._replicas.begin(recent, self._free, self._may_hold):
            node = self.node_of(copy.chunk)
            replicas.append(Replica(copy.service, node, self._on_node(copy.chunk, node), copy.chunk))
        return replicas

    def replicated(self, replica: Replica, done: bool) -> None:
        copy = ResidentCopy(replica.service, replica.place)
        if self._replicas.is_under_way(copy):
            self._replicas.end(copy, done)
            self.replicas_due = True
            self._believe(self.node_of(copy.chunk))
            if not done:
                self._note_change()  # somebody may wait for it to be warm there

    def chunk_of(self, holder: str) -> Chunk:
        return self._by_holder[holder]

    def chunk_view(self, now_s: float) -> ChunkView:
        return ChunkView(
            free=self._free,
            resident=self._residency.chunks_of(),
            restore_s=self._residency.restore_s,
            evicts=self._evicts,
            recent=lambda service: self._demand.recent(service, now_s),
            batch_tokens=self._residency.batch_tokens,
            restore_here=self._restore_here if self._residency.nodes_differ else None,
        )

    def check(self) -> None:
        super().check()
        self._chunks.check(self._by_holder.values())
        self._residency.check()
        self._replicas.check()

    def describe(self) -> dict[str, object]:
        return {
            **super().describe(),
            "regions": {name: {"start": one.start, "devices": one.size} for name, one in self._regions.items()},
            "chunks": {holder: list(chunk) for holder, chunk in self._by_holder.items()},
            "devices": self._residency.describe(),
            "services": self._residency.describe_services(),
            "restores": self.restores,
            "hits": self.hits,
            "prefetches": self.replicas,
        }

    def _chosen(self, ask: PoolRequest, size: int) -> Chunk | None:
        """The policy's chunk, where it is right for the action."""
        if ask.chunk is None:
            return None
        assert ask.chunk.size == size and self._chunks.host(ask.chunk), (
            f"{ask} names no free chunk: {self._chunks.free}"
        )
        return ask.chunk if self._allowed(ask.chunk, ask) else None

    def _place(self, ask: PoolRequest, size: int) -> Chunk:
        """A free chunk that holds the service already, else one of the smallest that fit and evicts least."""
        free = self._open(ask)
        if ask.service is not None:
            for chunk in self._residency.of_service(ask.service):
                if chunk.size == size and self._allowed(chunk, ask) and any(h.contains(chunk) for h in free):
                    return chunk
        hosts = [host for host in free if host.size >= size and self._allowed(host, ask)]
        assert hosts, f"no chunk of {size} for {ask}: {self._chunks.free}"
        level = min(host.size for host in hosts)
        hosts.sort()
        places = [place for host in hosts if host.size == level for place in host.parts(size)]
        if ask.service is None:
            return places[0]
        service = ask.service
        return min(places, key=lambda chunk: (len(self._residency.victims(ResidentCopy(service, chunk))), chunk))

    def _open(self, ask: PoolRequest) -> Sequence[Chunk]:
        """What is free and not kept from the one that asks."""
        return outside(self._free, ask.kept) if ask.kept else self._free

    def _restore_here(self, service: str, place: Chunk) -> float:
        return self._residency.restore_s_on(self.node_of(place), service, place.size)

    def _evicts(self, service: str, chunk: Chunk) -> list[tuple[str, int]]:
        return [(victim.service, victim.chunk.size) for victim in self._residency.victims(ResidentCopy(service, chunk))]

    def _allowed(self, chunk: Chunk, ask: PoolRequest) -> bool:
        """Whether the chunk lies where an action may be."""
        if ask.node:
            return self.node_of(chunk) == ask.node
        return not ask.among or self.node_of(chunk) in ask.among

    def _may_hold(self, service: str, place: Chunk) -> bool:
        return self._residency.may_hold(self.node_of(place), service)

    def _on_node(self, chunk: Chunk, node: str) -> Chunk:
        return chunk.moved(-self._regions[node].start)

    def _believe(self, node: str) -> None:
        """Take in what a node said of devices on which nothing computes or arrives any more."""
        copies, news = self._told.get(node, ([], set()))
        if not news:
            return
        unsettled = self._replicas.reached().union(*(chunk.devices for chunk in self._by_holder.values()))
        settled = set(self._regions[node].devices) - unsettled
        touching = {copy for copy in self._residency.on(news & settled) if settled.issuperset(copy.devices)}
        current = [copy for copy in copies if settled.issuperset(copy.devices) and not news.isdisjoint(copy.devices)]
        self._residency.believe(current, touching)
        news -= settled

    def _evict_and_restore(self, service: str | None, chunk: Chunk) -> tuple[bool, tuple[str, ...]]:
        """Whether the service must be restored, and the services of which every copy on the chunk goes first."""
        if service is None:
            return False, ()
        copy = ResidentCopy(service, chunk)
        warm = copy in self._residency
        victims = [] if warm else self._residency.victims(copy)
        names = tuple(dict.fromkeys(victim.service for victim in victims))
        for victim in self._residency.on(copy.devices):
            if not warm and victim.service in names:
                self._residency.evict(victim)
        self._residency.restore(copy)
        self._replicas.use(copy, warm)
        self.hits += warm
        self.restores += not warm
        return not warm, names
