"""GPU chunks by evict-on-execution (paper, GPU Manager via EOE): one pool over the devices of all nodes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from manager.chunk import Chunk, outside, power_at_least
from manager.config import NodeSpec, ServiceSpec
from manager.lease import Grant
from manager.resources.chunks import Chunks
from manager.resources.demand import Demand
from manager.resources.placed import PlacedPool, Replica
from manager.resources.pool import Headroom, PoolRequest
from manager.resources.replicas import Replicas
from manager.resources.residency import Residency, ResidentCopy
from manager.scheduler.policy import ChunkView


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
        found = self._best_fit(size, names) or self._least_used(size, names)
        if found is not None:
            name, place = found
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
        found = [(chunk.size, chunk.start, name) for name in names for chunk in self._free[name] if chunk.size >= size]
        if not found:
            return None
        _, start, name = min(found)
        return name, Chunk(start, size)

    def _least_used(self, size: int, names: Iterable[str]) -> tuple[str, Chunk] | None:
        found = []
        for name in names:
            region = self._regions[name]
            for place in region.parts(size):
                free = sum(chunk.size for chunk in self._free[name] if place.contains(chunk))
                reserved = any(place.meets(other) for other in self._places)
                found.append((reserved, size - free, place.start, name))
        if not found:
            return None
        _, _, start, name = min(found)
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
        #: Whether nothing has changed since replicas were looked for.
        self._replicated = False
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
        self._replicated = False
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
            self._replicated = False
            self._note_change()

    def open(self, node: str) -> None:
        if node in self._closed:
            self._closed.remove(node)
            self._replicated = False
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
        self._replicated = False
        self._by_holder[holder] = chunk
        self._told.get(self.node_of(chunk), ([], set()))[1].difference_update(chunk.devices)
        if ask.service is not None:
            self._demand.use(ask.service, now_s)
        restore, evicted = self._make_resident(ask.service, chunk)
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
        self._replicated = False
        chunk = self._by_holder.pop(holder)
        self._chunks.release(chunk)
        self._believe(self.node_of(chunk))

    def report(self, node: str, resident: Mapping[str, Iterable[Chunk]]) -> None:
        """Believe what a node says is resident: where something computes or arrives, once that is over."""
        region = self._regions.get(node)
        if region is None:
            return
        self._replicated = False
        found = [(service, chunk) for service, chunks in resident.items() for chunk in chunks]
        copies = [ResidentCopy(service, chunk.moved(region.start)) for service, chunk in found]
        self._told[node] = copies, set(region.devices)
        self._believe(node)
        self._note_change()

    def learn(self, services: Mapping[str, ServiceSpec]) -> None:
        self._residency.learn(services)
        self._replicated = False
        self._note_change()

    def restore_s(self, service: str, units: int, node: str = "") -> float:
        return self._residency.restore_s_on(node, service, power_at_least(units))

    @property
    def replicas(self) -> Mapping[str, int]:
        return self._replicas.counts()

    def replicate(self, now_s: float) -> Sequence[Replica]:
        if self._replicated or not self.free:
            return ()
        self._replicated = True
        found = []
        recent = partial(self._demand.recent, now_s=now_s)
        for copy in self._replicas.begin(recent, self._free, self._may_hold):
            node = self.node_of(copy.chunk)
            found.append(Replica(copy.service, node, self._on_node(copy.chunk, node), copy.chunk))
        return found

    def replicated(self, replica: Replica, done: bool) -> None:
        copy = ResidentCopy(replica.service, replica.place)
        if self._replicas.is_under_way(copy):
            self._replicas.end(copy, done)
            self._replicated = False
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
        found, news = self._told.get(node, ([], set()))
        if not news:
            return
        unsettled = self._replicas.reached().union(*(chunk.devices for chunk in self._by_holder.values()))
        settled = set(self._regions[node].devices) - unsettled
        touching = {copy for copy in self._residency.on(news & settled) if settled.issuperset(copy.devices)}
        told = [copy for copy in found if settled.issuperset(copy.devices) and not news.isdisjoint(copy.devices)]
        self._residency.believe(told, touching)
        news -= settled

    def _make_resident(self, service: str | None, chunk: Chunk) -> tuple[bool, tuple[str, ...]]:
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
