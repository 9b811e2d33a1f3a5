"""Assembly: a frozen configuration becomes a core, the same for serving and for simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from manager.config import ManagerSpec, SchedulerSpec
from manager.core.core import Core
from manager.core.executing import Executing
from manager.core.outside import OutsideQueue
from manager.core.queue import Bounds, FairShare, Queue
from manager.core.state import SchedulerState
from manager.resources.cores import CpuPool
from manager.resources.devices import GpuPool
from manager.resources.nodes import Nodes, Resources
from manager.scheduler.policy import Policy, PolicySpec
from manager.scheduler.registry import make_policy

#: ``bias`` of adaptive for the objective ``step``: shares grow with the work left, so that what would end last ends
#: sooner. Chosen on seeds 1 and 2 (docs/BENCHMARKS.md).
STEP_BIAS = -1.0


def build_core(
    spec: ManagerSpec,
    *,
    policies: Mapping[str, Policy] | None = None,
    function_bounds: Mapping[str, int] | None = None,
    outside: OutsideQueue | None = None,
) -> Core:
    """Build the core that ``spec`` describes; ``policies`` by resource kind replace those that it names.

    ``outside`` is shown beside its queue.

    Raises InvalidConfig if a policy is unknown.
    """
    resources = Resources(CpuPool(node) for node in spec.nodes if node.cores)
    resources.add(GpuPool(spec.nodes, spec.services))
    for name, declared in spec.resources.items():
        resources.declare(name, declared)
    nodes = Nodes(spec.nodes, resources, reserve=spec.scheduler.memory_reserve)
    state = SchedulerState(
        spec=spec.scheduler,
        tasks=spec.tasks,
        resources=resources,
        nodes=nodes,
        queue=Queue(
            Bounds(total=spec.scheduler.max_queued, tasks=spec.tasks, functions=function_bounds or {}), spec.services
        ),
        executing=Executing(resources, nodes),
        fair=FairShare(frozenset(pool.kind for pool in resources.timed)),
        policies={**_policies(spec.scheduler), **(policies or {})},
    )
    return Core(state, outside)


def _policies(spec: SchedulerSpec) -> dict[str, Policy]:
    named = {"default": PolicySpec(), **spec.policies}
    return {kind: make_policy(_for_objective(policy, spec.objective)) for kind, policy in named.items()}


def _for_objective(policy: PolicySpec, objective: str) -> PolicySpec:
    """Return the policy with what its configuration leaves open chosen for the objective."""
    if objective != "step" or policy.name != "adaptive":
        return policy
    return replace(policy, options={"bias": STEP_BIAS, **policy.options})
