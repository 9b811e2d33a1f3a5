"""Machines of a Ray cluster on this one machine: each a raylet, in a network namespace of its own where root allows."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TextIO

#: Addresses of the machines' own network; the first is the head's, and the gateway's.
SUBNET = "10.77.0"
GCS_PORT = 6379
POOL = "tangram-pool"
#: Ports of the workers of each machine, where all share one network.
WORKER_PORTS = 500
STOP_S = 20.0
#: Read by what Ray starts: a machine that is gone is told within seconds.
SETTINGS = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",
}


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
            self.raylet.wait(STOP_S)
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
        deadline_s = time.monotonic() + STOP_S
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
                    host.raylet.wait(STOP_S)
            host.kill()
            if host.network is not None:
                host.network.kill()
                host.network.wait(STOP_S)


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
