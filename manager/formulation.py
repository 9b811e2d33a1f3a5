"""Formulation: a call of a function becomes an action (paper, Action Formulation)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from manager.action import Action, Amdahl, UnitSet, capped, size_at
from manager.config import ManagerSpec, NodeSpec
from manager.errors import InvalidInput, Unsatisfiable
from manager.function import FunctionSpec
from manager.learning import History, Learned

#: Longest caller's key for learning.
_PROFILE_KEY_MAX = 200


def formulate(
    function: FunctionSpec,
    *,
    id: str,
    input: Mapping[str, object],
    trajectory: str | None,
    task: str,
    history: History,
    now_s: float,
    timeout_s: float | None = None,
    parent: str | None = None,
    attempt: int = 1,
) -> Action:
    """Make the action of one call, with what is known of its duration and elasticity.

    ``timeout_s`` may shorten the function's, not lengthen it. Raises InvalidInput if the timeout is not positive
    or the learning key is no plain value.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidInput(f"timeout {timeout_s:g} s is not positive", component="formulation", invocation_id=id)
    profile_key = _profile_key(function, input)
    size = size_at(input, function.duration.size) if function.duration.size else None
    learned = history.learned(function.name, profile_key, size, prior_s=function.duration.initial_s)
    declared = function.duration.profile == "declared" and function.duration.initial_s is not None
    sandbox = function.sandbox
    return Action(
        id=id,
        function=function.name,
        task=task,
        trajectory=trajectory,
        cost=capped(function.cost, function.key, _units_max(function, input, learned)),
        memory_bytes=0 if sandbox is None else sandbox.memory_bytes,
        placement=function.placement,
        trajectory_ttl_s=1800.0 if sandbox is None else sandbox.idle_ttl_s,
        key=function.key,
        elasticity=None if function.key is None else function.elasticity or Amdahl(learned.serial_fraction),
        t_ori_s=function.duration.initial_s if declared else learned.t_ori_s,
        line=None if declared else learned.line,
        borrows=learned.borrowed,
        malleable=function.runtime == "pytest" and function.key == "cpu",
        service=None if function.model is None else function.model.service,
        batch_tokens=0 if function.model is None else _batch_tokens(input),
        batch_marginal=learned.batch_marginal,
        profile_key=profile_key,
        size=size,
        submitted_s=now_s,
        timeout_s=function.timeout_s if timeout_s is None else min(timeout_s, function.timeout_s),
        queue_timeout_s=function.queue_timeout_s,
        parent=parent,
        attempt=attempt,
    )


def check_satisfiable(function: FunctionSpec, spec: ManagerSpec) -> None:
    """Raise Unsatisfiable if no node, quota or limit could ever serve the function's minimum."""
    memory_bytes = 0 if function.sandbox is None else function.sandbox.memory_bytes
    on_node = {kind: units for kind, units in function.cost.items() if kind in ("cpu", "gpu")}
    for kind, units in function.cost.items():
        if kind not in on_node:
            _check_named(function, kind, units, spec)
    if (on_node or memory_bytes) and not any(
        node.suits(function.placement) and _serves(node, on_node, memory_bytes) for node in spec.nodes
    ):
        raise Unsatisfiable(
            f"function {function.name} needs {_story(on_node, memory_bytes)} on one node{_where(function)}; "
            f"{_largest(spec.nodes)}; lower its cost or sandbox.memory, or give the node more",
            component="formulation",
            detail={"function": function.name},
        )


def _units_max(function: FunctionSpec, input: Mapping[str, object], learned: Learned) -> int | None:
    """Return the most units of the key that the call can use, or that may be tried on it; None for all."""
    bounds = [] if function.elasticity is not None else [learned.units_max]
    if function.runtime == "pytest":
        listed = {test for name in ("fail_to_pass", "pass_to_pass") for test in _texts(input.get(name))}
        if listed and not input.get("targets"):
            bounds.append(len(listed))
        if function.pytest is not None:
            bounds.append(function.pytest.max_workers)
        workers = input.get("workers")
        if isinstance(workers, int) and workers >= 1:
            bounds.append(workers)
    return min(bounds, default=None)


def _texts(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _profile_key(function: FunctionSpec, input: Mapping[str, object]) -> str:
    """Return the value of the input field that keys the learning; empty if there is none."""
    name = function.duration.key
    value = input.get(name, "") if name else ""
    if not isinstance(value, str | int | float | bool):
        path = f"$.{name}"
        raise InvalidInput(f"{path} keys the learning of durations: a plain value, please", detail={"path": path})
    return str(value)[:_PROFILE_KEY_MAX]


def _batch_tokens(input: Mapping[str, object]) -> int:
    """Return what the call adds to a batch: its token ids, or about one token for four characters of what it says."""
    ids, texts = input.get("token_ids"), input.get("texts")
    if isinstance(ids, list):
        return sum(len(row) for row in ids if isinstance(row, list))
    if isinstance(texts, list):
        return sum(1 + len(text) // 4 for text in texts if isinstance(text, str))
    return sum(1 + length // 4 for length in _said(input.get("messages")))


def _said(messages: object) -> Iterator[int]:
    """Yield the characters of each message of one conversation or several, its role among them."""
    if isinstance(messages, list):
        for each in messages:
            yield from _said(each)
    elif isinstance(messages, dict):
        yield sum(len(part if isinstance(part, str) else repr(part)) for part in messages.values())


def _check_named(function: FunctionSpec, kind: str, units: UnitSet, spec: ManagerSpec) -> None:
    """Check what a function takes of a declared resource."""
    declared = spec.resources.get(kind)
    if declared is None:
        known = ", ".join(sorted({"cpu", "gpu", *spec.resources}))
        raise Unsatisfiable(f"function {function.name} needs {kind}, which is none of {known}", component="formulation")
    if units.minimum > declared.most:
        raise Unsatisfiable(
            f"function {function.name} needs {units.minimum} of {kind}, which gives {declared.most} at most at once",
            component="formulation",
        )


def _serves(node: NodeSpec, cost: Mapping[str, UnitSet], memory_bytes: int) -> bool:
    has = {"cpu": node.cores, "gpu": _chunk_max(node.devices)}
    return memory_bytes <= node.memory_bytes and all(units.minimum <= has[kind] for kind, units in cost.items())


def _chunk_max(devices: int) -> int:
    """Return the largest power of two not above the number of devices."""
    return 1 << (devices.bit_length() - 1) if devices else 0


def _story(cost: Mapping[str, UnitSet], memory_bytes: int) -> str:
    parts = [f"{units.minimum} of {kind}" for kind, units in cost.items()]
    return " and ".join([*parts, *([_size(memory_bytes)] if memory_bytes else [])])


def _where(function: FunctionSpec) -> str:
    labels = [f"{label}={value}" for label, value in function.placement.labels]
    return f" with {' and '.join(labels)}" if labels else ""


def _largest(nodes: tuple[NodeSpec, ...]) -> str:
    if not nodes:
        return "there is no node"
    node = max(nodes, key=lambda node: (node.cores, node.memory_bytes, node.devices))
    return f"the largest, {node.name}, has {node.cores} cores, {node.devices} devices, {_size(node.memory_bytes)}"


def _size(size_bytes: int) -> str:
    """Return bytes of memory as they are written in a configuration: the largest unit that they fill."""
    unit, name = next(
        ((2**power, name) for power, name in ((30, "Gi"), (20, "Mi")) if size_bytes >= 2**power), (1, "B")
    )
    return f"{size_bytes / unit:.4g}{name} of memory"
