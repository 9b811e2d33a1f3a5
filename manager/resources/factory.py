"""Which pools a node, a quota and a concurrency limit become."""

from __future__ import annotations

from collections.abc import Mapping

from manager.config import ConcurrencySpec, NodeSpec, QuotaSpec, ServiceSpec
from manager.resources.basic import ConcurrencyPool, QuotaPool
from manager.resources.cpu import CpuPool
from manager.resources.gpu import GpuPool
from manager.resources.pool import Pool, Resources


class PoolFactory:
    """Makes pools, and changes those that are there already."""

    def of_node(self, node: NodeSpec) -> tuple[Pool, ...]:
        """The pools that belong to this node alone (devices belong to the pool of all nodes)."""
        return (CpuPool(node),) if node.cores else ()

    def quota(self, resources: Resources, name: str, spec: QuotaSpec) -> None:
        pool = resources.get(name)
        if isinstance(pool, QuotaPool):
            pool.reconfigure(spec)
        elif pool is None:
            resources.add(QuotaPool(name, spec))

    def concurrency(self, resources: Resources, name: str, spec: ConcurrencySpec) -> None:
        pool = resources.get(name)
        if isinstance(pool, ConcurrencyPool):
            pool.reconfigure(spec)
        elif pool is None:
            resources.add(ConcurrencyPool(name, spec))

    def services(self, resources: Resources, services: Mapping[str, ServiceSpec]) -> None:
        """Tell the pools of devices how large these services are."""
        for pool in resources:
            if isinstance(pool, GpuPool):
                pool.learn(services)
