"""The verb that looks whether a machine can serve a configuration."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click
import structlog

from gateway.cli.beginning import chosen
from gateway.config.load import GatewayConfig, load
from manager.errors import CodedError
from runtimes.sandbox.provider import make_provider
from runtimes.sandbox.sandbox import Provider
from tangram.cli.config import paths_argument
from tangram.cli.options import json_option
from tangram.cli.output import print_json, show, table


class Finding(NamedTuple):
    """One thing that a gateway needs, and whether it is here."""

    what: str
    #: ``ok``, ``note`` (less than there could be) or ``missing``.
    state: str
    #: What is here; if it is missing, the reason and what mends it.
    told: str


@click.command()
@paths_argument
@json_option
def doctor(paths: tuple[Path, ...], as_json: bool) -> None:
    """Look whether this machine can serve the configuration, and say what mends what is missing."""
    with _silence():
        findings = list(look(chosen(paths)))
    missing = [finding for finding in findings if finding.state == "missing"]
    if as_json:
        print_json({"ok": not missing, "findings": [finding._asdict() for finding in findings]})
    else:
        show(table(("WHAT", "STATE", ""), findings))
    raise SystemExit(1 if missing else 0)


@contextmanager
def _silence() -> Iterator[None]:
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


def look(paths: Sequence[Path]) -> Iterator[Finding]:
    """Yield each thing that a gateway needs; after a configuration that cannot be read nothing else."""
    try:
        config = load(paths, os.environ)
    except CodedError as error:
        yield Finding("configuration", "missing", error.message)
        return
    yield Finding("configuration", "ok", f"{len(config.files)} files, {len(config.functions)} functions")
    for name, port in (("port", config.server.port), ("grpc_port", config.server.grpc_port)):
        yield _port(config, name, port)
    yield _room(config)
    yield from _sandboxes(config)
    if any(function.runtime == "model" for function in config.functions.values()):
        yield _torch()


def _port(config: GatewayConfig, name: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in config.server.host else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((config.server.host, port))
        except OSError as error:
            told = f"{config.server.host} port {port}: {error.strerror}; set server.{name}, or end who has it"
            return Finding(f"server.{name}", "missing", told)
    return Finding(f"server.{name}", "ok", f"{config.server.host} port {port or '(any)'} is free")


def _room(config: GatewayConfig) -> Finding:
    """Whether the disk of the state directory, or of where it will be, has the room that is asked for."""
    place = config.server.state_dir.absolute()
    while not place.exists():
        place = place.parent
    free_bytes = shutil.disk_usage(place).free
    told = f"{free_bytes / 2**30:.1f} GiB free at {place}"
    if free_bytes < config.server.free_min_bytes:
        return Finding("disk", "missing", f"{told}: make room, or set server.state_dir or server.free_min")
    return Finding("disk", "ok", told)


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
