"""`tangram node`: joining, listing, draining."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click
from msgspec import UNSET, convert

from gateway import limits
from gateway.cli.serve import node as show_node
from gateway.cluster.store import TICKET_BYTES_MAX, TICKET_VARIABLE
from gateway.config.load import GatewayConfig, load
from gateway.config.schema import DevicesConfig
from gateway.invocations import logs
from gateway.runtime_factory import make_runtimes
from manager.clock import MonotonicClock
from manager.errors import InvalidConfig
from runtimes.model.engine import nvml
from runtimes.node.daemon import (
    KEY,
    DaemonSettings,
    NodeDaemon,
    NodeModels,
    NodeRuntimes,
)
from tangram import Client
from tangram.cli.main import VerbGroup
from tangram.cli.options import connected, json_option
from tangram.cli.output import cells, print_json, say, show, show_seconds, table
from tangram.types import FunctionInfo, NodeStatus, size_bytes


@click.command("list")
@json_option
@connected
def list_nodes(client: Client, as_json: bool) -> None:
    """List the machines that actions run on, and how they are."""
    result = client.nodes()
    if as_json:
        print_json(result)
        return
    machine = ("cores", "devices", "memory_bytes", "running", "trajectories")
    rows = cells(result, "node", "state", "since_s", *machine, lambda each: _written(each.labels), "why")
    show(table(("NODE", "STATE", "SINCE", "CORES", "DEVICES", "MEMORY", "RUNNING", "HOLDERS", "LABELS", "WHY"), rows))
    coming = [each for each in client.ray_machines() if each.state != "serving"]
    if coming:
        shown = [(each.machine[:12], each.node, each.state, show_seconds(each.since_s), each.why) for each in coming]
        show(table(("RAY MACHINE", "NODE", "STATE", "SINCE", "WHY"), shown))


@click.command("drain")
@click.argument("name")
@click.option(
    "--why",
    metavar="TEXT",
    default="an operator asked for it",
    show_default=True,
    help="What is told to whoever waits.",
)
@json_option
@connected
def drain_node(client: Client, name: str, why: str, as_json: bool) -> None:
    """Have a machine take no new work; it leaves when nothing runs or lives there, or after cluster.drain_grace.

    \b
    tangram node drain n1 --why "new kernel"
    """
    status = client.drain_node(name, why)
    if as_json:
        print_json(status)
        return
    say(f"{name} is {status.state}: {status.running} actions run, {status.trajectories} hold memory there")


@click.command("ticket")
@click.argument("name")
@click.option("--only", is_flag=True, help="Print the ticket alone, for scripts.")
@json_option
@connected
def issue_ticket(client: Client, name: str, only: bool, as_json: bool) -> None:
    """Print what admits one machine once, as the command that joins it.

    \b
    tangram node ticket n1 --only
    """
    ticket = client.node_ticket(name)
    if as_json:
        print_json(ticket)
        return
    if only:
        click.echo(ticket.ticket)
        return
    say(f"good for {ticket.expires_in_s:.0f} s, once; on the machine that is to join:")
    click.echo(
        f"{TICKET_VARIABLE}={ticket.ticket} tangram node join --gateway {ticket.gateway}"
        f" --fingerprint {ticket.fingerprint} --name {name} --state-dir ~/.tangram-node-{name}"
    )


@click.command("check")
@json_option
@connected
def check_nodes(client: Client, as_json: bool) -> int:
    """Say what is not as it should be with the machines, and what mends it; status 1 if there is anything."""
    nodes = client.nodes()
    problems = [problem for node in nodes for problem in problems_of(node)]
    problems += homeless(client.functions(), nodes)
    problems += [
        f"{each.node} is {each.state} on Ray's machine {each.machine[:12]}: {each.why}"
        for each in client.ray_machines()
        if each.state in ("waiting", "failed")
    ]
    if as_json:
        print_json({"problems": problems})
    elif problems:
        click.echo("\n".join(problems))
    else:
        say("every machine serves, and is able to run every function")
    return 1 if problems else 0


def problems_of(node: NodeStatus) -> Sequence[str]:
    """Return what is not as it should be with one machine."""
    remedies = {
        "joining": "wait; if it stays so, look into its log",
        "unfit": "mend that; it serves again by itself",
        "suspect": "look whether its daemon runs and reaches the gateway (cluster.advertise)",
        "draining": "it leaves when it is empty",
        "lost": "start `tangram node join` there again, with its state directory or a new ticket",
    }
    result = []
    if node.state in remedies:
        refused = f"; it may join again in {node.refused_s:.0f} s" if node.refused_s else ""
        result.append(f"{node.node} is {node.state} ({node.why}){refused}: {remedies[node.state]}")
    result += [f"{node.node} cannot run {function}: {why}" for function, why in sorted(node.unable.items())]
    return result


def homeless(functions: Sequence[FunctionInfo], nodes: Sequence[NodeStatus]) -> Sequence[str]:
    """Return why each function that no machine runs has none: no label fits, or those whose labels fit are not able."""
    living = [node for node in nodes if node.state not in ("lost", "drained")]
    #: A gateway that is alone asks no machine: what it cannot run it says of the function itself.
    is_asked = any(not node.local or node.able or node.unable for node in nodes) or not nodes
    result = []
    for function in functions:
        if function.sandbox is UNSET and {"cpu", "gpu"}.isdisjoint(function.cost):
            continue  # it runs in the gateway
        fit = [node for node in living if function.nodes.items() <= node.labels.items()]
        if not fit:
            labels = _written(function.nodes)
            which = f"no machine has the labels {labels}" if labels else "there is no machine"
            joined = f" with `--labels {labels}`, or change functions.{function.name}.nodes" if labels else ""
            result.append(f"{function.name} runs nowhere: {which}: have one join{joined}")
        elif is_asked and not any(function.name in node.able for node in fit):
            result.append(
                f"{function.name} runs nowhere: none of {', '.join(node.node for node in fit[:8])} is able to"
            )
    return result


@click.group(cls=VerbGroup)
def node() -> None:
    """Nodes: this machine as the scheduler would see it, and its daemon."""


node.add_command(show_node, "show")
for verb in (list_nodes, drain_node, issue_ticket, check_nodes):
    node.add_command(verb)


@node.command()
@click.option("--gateway", required=True, metavar="HOST:PORT", help="Where the gateway takes nodes (cluster.listen).")
@click.option(
    "--fingerprint", metavar="HEX", required=True, help="SHA-256 of its certificate, as it says when it starts."
)
@click.option(
    "--ticket",
    default="",
    envvar=TICKET_VARIABLE,
    help=f"Admits this node once; not needed once it was let in. {TICKET_VARIABLE} shows it to no other user.",
)
@click.option("--ticket-file", type=click.Path(path_type=Path), help="The same, from a file.")
@click.option("--state-dir", required=True, type=click.Path(path_type=Path), help="Of this node alone.")
@click.option("--name", metavar="NAME", required=True, help="As leases and records name it.")
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
@click.option("--log-level", metavar="LEVEL", default="info", show_default=True, help="debug, info, warning or error.")
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
    directory takes it over, as after a kill.

    \b
    tangram node join --gateway gpu0:8090 --fingerprint HEX --name n1 --state-dir n1
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
        spec=limits.describe(loaded),
        drain_grace_s=drain_grace,
        unattended_s=unattended,
        free_min_bytes=loaded.server.free_min_bytes,
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
    result = load(paths, os.environ, look=False) if paths else GatewayConfig()
    provider = result.sandbox.provider
    if sandboxes != "auto":
        provider = replace(provider, kind="container" if sandboxes == "docker" else "process")
    node = replace(result.node, name=name, labels={**result.node.labels, **_labels("--labels", labels.split(","))})
    if cores:
        node = replace(node, cpu=replace(node.cpu, cores=cores))
    return replace(
        result,
        server=replace(result.server, state_dir=state_dir),
        node=node,
        sandbox=replace(result.sandbox, provider=provider),
    )


def offered_devices(value: str, configured: DevicesConfig) -> DevicesConfig:
    """Return the model devices that a node offers: as given, else as configured, else all that NVML finds.

    Raises InvalidConfig for what is no ``KIND[:COUNT[:SIZE]]``.
    """
    if not value:
        undeclared = configured == DevicesConfig() and not nvml().gpus()
        return replace(configured, kind="none") if undeclared else configured
    kind, _, rest = value.partition(":")
    count, _, size = rest.partition(":")
    try:
        if count and not (count.isdecimal() and int(count)):
            raise ValueError(f"{count!r} is no number of devices")
        memory_bytes = size_bytes(size) if size else None
        result = {"kind": kind, "count": int(count) if count else None, "memory_bytes": memory_bytes}
        return convert(result, DevicesConfig)
    except ValueError as error:
        message = f"--devices: {value!r} is not KIND[:COUNT[:SIZE]] such as cuda:8 or cpu:2:4Gi: {error}"
        raise InvalidConfig(message, component="node") from None


async def _serve(config: GatewayConfig, settings: DaemonSettings) -> None:
    """Serve with the runtimes of this machine until a signal ends it."""
    settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    config = replace(config, models=replace(config.models, engines=False))
    runtimes = make_runtimes(config, MonotonicClock())
    served = NodeRuntimes(
        executor=runtimes.executor,
        environments=runtimes.environments,
        prepare=runtimes.prepare,
        close=runtimes.close,
        handlers_in_use=runtimes.handlers_in_use,
        models=NodeModels(runtimes.model, settings.spec.devices),
        snapshots=runtimes.provider.snapshots,
        trouble=runtimes.provider.trouble,
    )
    daemon = NodeDaemon(replace(settings, isolation=runtimes.provider.info.isolation), served)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, daemon.drain, "SIGTERM")
    loop.add_signal_handler(signal.SIGINT, daemon.stop)
    loop.add_signal_handler(signal.SIGHUP, daemon.leave)
    await daemon.run()


def _written(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def _labels(option: str, texts: Iterable[str]) -> dict[str, str]:
    """Return the labels of texts KEY=VALUE; empty texts are none. Raises InvalidConfig."""
    pairs = [each.partition("=") for each in texts if each]
    for key, sign, value in pairs:
        if not key or not sign or not value:
            raise InvalidConfig(f"{option}: {key}{sign}{value} is not KEY=VALUE", component="node")
    return {key: value for key, _, value in pairs}
