"""What a node tells of its model services, and what the gateway makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from manager.action import Chunk
from manager.config import ServiceSpec
from manager.errors import Unsupported
from manager.function import FunctionSpec, ModelAction, ModelSpec
from runtimes.model.runtime import ModelRuntime
from runtimes.node import protocol
from runtimes.node.daemon import NodeModels
from runtimes.node.protocol import Message, ModelsChanged
from runtimes.node.remote import RemoteModels
from tangram.frames import HEADER
from tests.runtimes.node.session import STUCK_S

JUDGE = FunctionSpec(
    name="judge", runtime="model", model=ModelSpec(path=Path("/models/judge"), action=ModelAction.SCORE)
)
COSTS = ServiceSpec(name="/models/judge:score", bytes_by_dop={1: 40, 2: 20}, restore_s_by_dop={1: 1.0, 2: 0.5})


class ScriptedDevices(ModelRuntime):
    """Devices on which a test decides what is resident."""

    def __init__(self) -> None:
        self.on_footprint: Callable[[ServiceSpec], None] | None = None
        self.on_residency: Callable[[Mapping[str, tuple[Chunk, ...]]], None] | None = None
        self.resident: dict[str, tuple[Chunk, ...]] = {}

    async def footprint(self, function: FunctionSpec) -> ServiceSpec:
        return COSTS

    def residency(self) -> Mapping[str, tuple[Chunk, ...]]:
        return self.resident

    def restore(self, *chunks: Chunk) -> None:
        self.resident = {COSTS.name: chunks}
        assert self.on_residency is not None
        self.on_residency(self.resident)


def test_a_model_function_travels_with_its_path() -> None:
    assert protocol.read_function(protocol.function_bytes(JUDGE), FunctionSpec) == JUDGE


async def test_costs_and_residency_arrive_as_they_were_told() -> None:
    told: list[Message] = []
    devices = ScriptedDevices()
    models, remote = NodeModels(devices, 2), RemoteModels(every_s=0.0)
    arrived = asyncio.Event()
    remote.on_change = lambda: arrived.set() if remote.resident else None
    models.on_change = told.append
    await models.prepared(JUDGE)
    devices.restore(Chunk(0, 1), Chunk(1, 1))
    for message in told:
        (kind, body) = HEADER.unpack_from(frame := protocol.encode(message))[1], frame[HEADER.size :]
        decoded = protocol.decode(kind, body)
        assert isinstance(decoded, ModelsChanged)
        remote.take(decoded)
    async with asyncio.timeout(STUCK_S):
        await arrived.wait()
    assert list(remote.services) == [COSTS]
    assert remote.resident == {COSTS.name: (Chunk(0, 1), Chunk(1, 1))}


def test_what_has_not_changed_is_not_told_again() -> None:
    told: list[Message] = []
    models = NodeModels(ScriptedDevices(), 1)
    models.on_change = told.append
    for _ in range(2):
        asyncio.run(models.prepared(JUDGE))
    assert len(told) == 1


async def test_a_node_that_tells_without_end_is_taken_up_now_and_then_and_its_last_word_counts() -> None:
    remote, changes = RemoteModels(every_s=0.01), 0
    last = asyncio.Event()

    def changed() -> None:
        nonlocal changes
        changes += 1
        if remote.resident == {COSTS.name: (Chunk(999, 1),)}:
            last.set()

    remote.on_change = changed
    for number in range(1000):
        remote.take(ModelsChanged(services=[COSTS], resident={COSTS.name: [Chunk(number, 1)]}))
    assert changes == 1 and remote.resident == {COSTS.name: (Chunk(0, 1),)}, "the first at once"
    async with asyncio.timeout(STUCK_S):
        await last.wait()
    assert changes == 2
    remote.take(ModelsChanged(services=[], resident={}))
    remote.attach()
    assert remote.resident == {}
    remote.close()


async def test_another_link_begins_with_nothing() -> None:
    """It may be that of the next daemon, whose devices are empty."""
    remote, changes = RemoteModels(), []
    remote.on_change = lambda: changes.append(dict(remote.resident))
    remote.take(ModelsChanged(services=[COSTS], resident={COSTS.name: [Chunk(0, 1)]}))
    remote.attach()
    assert (remote.services, remote.resident, len(changes)) == ([], {}, 1)


def test_a_node_without_devices_says_how_it_would_have_some() -> None:
    models = NodeModels(ScriptedDevices(), 0)
    with pytest.raises(Unsupported, match="tangram node join --devices"):
        models.check(JUDGE)
    models.check(FunctionSpec(name="shell", runtime="exec"))
