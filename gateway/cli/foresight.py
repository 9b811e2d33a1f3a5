"""What this machine will refuse of a configuration: cores, sandboxes and images, torch; asked without serving it."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import structlog

from gateway.config.load import GatewayConfig
from gateway.machine import describe
from manager.errors import CodedError
from manager.formulation import check_satisfiable
from runtimes.sandbox.provider import make_provider
from runtimes.sandbox.sandbox import Provider


class Finding(NamedTuple):
    """One thing that a gateway needs, and whether it is here."""

    what: str
    #: ``ok``, ``note`` (less than there could be) or ``missing``.
    state: str
    #: What is here; if it is missing, the reason and what mends it.
    told: str


@contextmanager
def silence() -> Iterator[None]:
    """Keep lines about sandboxes away from what is printed: the findings say the same."""
    before, configured = structlog.get_config(), structlog.is_configured()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        yield
    finally:
        if configured:
            structlog.configure(**before)
        else:
            structlog.reset_defaults()


def foretold(config: GatewayConfig) -> Iterator[Finding]:
    """Yield what the functions need of this machine, and whether it is here."""
    yield from _cores(config)
    yield from _sandboxes(config)
    if any(function.runtime == "model" for function in config.functions.values()):
        yield _torch()


def _cores(config: GatewayConfig) -> Iterator[Finding]:
    """Tell which functions no node, quota or limit could ever serve."""
    try:
        spec = config.manager_spec((describe(config),))
    except CodedError as error:
        yield Finding("machine", "missing", error.message)
        return
    for name, function in sorted(config.functions.items()):
        try:
            check_satisfiable(function, spec)
        except CodedError as error:
            yield Finding(f"function {name}", "missing", error.message)


def _sandboxes(config: GatewayConfig) -> Iterator[Finding]:
    """What sandboxes are made of here, and whether each function's can be."""
    with tempfile.TemporaryDirectory(prefix="tangram-doctor-") as directory:
        try:
            provider = make_provider(replace(config.sandbox.provider, state_dir=Path(directory)))
        except CodedError as error:
            yield Finding("sandboxes", "missing", error.message)
            return
        yield Finding("sandboxes", "ok", f"{provider.info.engine}: {provider.info.isolation}")
        lacking = sorted(name for name, held in provider.info.limits.items() if held is False)
        if lacking:
            yield Finding("sandboxes", "note", f"not held here: {', '.join(lacking)} (docs/SANDBOXES.md)")
        yield from asyncio.run(_checked(config, provider))


async def _checked(config: GatewayConfig, provider: Provider) -> list[Finding]:
    findings = []
    try:
        for name, function in sorted(config.functions.items()):
            if function.sandbox is None:
                continue
            try:
                await provider.check(function.sandbox)
                findings.append(Finding(f"function {name}", "ok", "its sandbox can be made"))
            except CodedError as error:
                findings.append(Finding(f"function {name}", "missing", error.message))
    finally:
        with suppress(CodedError):
            await provider.close()
    return findings


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "missing", "model functions want it: pip install 'tangram-gateway[model]'")
    return Finding("torch", "ok", "installed")
