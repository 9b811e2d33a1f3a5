"""Rollouts over a real Ray cluster whose machines come and go (`make cluster-demo`), and what became of them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TextIO

import yaml

from tangram import AsyncClient, Client, InvocationResult
from tangram.errors import TangramError

ROOT = Path(__file__).resolve().parents[1]
IMAGE = os.environ.get("TANGRAM_BASE_IMAGE", "tangram-base:bookworm")
#: Seconds for the whole, for a gateway to serve, and for machines to join.
LIMIT_S, START_S, JOIN_S, STOP_S = 270.0, 60.0, 90.0, 60.0
TRAJECTORIES, TRIES, PROBES, PROBES_AT_ONCE = 8, 3, 40, 4
#: Addresses of the machines' own network; the first is the head's, and the gateway's.
SUBNET = "10.77.0"
GCS_PORT = 6379
POOL = "tangram-pool"
#: Ports of the workers of each machine, where all share one network.
WORKER_PORTS = 500
HOST_STOP_S = 20.0
#: Read by what Ray starts: a machine that is gone is told within seconds.
SETTINGS = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",
}
BROKEN = "def mean(values):\n    return sum(values) / (len(values) - 1)\n"
TESTS = "from calc import mean\n\ndef test_mean():\n    assert mean([1, 2, 3]) == 2\n"
MEND = "sed -i 's/(len(values) - 1)/len(values)/' project/calc.py"


# -- the machines: each a raylet, in a network namespace of its own where root allows


@dataclass(slots=True, eq=False)
class RayHost:
    """One machine: its raylet, and the process that holds its network if it has one of its own."""

    name: str
    address: str
    raylet: subprocess.Popen[bytes] | None = None
    network: subprocess.Popen[bytes] | None = None

    def processes(self) -> list[int]:
        """Return every process in the machine's own network, but the one that holds it; without one, Ray's."""
        if self.network is None:
            return [] if self.raylet is None else _descendants(self.raylet.pid)
        mine = _network_of(str(self.network.pid))
        found = []
        for each in Path("/proc").glob("[0-9]*/ns/net"):
            with suppress(OSError):
                if each.stat().st_ino == mine and int(each.parts[2]) != self.network.pid:
                    found.append(int(each.parts[2]))
        return found

    def kill(self) -> int:
        """kill -9 of all that runs there, as if its plug were pulled; return how many processes that were."""
        pids = self.processes()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.raylet is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.raylet.pid, signal.SIGKILL)
            self.raylet.wait(HOST_STOP_S)
        return max(1, len(pids))


@dataclass(slots=True)
class RayHosts:
    """A head and the machines that have joined it."""

    python: str
    directory: Path
    own_networks: bool
    log: TextIO
    hosts: list[RayHost] = field(default_factory=list)

    @property
    def head(self) -> str:
        return f"{SUBNET}.1" if self.own_networks else "127.0.0.1"

    @property
    def address(self) -> str:
        return f"{self.head}:{GCS_PORT}"

    def begin(self) -> None:
        """Start the head; raises RuntimeError if it does not come up."""
        if self.own_networks:
            _ip("link", "add", "tangram", "type", "bridge")
            _ip("addr", "add", f"{self.head}/24", "dev", "tangram")
            _ip("link", "set", "tangram", "up")
        host = RayHost("head", self.head)
        self.hosts.append(host)
        self._start(host, "--head", f"--port={GCS_PORT}", "--include-dashboard=false", "--num-cpus=0")

    def add(self, name: str, cpus: int) -> RayHost:
        """Add a machine to the pool; it is there once Ray says so."""
        number = len(self.hosts) + 1
        host = RayHost(name, f"{SUBNET}.{number}" if self.own_networks else "127.0.0.1")
        self.hosts.append(host)
        if self.own_networks:
            host.network = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
            self._plug(host, number)
        self._start(host, f"--address={self.address}", f"--num-cpus={cpus}", f"--labels={POOL}=demo")
        return host

    def _plug(self, host: RayHost, number: int) -> None:
        """Connect a machine's network to the others' by a pair of devices."""
        assert host.network is not None
        pid, ours, theirs = str(host.network.pid), f"tangram{number}", f"inner{number}"
        deadline_s = time.monotonic() + HOST_STOP_S
        while _network_of(pid) == _network_of("self"):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{host.name} gets no network of its own")
            time.sleep(0.01)
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs)
        _ip("link", "set", theirs, "netns", pid)
        _ip("link", "set", ours, "master", "tangram", "up")
        inside = ["nsenter", "--net", "--target", pid]
        for words in (("addr", "add", f"{host.address}/24", "dev", theirs), ("link", "set", theirs, "up")):
            subprocess.run([*inside, "ip", *words], check=True)
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)

    def _start(self, host: RayHost, *words: str) -> None:
        inside = [] if host.network is None else ["nsenter", "--net", "--target", str(host.network.pid)]
        number = len(self.hosts)
        ports = [] if self.own_networks else _worker_ports(number)
        ray = str(Path(self.python).with_name("ray"))
        command = [*inside, ray, "start", "--block", f"--node-ip-address={host.address}", *ports, *words]
        # A directory of its own, as each machine has: Ray looks there for a cluster that runs already.
        environment = os.environ | SETTINGS | {"RAY_TMPDIR": str(self.directory)}
        host.raylet = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def end(self) -> None:
        """End every machine, the head last."""
        for host in reversed(self.hosts):
            if host.raylet is not None and host.raylet.poll() is None:
                host.raylet.terminate()
                with suppress(subprocess.TimeoutExpired):
                    host.raylet.wait(HOST_STOP_S)
            host.kill()
            if host.network is not None:
                host.network.kill()
                host.network.wait(HOST_STOP_S)


def _descendants(pid: int) -> list[int]:
    """Return a process and all that it has started, as far as it is still theirs."""
    parents: dict[int, int] = {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(each.parts[2])] = int(each.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def _network_of(pid: str) -> int:
    return Path(f"/proc/{pid}/ns/net").stat().st_ino


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _worker_ports(number: int) -> list[str]:
    least = 20000 + number * WORKER_PORTS
    return [f"--min-worker-port={least}", f"--max-worker-port={least + WORKER_PORTS - 1}"]


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread after so long."""

    def over(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


# -- what happens


@dataclass(slots=True)
class DemoRun:
    """What happened, as the demo saw it."""

    began_s: float = field(default_factory=time.monotonic)
    rewards: dict[str, float] = field(default_factory=dict)
    restarts: int = 0
    gave_up: int = 0
    halfway: asyncio.Event = field(default_factory=asyncio.Event)
    probes: Counter[str] = field(default_factory=Counter)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began_s:6.1f} s  {text}", flush=True)


def main() -> int:
    """Run it; the exit status says whether everything ended as promised."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it leaves nothing behind then, too
    run = DemoRun()
    directory = Path(tempfile.mkdtemp(prefix="tcd-", dir="/tmp"))  # sockets have short names
    kept = ROOT / ".demo" / "cluster"
    kept.mkdir(parents=True, exist_ok=True)
    own = "--own-networks" in sys.argv
    status = 1
    with (kept / "ray.log").open("w") as log:
        hosts = RayHosts(os.environ["TANGRAM_RAY_PYTHON"], directory, own, log)
        try:
            with time_limit(LIMIT_S):
                status = _play(run, hosts, kept)
        except (TimeoutError, RuntimeError, subprocess.SubprocessError, TangramError) as error:
            run.say(f"not done: {type(error).__name__}: {error}; logs lie in {kept.relative_to(ROOT)}")
        finally:
            hosts.end()
            _clean(directory)
    run.say("everything that was started is gone")
    return status


def _play(run: DemoRun, hosts: RayHosts, kept: Path) -> int:
    where = "each in a network of its own" if hosts.own_networks else "told apart by their ports"
    run.say(f"a Ray cluster of three nodes, {where}: a head and two machines of the pool")
    hosts.begin()
    _until_ray(hosts, 1)
    for number, name in enumerate(("n1", "n2"), start=2):
        hosts.add(name, cpus=2)
        if not hosts.own_networks:
            _until_ray(hosts, number)  # two raylets of one address must not begin at once
    _until_ray(hosts, 3)
    with _gateway(hosts, kept) as url, Client(url) as client:
        run.say(f"a gateway with cluster.ray on {url}, which only schedules; it holds no Ray")
        _until_nodes(run, client, 2)
        asyncio.run(_rollouts(run, hosts, url))
        status = _judge(run, client)
    run.say("the gateway has ended its daemons and given back what Ray held for it")
    return status


async def _rollouts(run: DemoRun, hosts: RayHosts, url: str) -> None:
    """The batch, and in the middle of it one machine dies and another joins."""
    run.say(f"{TRAJECTORIES} trajectories of commands and a pytest reward, and {PROBES} idempotent actions beside them")
    async with AsyncClient(url) as client:
        gate = asyncio.Semaphore(PROBES_AT_ONCE)
        work = [_trajectory(run, client, number) for number in range(TRAJECTORIES)]
        work += [_probe(run, client, gate, number) for number in range(PROBES)]
        await asyncio.gather(*work, _upheaval(run, hosts, client))


async def _upheaval(run: DemoRun, hosts: RayHosts, client: AsyncClient) -> None:
    await run.halfway.wait()
    victim = hosts.hosts[-1]
    homes = {each.node: (each.running, each.trajectories) for each in await client.nodes()}
    count = await asyncio.to_thread(victim.kill)
    await asyncio.to_thread(_kill_daemons, hosts, victim.name)
    run.say(f"machine {victim.name} is dead: kill -9 of its {count} processes; held before (running, living): {homes}")
    await asyncio.to_thread(hosts.add, "n3", 2)
    run.say("machine n3 joins the Ray cluster; nobody tells the gateway")
    known = set(homes)
    async with asyncio.timeout(JOIN_S):
        while {each.node for each in await client.nodes() if each.state == "ready"} <= known:  # noqa: ASYNC110
            await asyncio.sleep(0.25)
    run.say("its actor holds the reservation, its daemon has joined by a ticket, and it serves")


async def _trajectory(run: DemoRun, client: AsyncClient, number: int) -> None:
    """One rollout, begun again from nothing where its machine was lost, as a trainer would."""
    for attempt in range(1, TRIES + 1):
        name = f"rollout-{number}-{attempt}"
        try:
            async with client.trajectory(name, function="shell") as sandbox:
                for path, text in (("calc.py", BROKEN), ("test_calc.py", TESTS)):
                    (await sandbox.exec(f"mkdir -p project && cat > project/{path}", stdin=text)).raise_for_failure()
                before = await sandbox.invoke("reward", {"cwd": "project"})
                for _ in range(4):
                    (await sandbox.exec("sleep 1; ls project")).raise_for_failure()  # an agent at work
                (await sandbox.exec(MEND)).raise_for_failure()
                after = await sandbox.invoke("reward", {"cwd": "project"})
            pair = [float(dict(each.raise_for_failure().result)["reward"]) for each in (before, after)]
        except TangramError as error:
            run.say(f"{name}: {error.code}: {str(error)[:110]}; it begins again")
            run.restarts += 1
            continue
        run.rewards[name] = pair[1]
        if pair != [0.0, 1.0]:
            run.say(f"{name}: rewards {pair} where 0 and 1 were expected")
        return
    run.gave_up += 1


async def _probe(run: DemoRun, client: AsyncClient, gate: asyncio.Semaphore, number: int) -> None:
    """An action of no trajectory that may run elsewhere if its machine is lost."""
    async with gate:
        result = await client.invoke("probe", {"command": f"sleep 1; echo {number}"})
        run.probes[result.state] += 1
        if sum(run.probes.values()) >= PROBES // 4:
            run.halfway.set()


# -- what became of it


def _judge(run: DemoRun, client: Client) -> int:
    """Print the summary; 0 if every promise held."""
    records = list(client.list(limit=1000))
    again = [each for each in records if each.attempts]
    states = Counter(str(each.state) for each in records)
    reasons = Counter(str(each.reason) for each in records if each.state != "succeeded")
    open_ones = [each.id for each in records if each.ended_at is None]
    twice = [count for count in Counter(each.id for each in records).values() if count > 1]
    lost_probes = [each for each in records if each.function == "probe" and each.state != "succeeded"]
    repeated = [each for each in again if not _may_repeat(each)]
    print("\n  where actions ended:")
    for node, count in sorted(Counter(each.node or "-" for each in records).items()):
        print(f"    {node:<24} {count:>4}")
    promises = (
        (f"{len(records)} actions, each with one end ({_told(states)}; {_told(reasons)})", not open_ones and not twice),
        (f"idempotent actions that were lost ran elsewhere ({len(again)} of {PROBES})", not lost_probes),
        ("nothing that is not idempotent began twice", not repeated),
        (
            f"{len(run.rewards)} of {TRAJECTORIES} rollouts have their reward, {run.restarts} begun again",
            not run.gave_up,
        ),
        ("every reward is what the tests say", all(reward == 1.0 for reward in run.rewards.values())),
    )
    print("  promises:")
    for words, held in promises:
        print(f"    {'kept  ' if held else 'BROKEN'} {words}")
    print(flush=True)
    return 0 if all(held for _, held in promises) else 1


def _may_repeat(record: InvocationResult) -> bool:
    return record.function in ("probe", "reward")


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none failed"


# -- the cluster and the gateway


def _until_ray(hosts: RayHosts, count: int) -> None:
    """Wait until Ray knows so many machines; raises TimeoutError."""
    driver = ROOT / "runtimes/node/ray/driver.py"
    deadline_s = time.monotonic() + JOIN_S
    while time.monotonic() < deadline_s:
        asked = [hosts.python, str(driver), "look", hosts.address]
        with suppress(subprocess.TimeoutExpired, ValueError):
            done = subprocess.run(asked, capture_output=True, timeout=JOIN_S, check=False)
            if len(json.loads(done.stdout)["nodes"]) >= count:
                return
        time.sleep(0.5)
    raise TimeoutError(f"the Ray cluster has not {count} nodes after {JOIN_S:g} s")


def _until_nodes(run: DemoRun, client: Client, count: int) -> None:
    deadline_s = time.monotonic() + JOIN_S
    while sum(each.state == "ready" for each in client.nodes() if not each.local) < count:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"only these joined: {list(client.nodes())}; {list(client.ray_machines())}")
        time.sleep(0.2)
    for each in client.nodes():
        if not each.local:
            run.say(f"{each.node} serves: {each.cores} cores from {each.peer}, sandboxes: {each.isolation[:40]}")


def _document(hosts: RayHosts) -> dict[str, object]:
    shell = {"runtime": "exec", "cost": {"cpu": 1}, "timeout": "1m", "queue_timeout": "2m"}
    name = "ray-{address}" if hosts.own_networks else "ray-{id}"
    ours = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "gateway"]
    return {
        "version": 1,
        "server": {"port": 0, "grpc_port": 0, "state_dir": str(hosts.directory / "gateway"), "drain_grace": "1s"},
        "node": {"cpu": {"cores": "0"}, "memory": "1Gi"},
        "sandbox": {"provider": "container", "image": IMAGE, "memory": "256Mi"},
        "cluster": {
            "listen": f"{hosts.head}:0",
            "local": "none",
            "beat": "500ms",
            "silent": "2s",
            "lost_after": "5s",
            "ray": {
                "address": hosts.address,
                "python": hosts.python,
                "labels": {POOL: "demo"},
                "name": name,
                "state_dir": str(hosts.directory / "nodes" / "{name}"),
                "command": ours,
                "join": ["--config", str(hosts.directory / "node.yaml")],
                "at_end": "release",
            },
        },
        "functions": {
            "shell": shell,
            "probe": shell | {"idempotent": True},
            "reward": {"runtime": "pytest", "cost": {"cpu": 1}, "timeout": "1m", "idempotent": True},
        },
    }


@contextmanager
def _gateway(hosts: RayHosts, kept: Path) -> Iterator[str]:
    """A gateway in a process of its own; yields its address, and ends it as a person would."""
    config = hosts.directory / "tangram.yaml"
    config.write_text(yaml.safe_dump(_document(hosts)))
    sandbox = {"provider": "container", "image": IMAGE, "memory": "256Mi"}
    (hosts.directory / "node.yaml").write_text(yaml.safe_dump({"sandbox": sandbox, "node": {"memory": "2Gi"}}))
    with (kept / "gateway.log").open("wb") as log:
        command = [sys.executable, "-m", "gateway", "serve", str(config)]
        child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            yield _served(kept / "gateway.log", child)
        finally:
            child.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                child.wait(STOP_S)
            child.kill()
            child.wait(STOP_S)


def _served(log: Path, child: subprocess.Popen[bytes]) -> str:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and child.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict) and said.get("event") == "serving":
                    return f"http://{said['http']}"
        time.sleep(0.05)
    raise RuntimeError(f"the gateway does not serve: {log.read_text(errors='replace')[-1500:]}")


def _kill_daemons(hosts: RayHosts, name: str) -> None:
    """kill -9 of a machine's daemon, which is none of Ray's processes; its network names them where it has one."""
    if hosts.own_networks:
        return
    places = sorted((hosts.directory / "nodes").glob("*/pid"), key=lambda each: each.stat().st_mtime)
    with suppress(OSError, ValueError, IndexError):
        os.kill(int(places[-1].read_text()), signal.SIGKILL)


def _clean(directory: Path) -> None:
    """Remove what daemons left behind: a dead one's containers, and every state directory."""
    for place in [*(directory / "nodes").glob("*"), directory / "gateway"]:
        with suppress(OSError, ValueError):
            pid = int((place / "pid").read_text())
            if str(place) in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
        command = [sys.executable, "-m", "gateway", "clean", "--yes", str(place)]
        subprocess.run(command, cwd=ROOT, capture_output=True, timeout=STOP_S, check=False)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
