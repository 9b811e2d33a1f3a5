"""Policies by name. Each is imported when it is first asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Literal, cast, get_args

from manager.errors import InvalidConfig
from manager.function import Setting, settings_of
from manager.scheduler.policy import Policy, PolicySpec

#: The policies: ``fixed`` is the class ``FixedPolicy`` of ``manager.scheduler.fixed``, built from its options as
#: keywords. The configuration, its schema and its reference name them by this list.
PolicyName = Literal["adaptive", "price", "paper", "fixed"]
POLICIES: tuple[str, ...] = get_args(PolicyName)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreOptions:
    """Options that the core reads, whatever the policy."""

    worker_cost_s: Annotated[float, Setting("core-seconds charged for a worker at a start", ge=0, le=3600)] = 0.0
    resize_interval_s: Annotated[float, Setting("least seconds between resizes of an action", ge=0, le=3600)] = 0.0


def make_policy(spec: PolicySpec) -> Policy:
    """The policy that ``spec`` names, with its constants.

    Raises InvalidConfig for a name or an option that is not known, or one out of its range.
    """
    if spec.name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        near = _near(spec.name, POLICIES)
        raise InvalidConfig(f"no policy is named {spec.name!r}: known are {known}{near}", component="scheduler")
    # The class is found by name, so that a policy's imports are paid for only where it is used.
    module = import_module(f"manager.scheduler.{spec.name}")
    type_ = cast("type[Policy]", getattr(module, f"{spec.name.capitalize()}Policy"))
    options = {**_declared(type_), **_declared(CoreOptions)}
    checked = {name: _checked(spec, name, value, options) for name, value in spec.options.items()}
    return type_(**{name: value for name, value in checked.items() if name in _declared(type_)})


def _declared(noun: type) -> dict[str, tuple[type, Setting]]:
    """Return the type and the setting of each option that a dataclass declares."""
    return {name: (get_args(hint)[0], setting) for name, hint, setting in settings_of(noun)}


def _checked(spec: PolicySpec, name: str, value: float, options: Mapping[str, tuple[type, Setting]]) -> float:
    """Return an option as its policy wants it; the YAML gives a whole number as a float too."""
    if name not in options:
        known = ", ".join(sorted(options))
        raise InvalidConfig(
            f"policy {spec.name} has no option {name!r}: it has {known}{_near(name, options)}", component="scheduler"
        )
    wanted, setting = options[name]
    rules = [
        ("a finite number", math.isfinite(value)),
        *([("a whole number", value % 1 == 0)] if wanted is int else []),
        *([(f"at least {setting.ge:g}", value >= setting.ge)] if setting.ge is not None else []),
        *([(f"more than {setting.gt:g}", value > setting.gt)] if setting.gt is not None else []),
        *([(f"at most {setting.le:g}", value <= setting.le)] if setting.le is not None else []),
    ]
    broken = next((rule for rule, holds in rules if not holds), None)
    if broken is not None:
        raise InvalidConfig(
            f"policy {spec.name}: option {name} is {value:g} where {broken} is needed: {setting.meaning}",
            component="scheduler",
        )
    return int(value) if wanted is int else float(value)


def _near(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
