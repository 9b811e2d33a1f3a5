"""The census: everything on the machine that a gateway, its sandboxes and its engine hold, told from all else."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from bench.private_docker import PrivateDocker
from runtimes.sandbox.environments import TRAJECTORY
from runtimes.sandbox.process import end_left
from runtimes.sandbox.sandbox import descendants
from runtimes.sandbox.spec import SandboxRecord

#: What tells the processes of one run from all others: the environment's variable that names its directory.
MARKER = "TANGRAM_KILLS"
#: Longest time that the kernel takes for what ended with the gateway.
ENDED_S = 10.0
#: The control groups that containers and process sandboxes get.
GROUP = re.compile(r"[0-9a-f]{64}|tangram-[0-9a-f]{16}")


class Census:
    """Counts what belongs to one run."""

    def __init__(self, directory: Path, docker: PrivateDocker | None) -> None:
        self._directory = directory
        self._docker = docker
        #: Sandboxes seen so far, by name: the control groups of processes are found by it.
        self._seen: set[str] = set()

    def look(self) -> None:
        """Remember the sandboxes that there are now."""
        self._seen.update(place.name for place in self._sandboxes())

    def take(self, gateway: int | None) -> dict[str, int]:
        """What there is beside the gateway's own process."""
        self.look()
        engine, temporary = self._docker, self._directory / "tmp"
        counts = {
            "processes": len(set(self._processes()) - {gateway}),
            "zombies": sum(parent == gateway and state == "Z" for _, parent, state in _table()),
            "cgroups": len(list(self._cgroups())),
            "sockets": sum(place.is_socket() for place in self._directory.rglob("*")) + self._bound(),
            "sandbox_directories": len(list(self._sandboxes())),
            "temporary_files": len([*temporary.iterdir(), *self._directory.glob("state*/models/groups-*")]),
        }
        if engine is not None:
            mounts = engine.mounts()
            counts |= {
                "containers": len(engine.containers()),
                "mounts": len(mounts),
                "network_namespaces": sum("/netns/" in place for place in mounts),
                "layers": len(list((engine.directory / "data/overlay2").glob("[0-9a-f]*"))),
                "images": len(engine.docker("images", "--quiet", "--all").split()),
            }
        return counts

    async def ended(self, empty: Mapping[str, int]) -> dict[str, int]:
        """What there is once the gateway has ended and the kernel has taken down what ended with it, if it does."""
        deadline_s = time.monotonic() + ENDED_S
        while True:
            held = await asyncio.to_thread(self.take, None)
            if all(count <= empty[name] for name, count in held.items()) or time.monotonic() > deadline_s:
                return held
            await asyncio.sleep(1.0)

    def who(self) -> list[str]:
        """Those processes in words: id, parent, state and command line."""
        ours = set(self._processes())
        said = []
        for pid, parent, state in _table():
            with suppress(OSError):
                if pid in ours:
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                    said.append(f"{pid} of {parent}, {state}: {command[:200]}")
        return said

    def kill_sandbox(self, trajectory: str) -> bool:
        """Kill the runner of a trajectory, with all that is in its sandbox; False if it has none now."""
        for place in self._sandboxes():
            record = SandboxRecord.read(place)
            if record is None or not record.ready or record.labels.get(TRAJECTORY) != trajectory:
                continue
            if self._docker is not None:
                with suppress(subprocess.CalledProcessError):  # it has ended meanwhile
                    self._docker.docker("kill", record.name)
                return True
            if record.runs():
                with suppress(ProcessLookupError):
                    os.kill(record.pid, signal.SIGKILL)
                return True
        return False

    def sweep(self) -> None:
        """End the processes and groups that are left, so that a bench that found some leaves none itself."""
        for root in {place.parent for place in self._sandboxes()}:
            end_left(root)
        ours = set(self._processes())
        for pid in (*ours, *descendants(ours)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _processes(self) -> Iterator[int]:
        marker, place = f"{MARKER}={self._directory.name}".encode(), f"{self._directory}/".encode()
        for pid, _, _ in _table():
            with suppress(OSError):
                if (
                    marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    or place in Path(f"/proc/{pid}/cmdline").read_bytes()
                ):
                    yield pid
        if self._docker is not None:
            yield from self._docker.processes()

    def _cgroups(self) -> Iterator[Path]:
        if self._docker is not None:
            yield from (group for group in self._docker.cgroups() if GROUP.fullmatch(group.name))
            return
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, names, place = line.split(":", 2)
            for own in (Path("/sys/fs/cgroup", names, place.lstrip("/")), Path("/sys/fs/cgroup", place.lstrip("/"))):
                yield from (group for group in own.glob("tangram-*") if group.name[8:] in self._seen)

    def _bound(self) -> int:
        """Sockets of this network namespace that are bound below the directory."""
        lines = Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()
        return sum(f"{self._directory}/" in line for line in lines)

    def _sandboxes(self) -> Iterator[Path]:
        return self._directory.glob("state*/sandboxes/sandboxes/*")


def _table() -> list[tuple[int, int, str]]:
    """Every process: (pid, parent, state)."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (place / "stat").read_bytes().rpartition(b")")[2].split()
            found.append((int(place.name), int(fields[1]), fields[0].decode()))
    return found
