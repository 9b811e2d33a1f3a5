"""Many machines: what the channel and a call of a Ray actor add to an action, and how a fleet joins and dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import uvloop

from bench.cluster import channel, fleet, local_process, strains
from bench.report import BenchReport, arguments
from bench.sandbox import IMAGE
from gateway.invocations.logs import configure

ROOT = Path(__file__).resolve().parents[2]
PEER_S, MAKE_S = 180.0, 300.0


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and say whether every check holds."""
    given = arguments("cluster", argv)
    configure("critical")  # what is lost here is lost on purpose
    report = BenchReport("cluster")
    rounds = 400 if given.quick else 2000
    cpu_us = uvloop.run(channel.no_ops(report, rounds))
    peer(report, cpu_us, 1000 if given.quick else 5000)
    uvloop.run(channel.frames(report, 1.0 if given.quick else 5.0))
    if _docker():
        uvloop.run(channel.commands(report, 100 if given.quick else 400))
        local_process.compare(report, 6 if given.quick else 20)
        uvloop.run(strains.files(report, 100 if given.quick else 400))
    else:
        report.note("no Docker: what commands cost, beside files and by cluster.local: process, was not measured")
    uvloop.run(fleet.crowd(report, 200 if given.quick else 1000, 2.0 if given.quick else 10.0))
    uvloop.run(fleet.losses(report, 150 if given.quick else 400))
    report.note("log_line_cpu_us is the channel's part: what the log's store costs is the same for a local action")
    uvloop.run(strains.frozen(report, 2 if given.quick else 5))
    uvloop.run(strains.strangers(report, 1000 if given.quick else strains.STRANGERS, 2.0 if given.quick else 5.0))
    uvloop.run(strains.deaf(report))
    return report.print(as_json=given.json)


def peer(report: BenchReport, channel_us: float, count: int) -> None:
    """The same no-op as a call of a Ray actor, in an environment of its own."""
    try:
        made = subprocess.run(
            [str(ROOT / "scripts" / "ray-environment")], capture_output=True, timeout=MAKE_S, check=True
        )
        command = [made.stdout.decode().strip(), str(ROOT / "bench/cluster/actor_peer.py")]
        command += [str(count), str(channel.IN_FLIGHT)]
        alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "-"]
        own = subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0
        done = subprocess.run(
            [*alone, *command] if own else command, capture_output=True, timeout=PEER_S, check=True, cwd="/"
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        report.note(f"no Ray: actor_cpu_over_channel was not measured ({type(error).__name__})")
        return
    figures = {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}
    report.figure(f"actor_{channel.IN_FLIGHT}", figures)
    report.check("actor_cpu_over_channel", round(found["cpu_us"] / channel_us, 2), 5.0, "higher")


def _docker() -> bool:
    words = ["docker", "image", "inspect", IMAGE]
    try:
        return subprocess.run(words, capture_output=True, env=dict(os.environ), check=False).returncode == 0
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
