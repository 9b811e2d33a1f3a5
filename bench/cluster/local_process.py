"""This machine inline against a daemon of its own: what a command costs the gateway, and how many run a second.

Two gateways serve side by side and are asked by turns, so that what else the machine does meets both alike.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from bench.report import BenchReport, median
from bench.serving import IMAGE, ROOT, process_cpu_s
from tangram import Client

START_S, STOP_S, LOOK_S = 120.0, 60.0, 0.05
#: Trajectories that run a command each at once, and commands of each in one turn.
TRAJECTORIES, COMMANDS = 8, 10


@dataclass(slots=True)
class LocalGateway:
    """One of the two, and what its turns gave."""

    kind: str
    pid: int
    client: Client
    per_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)

    def turn(self, *, counted: bool = True) -> None:
        """Run the commands of every trajectory, all trajectories at once."""
        began_s, spent_s = time.monotonic(), process_cpu_s(self.pid)
        with ThreadPoolExecutor(TRAJECTORIES) as pool:
            list(pool.map(self._commands, range(TRAJECTORIES)))
        number = TRAJECTORIES * COMMANDS
        if counted:
            self.per_s.append(number / (time.monotonic() - began_s))
            self.cpu_us.append((process_cpu_s(self.pid) - spent_s) / number * 1e6)

    def _commands(self, number: int) -> None:
        for _ in range(COMMANDS):
            ended = self.client.invoke("shell", {"argv": ["true"]}, trajectory=f"t{number}")
            if ended.state != "succeeded":
                raise RuntimeError(f"{self.kind}: {ended.state}: {ended.message}")


@contextmanager
def served(kind: str, directory: Path) -> Iterator[LocalGateway]:
    """A gateway of which this machine is one core, inline or by a daemon of its own."""
    config = directory / "tangram.yaml"
    shell = {"runtime": "exec", "cost": {"cpu": 1}, "idempotent": True, "queue_timeout": "2m"}
    document = {
        "version": 1,
        "server": {"port": 0, "grpc_port": 0, "auth": "none", "state_dir": str(directory / "state")},
        "node": {"memory": "4Gi"},
        "cluster": {"listen": "127.0.0.1:0", "local": kind},
        "sandbox": {"provider": "container", "image": IMAGE, "memory": "128Mi"},
        "functions": {"shell": shell},
    }
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    words = [sys.executable, "-m", "gateway", "serve", "--log-level", "error", str(config)]
    with (directory / "out").open("wb") as out:
        process = subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        with Client(_address(directory / "out", process)) as client:
            client.invoke("shell", {"argv": ["true"]})  # waits until the machine serves
            yield LocalGateway(kind, process.pid, client)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        finally:
            process.kill()
            left = [sys.executable, "-m", "gateway", "clean", "--yes", str(directory / "state")]
            subprocess.run(left, cwd=ROOT, check=False, capture_output=True, timeout=STOP_S)


def _address(out: Path, process: subprocess.Popen[bytes]) -> str:
    ends_s = time.monotonic() + START_S
    while time.monotonic() < ends_s and process.poll() is None:
        found = re.search(r"page: (http://[^/\s]+)", out.read_text(encoding="utf-8"))
        if found is not None:
            return found[1]
        time.sleep(LOOK_S)
    raise RuntimeError(f"the gateway does not serve: {out.read_text(encoding='utf-8')[-2000:]}")


def compare(report: BenchReport, turns: int) -> None:
    """Measure both by turns."""
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as place:
        directories = [Path(place) / kind for kind in ("inline", "process")]
        for directory in directories:
            directory.mkdir()
        with served("inline", directories[0]) as inline, served("process", directories[1]) as process:
            for each in (inline, process):
                each.turn(counted=False)
            for number in range(turns):
                for each in (inline, process) if number % 2 else (process, inline):
                    each.turn()
    figures: dict[str, float | int] = {}
    for each in (inline, process):
        figures |= {f"{each.kind}_cpu_us": round(median(each.cpu_us)), f"{each.kind}_per_s": round(median(each.per_s))}
    report.figure("local", {**figures, "turns": turns})
    cpu = median([own / other for own, other in zip(process.cpu_us, inline.cpu_us, strict=True)])
    rate = median([own / other for own, other in zip(process.per_s, inline.per_s, strict=True)])
    report.check("process_cpu_over_inline", round(cpu, 3), 0.6, "lower")
    report.check("process_per_s_over_inline", round(rate, 3), 1.0, "higher")
