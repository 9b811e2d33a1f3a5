"""A Docker engine on another machine, as far as a test can have one: it shares nothing with us but a TCP port.

It knows a second runtime, crun, if that is installed.

It has its own mounts (nothing of /tmp, where the tests' state lies, and nothing of /run), its own process ids and
network, its own data, which is memory, and its own branch of the cgroups.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path

START_S, IMAGE_S, STOP_S = 60.0, 120.0, 30.0
STEP_S = 0.05

CRUN = shutil.which("crun")

#: The first process of the engine's world; it starts the engine again whenever that ends.
WORLD = """
set -eu
mkdir -p /var/lib/docker
umount /sys/fs/cgroup/unified 2>/dev/null || true  # crun refuses to work beside it
for place in /tmp /run /var/lib/docker; do mount -t tmpfs tmpfs $place; done
while :; do
    rm -f /run/docker.pid
    # It is given the port as a service manager would: the socket is of our network, the engine is not.
    sh -c 'LISTEN_PID=$$ LISTEN_FDS=1 exec dockerd --host fd:// --bridge=none --iptables=false --ip6tables=false \
        --live-restore $RUNTIMES --cgroup-parent "$GROUP" --log-level warn' 3<&0 </dev/null || true
    # The next one would take a containerd that is about to end for its own.
    while kill -0 "$(cat /run/docker/containerd/containerd.pid)" 2>/dev/null; do sleep 0.05; done
    rm -f /run/docker/containerd/containerd.pid
done
"""


class RemoteEngine:
    """Started by `start`; ended with everything in it by `stop`, or with the process that started it."""

    def __init__(self, log: Path) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.host = f"tcp://127.0.0.1:{self.port}"
        self._group = f"/tangram-remote-{self.port}"
        self._log = log
        self._world: subprocess.Popen[bytes] | None = None

    def start(self, image: str) -> None:
        """Serve, with an image of the local engine's; raises RuntimeError with the reason."""
        if os.geteuid() != 0:
            raise RuntimeError("only root can start a second engine")
        for tool in ("unshare", "setpriv", "dockerd"):
            if shutil.which(tool) is None:
                raise RuntimeError(f"{tool} is not installed")
        apart = ("--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc")
        world = ["unshare", *apart, "sh", "-c", WORLD]
        with self._log.open("wb") as log:
            self._world = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *world],
                env={**os.environ, "GROUP": self._group, "RUNTIMES": f"--add-runtime crun={CRUN}" if CRUN else ""},
                stdin=self._listener.fileno(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.wait()
        with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as saving:
            self.docker("load", stdin=saving.stdout)

    def wait(self) -> None:
        """Until it answers."""
        gate = threading.Event()
        for _ in range(int(START_S / STEP_S)):
            if self.answers():
                return
            if self._world is None or self._world.poll() is not None:
                break
            gate.wait(STEP_S)
        lines = self._log.read_text(errors="replace").splitlines()
        raise RuntimeError("the second engine does not answer: " + " | ".join(lines[-3:]))

    def answers(self) -> bool:
        try:
            self.docker("version")
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return False
        return True

    def docker(self, *words: str, stdin: object = None) -> str:
        """The docker client, on this engine."""
        done = subprocess.run(
            ["docker", "--host", self.host, *words],
            stdin=stdin,  # type: ignore[call-overload]  # a file or None
            capture_output=True,
            text=True,
            check=True,
            timeout=IMAGE_S,
        )
        return str(done.stdout).strip()

    def kill(self) -> None:
        """kill -9 of the engine alone; its containers live on, and it is started again."""
        (pid,) = [pid for pid in self._processes() if _command(pid)[:1] == ["dockerd"]]
        os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """End it with its containers, and remove what it leaves."""
        if self._world is not None:
            for pid in _children(self._world.pid):
                os.kill(pid, signal.SIGKILL)  # the first process of its world: everything in it ends
            self._world.wait(STOP_S)
        self._listener.close()
        for root in Path("/sys/fs/cgroup").glob(f"**{self._group}"):
            for place in sorted(root.glob("**/"), reverse=True):
                place.rmdir()

    def _processes(self) -> list[int]:
        """Everything in its world."""
        assert self._world is not None
        found, fresh = [], [self._world.pid]
        while fresh:
            fresh = [child for pid in fresh for child in _children(pid)]
            found += fresh
        return found


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []
