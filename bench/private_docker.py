"""A Docker engine of one's own, that may be killed and stopped without anybody else noticing.

Its socket, roots, network-less containers and control groups are all its own and named after its directory, so that
whatever it leaves behind can be told from everything else on the machine.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

START_S, STOP_S, STEP_S = 40.0, 15.0, 0.05


class PrivateDocker:
    """One dockerd with its own containerd; `start`, `kill`, `start` again with the same containers."""

    def __init__(self, *, live_restore: bool = True, options: Sequence[str] = ()) -> None:
        """``options`` are further ones of dockerd."""
        self.live_restore = live_restore
        self._options = tuple(options)
        #: Short: the sockets below it may have 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="tangram-docker-"))
        # In memory, where that can be: an image's thousands of files are unpacked and removed each time.
        _quietly("mount", "-t", "tmpfs", "-o", "mode=711", "none", str(self.directory))
        self._driver = _storage_driver(self.directory)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """What its control groups are called, and what the command lines of its processes contain."""
        return self.directory.name

    @property
    def host(self) -> str:
        return f"unix://{self.directory}/socket"

    @property
    def environment(self) -> dict[str, str]:
        """For whoever is to use this engine."""
        return {"DOCKER_HOST": self.host}

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, and wait until it answers; raises RuntimeError with the end of its log where it does not."""
        for name in ("pid", "run/containerd/containerd.pid"):  # of one that was killed
            (self.directory / name).unlink(missing_ok=True)
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline_s = time.monotonic() + START_S
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                log_text = (self.directory / "log").read_text(encoding="utf-8", errors="replace")
                raise RuntimeError("dockerd does not answer:\n" + log_text[-2000:])
            time.sleep(STEP_S)

    def answers(self) -> bool:
        """Whether it answers a ping now."""
        with suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(1.0)
            sock.connect(str(self.directory / "socket"))
            sock.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return b" 200 " in sock.recv(64)
        return False

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP makes it an engine that does not answer, SIGCONT one that does."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, as a crash would; its containerd dies with it, its containers do not."""
        beneath = self.directory / "run/containerd/containerd.pid"
        containerd = os.pidfd_open(int(beneath.read_text(encoding="ascii")))
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(STOP_S)
        # A dockerd that is started while the old containerd dies takes it for its own, and gives up later.
        select.select([containerd], [], [], STOP_S)
        os.close(containerd)

    def revive(self) -> None:
        """Have it alive, answering and with live restore again."""
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGCONT)
            if self.live_restore:
                return
            self.kill()
        self.live_restore = True
        self.start()

    def docker(self, *words: str) -> str:
        """One command of the client; raises CalledProcessError."""
        done = subprocess.run(
            ["docker", "--host", self.host, *words], capture_output=True, text=True, check=True, timeout=120
        )
        return done.stdout.strip()

    def containers(self) -> list[str]:
        """The names of all its containers, running or not."""
        return self.docker("ps", "--all", "--format", "{{.Names}}").split()

    def load(self, image: str) -> None:
        """Copy an image from the machine's own engine."""
        with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as saving:
            subprocess.run(
                ["docker", "--host", self.host, "load"], stdin=saving.stdout, stdout=subprocess.DEVNULL, check=True
            )
        if saving.returncode != 0:
            raise RuntimeError(f"no image {image}: make it with scripts/base-image")

    def close(self) -> None:
        """End it with all its containers, and remove every trace."""
        if self._process is not None:
            if self._process.poll() is None:
                with suppress(OSError):
                    self.signal(signal.SIGCONT)
            else:
                with suppress(RuntimeError):
                    self.start()
            with suppress(subprocess.SubprocessError):
                if names := self.containers():
                    self.docker("rm", "--force", "--volumes", *names)
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            self._process.kill()
            self._process.wait()
        for pid in self.processes():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for place in (*sorted(self.mounts(), reverse=True), str(self.directory)):
            _quietly("umount", "--lazy", place)
        for group in sorted(self.cgroups(), reverse=True):
            with suppress(OSError):
                group.rmdir()
        shutil.rmtree(self.directory, ignore_errors=True)

    # --- what it holds of the machine

    def processes(self) -> list[int]:
        """The shims, and what runs in the containers; not the engine's own two."""
        own = {0 if self._process is None else self._process.pid, os.getpid()}
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                said = (place / "cmdline").read_bytes() + (place / "cgroup").read_bytes()
                parent = int((place / "stat").read_bytes().rpartition(b")")[2].split()[1])
                if self.name.encode() in said and not own & {int(place.name), parent}:
                    found.append(int(place.name))
        return found

    def cgroups(self) -> list[Path]:
        """The directories of its control groups, its own parent group first."""
        tops = [*Path("/sys/fs/cgroup").glob(f"*/{self.name}"), *Path("/sys/fs/cgroup").glob(self.name)]
        return [Path(place) for top in tops for place, _, _ in os.walk(top)]

    def mounts(self) -> list[str]:
        """Mount points below its directory: layers, shared memory, network namespaces."""
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        return [place for line in lines if (place := line.split(" ")[4]).startswith(f"{self.directory}/")]

    def _command(self) -> list[str]:
        place = self.directory
        return [
            # A network namespace of its own: an engine without a bridge removes docker0, whosever it is.
            *("unshare", "--net", "dockerd"),
            *("--host", self.host, "--pidfile", str(place / "pid")),
            *("--data-root", str(place / "data"), "--exec-root", str(place / "run")),
            *("--cgroup-parent", f"/{self.name}", "--storage-driver", self._driver, "--log-level", "warn"),
            *("--bridge=none", "--iptables=false", "--ip6tables=false"),
            f"--live-restore={str(self.live_restore).lower()}",
            *self._options,
        ]


@contextmanager
def private_docker(image: str, *, live_restore: bool = True, options: Sequence[str] = ()) -> Iterator[PrivateDocker]:
    """An engine that has the image, for as long as the block."""
    docker = PrivateDocker(live_restore=live_restore, options=options)
    try:
        docker.start()
        docker.load(image)
        yield docker
    finally:
        docker.close()


def _storage_driver(directory: Path) -> str:
    """overlay2 where layers can be overlaid below this directory."""
    places = {name: directory / name for name in ("lower", "upper", "work", "merged")}
    for place in places.values():
        place.mkdir()
    options = f"lowerdir={places['lower']},upperdir={places['upper']},workdir={places['work']}"
    overlaid = _quietly("mount", "-t", "overlay", "overlay", "-o", options, str(places["merged"]))
    if overlaid:
        _quietly("umount", str(places["merged"]))
    for place in places.values():
        shutil.rmtree(place, ignore_errors=True)
    return "overlay2" if overlaid else "vfs"


def _quietly(*command: str) -> bool:
    """Whether it could be done."""
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
