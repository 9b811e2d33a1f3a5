"""Policies by name. Each is imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from typing import Literal, cast, get_args

from manager.errors import InvalidConfig
from manager.scheduler.policy import Policy, PolicySpec

#: The policies: ``fixed`` is the class ``FixedPolicy`` of ``manager.scheduler.fixed``, built from its options as
#: keywords. The configuration, its schema and its reference name them by this list.
PolicyName = Literal["adaptive", "price", "paper", "fixed"]
POLICIES: tuple[str, ...] = get_args(PolicyName)

#: Options that the core reads, whatever the policy.
CORE_OPTIONS = frozenset({"worker_cost_s", "resize_interval_s"})


def make_policy(spec: PolicySpec) -> Policy:
    """The policy that ``spec`` names, with its constants.

    Raises InvalidConfig for a name or an option that is not known.
    """
    if spec.name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        near = get_close_matches(spec.name, POLICIES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InvalidConfig(f"no policy is named {spec.name!r}: known are {known}{hint}", component="scheduler")
    # The class is found by name, so that a policy's imports are paid for only where it is used.
    module = import_module(f"manager.scheduler.{spec.name}")
    make = cast(Callable[..., Policy], getattr(module, f"{spec.name.capitalize()}Policy"))
    options = {key: value for key, value in spec.options.items() if key not in CORE_OPTIONS}
    try:
        return make(**options)
    except TypeError as error:
        raise InvalidConfig(f"policy {spec.name}: {error}", component="scheduler") from error
