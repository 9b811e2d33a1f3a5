"""A function's section made into its `FunctionSpec`: defaults filled in, files looked at, revision computed."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import orjson

from gateway.config.declared import Resource
from gateway.config.document import suggestion
from gateway.config.functions import FunctionSection
from gateway.config.resources import with_needs
from gateway.config.sections import SandboxConfig
from manager.action import UnitSet
from manager.function import FunctionSpec, Isolation
from runtimes.kind import DeclarationSite, Kind


def function_spec(
    name: str,
    section: FunctionSection,
    place: DeclarationSite,
    *,
    kinds: Collection[str],
    resources: Mapping[str, Resource],
    sandbox: SandboxConfig,
) -> FunctionSpec:
    """Return the function that the section describes; what is wrong with it is in ``place.problems``."""
    kind = section.kind
    cost = _cost(section, kinds, place)
    key = _key(section, cost, place)
    # Any: a kind names fields of its functions' class, which checks them.
    own: Mapping[str, Any] = kind.spec(section.own, place)
    spec = kind.function(
        name=name,
        runtime=kind.name,
        cost=with_needs(cost, resources),
        key=key,
        elasticity=None if section.elasticity is None else section.elasticity.elasticity(),
        sandbox=None if section.sandbox is None else replace(sandbox.default, **section.sandbox),
        **section.settings,
        **own,
    )
    if spec.retry.on_status and kind.name != "api":
        place.refuse(("retry", "on"), "HTTP statuses are tried again by api functions only: name a reason")
    _check_sandbox(spec, sandbox, place)
    return replace(spec, revision=_revision(spec, kind, place))


def _cost(section: FunctionSection, kinds: Collection[str], place: DeclarationSite) -> Mapping[str, UnitSet]:
    if section.cost is None:
        return {} if section.kind.cost is None else {section.kind.cost: UnitSet.fixed(1)}
    for kind in section.cost:
        if kind == "memory":
            place.refuse(("cost", kind), "memory is no cost: write sandbox.memory, which a trajectory holds")
        elif kind not in kinds:
            place.refuse(("cost", kind), f"{kind!r} is no resource{suggestion(kind, kinds)}")
    return section.cost


def _key(section: FunctionSection, cost: Mapping[str, UnitSet], place: DeclarationSite) -> str | None:
    """The key elasticity resource: the declared one, else the only elastic one (its elasticity is then learned)."""
    if section.elasticity is not None:
        key = section.elasticity.key
        if key not in cost:
            place.refuse(("elasticity", "key"), f"{key!r} is not in the cost{suggestion(key, cost)}")
            return None
        return key
    elastic = [kind for kind, units in cost.items() if units.elastic]
    if len(elastic) > 1:
        place.refuse(("cost",), f"{' and '.join(elastic)} are elastic: say which is the key (elasticity.key)")
    return elastic[0] if elastic else None


def _check_sandbox(spec: FunctionSpec, server: SandboxConfig, place: DeclarationSite) -> None:
    if spec.sandbox is None:
        return
    if spec.sandbox.warm.min > spec.sandbox.warm.max:
        place.refuse(("sandbox", "warm"), f"min {spec.sandbox.warm.min} is more than max {spec.sandbox.warm.max}")
    if refused := spec.sandbox.refuses(spec.sandbox.user):
        place.refuse(("sandbox", "user"), refused)
    if spec.sandbox.isolation is Isolation.CONTAINER:
        if server.provider.kind in ("process", "plain"):
            message = f"a container is required, but sandbox.provider is {server.provider.kind}"
            place.refuse(("sandbox", "isolation"), message)
        if not spec.sandbox.image:
            place.refuse(("sandbox", "image"), "a container is required: name its image here or in the sandbox section")


def _revision(spec: FunctionSpec, kind: Kind, place: DeclarationSite) -> str:
    """Twelve hex digits of the definition, and of what it points to."""
    try:
        text = orjson.dumps(spec, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError as error:
        place.refuse((), f"cannot be written as JSON: {error}")
        return ""
    digest = hashlib.sha256(text)
    if place.look and not place.problems:
        try:
            digest.update(kind.source(spec).encode())
        except (OSError, ValueError) as error:
            place.refuse((kind.name,), str(error))
    return digest.hexdigest()[:12]
