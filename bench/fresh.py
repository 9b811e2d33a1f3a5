"""What an action in a sandbox that nobody has used costs: processor time, by who spends it.

    python -m bench.fresh [--json]                               # this checkout
    python -m bench.fresh --before DIRECTORY --turns 3           # that one and this one in turns

Pytest actions as of `examples/trl_grpo`, each in a container of its own, through a gateway of its own process, on an
engine of its own: its processes and containers are in control groups of their own, so that whatever else runs on the
machine is not counted. What the kernel does for them in threads of its own is not, either.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.private_docker import PrivateDocker, private_docker
from bench.report import BenchReport, Figure, median, parser
from tangram import AsyncClient

IMAGE = "tangram-base:bookworm"
ACCOUNTS = Path("/sys/fs/cgroup/cpuacct")
TOKEN = "bench-bench-bench"
CONFIG = """
version: 1
server: {{state_dir: {directory}/state, port: 0, grpc_port: 0, token: bench-bench-bench}}
sandbox: {{provider: container, image: "{image}", memory: 256Mi}}
functions:
  passes:
    runtime: pytest
    sandbox:
      warm: {{min: 2, max: 4}}
      env: {{PYTEST_DISABLE_PLUGIN_AUTOLOAD: "1"}}
    pytest: {{args: ["-p", "no:cacheprovider"]}}
    timeout: 60s
    idempotent: true
    max_queued: 4096
"""
SUITE = """from program import f


CASES = [
    (2, 3, 5),
    (7, 4, 11),
    (-5, 1, -4),
    (0, 6, 6),
]


def test_it():
    assert [f(a, b) for a, b, _ in CASES] == [wanted for _, _, wanted in CASES]
"""
#: Actions before those that are counted; then the pool is as large as it becomes.
FIRST = 8
START_S, SETTLED_S, SETTLE_S = 60.0, 1.5, 60.0
#: Who spends processor time, as told.
PARTS = ("gateway", "dockerd", "containerd", "shims and runc", "in the containers")


@dataclass(frozen=True, slots=True)
class ProcessorSeconds:
    """Processor seconds since the start, by part."""

    parts: Mapping[str, float]

    def since(self, earlier: ProcessorSeconds) -> dict[str, float]:
        return {name: value - earlier.parts[name] for name, value in self.parts.items()}


class ProcessorAccounts:
    """The control groups in which the engine, its containers and a gateway are counted."""

    def __init__(self, docker: PrivateDocker) -> None:
        self._docker = docker
        self._containers = ACCOUNTS / docker.name
        self._engine, self.gateway = (ACCOUNTS / f"{docker.name}-{name}" for name in ("engine", "gateway"))
        for group in (self._engine, self.gateway):
            group.mkdir(exist_ok=True)
        file = docker.directory / "run/containerd/containerd.pid"
        self._daemons = {"dockerd": docker.pid, "containerd": int(file.read_text(encoding="ascii"))}
        for pid in self._daemons.values():
            (self._engine / "cgroup.procs").write_text(str(pid))

    def spent(self) -> ProcessorSeconds:
        daemons = {name: _process_s(pid) for name, pid in self._daemons.items()}
        return ProcessorSeconds(
            {
                "gateway": _group_s(self.gateway),
                **daemons,
                "shims and runc": _group_s(self._engine) - sum(daemons.values()),
                "in the containers": _group_s(self._containers) if self._containers.exists() else 0.0,
            }
        )

    def remove(self) -> None:
        for group in (self._engine, self.gateway):
            if group.exists():
                group.rmdir()


def _group_s(group: Path) -> float:
    return int((group / "cpuacct.usage").read_text(encoding="ascii")) / 1e9


def _process_s(pid: int) -> float:
    """Seconds of a process and its threads, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def gateway(checkout: Path, docker: PrivateDocker, accounts: ProcessorAccounts, directory: Path) -> Iterator[str]:
    """Serve a checkout's gateway on the engine; yields its address."""
    directory.mkdir()
    (directory / "tangram.yaml").write_text(CONFIG.format(directory=directory, image=IMAGE))
    enter = ["sh", "-c", f'echo $$ > {accounts.gateway}/cgroup.procs; exec "$@"', "sh"]
    command = [sys.executable, "-c", "from tangram.cli import run; run()", "serve", str(directory)]
    environment = {**os.environ, **docker.environment, "PYTHONPATH": str(checkout)}
    with (directory / "log").open("wb") as log:
        serving = subprocess.Popen([*enter, *command], cwd=directory, env=environment, stdout=log, stderr=log)
    try:
        yield _address(directory / "log", serving)
    finally:
        serving.send_signal(signal.SIGINT)
        serving.wait(START_S)


def _address(log: Path, serving: subprocess.Popen[bytes]) -> str:
    """Wait until it serves; raises RuntimeError with the end of its log where it does not."""
    deadline_s = time.monotonic() + START_S
    while serving.poll() is None and time.monotonic() < deadline_s:
        for line in log.read_text(encoding="utf-8").splitlines():
            told = json.loads(line) if line.startswith("{") else {}
            if told.get("event") == "serving":
                return str(told["http"])
        time.sleep(0.05)
    raise RuntimeError(f"the gateway does not serve:\n{log.read_text(encoding='utf-8')[-2000:]}")


@contextmanager
def counted_docker() -> Iterator[tuple[PrivateDocker, ProcessorAccounts]]:
    """An engine of its own whose processor time is counted."""
    with ExitStack() as stack:
        docker = stack.enter_context(private_docker(IMAGE))
        accounts = ProcessorAccounts(docker)
        yield docker, accounts
    accounts.remove()


def settle(docker: PrivateDocker) -> int:
    """Wait until no container has come or gone for a while; return how many there are."""
    deadline_s, since_s, before = time.monotonic() + SETTLE_S, time.monotonic(), docker.containers()
    while time.monotonic() < deadline_s and time.monotonic() - since_s < SETTLED_S:
        time.sleep(0.25)
        now = docker.containers()
        if now != before:
            since_s, before = time.monotonic(), now
    return len(before)


async def act(client: AsyncClient, key: str, count: int) -> float:
    """Run so many different programs at once; return the seconds that they took."""
    programs = [f"# {key}, {number}\ndef f(a, b):\n    return a + b\n" for number in range(count)]
    inputs = [{"tests": {"program.py": program, "test_program.py": SUITE}} for program in programs]
    begun_s = time.monotonic()
    ends = await client.map("passes", inputs, key=key, concurrency=count)
    wrong = [end.result for end in ends if not (isinstance(end.result, dict) and end.result.get("reward") == 1.0)]
    if wrong:
        raise RuntimeError(f"not passed: {wrong[0]}")
    return time.monotonic() - begun_s


async def turn(
    checkout: Path, docker: PrivateDocker, accounts: ProcessorAccounts, directory: Path, count: int
) -> dict[str, float]:
    """Serve a checkout's gateway, run the actions, and return seconds for each of them by part, and of the clock."""
    with gateway(checkout, docker, accounts, directory) as address:
        async with AsyncClient(address, token=TOKEN) as client:
            await act(client, f"first-{directory.name}", FIRST)
            before = settle(docker)
            earlier = accounts.spent()
            wall_s = await act(client, f"counted-{directory.name}", count)
            after = settle(docker)
            told = accounts.spent().since(earlier)
    if before != after:
        raise RuntimeError(f"{before} containers before the actions, {after} after them")
    return {name: value / count for name, value in told.items()} | {"wall": wall_s / count}


def measure(report: BenchReport, checkouts: Mapping[str, Path], turns: int, count: int) -> None:
    """Play the checkouts in turns."""
    if not ACCOUNTS.is_dir():
        report.note(f"left out: processor time is read from control groups of version 1, and there is no {ACCOUNTS}")
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory(prefix="tangram-fresh-") as name, counted_docker() as (docker, accounts):
        Path(name).chmod(0o755)
        for number in range(turns):
            for which, checkout in checkouts.items():
                place = Path(name) / f"{which}-{number}"
                found[which].append(asyncio.run(turn(checkout, docker, accounts, place, count)))
                told = {key: round(value, 4) for key, value in found[which][-1].items()}
                print(which, told, "load", os.getloadavg()[0], file=sys.stderr, flush=True)
    total: dict[str, float] = {}
    for which, rounds in found.items():
        middle = {part: median([each[part] for each in rounds]) for part in (*PARTS, "wall")}
        total[which] = median([sum(each[part] for part in PARTS) for each in rounds])
        figures: dict[str, Figure] = {f"{part}, ms": round(1e3 * value, 1) for part, value in middle.items()}
        report.figure(f"{which}: processor time of an action", figures | {"all, ms": round(1e3 * total[which], 1)})
    if len(total) == 2:
        report.check("processor_time_now_over_before", total["now"] / total["before"], limit=1.05, better="lower")


def main() -> int:
    flags = parser("fresh")
    flags.add_argument("--before", type=Path, help="checkout of an earlier commit, played in turns with this one")
    flags.add_argument("--turns", type=int, default=1)
    flags.add_argument("--actions", type=int, default=60, help="actions of a turn")
    given = flags.parse_args()
    report = BenchReport("fresh")
    now = {"now": Path(__file__).resolve().parents[1]}
    checkouts = {"before": given.before.resolve(), **now} if given.before else now
    measure(report, checkouts, given.turns, 20 if given.quick else given.actions)
    return report.print(as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
