"""The verbs that ask a gateway about its machines: `tangram node list`, `drain`, `ticket` and `check`."""

from __future__ import annotations

from collections.abc import Sequence

import click
from msgspec import UNSET

from gateway.cluster.tickets import TICKET_VARIABLE
from tangram import Client
from tangram.cli.options import connected, json_option
from tangram.cli.output import print_json, say, show, show_seconds, table
from tangram.types import FunctionInfo, NodeStatus, show_size


@click.command("list")
@json_option
@connected
def list_nodes(client: Client, as_json: bool) -> None:
    """List the machines that actions run on, and how they are."""
    found = client.nodes()
    if as_json:
        print_json(found)
        return
    rows = [
        (
            each.node,
            each.state,
            show_seconds(each.since_s),
            each.cores,
            each.devices,
            show_size(each.memory_bytes),
            each.running,
            each.trajectories,
            ",".join(f"{key}={value}" for key, value in sorted(each.labels.items())),
            each.why,
        )
        for each in found
    ]
    show(table(("NODE", "STATE", "SINCE", "CORES", "DEVICES", "MEMORY", "RUNNING", "HOLDERS", "LABELS", "WHY"), rows))
    coming = [each for each in client.ray_machines() if each.state != "serving"]
    if coming:
        told = [(each.machine[:12], each.node, each.state, show_seconds(each.since_s), each.why) for each in coming]
        show(table(("RAY MACHINE", "NODE", "STATE", "SINCE", "WHY"), told))


@click.command("drain")
@click.argument("name")
@click.option("--why", default="an operator asked for it", show_default=True, help="What is told to whoever waits.")
@json_option
@connected
def drain_node(client: Client, name: str, why: str, as_json: bool) -> None:
    """Have a machine take no new work; it leaves when nothing runs or lives there, or after cluster.drain_grace."""
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
    """Print what admits one machine once, as the command that joins it."""
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
    found = []
    if node.state in remedies:
        refused = f"; it may join again in {node.refused_s:.0f} s" if node.refused_s else ""
        found.append(f"{node.node} is {node.state} ({node.why}){refused}: {remedies[node.state]}")
    found += [f"{node.node} cannot run {function}: {why}" for function, why in sorted(node.unable.items())]
    return found


def homeless(functions: Sequence[FunctionInfo], nodes: Sequence[NodeStatus]) -> Sequence[str]:
    """Return why each function that no machine runs has none: no label fits, or those whose labels fit are not able."""
    living = [node for node in nodes if node.state not in ("lost", "drained")]
    #: A gateway that is alone asks no machine: what it cannot run it says of the function itself.
    is_asked = any(not node.local or node.able or node.unable for node in nodes) or not nodes
    found = []
    for function in functions:
        if function.sandbox is UNSET and {"cpu", "gpu"}.isdisjoint(function.cost):
            continue  # it runs in the gateway
        fit = [node for node in living if function.nodes.items() <= node.labels.items()]
        if not fit:
            labels = ",".join(f"{key}={value}" for key, value in sorted(function.nodes.items()))
            which = f"no machine has the labels {labels}" if labels else "there is no machine"
            joined = f" with `--labels {labels}`, or change functions.{function.name}.nodes" if labels else ""
            found.append(f"{function.name} runs nowhere: {which}: have one join{joined}")
        elif is_asked and not any(function.name in node.able for node in fit):
            found.append(f"{function.name} runs nowhere: none of {', '.join(node.node for node in fit[:8])} is able to")
    return found
