"""Which pools a node, a quota and a concurrency limit become."""

from __future__ import annotations

from manager.config import ConcurrencySpec, NodeSpec, QuotaSpec
from manager.resources.basic import ConcurrencyPool, QuotaPool
from manager.resources.cpu import CpuPool
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
