"""The state of the gateway: one function of it, what is held, and whether work is taken."""

from __future__ import annotations

from msgspec import UNSET, convert

from gateway import wire
from gateway.functions import function_info
from gateway.services import Services
from tangram.types import FunctionInfo, Health, ResourcesInfo, SandboxesInfo

#: The status of a gateway that takes work.
READY = "ready"


def get_function(services: Services, name: str) -> FunctionInfo:
    """Return a function with what was learned of it, and its changes; raises NotFound."""
    known, learned = services.functions, services.learned
    spec = known.get(wire.name(name, "function"))
    return function_info(
        spec, learned(spec.name), known.readiness(spec.name), known.source(spec.name), known.changes(spec.name)
    )


def get_resources(services: Services) -> ResourcesInfo:
    """Return pools and who holds what, in plain words what the sandboxes are, and the model processes."""
    sandboxes = convert(services.sandboxes(), SandboxesInfo, from_attributes=True)
    return convert({**services.engine.resources(), "sandboxes": sandboxes, "models": services.models()}, ResourcesInfo)


def get_readiness(services: Services) -> Health:
    """Return whether work is taken now (`READY`), and if not, why."""
    known = services.functions
    states = {spec.name: known.readiness(spec.name) for spec in known.all()}
    return Health(
        status=services.unready() or READY,
        warnings=(*services.warnings(), *services.sandboxes().weakenings),
        record=services.record() or UNSET,
        preparing=tuple(name for name, each in states.items() if each.status == "preparing"),
        unavailable=tuple(name for name, each in states.items() if each.status == "unavailable"),
    )
