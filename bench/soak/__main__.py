"""The soak: actions without end while runners, containers, workers, the engine and the gateway are killed at random.

``python -m bench.soak [--minutes 10] [--provider container] [--kinds runner,engine] [--seed 1] [--json]``: afterwards
nothing may be left behind, and everything accepted must have come to a typed end. The engine is the soak's own.
"""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.durable import upstream
from bench.gateway import IMAGE, ROOT
from bench.private_docker import private_docker
from bench.report import BenchReport, parser
from bench.soak.census import Census, descriptors
from bench.soak.faults import KINDS, Faults
from bench.soak.gateway import SoakGateway, at_rest, balanced
from bench.soak.traffic import Traffic

#: The share of the time in which the gateway itself is spared, so that what leaks in it has time to show.
SPARED = 0.6
WARM_UP_S = 20.0
#: Longest time until everything is at rest: an engine's silence, and twice the search for orphans.
REST_S = 150.0
#: Connections to the engine that a gateway may hold more of than at first: one for each of its threads, and the two
#: doors' own to whoever asked last.
ENGINE_CONNECTIONS = 11
#: What an engine that is killed as it makes a container's network leaves mounted, once for each kill at most. Nothing
#: in it says whose it is, and taking one away could hit a container that is being started.
ENGINES_OWN = ("mounts", "network_namespaces")
CHECKPOINT = """
import sys
from pathlib import Path
from bench.model.checkpoints import TINY, write_checkpoint
print(write_checkpoint(Path(sys.argv[1]), "llama", "score", TINY, dtype="float32", device="cpu", seed=0))
"""


@dataclass(slots=True, kw_only=True)
class SoakWorld:
    """The gateway, those who use it, those who break it, and who counts what they leave behind."""

    gateway: SoakGateway
    traffic: Traffic
    faults: Faults
    census: Census
    #: What there was before the gateway was started.
    empty: Mapping[str, int]
    #: Readings of the metrics, and those in which accepted was not queued + running + terminal.
    readings: int = 0
    unbalanced: list[str] = field(default_factory=list)

    async def phase(self, seconds: float, kinds: tuple[str, ...]) -> None:
        """Traffic and faults side by side, under the eyes of an auditor."""
        say(f"{seconds:.0f} s of traffic, breaking {', '.join(kinds) or 'nothing'}")
        audit = asyncio.create_task(self._audit())
        async with asyncio.TaskGroup() as group:
            group.create_task(self.traffic.run(seconds))
            if kinds:
                group.create_task(self.faults.run(seconds, kinds))
        audit.cancel()
        await asyncio.gather(audit, return_exceptions=True)

    async def _audit(self) -> None:
        while True:
            try:
                metrics = await self.gateway.metrics()
            except httpx.HTTPError:  # it is down or stopped
                metrics = {}
            if metrics:
                self.readings += 1
                if not balanced(metrics):
                    self.unbalanced.append(str({name: metrics[name] for name in metrics if "_invocations_" in name}))
            await asyncio.sleep(0.25)

    async def rest(self, wanted: Mapping[str, int] | None) -> dict[str, int]:
        """Wait until nothing is under way and no more is held than is wanted; what is held then.

        The gauges are looked at first: what they say holds from then on, as nobody asks for anything.
        """
        say(f"{self.traffic.ends.total()} ends; waiting until all is at rest")
        deadline_s, before, told = time.monotonic() + REST_S, None, {"": 0}
        while True:
            metrics = await self.gateway.metrics()
            held = await asyncio.to_thread(self.census.take, self.gateway.pid)
            calm = at_rest(metrics) and not await self.gateway.trajectories()
            bound = before if wanted is None else wanted
            more = {name: count for name, count in held.items() if bound is None or count > bound[name]}
            if (calm and not more) or time.monotonic() > deadline_s:
                return {**held, "cores": int(metrics["total"] - metrics["free"])}
            before = held
            if more != told:
                say(f"{'calm' if calm else 'something lives'}, held beyond the first time: {more}")
                told = more
            await asyncio.sleep(1.0)


@asynccontextmanager
async def world(provider: str, seed: int, *, scores: bool) -> AsyncIterator[SoakWorld]:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tangram-soak-")))
        docker = stack.enter_context(private_docker(IMAGE)) if provider == "container" else None
        checkpoint = await asyncio.to_thread(write_checkpoint, directory) if scores else None
        served = await stack.enter_async_context(upstream())
        gateway = SoakGateway(
            directory,
            provider=provider,
            upstream=served.port,
            checkpoint=checkpoint,
            environment={} if docker is None else docker.environment,
        )
        stack.push_async_callback(gateway.close)
        census = Census(directory, docker)
        yield SoakWorld(
            gateway=gateway,
            traffic=Traffic(gateway, seed, scores=scores),
            faults=Faults(gateway, census, docker, seed),
            census=census,
            empty=await asyncio.to_thread(census.take, None),
        )


def say(what: str) -> None:
    print(f"soak: {what}", file=sys.stderr, flush=True)


def write_checkpoint(directory: Path) -> Path:
    """In a process of its own: this one need not have torch in it."""
    command = [sys.executable, "-c", CHECKPOINT, str(directory)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


async def soak(report: BenchReport, *, minutes: float, provider: str, kinds: tuple[str, ...], seed: int) -> None:
    scores = importlib.util.find_spec("torch") is not None
    spared = tuple(kind for kind in kinds if kind != "gateway")
    async with world(provider, seed, scores=scores) as parts:
        gateway = parts.gateway
        await gateway.start()
        await parts.phase(min(WARM_UP_S, 10 * minutes), ())
        first = await parts.rest(None)
        wanted, opened = {name: first[name] for name in parts.empty}, descriptors(gateway.pid)
        await parts.phase(60 * minutes * (SPARED if "gateway" in kinds else 1.0), spared)
        spared_left = await parts.rest(wanted)
        held = descriptors(gateway.pid)
        report.check("leaked_descriptors", held.total() - opened.total(), limit=ENGINE_CONNECTIONS, better="lower")
        report.figure("more_descriptors", dict(held - opened))
        if "gateway" in kinds:
            await parts.phase(60 * minutes * (1 - SPARED), kinds)
        left = await parts.rest(wanted)
        status = await gateway.end(signal.SIGINT)
        end = await parts.census.ended(parts.empty)
        tell(report, parts, {"first": first, "spared": spared_left, "last": left, "end": end}, status)
        for line in parts.census.who():
            report.note(f"left behind: {line}")
        if not report.ok:
            report.note("the end of the gateway's log:\n" + gateway.log(6000))


def tell(report: BenchReport, parts: SoakWorld, held: Mapping[str, Mapping[str, int]], status: int) -> None:
    """What was done, how everything ended, and what is left more than there was at first."""
    traffic = parts.traffic
    report.figure("faults", dict(sorted(parts.faults.done.items())))
    functions = sorted({function for function, _ in traffic.ends})
    report.figure(
        "ends", {name: {how: n for (f, how), n in sorted(traffic.ends.items()) if f == name} for name in functions}
    )
    report.figure("sent_again", traffic.repeated)
    report.figure("call_p99_s", round(traffic.call_p99_s, 3))
    report.figure("readings", parts.readings)
    report.figure("held", {name: dict(counts) for name, counts in held.items()})
    first, empty = held["first"], parts.empty
    engine_kills = sum(count for what, count in parts.faults.done.items() if what.startswith("engine SIGKILL"))
    for name in first:
        grown = max(held[when][name] - first[name] for when in ("spared", "last"))
        leaked = max(grown, held["end"].get(name, 0) - empty.get(name, 0))
        report.check(f"leaked_{name}", leaked, limit=engine_kills if name in ENGINES_OWN else 0, better="lower")
    for name, found in (("untyped_ends", traffic.untyped), ("hung", traffic.hung), ("unbalanced", parts.unbalanced)):
        report.check(name, len(found), limit=0, better="lower")
        for line in found[:5]:
            report.note(f"{name}: {line}")
    report.check("exit_status", abs(status), limit=0, better="lower")


def main() -> int:
    options = parser("soak")
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--provider", choices=("container", "process"), default="container")
    options.add_argument("--kinds", help=f"what is killed, of {','.join(KINDS)}; all of them by default")
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    possible = KINDS if chosen.provider == "container" else ("runner", "worker", "gateway")
    kinds = possible if chosen.kinds is None else tuple(chosen.kinds.split(","))
    if not set(kinds) <= set(possible):
        options.error(f"--kinds: with {chosen.provider} sandboxes there are {', '.join(possible)}")
    report = BenchReport("soak")
    minutes = min(0.5, chosen.minutes) if chosen.quick else chosen.minutes
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # it cleans up after itself then, too
    asyncio.run(soak(report, minutes=minutes, provider=chosen.provider, kinds=kinds, seed=chosen.seed))
    return report.print(as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
