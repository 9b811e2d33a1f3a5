"""A node's side of model services: what its devices hold is told to the gateway whenever it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from manager.action import Chunk
from manager.config import ServiceSpec
from manager.errors import Unsupported
from manager.function import FunctionSpec
from runtimes.node.models.messages import ModelsChanged
from runtimes.node.wire import COMPONENT


class DeviceModels(Protocol):
    """The models on a machine's devices: `runtimes.model.runtime.ModelRuntime`."""

    on_footprint: Callable[[ServiceSpec], None] | None
    on_residency: Callable[[Mapping[str, tuple[Chunk, ...]]], None] | None

    async def footprint(self, function: FunctionSpec) -> ServiceSpec:
        """Return what the service of a prepared function costs here."""
        ...

    def residency(self) -> Mapping[str, tuple[Chunk, ...]]:
        """Return the chunks on which each service is resident."""
        ...


class NodeModels:
    """The model services of one node. Use from one event loop."""

    def __init__(self, models: DeviceModels, devices: int) -> None:
        """``devices`` is how many the node has."""
        self._models = models
        self._devices = devices
        self._services: dict[str, ServiceSpec] = {}
        #: Called with all that there is, whenever some of it has changed.
        self.on_change: Callable[[ModelsChanged], None] = lambda facts: None
        models.on_footprint = self._learn
        models.on_residency = lambda resident: self.on_change(self.facts())

    def check(self, function: FunctionSpec) -> None:
        """Raise Unsupported for a model function that no device of this node could ever run."""
        if function.model is not None and not self._devices:
            told = f"function {function.name!r}: this node has no model devices (tangram node join --devices)"
            raise Unsupported(told, component=COMPONENT)

    async def prepared(self, function: FunctionSpec) -> None:
        """Tell what the service of a function costs here, now that it was prepared; nothing for other functions."""
        if function.model is not None:
            self._learn(await self._models.footprint(function))

    def facts(self) -> ModelsChanged:
        """Return what services there are, and what is resident."""
        resident = {service: list(chunks) for service, chunks in self._models.residency().items()}
        return ModelsChanged(services=list(self._services.values()), resident=resident)

    def _learn(self, service: ServiceSpec) -> None:
        if self._services.get(service.name) != service:
            self._services[service.name] = service
            self.on_change(self.facts())
