"""Random kills of a gateway, its nodes and a runner under load of all kinds, and then a check for each promise.

``python -m bench.kills [--provider process|container] [--kills 15] [--nodes 2] [--seed 1] [--json]``: the gateway has
a directory, ports, an upstream and (for containers) an engine of its own; daemons of nodes stand beside it.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from bench.inputs import OWN_PATH
from bench.kills.callers import Callers
from bench.kills.census import Census
from bench.kills.gateway import KilledGateway, KilledNode, at_rest, balanced
from bench.kills.history import KillHistory
from bench.kills.judge import CERTAIN, CHECKS, FRAIL, KINDS, LIMIT, PERIOD_S, TRAVEL_S, Promise, spans_s
from bench.kills.outside import outside
from bench.private_docker import private_docker
from bench.report import BenchReport, parser, play
from bench.serving import IMAGE

#: Between two kills, and between the end and the next start, in seconds.
BETWEEN_S, DOWN_S = (0.3, 4.0), (0.0, 0.5)
#: The share of the ends that come with notice.
NOTICE = 0.3
REST_S, AUDIT_S = 60.0, 0.25
#: Seconds that a run may take, and those that it may take more for each kill.
TOTAL_S, QUICK_S, KILL_S = 420.0, 180.0, 30.0
#: What falls, drawn for each kill; the first is that of two at once.
VICTIMS = (("gateway", "node"), ("gateway",), ("gateway",), ("node",), ("runner",), ("gateway", "runner"))

#: A template, as `bench.kills.gateway.KilledGateway` fills it in; what is in capitals is filled in here.
CONFIG = """
version: 1
server:
  state_dir: {directory}/state
  port: {port}
  grpc_port: 0
  drain_grace: 500ms
  callbacks: {{allow: ["127.0.0.0/8"]}}
sandbox: {{provider: {provider}, image: "{image}", memory: 256MiSANDBOX_PATH}}
cluster: {{listen: "{listen}", beat: 300ms}}
node: {{labels: {{pool: here}}, devices: {{kind: cpu, count: 2, memory: 64Mi}}}}
resources: {{search: {{kind: quota, limit: LIMIT, period: PERIODs}}}}
functions:
  shell: {{runtime: exec, cost: {{cpu: 1}}, timeout: 150s, queue_timeout: 120s, nodes: {{pool: here}}}}
  suite: {{runtime: pytest, cost: {{cpu: 1}}, timeout: 30s, queue_timeout: 120s, nodes: {{pool: here}}}}
  echo: {{runtime: handler, handler: "handler:echo", cost: {{cpu: 1}}, scale: {{min: 1, max: 1}}}}
  once:
    runtime: api
    request: {{method: GET, url: "http://127.0.0.1:{upstream}/do?{{name}}"}}
    timeout: 20s
    queue_timeout: 120s
  again:
    runtime: api
    request: {{method: GET, url: "http://127.0.0.1:{upstream}/do?{{name}}"}}
    timeout: 20s
    queue_timeout: 120s
    idempotent: true
  metered:
    runtime: api
    request: {{method: GET, url: "http://127.0.0.1:{upstream}/metered?{{name}}"}}
    cost: {{search: 1}}
    timeout: 20s
    queue_timeout: 120s
"""
ON_NODE = """
  shell_NODE: {{runtime: exec, cost: {{cpu: 1}}, timeout: 150s, queue_timeout: 120s, nodes: {{pool: NODE}}}}
"""
HANDLER = """
import time

def echo(event, context):
    print(event["name"], "begins")
    time.sleep(event["hold_s"])
    print(event["name"], "ends")
    return event
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorld:
    """The gateway, those who call it, what they saw, and who counts what is left."""

    gateway: KilledGateway
    nodes: Sequence[KilledNode]
    callers: Callers
    history: KillHistory
    census: Census


@asynccontextmanager
async def kill_world(provider: str, nodes: Sequence[str], random_: random.Random) -> AsyncIterator[KillWorld]:
    """Everything in a directory of its own, which is removed in the end."""
    history = KillHistory()
    path = f', path: "{OWN_PATH}"' if provider == "process" else ""  # where there is a pytest
    template = CONFIG.replace("SANDBOX_PATH", path).replace("LIMIT", str(LIMIT)).replace("PERIOD", f"{PERIOD_S:g}")
    template += "".join(ON_NODE.replace("NODE", name) for name in nodes)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tangram-kills-")))
        docker = stack.enter_context(private_docker(IMAGE)) if provider == "container" else None
        census = Census(directory, docker)
        stack.callback(census.sweep)  # also of what a broken run leaves; after the gateway's end
        upstream = await stack.enter_async_context(outside(history, random_))
        gateway = KilledGateway(
            directory,
            provider=provider,
            upstream=upstream,
            environment={} if docker is None else docker.environment,
            config=template,
            handler=HANDLER,
        )
        stack.push_async_callback(gateway.close)
        daemons = [KilledNode(directory, gateway, name, provider=provider) for name in nodes]
        for daemon in daemons:
            stack.push_async_callback(daemon.close)
        callers = Callers(gateway.url, f"http://127.0.0.1:{upstream}/told", history, random_, nodes)
        stack.push_async_callback(callers.close)
        yield KillWorld(gateway=gateway, nodes=daemons, callers=callers, history=history, census=census)


async def kill(report: BenchReport, world: KillWorld, count: int, random_: random.Random) -> Counter[str]:
    """End what is drawn so often, with and without notice, and start it again each time."""
    done: Counter[str] = Counter()
    for number in range(count):
        await asyncio.sleep(random_.uniform(*BETWEEN_S))
        await asyncio.to_thread(world.census.look)
        victims = set(VICTIMS[0] if number == 0 else random_.choice(VICTIMS))
        if not world.nodes:
            victims = {each if each == "runner" else "gateway" for each in victims}
        done.update(await asyncio.gather(*[end_and_start(world, each, random_) for each in sorted(victims)]))
        report.progress(f"{number + 1} of {count}, {len(world.history.calls)} calls")
    await asyncio.gather(*[node.ready() for node in world.nodes])
    await asyncio.sleep(BETWEEN_S[1])
    world.callers.stop()
    return done


async def end_and_start(world: KillWorld, victim: str, random_: random.Random) -> str:
    """End one of a kind, and start it again, unless it is a runner; return what was ended how."""
    if victim == "runner":
        await asyncio.to_thread(world.census.kill_sandbox, FRAIL)
        return "runner SIGKILL"
    server: KilledGateway | KilledNode = random_.choice(world.nodes) if victim == "node" else world.gateway
    notice = signal.SIGTERM if server is world.gateway else signal.SIGHUP
    how = notice if random_.random() < NOTICE else signal.SIGKILL
    down_s = random_.uniform(*DOWN_S)
    status = await server.end(how)
    if how is notice and (server is world.gateway or status != -notice):  # a daemon that had not begun yet just ends
        world.history.exits.append(status)
    await asyncio.sleep(down_s)
    await server.start()
    return f"{victim} {how.name}"


async def rest(world: KillWorld) -> None:
    """Wait until nothing is under way, callbacks included."""
    asked = [call for call in world.history.calls if call.calls_back and call.ids]
    deadline_s = time.monotonic() + REST_S
    while time.monotonic() < deadline_s:
        told = all(any(world.history.callbacks.get(each) for each in call.ids) for call in asked)
        if told and at_rest(await world.gateway.metrics()):
            return
        await asyncio.sleep(0.5)


async def audit(world: KillWorld) -> None:
    """Read the metrics for ever: each invocation that was accepted is queued, running or ended."""
    while True:
        with suppress(httpx.HTTPError):  # it is down
            metrics = await world.gateway.metrics()
            if metrics and not balanced(metrics):
                world.history.unbalanced.append(str({key: metrics[key] for key in metrics if "_invocations_" in key}))
        await asyncio.sleep(AUDIT_S)


async def kills(report: BenchReport, *, provider: str, nodes: int, count: int, seed: int, within_s: float) -> None:
    """Kill, let all come to rest, and judge; cut before that, judge what cannot be made good any more."""
    random_ = random.Random(seed)
    names = [f"n{number}" for number in range(1, nodes + 1)]
    async with asyncio.timeout(within_s), kill_world(provider, names, random_) as world:
        history = world.history
        empty = await asyncio.to_thread(world.census.take, None)
        await world.gateway.start()
        await asyncio.gather(*[node.join() for node in world.nodes])
        auditing = asyncio.create_task(audit(world))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(world.callers.run())
                killing = group.create_task(kill(report, world, count, random_))
        except asyncio.CancelledError:
            tell(report, world, Counter(), CERTAIN)
            raise
        finally:
            auditing.cancel()
            await asyncio.gather(auditing, return_exceptions=True)
        await world.callers.collect()
        await rest(world)
        history.exits += [await node.end(signal.SIGINT) for node in world.nodes]
        history.exits.append(await world.gateway.end(signal.SIGINT))
        held = await world.census.ended(empty)
        history.left = {name: held[name] - empty[name] for name in held}
        tell(report, world, killing.result(), CHECKS)
        for line in world.census.who():
            report.note(f"left behind: {line}")


def tell(report: BenchReport, world: KillWorld, ends: Counter[str], checks: Mapping[str, Promise]) -> None:
    """What was asked and how it ended, and a check for each promise."""
    history = world.history
    report.figure("ends", dict(ends))
    states = Counter((call.function, str(call.last["state"]) if call.last else "none") for call in history.calls)
    functions = sorted({function for function, _ in states})
    report.figure(
        "calls", {name: {how: n for (f, how), n in sorted(states.items()) if f == name} for name in functions}
    )
    report.figure("accepted", sum(bool(call.ids) for call in history.calls))
    report.figure("callbacks", sum(map(len, history.callbacks.values())))
    report.figure("sent_again", world.callers.repeated)
    report.figure("quota_shortest_span_s", round(min(spans_s(history), default=0.0), 3))
    found = {name: check(history) for name, check in checks.items()}
    if checks is CHECKS:
        for kind, parts in KINDS.items():
            report.check(kind, sum(len(found[part.__name__]) for part in parts), limit=0, better="lower")
    for name, broken in found.items():
        report.check(name, len(broken), limit=0, better="lower")
        for line in broken[:5]:
            report.note(f"{name}: {line}")
    report.note(
        f"quota_exceeded_windows: {LIMIT} in {PERIOD_S:g} s as the upstream sees them; "
        f"{TRAVEL_S:g} s are left for the way there"
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("kills", parts=True)
    options.add_argument("--provider", choices=("process", "container"), default="process")
    options.add_argument("--kills", type=int, default=15)
    options.add_argument("--nodes", type=int, default=2, help="daemons of nodes beside the gateway")
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args(argv)
    report = BenchReport("kills")
    count, nodes = (min(3, chosen.kills), min(1, chosen.nodes)) if chosen.quick else (chosen.kills, chosen.nodes)
    within_s = QUICK_S if chosen.quick else TOTAL_S + KILL_S * count
    part = partial(
        kills, report, provider=chosen.provider, nodes=nodes, count=count, seed=chosen.seed, within_s=within_s
    )
    return play(report, chosen, {"kills": part})


if __name__ == "__main__":
    sys.exit(main())
