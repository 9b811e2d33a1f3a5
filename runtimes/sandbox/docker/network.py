"""The networks of container sandboxes: none, one for each task, or the engine's with egress held by rules."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import structlog

from manager.errors import CapacityExceeded, CodedError, InvalidConfig, NotFound, Unsupported
from manager.function import Network, SandboxSpec
from runtimes.sandbox.docker.engine import DockerEngine, Found
from runtimes.sandbox.docker.remains import GATEWAY
from runtimes.sandbox.egress import Egress, EgressGuard
from runtimes.sandbox.record import TASK, SandboxRecord
from runtimes.sandbox.runner.protocol import lost

logger = structlog.get_logger("sandbox.network")

COMPONENT = "sandbox.network"
#: Seconds after which somebody who found all networks in use may ask again.
RETRY_S = 10.0
#: Networks of the engine's own.
NO_NETWORK, BRIDGE = "none", "bridge"
#: An internal bridge has the machine's address on it by default, and through that all of its services.
NO_HOST = {"com.docker.network.bridge.inhibit_ipv4": "true"}
#: The sandbox itself: an engine asks its own machine's name server on behalf of whoever has no way to it.
NO_NAMES = ("127.0.0.1",)


class ContainerNetworks:
    """What a provider's containers reach. ``here`` says of each whether it is on this machine, and of its kernel."""

    def __init__(
        self,
        engine: DockerEngine,
        *,
        labels: Mapping[str, str],
        name_servers: Sequence[str],
        egress_network: str,
        internal_networks: int,
    ) -> None:
        self._guard = EgressGuard(name_servers)
        self._egress_network = egress_network
        self._internal = InternalNetworks(engine, labels, internal_networks)
        self.weakenings = (
            (f"egress reaches what the network {egress_network!r} lets it (sandbox.docker.egress_network)",)
            if egress_network
            else ()
        )

    def holds_egress(self, *, here: bool) -> bool:
        """Return whether egress is the public world, by rules of ours."""
        return self._guards(here) and not self._guard.obstacle

    def _guards(self, here: bool) -> bool:
        return here and not self._egress_network

    async def check(self, spec: SandboxSpec, *, here: bool) -> None:
        """Raise InvalidConfig or Unsupported if a sandbox's network can never be what the spec says."""
        if spec.network is not Network.EGRESS or self._guards(here):
            await self._guard.check(spec)
        elif not self._egress_network:
            raise Unsupported(
                "network: egress is held to the public world by rules that cannot be set from a container, nor for a "
                "kernel of its own (sandbox.runtime); make a network of the engine that has rules of its own, and name "
                "it: sandbox.docker.egress_network",
                component=COMPONENT,
            )
        elif spec.allow:
            raise Unsupported(
                f"sandbox.allow: the rules of the network {self._egress_network!r} are not the gateway's to set",
                component=COMPONENT,
            )

    @asynccontextmanager
    async def of(self, spec: SandboxSpec, task: str) -> AsyncIterator[str]:
        """Yield the engine's network for a sandbox of a task; it is there until the block ends."""
        if spec.network is Network.INTERNAL:
            async with self._internal.joined(task) as name:
                yield name
        elif spec.network is Network.EGRESS:
            yield self._egress_network or BRIDGE
        else:
            yield NO_NETWORK

    async def resolve(self, spec: SandboxSpec, *, here: bool) -> Egress | None:
        """Return what the rules shall let through, None if there are none; raises InvalidConfig."""
        return await self._guard.resolve(spec) if self._guards(here) else None

    def name_servers(self, spec: SandboxSpec, egress: Egress | None) -> tuple[str, ...]:
        """Return a sandbox's name servers; empty takes the engine's."""
        if egress is None:
            return NO_NAMES if spec.network is Network.INTERNAL else ()
        return egress.name_servers or NO_NAMES

    async def enforce(self, egress: Egress | None, pid: int) -> None:
        """Set the rules, if any, in the network namespace of a process; raises CodedError if they cannot be set."""
        if egress is not None:
            await self._guard.enforce(egress, pid)

    async def require(self, found: Found, record: SandboxRecord, *, here: bool) -> None:
        """Raise `lost` if a container's network is not the one that its spec asks for.

        One that was restarted from outside has a new network namespace, without rules.
        """
        spec, task = record.spec, record.labels.get(TASK, record.name)
        if spec.network is Network.EGRESS and self._guards(here) and not await self._guard.holds(found.pid):
            raise lost("its network namespace has no rules")
        if spec.network is Network.INTERNAL and found.network != self._internal.name_of(task):
            raise lost("its network is not that of its task")

    def after(self, found: Found) -> Callable[[], Awaitable[None]] | None:
        """Return what is to be called when a container has gone."""
        return None if found.network in (NO_NETWORK, BRIDGE, self._egress_network) else self.sweep

    async def sweep(self) -> None:
        """Remove the internal networks on which no sandbox is."""
        await self._internal.sweep()


class InternalNetworks:
    """The internal networks of one gateway's sandboxes, known to the engine by their labels."""

    def __init__(self, engine: DockerEngine, labels: Mapping[str, str], limit: int) -> None:
        self._engine = engine
        self._labels = dict(labels)
        #: What tells them from another gateway's, however often this one is started and wherever it runs.
        self._own = f"{GATEWAY}={labels[GATEWAY]}"
        self._limit = limit
        self._lock = asyncio.Lock()
        #: How many sandboxes are being made on a network: the engine does not count them before they start.
        self._joining: Counter[str] = Counter()

    def name_of(self, task: str) -> str:
        """Return the name of a task's network: another gateway of this engine has others for tasks of one name."""
        spoken = f"{self._own}\0{task}"
        return f"tangram-{hashlib.sha256(spoken.encode()).hexdigest()[:16]}"

    @asynccontextmanager
    async def joined(self, task: str) -> AsyncIterator[str]:
        """Yield the name of the task's network, which is there until the block ends and a sandbox on it lives.

        Raises CapacityExceeded if there are as many networks as may be, all in use.
        """
        name = self.name_of(task)
        async with self._lock:
            self._joining[name] += 1
            try:
                await self._ensure(name, task)
            except BaseException:
                self._leave(name)
                raise
        try:
            yield name
        finally:
            self._leave(name)

    async def sweep(self) -> None:
        """Remove the networks on which no sandbox is; what cannot be removed now is left to the next time."""
        async with self._lock:
            try:
                await self._removed_unused(await self._there())
            except CodedError as error:
                logger.warning("unused networks are not looked for", why=error.message)

    async def _ensure(self, name: str, task: str) -> None:
        there = await self._there()
        if name not in there and len(there) >= self._limit:
            there = await self._removed_unused(there)
        if name not in there and len(there) >= self._limit:
            raise CapacityExceeded(
                f"{len(there)} tasks have an internal network, as many as sandbox.docker.internal_networks lets be",
                component=COMPONENT,
                retry_after_s=RETRY_S,
            )
        await make_isolated(self._engine, name, {**self._labels, TASK: task})

    async def _there(self) -> tuple[str, ...]:
        found = await self._engine.call(self._engine.api.networks, filters={"label": [self._own]})
        return tuple(str(item["Name"]) for item in found)

    async def _removed_unused(self, there: Iterable[str]) -> tuple[str, ...]:
        """Remove what nobody uses; return what is left."""
        left = []
        for name in there:
            try:
                if self._joining[name] or not await self._removed(name):
                    left.append(name)
            except CodedError as error:
                logger.warning("an internal network was not removed", network=name, why=error.message)
                left.append(name)
        return tuple(left)

    async def _removed(self, name: str) -> bool:
        """Remove a network on which no container runs; return whether it is gone."""
        try:
            await self._engine.call(self._engine.api.remove_network, name)
        except NotFound:
            return True
        except CodedError as error:
            if "active endpoints" in error.message:
                return False
            raise
        return True

    def _leave(self, name: str) -> None:
        self._joining[name] -= 1
        if not self._joining[name]:
            del self._joining[name]


async def make_isolated(engine: DockerEngine, name: str, labels: Mapping[str, str]) -> None:
    """Make a bridge without a way out and without the engine's machine on it, once; raises InvalidConfig."""

    async def found() -> list[Mapping[str, Any]]:
        networks = await engine.call(engine.api.networks, names=[name])
        return [network for network in networks if network["Name"] == name]

    if not (existing := await found()):
        try:
            await engine.call(
                engine.api.create_network,
                name,
                driver="bridge",
                internal=True,
                check_duplicate=True,
                options=NO_HOST,
                labels=dict(labels),
            )
            return
        except CodedError:
            if not (existing := await found()):  # else somebody was faster
                raise
    if not existing[0].get("Internal") or not NO_HOST.items() <= (existing[0].get("Options") or {}).items():
        raise InvalidConfig(
            f"the network {name!r} shows the engine's machine to sandboxes: docker network rm {name}",
            component=COMPONENT,
        )
