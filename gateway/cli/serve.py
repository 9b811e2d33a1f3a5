"""`tangram serve`, `init`, `validate`, `doctor` and the configuration."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
import structlog

from gateway.config.load import GatewayConfig, load
from gateway.facades.docker.http import require_place
from gateway.limits import describe
from manager.errors import CodedError, Conflict, Unsupported
from manager.formulation import check_satisfiable
from manager.function import SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.provider import docker_installed, make_provider
from runtimes.sandbox.pytest.runtime import INSTALL, PytestSettings
from runtimes.sandbox.sandbox import Provider
from runtimes.secrets import SECRET, Secrets
from tangram.cli import exit_status
from tangram.cli.options import json_option, paths_argument
from tangram.cli.output import TableColumn, print_json, say, show, table
from tangram.types import files_of, find_token, show_size

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
#: Served where a directory has no configuration, and not written by `init`.
NONE = TEMPLATES / "none.yaml"


def chosen(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Return what is to be served: the paths, else this directory, else `NONE`, and say so."""
    if paths or files_of(Path()):
        return tuple(paths) or (Path(),)
    click.echo("no tangram.yaml here: serving shell and pytest_reward; `tangram init` writes one", err=True)
    return (NONE,)


def tell_missing_image(config: GatewayConfig) -> None:
    """Say the one command that makes the base image, where there is an engine and it has none."""
    settings, image = config.sandbox.provider, config.sandbox.default.image
    if settings.kind not in ("auto", "container") or not docker_installed(settings.docker.host):
        return
    from runtimes.sandbox.docker import images as base_image  # docker takes a while to import

    if base_image.lacks(image, settings.docker.host):
        click.echo(f"the base image {image} is missing: run `{base_image.remedy(image)}`", err=True)


def tell_no_function(config: GatewayConfig) -> None:
    """Say so where nothing can be called."""
    if not config.functions:
        say("no function is served: these files have none; without PATHS, tangram.yaml and functions/ are read")


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), default=Path())
@json_option
def init(directory: Path, as_json: bool) -> None:
    """Write a commented tangram.yaml and a function of each kind.

    \b
    tangram init rollouts
    """
    files = [file for file in sorted(TEMPLATES.rglob("*")) if file.is_file() and file != NONE]
    targets = {file: directory / file.relative_to(TEMPLATES) for file in files if "__pycache__" not in file.parts}
    there = [str(target) for target in targets.values() if target.exists()]
    if there:
        raise Conflict(f"{', '.join(there)}: there already; nothing was written", component="init")
    for file, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    written = [str(target) for target in targets.values()]
    if as_json:
        print_json({"written": written})
        return
    click.echo("\n".join(written))
    place = "" if directory == Path() else f" {directory}"
    click.echo(f"next: tangram doctor{place}; tangram serve{place}", err=True)


#: Seconds in which a sandbox must say whether it has pytest.
PYTEST_S = 30.0


class Finding(NamedTuple):
    """One thing that a gateway needs, and whether it is here."""

    what: str
    #: ``ok``, ``note`` (less than there could be) or ``missing``.
    state: str
    #: What is here; if it is missing, the reason and what mends it.
    detail: str


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


def preflight(config: GatewayConfig) -> Iterator[Finding]:
    """Yield what the functions need of this machine, and whether it is here; each function once."""
    refused = [*_cores(config), *_secrets(config)]
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


def _secrets(config: GatewayConfig) -> Iterator[Finding]:
    """Tell which secrets that functions name are not here."""
    held = Secrets(config.server.secrets_dir)
    for name, function in sorted(config.functions.items()):
        for each in sorted(set(SECRET.findall(f"{function.request} {function.sandbox}"))):
            try:
                held.get(each)
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
        yield from _docker_facade(config, provider)
        yield from asyncio.run(_checked(config, provider, refused))


def _docker_facade(config: GatewayConfig, provider: Provider) -> Iterator[Finding]:
    """Tell what clients must name where sandboxes are no containers, and so have no images."""
    facade = config.server.facades.docker
    function = None if facade is None else config.functions.get(facade.function)
    if function is None or function.sandbox is None or provider.info.kind == "container" or function.sandbox.images:
        return
    image = function.sandbox.image
    message = (
        f"sandboxes are no containers here, and docker run begins one for the name {image!r} alone: "
        f"set {function.name}'s sandbox.image to the name that clients say, or serve with a Docker engine"
    )
    yield Finding("server.facades.docker", "missing" if not image else "note", message)


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


@click.command()
@paths_argument
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error", "critical"], case_sensitive=False),
    default="info",
    show_default=True,
    help="Level of the gateway's own log.",
)
@click.option(
    "--log-format",
    type=click.Choice(["auto", "json", "text"]),
    default="auto",
    show_default=True,
    help="auto: lines for people on a terminal, JSON elsewhere.",
)
@click.option(
    "--weaker-isolation", is_flag=True, help="Serve sandboxes that are weaker than those the state directory served."
)
def serve(paths: tuple[Path, ...], log_level: str, log_format: str, weaker_isolation: bool) -> None:
    """Serve until SIGTERM, then drain.

    \b
    tangram serve
    tangram serve tangram.yaml functions --log-format json
    """
    # Until it serves it takes nothing on that the next start would not take up: it may just end, and says that it did.
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        _serve(paths, log_level, log_format, weaker_isolation)
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(paths: tuple[Path, ...], log_level: str, log_format: str, weaker_isolation: bool) -> None:
    # Nothing that is imported and read at the start is garbage, and looking for some takes a tenth of the time.
    gc.disable()
    import uvloop

    from gateway import app
    from gateway.config import load
    from gateway.invocations import logs

    logs.configure(log_level, for_people=log_format == "text" or (log_format == "auto" and sys.stderr.isatty()))
    served = chosen(paths)
    config = load.load(served, os.environ)
    provider = replace(config.sandbox.provider, weaker=weaker_isolation)
    config = replace(config, sandbox=replace(config.sandbox, provider=provider))
    if served == (NONE,):
        tell_missing_image(config)
    tell_no_function(config)

    async def run() -> None:
        async with app.gateway(config, paths=served, env=os.environ) as running:
            click.echo(f"page: {running.page_address()}")
            gc.freeze()
            gc.enable()
            await running.serve()

    uvloop.run(run())


@click.command()
@paths_argument
@click.option("--no-look", is_flag=True, help="Do not look for handlers and checkpoints on this machine.")
@json_option
def validate(paths: tuple[Path, ...], no_look: bool, as_json: bool) -> None:
    """Check configuration files; every problem is told with its file, line and key.

    What this machine would refuse of a valid one (cores, images, torch) is warned of on standard error.

    \b
    tangram validate
    """
    from gateway.config import load
    from gateway.registry import function_info
    from manager.errors import InvalidConfig

    try:
        loaded = load.load(paths or (Path(),), os.environ, look=not no_look)
        if not no_look:
            _check_models(loaded)
    except InvalidConfig as error:
        if as_json:
            print_json({"ok": False, **error.detail})
            raise click.exceptions.Exit(exit_status.of_code(error.code)) from None
        raise
    warnings = [] if no_look else _warnings(loaded)
    if as_json:
        functions = {
            name: msgspec.to_builtins(function_info(function)) for name, function in sorted(loaded.functions.items())
        }
        files = [str(file) for file in loaded.files]
        print_json({"ok": True, "functions": functions, "files": files, "warnings": warnings})
    else:
        names = ", ".join(sorted(loaded.functions)) or "none"
        click.echo(f"{len(loaded.files)} files, {len(loaded.functions)} functions: {names}")
        for each in warnings:
            say(f"warning: {each}")


def _check_models(config: GatewayConfig) -> None:
    """Raise InvalidConfig for checkpoints that would be refused when they are served, where torch can tell."""
    from gateway.config.load import refusal
    from gateway.config.yaml import ConfigProblem

    own = [each for each in config.functions.values() if each.model is not None and each.model.engine is None]
    here = [each for each in own if each.model is not None and each.model.path.is_dir()]
    if not here or importlib.util.find_spec("torch") is None:
        return
    from runtimes.model.runtime import model_problems

    problems = asyncio.run(model_problems(here, config.models))
    if problems:
        raise refusal(
            [ConfigProblem(message=why, path=("functions", name, "model")) for name, why in sorted(problems.items())]
        )


def _warnings(config: GatewayConfig) -> list[str]:

    with silence():
        return [f"{each.what}: {each.detail}" for each in preflight(config) if each.state == "missing"]


@click.command("config-schema")
def config_schema() -> None:
    """Print the JSON Schema of the YAML, for editors.

    \b
    tangram config-schema > tangram.schema.json
    """
    from gateway.config.schema import schema

    click.echo(json.dumps(schema(), indent=2, sort_keys=True))


@click.command("show")
@paths_argument
@json_option
def node(paths: tuple[Path, ...], as_json: bool) -> None:
    """This machine as the scheduler would see it."""
    from gateway import limits as machine
    from gateway.config import load

    result = files_of(Path())
    loaded = load.load(paths or (Path(),), os.environ, look=False) if paths or result else load.GatewayConfig()
    described = machine.describe(loaded)
    if as_json:
        print_json(msgspec.to_builtins(described, enc_hook=str))
        return
    numa = "; ".join(" ".join(map(str, cores)) for cores in described.numa)
    show(
        table(
            ("NODE", "CORES", "NUMA", "MEMORY", "DEVICES", "DEVICE MEMORY"),
            [
                (
                    described.name,
                    described.cores,
                    numa,
                    show_size(described.memory_bytes),
                    described.devices,
                    show_size(described.device_bytes),
                )
            ],
        )
    )


@click.command()
@paths_argument
@json_option
def doctor(paths: tuple[Path, ...], as_json: bool) -> None:
    """Look whether this machine can serve the configuration, and say what mends what is missing.

    \b
    tangram doctor
    """
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
    is_ours = find_token(config.server.host, config.server.port) is not None
    ports = {f"facades.{name}.port": port for name, port in config.server.facades.ports.items()}
    for name, port in {"port": config.server.port, "grpc_port": config.server.grpc_port, **ports}.items():
        yield (
            Finding(f"server.{name}", "note", "your own gateway serves here") if is_ours else _port(config, name, port)
        )
    if config.server.facades.docker is not None:
        yield _socket(Path(config.server.facades.docker.socket))
    yield _room(config)
    yield from preflight(config)


def _port(config: GatewayConfig, name: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in config.server.host else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((config.server.host, port))
        except OSError as error:
            message = f"{config.server.host} port {port}: {error.strerror}; set server.{name}, or end who has it"
            return Finding(f"server.{name}", "missing", message)
    return Finding(f"server.{name}", "ok", f"{config.server.host} port {port or '(any)'} is free")


def _socket(path: Path) -> Finding:
    """Whether Docker's facade can listen at its path."""
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
        message = (
            f"{place} cannot be written to: mount it for writing, give its user the right, or set server.state_dir"
        )
        return Finding("disk", "missing", message)
    free_bytes = shutil.disk_usage(place).free
    message = f"{show_size(free_bytes)} free at {place}"
    if free_bytes < max(config.server.free_min_bytes, 1):
        return Finding("disk", "missing", f"{message}: make room, or set server.state_dir or server.free_min")
    return Finding("disk", "ok", message)
