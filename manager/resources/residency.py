"""Which services' copies are resident on which devices, and which go first: least recently used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from manager.chunk import Chunk
from manager.config import ServiceSpec


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
        found: dict[str, list[Chunk]] = {}
        for copy in self._copies:
            found.setdefault(copy.service, []).append(copy.chunk)
        return {service: tuple(sorted(chunks)) for service, chunks in sorted(found.items())}

    def of_service(self, service: str) -> list[Chunk]:
        return sorted(copy.chunk for copy in self._copies if copy.service == service)

    def size_bytes(self, copy: ResidentCopy) -> int:
        """Bytes on each of its devices, no more than these have; 0 where the service is not described.

        Nodes tell what a service takes: one whose files are larger elsewhere is no reason to fail here.
        """
        spec = self._services.get(copy.service)
        told = 0 if spec is None else spec.bytes_by_dop.get(copy.chunk.size, 0)
        return min(told, *[self._capacity.get(device, told) for device in copy.devices])

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
