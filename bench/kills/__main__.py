"""Random kills of a gateway under load of all kinds, and then a check for each promise that can be seen from outside.

``python -m bench.kills [--provider process|container] [--kills 15] [--seed 1] [--json]``: the gateway has a directory,
ports, an upstream and (for containers) an engine of its own. It ends within ten minutes.
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
from bench.kills.gateway import KilledGateway, at_rest, balanced
from bench.kills.history import KillHistory
from bench.kills.judge import CERTAIN, CHECKS, LIMIT, PERIOD_S, TRAVEL_S, Promise, spans_s
from bench.kills.outside import outside
from bench.private_docker import private_docker
from bench.report import BenchReport, parser, play
from bench.serving import IMAGE

#: Between two kills, and between the end and the next start, in seconds.
BETWEEN_S, DOWN_S = (0.3, 4.0), (0.0, 0.5)
#: The share of the ends that come with notice.
NOTICE = 0.3
REST_S, TOTAL_S, QUICK_S, AUDIT_S = 60.0, 570.0, 180.0, 0.25

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
node: {{devices: {{kind: cpu, count: 2, memory: 64Mi}}}}
resources: {{search: {{kind: quota, limit: LIMIT, period: PERIODs}}}}
functions:
  shell: {{runtime: exec, cost: {{cpu: 1}}, timeout: 20s, queue_timeout: 120s}}
  suite: {{runtime: pytest, cost: {{cpu: 1}}, timeout: 30s, queue_timeout: 120s}}
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
    callers: Callers
    history: KillHistory
    census: Census


@asynccontextmanager
async def kill_world(provider: str, random_: random.Random) -> AsyncIterator[KillWorld]:
    """Everything in a directory of its own, which is removed in the end."""
    history = KillHistory()
    path = f', path: "{OWN_PATH}"' if provider == "process" else ""  # where there is a pytest
    template = CONFIG.replace("SANDBOX_PATH", path).replace("LIMIT", str(LIMIT)).replace("PERIOD", f"{PERIOD_S:g}")
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
        callers = Callers(gateway.url, f"http://127.0.0.1:{upstream}/told", history, random_)
        stack.push_async_callback(callers.close)
        yield KillWorld(gateway=gateway, callers=callers, history=history, census=census)


async def kill(report: BenchReport, world: KillWorld, count: int, random_: random.Random) -> Counter[str]:
    """End the gateway so often, at random, with and without notice, and start it again each time."""
    done: Counter[str] = Counter()
    for number in range(count):
        await asyncio.sleep(random_.uniform(*BETWEEN_S))
        how = signal.SIGTERM if random_.random() < NOTICE else signal.SIGKILL
        await asyncio.to_thread(world.census.look)
        status = await world.gateway.end(how)
        if how is signal.SIGTERM:
            world.history.exits.append(status)
        done[how.name] += 1
        await asyncio.sleep(random_.uniform(*DOWN_S))
        await world.gateway.start()
        report.progress(f"{number + 1} of {count}, {len(world.history.calls)} calls")
    await asyncio.sleep(BETWEEN_S[1])
    world.callers.stop()
    return done


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


async def kills(report: BenchReport, *, provider: str, count: int, seed: int, within_s: float) -> None:
    """Kill, let all come to rest, and judge; cut before that, judge what cannot be made good any more."""
    random_ = random.Random(seed)
    async with asyncio.timeout(within_s), kill_world(provider, random_) as world:
        history = world.history
        empty = await asyncio.to_thread(world.census.take, None)
        await world.gateway.start()
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
        history.exits.append(await world.gateway.end(signal.SIGINT))
        held = await world.census.ended(empty)
        history.left = {name: held[name] - empty[name] for name in held}
        tell(report, world, killing.result(), CHECKS)
        for line in world.census.who():
            report.note(f"left behind: {line}")


def tell(report: BenchReport, world: KillWorld, ends: Counter[str], checks: Mapping[str, Promise]) -> None:
    """What was asked and how it ended, and a check for each promise."""
    history = world.history
    report.figure("ends_of_the_gateway", dict(ends))
    states = Counter((call.function, str(call.last["state"]) if call.last else "none") for call in history.calls)
    functions = sorted({function for function, _ in states})
    report.figure(
        "calls", {name: {how: n for (f, how), n in sorted(states.items()) if f == name} for name in functions}
    )
    report.figure("accepted", sum(bool(call.ids) for call in history.calls))
    report.figure("callbacks", sum(map(len, history.callbacks.values())))
    report.figure("sent_again", world.callers.repeated)
    report.figure("quota_shortest_span_s", round(min(spans_s(history), default=0.0), 3))
    for name, check in checks.items():
        found = check(history)
        report.check(name, len(found), limit=0, better="lower")
        for line in found[:5]:
            report.note(f"{name}: {line}")
    report.note(
        f"quota_exceeded_windows: {LIMIT} in {PERIOD_S:g} s as the upstream sees them; "
        f"{TRAVEL_S:g} s are left for the way there"
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("kills", parts=True)
    options.add_argument("--provider", choices=("process", "container"), default="process")
    options.add_argument("--kills", type=int, default=15)
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args(argv)
    report = BenchReport("kills")
    count = min(3, chosen.kills) if chosen.quick else chosen.kills
    within_s = QUICK_S if chosen.quick else TOTAL_S
    part = partial(kills, report, provider=chosen.provider, count=count, seed=chosen.seed, within_s=within_s)
    return play(report, chosen, {"kills": part})


if __name__ == "__main__":
    sys.exit(main())
