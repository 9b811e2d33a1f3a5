"""What this machine will refuse of a configuration: cores, sandboxes and images, torch; asked without serving it."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import secrets
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import structlog

from gateway.config.load import GatewayConfig
from gateway.machine import describe
from manager.errors import CodedError, Unsupported
from manager.formulation import check_satisfiable
from manager.function import SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.provider import make_provider
from runtimes.sandbox.pytest.runtime import INSTALL, PytestSettings
from runtimes.sandbox.sandbox import Provider

#: Seconds in which a sandbox must say whether it has pytest.
PYTEST_S = 30.0


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
    """Yield what the functions need of this machine, and whether it is here; each function once."""
    refused = list(_cores(config))
    yield from refused
    yield from _sandboxes(config, {each.what for each in refused})
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


def _sandboxes(config: GatewayConfig, refused: Collection[str]) -> Iterator[Finding]:
    """What sandboxes are made of here, and whether each function's can be."""
    with tempfile.TemporaryDirectory(prefix="tangram-doctor-") as directory:
        Path(directory).chmod(0o711)  # the user of a sandbox reaches its own directory below it
        try:
            provider = make_provider(replace(config.sandbox.provider, state_dir=Path(directory)))
        except CodedError as error:
            yield Finding("sandboxes", "missing", error.message)
            return
        yield Finding("sandboxes", "ok", f"{provider.info.engine}: {provider.info.isolation}")
        lacking = sorted(name for name, held in provider.info.limits.items() if held is False)
        if lacking:
            yield Finding("sandboxes", "note", f"not held here: {', '.join(lacking)} (docs/SANDBOXES.md)")
        yield from _docker_door(config, provider)
        yield from asyncio.run(_checked(config, provider, refused))


def _docker_door(config: GatewayConfig, provider: Provider) -> Iterator[Finding]:
    """Tell what clients must name where sandboxes are no containers, and so have no images."""
    door = config.server.facades.docker
    function = None if door is None else config.functions.get(door.function)
    if function is None or function.sandbox is None or provider.info.kind == "container" or function.sandbox.images:
        return
    image = function.sandbox.image
    told = (
        f"sandboxes are no containers here, and docker run begins one for the name {image!r} alone: "
        f"set {function.name}'s sandbox.image to the name that clients say, or serve with a Docker engine"
    )
    yield Finding("server.facades.docker", "missing" if not image else "note", told)


async def _checked(config: GatewayConfig, provider: Provider, refused: Collection[str]) -> list[Finding]:
    findings = []
    try:
        for name, function in sorted(config.functions.items()):
            if function.sandbox is None or f"function {name}" in refused:
                continue
            try:
                await provider.check(function.sandbox)
                if function.runtime == "pytest" and provider.info.kind != "container":
                    await _require_pytest(provider, function.sandbox)
                findings.append(Finding(f"function {name}", "ok", "its sandbox can be made"))
            except CodedError as error:
                findings.append(Finding(f"function {name}", "missing", error.message))
    finally:
        with suppress(CodedError):
            await provider.close()
    return findings


async def _require_pytest(provider: Provider, spec: SandboxSpec) -> None:
    """Raise Unsupported if a sandbox of the host's own files has no pytest: each of its rewards would fail."""
    sandbox = await provider.create(spec, name=f"doctor-{secrets.token_hex(4)}", labels={}, mounts={})
    try:
        looked = Command(argv=(PytestSettings().python, "-c", "import pytest"), timeout_s=PYTEST_S)
        result = await sandbox.run(looked)
    finally:
        await sandbox.close()
    if result.exit_code != 0:
        raise Unsupported(f"its sandbox has no pytest: {INSTALL}", component="pytest")


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "missing", "model functions want it: pip install 'tangram-gateway[model]'")
    return Finding("torch", "ok", "installed")
