"""The verb that looks whether a machine can serve a configuration."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from gateway.cli.beginning import chosen
from gateway.cli.foresight import Finding, foretold, silence
from gateway.config.load import GatewayConfig, load
from gateway.facades.docker.listener import require_place
from manager.errors import CodedError
from tangram.cli.options import json_option, paths_argument
from tangram.cli.output import TableColumn, print_json, show, table
from tangram.types import show_size


@click.command()
@paths_argument
@json_option
def doctor(paths: tuple[Path, ...], as_json: bool) -> None:
    """Look whether this machine can serve the configuration, and say what mends what is missing."""
    with silence():
        findings = list(look(chosen(paths)))
    missing = [finding for finding in findings if finding.state == "missing"]
    if as_json:
        print_json({"ok": not missing, "findings": [finding._asdict() for finding in findings]})
    else:
        show(table(("WHAT", "STATE", TableColumn("")), findings))
    raise SystemExit(1 if missing else 0)


def look(paths: Sequence[Path]) -> Iterator[Finding]:
    """Yield each thing that a gateway needs; after a configuration that cannot be read nothing else."""
    try:
        config = load(paths, os.environ)
    except CodedError as error:
        yield Finding("configuration", "missing", error.message)
        return
    yield Finding("configuration", "ok", f"{len(config.files)} files, {len(config.functions)} functions")
    doors = {f"facades.{name}.port": port for name, port in config.server.facades.ports.items()}
    for name, port in {"port": config.server.port, "grpc_port": config.server.grpc_port, **doors}.items():
        yield _port(config, name, port)
    if config.server.facades.docker is not None:
        yield _socket(Path(config.server.facades.docker.socket))
    yield _room(config)
    yield from foretold(config)


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


def _socket(path: Path) -> Finding:
    """Whether the Docker door can listen at its path."""
    try:
        require_place(path)
    except CodedError as error:
        return Finding("server.facades.docker.socket", "missing", error.message)
    return Finding("server.facades.docker.socket", "ok", f"{path} is free")


def _room(config: GatewayConfig) -> Finding:
    """Whether the disk of the state directory, or of where it will be, has the room that is asked for."""
    place = config.server.state_dir.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        told = f"{place} cannot be written to: mount it for writing, give its user the right, or set server.state_dir"
        return Finding("disk", "missing", told)
    free_bytes = shutil.disk_usage(place).free
    told = f"{show_size(free_bytes)} free at {place}"
    if free_bytes < max(config.server.free_min_bytes, 1):
        return Finding("disk", "missing", f"{told}: make room, or set server.state_dir or server.free_min")
    return Finding("disk", "ok", told)
