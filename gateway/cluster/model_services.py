"""What a node tells of model services, as far as the scheduler believes it: one node does not shape all scheduling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gateway.cluster.greeting import DEVICES_MAX
from manager.action import Chunk
from manager.config import ServiceSpec
from manager.function import FunctionSpec

#: Copies on one device, and on all of a node: what more it tells of is taken for not resident, which costs a restore.
DEVICE_COPIES_MAX = 32
NODE_COPIES_MAX = 512
#: No restore takes longer (years), and no device has more bytes: means and sums of these stay finite.
_RESTORE_MAX_S = 1e9
_BYTES_MAX = 2**50


class DeclaredServices:
    """The services of functions that were declared here: a node tells of no others."""

    def __init__(self) -> None:
        self._functions: dict[str, FunctionSpec] = {}

    def declare(self, *functions: FunctionSpec) -> None:
        """Take up functions, each in place of the one of its name."""
        self._functions.update({each.name: each for each in functions if each.model is not None})

    def services(self, told: Sequence[ServiceSpec]) -> list[ServiceSpec]:
        """Return those of declared functions whose costs can be, batched and copied as declared."""
        names = self._names()
        found = {service.name: service for service in told if service.name in names and _can_be(service)}
        return [self._as_declared(service) for service in found.values()]

    def resident(self, told: Mapping[str, Iterable[Chunk]], devices: int) -> dict[str, tuple[Chunk, ...]]:
        """Return the chunks of declared services on the node's devices, no more than a node may have."""
        found: dict[str, tuple[Chunk, ...]] = {}
        on_device: Counter[int] = Counter()
        left, names = NODE_COPIES_MAX, self._names()
        for name in (name for name in told if name in names):
            kept = []
            for chunk in dict.fromkeys(told[name]):
                if not _lies_on(chunk, devices) or not left:
                    continue
                if max(on_device[device] for device in chunk.devices) < DEVICE_COPIES_MAX:
                    on_device.update(chunk.devices)
                    kept.append(chunk)
                    left -= 1
            found[name] = tuple(kept)
        return found

    def _names(self) -> set[str]:
        return {each.model.service for each in self._functions.values() if each.model is not None}

    def _as_declared(self, service: ServiceSpec) -> ServiceSpec:
        declared = [each.model for each in self._functions.values() if each.model is not None]
        models = [model for model in declared if model.service == service.name]
        is_ours = not any(model.engine_url for model in models)
        batch_tokens = min(model.batch_tokens for model in models) if is_ours else 0
        return replace(service, batch_tokens=batch_tokens, restore_s_by_node={}, replicable=is_ours)


def _can_be(service: ServiceSpec) -> bool:
    return (
        all(1 <= dop <= DEVICES_MAX for dop in (*service.bytes_by_dop, *service.restore_s_by_dop))
        and all(0 <= size <= _BYTES_MAX for size in service.bytes_by_dop.values())
        and all(0.0 <= restore_s <= _RESTORE_MAX_S for restore_s in service.restore_s_by_dop.values())  # nan is not
    )


def _lies_on(chunk: Chunk, devices: int) -> bool:
    start, size = chunk
    return size > 0 and not size & (size - 1) and start >= 0 and start % size == 0 and chunk.end <= devices
