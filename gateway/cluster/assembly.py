"""Which machines a configuration means: this one alone, or those that join as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.cluster.machines import OneMachine
from gateway.config.load import GatewayConfig
from gateway.store.store import Store
from manager.clock import Clock
from manager.config import NodeSpec
from runtimes.sandbox.handler.sources import HandlerCopies


async def machines_of(
    config: GatewayConfig,
    here: NodeSpec,
    paths: Sequence[Path],
    store: Store,
    clock: Clock,
    wall: Callable[[], float],
    copies: HandlerCopies,
) -> OneMachine:
    """Return the machines of a gateway that serves the configuration in ``paths``, its handlers from ``copies``.

    Raises InvalidConfig or StorageUnavailable.
    """
    if config.cluster is None:
        return OneMachine(here)
    from gateway.cluster.cluster import open_cluster

    age_s = config.sandbox.provider.snapshots.age_s
    return await open_cluster(config.cluster, here, paths, store, config.server, clock, wall, age_s, copies)
