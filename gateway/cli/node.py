"""The verbs of nodes: this machine as one, and its daemon."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
from msgspec import convert

from gateway import machine
from gateway.cli.config import node as show_node
from gateway.cli.nodes import check_nodes, drain_node, issue_ticket, list_nodes
from gateway.cluster.tickets import TICKET_BYTES_MAX, TICKET_VARIABLE
from gateway.config.load import GatewayConfig, load
from gateway.config.sections import DevicesConfig
from gateway.invocations import logs
from gateway.runtime_factory import make_runtimes
from manager.clock import MonotonicClock
from manager.errors import InvalidConfig
from runtimes.model.engine import nvml
from runtimes.node.daemon import (
    KEY,
    AgentSettings,
    Daemon,
    DaemonSettings,
    EnvironmentSandboxes,
    FitnessSettings,
    HostWork,
    NodeModels,
    ServedSnapshots,
)
from tangram.types import size_bytes


class NodeVerbs(click.Group):
    """``tangram node VERB``; without a verb it shows this machine, as it is configured in the paths that follow."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not (args and (args[0] in self.commands or args[0] in ("-h", "--help"))):
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=NodeVerbs)
def node() -> None:
    """Nodes: this machine as the scheduler would see it, and its daemon."""


node.add_command(show_node, "show")
for verb in (list_nodes, drain_node, issue_ticket, check_nodes):
    node.add_command(verb)


@node.command()
@click.option("--gateway", required=True, metavar="HOST:PORT", help="Where the gateway takes nodes (cluster.listen).")
@click.option("--fingerprint", required=True, help="SHA-256 of its certificate, as it says when it starts.")
@click.option(
    "--ticket",
    default="",
    envvar=TICKET_VARIABLE,
    help=f"Admits this node once; not needed once it was let in. {TICKET_VARIABLE} shows it to no other user.",
)
@click.option("--ticket-file", type=click.Path(path_type=Path), help="The same, from a file.")
@click.option("--state-dir", required=True, type=click.Path(path_type=Path), help="Of this node alone.")
@click.option("--name", required=True, help="As leases and records name it.")
@click.option("--labels", default="", metavar="KEY=VALUE,...", help="What functions may choose it by.")
@click.option("--cores", default="", metavar="0-3,8", help="The cores that actions may have; all by default.")
@click.option(
    "--devices", default="", metavar="KIND[:COUNT[:SIZE]]", help="Model devices: cuda:8, cpu:2:4Gi, auto or none."
)
@click.option("--sandboxes", default="auto", type=click.Choice(["auto", "docker", "process"]), help="Of which kind.")
@click.option(
    "--config",
    "configs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="YAML whose sections sandbox and node count here, and server.free_min; may be given several times.",
)
@click.option("--drain-grace", default=600.0, show_default=True, help="Seconds that SIGTERM waits for what runs.")
@click.option("--unattended", default=600.0, show_default=True, help="Seconds without a gateway until all is ended.")
@click.option("--log-level", default="info", show_default=True, help="debug, info, warning or error.")
def join(
    gateway: str,
    fingerprint: str,
    ticket: str,
    ticket_file: Path | None,
    state_dir: Path,
    name: str,
    labels: str,
    cores: str,
    devices: str,
    sandboxes: str,
    configs: tuple[Path, ...],
    drain_grace: float,
    unattended: float,
    log_level: str,
) -> None:
    """Join this machine to a gateway, and serve it until SIGTERM.

    SIGTERM drains: no new work, and the end when nothing is left; a second one changes nothing. SIGINT ends it now,
    with all that runs. SIGHUP ends the daemon alone: what runs in sandboxes goes on, and the next daemon of the state
    directory takes it over, as after a kill. SIGUSR1 does so too, but ends the trajectories in which nothing runs.
    """
    logs.configure(log_level)
    host, _, port = gateway.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidConfig(f"--gateway: {gateway!r} is not HOST:PORT", component="node")
    for variable in [each for each in os.environ if each.startswith("RAY_") or each == TICKET_VARIABLE]:
        del os.environ[variable]  # a token is for no sandbox, and for no child of ours
    loaded = _configuration(configs, state_dir.absolute(), name, labels, cores, sandboxes)
    loaded = replace(loaded, node=replace(loaded.node, devices=offered_devices(devices, loaded.node.devices)))
    settings = DaemonSettings(
        host=host.strip("[]"),
        port=int(port),
        fingerprint=fingerprint,
        ticket=given_ticket(ticket, ticket_file, state_dir),
        state_dir=state_dir.absolute(),
        spec=machine.describe(loaded),
        drain_grace_s=drain_grace,
        unattended_s=unattended,
        agent=AgentSettings(fitness=FitnessSettings(free_min_bytes=loaded.server.free_min_bytes)),
    )
    import uvloop

    uvloop.run(_serve(loaded, settings))


def given_ticket(ticket: str, file: Path | None, state_dir: Path) -> str:
    """Return the ticket that admits this node; empty for none. Raises InvalidConfig for a file that cannot be read.

    A node that was let in before has its key: a file that has been removed since is none.
    """
    if file is None:
        return ticket
    if ticket:
        raise InvalidConfig(f"give one of --ticket, {TICKET_VARIABLE} and --ticket-file", component="node")
    try:
        with file.open("rb") as opened:
            return opened.read(TICKET_BYTES_MAX).decode("ascii", "replace").strip()
    except OSError as error:
        if (state_dir / KEY).exists():
            return ""
        raise InvalidConfig(f"--ticket-file: {error}", component="node") from None


def _configuration(
    paths: tuple[Path, ...], state_dir: Path, name: str, labels: str, cores: str, sandboxes: str
) -> GatewayConfig:
    """Return what the runtimes of a node are made from; raises InvalidConfig."""
    found = load(paths, os.environ, look=False) if paths else GatewayConfig()
    pairs = [pair.partition("=") for pair in labels.split(",") if pair]
    if any(not key or not mark for key, mark, _ in pairs):
        raise InvalidConfig(f"--labels: {labels!r} is not KEY=VALUE,...", component="node")
    provider = found.sandbox.provider
    if sandboxes != "auto":
        provider = replace(provider, kind="container" if sandboxes == "docker" else "process")
    node = replace(found.node, name=name, labels={**found.node.labels, **{key: value for key, _, value in pairs}})
    if cores:
        node = replace(node, cpu=replace(node.cpu, cores=cores))
    return replace(
        found,
        server=replace(found.server, state_dir=state_dir),
        node=node,
        sandbox=replace(found.sandbox, provider=provider),
    )


def offered_devices(given: str, configured: DevicesConfig) -> DevicesConfig:
    """Return the model devices that a node offers: as given, else as configured, else all that NVML finds.

    Raises InvalidConfig for what is no ``KIND[:COUNT[:SIZE]]``.
    """
    if not given:
        undeclared = configured == DevicesConfig() and not nvml().gpus()
        return replace(configured, kind="none") if undeclared else configured
    kind, _, rest = given.partition(":")
    count, _, size = rest.partition(":")
    try:
        if count and not (count.isdecimal() and int(count)):
            raise ValueError(f"{count!r} is no number of devices")
        memory_bytes = size_bytes(size) if size else None
        found = {"kind": kind, "count": int(count) if count else None, "memory_bytes": memory_bytes}
        return convert(found, DevicesConfig)
    except ValueError as error:
        told = f"--devices: {given!r} is not KIND[:COUNT[:SIZE]] such as cuda:8 or cpu:2:4Gi: {error}"
        raise InvalidConfig(told, component="node") from None


async def _serve(config: GatewayConfig, settings: DaemonSettings) -> None:
    """Serve with the runtimes of this machine until a signal ends it."""
    settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    runtimes = make_runtimes(config, MonotonicClock())
    info = runtimes.provider.info
    work = HostWork(
        executor=runtimes.executor,
        sandboxes=EnvironmentSandboxes(runtimes.environments),
        check=runtimes.prepare,
        close=runtimes.close,
        handlers=runtimes.handlers_in_use,
        models=NodeModels(runtimes.model, settings.spec.devices),
        snapshots=ServedSnapshots(runtimes.environments),
        trouble=runtimes.provider.trouble,
    )
    daemon = Daemon(replace(settings, isolation=info.isolation, sandboxes=info.kind), work)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, daemon.drain, "SIGTERM")
    loop.add_signal_handler(signal.SIGINT, daemon.stop)
    loop.add_signal_handler(signal.SIGHUP, daemon.leave)
    loop.add_signal_handler(signal.SIGUSR1, partial(daemon.leave, tidy=True))
    await daemon.run()
