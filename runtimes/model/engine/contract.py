"""The contract of a model backend: what the runtime asks of our own processes or of another server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from manager.action import Chunk
from manager.config import ServiceSpec
from manager.function import FunctionSpec
from runtimes.model.request import ModelInput

#: Told the place of a request in its job, its JSON value and the measured use so far.
OnAnswered = Callable[[int, Mapping[str, object], Mapping[str, float]], None]
#: Told whenever what a service costs is known better than before.
OnFootprint = Callable[[ServiceSpec], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One action, admitted: its input checked, and what the backend made of it (token ids, a prompt)."""

    function: FunctionSpec
    input: ModelInput
    admitted: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelJob:
    """One action, or one batch of the same service, on one chunk."""

    service: str
    chunk: Chunk
    requests: tuple[ModelRequest, ...]
    #: Services that the manager chose to evict for it.
    evict: tuple[str, ...] = ()
    #: CPU cores granted; empty leaves the device's own bound.
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A JSON value for each request, in their order, and the measured use of the whole job."""

    values: tuple[Mapping[str, object], ...]
    usage: Mapping[str, float]


class ModelBackend(Protocol):
    """Restores, executes and evicts services on chunks. Failures of an action are ActionFailed."""

    async def prepare(self, function: FunctionSpec) -> ServiceSpec:
        """Check that the function can run, warm up and return its cost; raises InvalidConfig or Unsupported."""
        ...

    async def admit(self, function: FunctionSpec, given: ModelInput) -> ModelRequest:
        """Check one action's input before it joins a batch; raises InvalidInput, or ActionFailed."""
        ...

    async def restore(self, service: str, function: FunctionSpec, chunk: Chunk) -> bool:
        """Make the service resident without computing; return False if it does not fit beside what is there."""
        ...

    async def execute(self, job: ModelJob, restored: Callable[[], None], answered: OnAnswered) -> Answers:
        """Restore if needed and compute; ``restored`` is called once the weights are in place.

        ``answered`` is called with a request that has ended while others go on.

        Cancelling stops the work, at the latest by killing the chunk's processes, before it returns.
        """
        ...

    async def evict(self, service: str, chunk: Chunk) -> None:
        """Give the service's device memory back; nothing is written. Must not fail."""
        ...

    def residency(self) -> Mapping[str, tuple[Chunk, ...]]:
        """Service -> chunks on which it is resident, as last reported by the devices."""
        ...

    async def close(self) -> None:
        """Release everything; idempotent."""
        ...
