"""The soak: actions without end while runners, containers and (asked for) the engine itself are killed at random.

``python -m bench.soak [--minutes 10] [--kill-engine] [--seed 1] [--json]``: afterwards nothing may be leaked, and
every action must have had a typed end.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from bench.report import Report, parser
from bench.sandbox import House, house
from manager.errors import TangramError

SCRIPTS = Path(__file__).parents[1] / "scripts"
TRAJECTORIES = 12
#: What an agent does, and what goes wrong with it.
DEEDS: tuple[dict[str, object], ...] = (
    {"argv": ["true"]},
    {"command": "echo x >> file; wc -l < file"},
    {"command": "sleep 0.3"},
    {"command": "sleep 500 >/dev/null 2>&1 &"},
    {"command": "head -c 3000000 /dev/urandom"},
    {"command": "trap '' TERM; (setsid sleep 100 &); sleep 100"},
    {"command": "exit 3"},
    {"argv": ["python3", "-c", "x = bytearray(10**11)"]},
    {"command": ":(){ :|:& };: ; sleep 50"},
)


class Soak:
    """Counts what happens until the time is over."""

    def __init__(self, parts: House, seed: int, until_s: float) -> None:
        self._house = parts
        self._random = random.Random(seed)
        self._until_s = until_s
        self.ends: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._until_s

    async def live(self, trajectory: str) -> None:
        """One trajectory's actions, now and then cancelled or ended and begun anew."""
        while not self.over:
            deed = self._random.choice(DEEDS)
            acting = asyncio.ensure_future(self._house.act(trajectory, deed, timeout_s=1.5))
            if self._random.random() < 0.05:
                await asyncio.wait([acting], timeout=self._random.random())
                self._house.engine.cancel(f"bench-{self._house.count}", "soak")
            outcome = (await acting).outcome
            self.ends[outcome.state.value if outcome.reason is None else outcome.reason.value] += 1
            if self._random.random() < 0.03:
                await self._house.engine.end_trajectory(trajectory)

    async def kill(self, *, engine: bool) -> None:
        """A runner or a container every other second; the engine every half minute."""
        engine_due_s = time.monotonic() + 20
        while not self.over:
            await asyncio.sleep(2 * self._random.random())
            living = [str(entry["sandbox"]) for entry in self._house.environments.list()]
            if engine and time.monotonic() > engine_due_s:
                await asyncio.to_thread(_kill_engine)
                engine_due_s = time.monotonic() + 30
                self.kills["engine"] += 1
            elif living:
                how = self._random.choice(("runner", "container"))
                await asyncio.to_thread(_kill_one, self._random.choice(living), how)
                self.kills[how] += 1


def _kill_one(sandbox: str, how: str) -> None:
    name = f"tangram-{sandbox}"
    if how == "container":
        subprocess.run(["docker", "rm", "-f", name], capture_output=True, check=False)
        return
    found = subprocess.run(["docker", "inspect", "-f", "{{.State.Pid}}", name], capture_output=True, check=False)
    if found.returncode == 0 and int(found.stdout) > 0:
        with suppress(ProcessLookupError):
            os.kill(int(found.stdout), signal.SIGKILL)


def _kill_engine() -> None:
    """As a crash would; the containers live on (live restore) and the engine comes back."""
    with suppress(ProcessLookupError):
        os.kill(int(Path("/var/run/docker.pid").read_text(encoding="ascii")), signal.SIGKILL)
    subprocess.run([SCRIPTS / "docker-up"], capture_output=True, check=True, timeout=120)


def _leaks() -> dict[str, int]:
    """Containers, runners and control groups on this machine that are a sandbox's."""
    listed = subprocess.run(["docker", "ps", "-aq", "--no-trunc"], capture_output=True, text=True, check=True)
    containers = set(listed.stdout.split())
    runners = 0
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            runners += b"/.tangram/runner.py" in process.read_bytes()
    groups = [group for group in Path("/sys/fs/cgroup").glob("**/docker/*") if group.is_dir() and len(group.name) == 64]
    orphaned = {group.name for group in groups} - containers
    return {"containers": len(containers), "runners": runners, "cgroups": len(orphaned)}


async def soak(report: Report, *, minutes: float, engine: bool, seed: int) -> None:
    before = _leaks()
    async with house() as parts:
        await parts.environments.start()
        run = Soak(parts, seed, time.monotonic() + 60 * minutes)
        async with asyncio.TaskGroup() as group:
            group.create_task(run.kill(engine=engine))
            for index in range(TRAJECTORIES):
                group.create_task(run.live(f"soak-{index}"))
        for index in range(TRAJECTORIES):
            with suppress(TangramError):
                await parts.engine.end_trajectory(f"soak-{index}")
        report.figure("pools_after", str(parts.engine.resources())[:2000])
    after = _leaks()
    report.figure("actions", sum(run.ends.values()))
    report.figure("ends", dict(sorted(run.ends.items())))
    report.figure("kills", dict(sorted(run.kills.items())))
    for name, count in after.items():
        report.check(f"leaked_{name}", count - before[name], limit=0, better="lower")
    report.check("untyped_ends", run.ends["internal"], limit=0, better="lower")


def main() -> int:
    options = parser("soak")
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--kill-engine", action="store_true", help="also kill dockerd (root; nobody else may need it)")
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    report = Report("soak")
    minutes = min(0.5, chosen.minutes) if chosen.quick else chosen.minutes
    asyncio.run(soak(report, minutes=minutes, engine=chosen.kill_engine, seed=chosen.seed))
    return report.print(as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
