"""Where the devices stand: what is resident, how often models were swapped, and how often they were found in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtimes.model.device.devices import used_bytes
from runtimes.model.engine.torch_backend import TorchBackend


def hit_rate(executions: float, swaps: float) -> float:
    """Return the share of the executions that found their model in place; 0 if there were none."""
    return round(1 - swaps / executions, 4) if executions else 0.0


@dataclass(slots=True)
class ModelStats:
    """Counters since the start."""

    actions: int = 0
    #: Executions, restores before them, and evictions: the members of a batch share theirs.
    executions: float = 0.0
    swaps: float = 0.0
    evictions: float = 0.0
    restore_s: float = 0.0
    restored_bytes: float = 0.0

    def count(self, usage: Mapping[str, float]) -> None:
        """Add one answered action."""
        share = 1 / max(usage["batch"], 1.0)
        self.actions += 1
        self.executions += share
        if usage["restored"]:
            self.swaps += share
            self.restore_s += usage["restore_s"] * share
            self.restored_bytes += usage["restore_bytes"] * share
        self.evictions += usage.get("evicted", 0.0) * share

    def view(self, backend: TorchBackend | None) -> dict[str, object]:
        """JSON-able, for ``GET /resources`` and ``tangram top``."""
        view: dict[str, object] = {
            "actions": self.actions,
            "executions": round(self.executions),
            "swaps": round(self.swaps),
            "hit_rate": hit_rate(self.executions, self.swaps),
            "evictions": round(self.evictions),
            "restore_s": round(self.restore_s, 6),
            "restored_bytes": round(self.restored_bytes),
        }
        if backend is None:
            return {**view, "devices": [], "services": {}, "host_images": {}}
        images = backend.images
        host = {"bytes": images.held_bytes, "bound_bytes": images.bound_bytes, "count": len(images.ids())}
        services = {name: [list(chunk) for chunk in chunks] for name, chunks in backend.residency().items()}
        return {
            **view,
            "devices": _devices(backend),
            "services": services,
            "host_images": {**host, "reads": images.reads},
        }


def _devices(backend: TorchBackend) -> list[dict[str, object]]:
    fleet = backend.fleet
    return [
        {
            "index": device.index,
            "kind": device.kind,
            "name": device.name,
            "alive": worker.alive,
            "pid": worker.pid,
            "restarts": worker.restarts,
            "running": None
            if counted.running is None
            else {"service": counted.running[0], "chunk": [*counted.running[1]]},
            "executions": counted.executions,
            "swaps": counted.swaps,
            "hit_rate": hit_rate(counted.executions, counted.swaps),
            "arena_bytes": device.arena_bytes,
            "resident_bytes": sum(slot.size_bytes for slot in fleet.slots(device.index)),
            "used_bytes": used_bytes(device),
            "resident": [
                {"service": slot.service, "chunk": [slot.start, slot.dop], "bytes": slot.size_bytes}
                for slot in fleet.slots(device.index)
            ],
        }
        for device, worker, counted in zip(fleet.devices, fleet.workers, fleet.counts, strict=True)
    ]
