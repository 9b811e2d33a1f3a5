"""Many machines: what the channel and a call of a Ray actor add to an action, and how a fleet joins and dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.cluster import channel, fleet, local_process, strains
from bench.report import BenchReport, parser
from bench.serving import IMAGE
from gateway.invocations.logs import configure

ROOT = Path(__file__).resolve().parents[2]
PEER_S, MAKE_S = 180.0, 300.0


@dataclass(frozen=True, slots=True)
class Part:
    """What is measured in one go, and the checks that come of it, by the names of a whole run."""

    checks: tuple[str, ...]
    play: Callable[[BenchReport, bool], None]
    docker: bool = False


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and say whether every check holds."""
    flags = parser("cluster")
    flags.add_argument("--only", metavar="NAME[,NAME]", help="only what these checks need (a run tells their names)")
    given = flags.parse_args(argv)
    names = {check for part in PARTS for check in part.checks}
    wanted = set(filter(None, given.only.split(","))) if given.only is not None else names
    if not wanted or not wanted <= names:
        flags.error(f"--only takes names of checks: {', '.join(sorted(names))}")
    configure("critical")  # what is lost here is lost on purpose
    report, here = BenchReport("cluster"), _docker()

    def play() -> None:
        for part in PARTS:
            if wanted.isdisjoint(part.checks):
                continue
            if part.docker and not here:
                report.note(f"no Docker, so not measured: {', '.join(part.checks)}")
                continue
            with report.part(part.checks[0]):
                part.play(report, given.quick)

    return report.run(play, as_json=given.json)


def no_ops(report: BenchReport, quick: bool) -> None:
    """The channel's no-ops, and the same by the peer."""
    cpu_us = uvloop.run(channel.no_ops(report, 400 if quick else 2000))
    report.note("log_line_cpu_us is the channel's part: what the log's store costs is the same for a local action")
    peer(report, cpu_us, 1000 if quick else 5000)


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


PARTS = (
    Part(("channel_minus_local_p50_ms", "log_line_cpu_us", "actor_cpu_over_channel"), no_ops),
    Part(("channel_frames_per_s",), lambda report, quick: uvloop.run(channel.frames(report, 1.0 if quick else 5.0))),
    Part(
        ("exec_minus_local_p50_ms", "gateway_cpu_over_local"),
        lambda report, quick: uvloop.run(channel.commands(report, 100 if quick else 400)),
        docker=True,
    ),
    Part(
        ("process_cpu_over_inline", "process_per_s_over_inline"),
        lambda report, quick: local_process.compare(report, 6 if quick else 20),
        docker=True,
    ),
    Part(
        ("file_slowdown_p99",),
        lambda report, quick: uvloop.run(strains.files(report, 100 if quick else 400)),
        docker=True,
    ),
    Part(
        ("join_1000_s", "beats_1000_core_share"),
        lambda report, quick: uvloop.run(fleet.crowd(report, 200 if quick else 1000, 2.0 if quick else 10.0)),
    ),
    Part(
        ("first_lease_after_join_ms", "node_loss_lost_idempotent"),
        lambda report, quick: uvloop.run(fleet.losses(report, 150 if quick else 400)),
    ),
    Part(("frozen_node_noticed_s",), lambda report, quick: uvloop.run(strains.frozen(report, 2 if quick else 5))),
    Part(
        ("strangers_loop_lag_ms",),
        lambda report, quick: uvloop.run(
            strains.strangers(report, 1000 if quick else strains.STRANGERS, 2.0 if quick else 5.0)
        ),
    ),
    Part(("deaf_node_loop_lag_ms",), lambda report, quick: uvloop.run(strains.deaf(report))),
)


if __name__ == "__main__":
    sys.exit(main())
