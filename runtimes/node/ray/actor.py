"""The actor: what Ray holds on one machine. It starts that machine's daemon, and starts it again when it has died.

Run as a detached actor of Ray's by value, so it knows the standard library only. The daemon is no child of it: Ray
kills what its workers have forked, and a daemon must outlive actor, raylet and head. It is known by its pid file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

#: What the daemon gets of this process's environment. Ray's own variables, and its token above all, are not among them.
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "LD_LIBRARY_PATH")
#: Where a daemon writes its pid, in its state directory, which its command names.
PID_FILE = "pid"
WATCH_S = 1.0
BACKOFF_MAX_S = 60.0
#: A daemon that has lived for so long was well: its next death is waited for as its first.
WELL_S = 120.0
#: Seconds until a daemon must have written its pid file, and until one that is asked to end has gone.
START_S = 30.0
#: Seconds that a daemon which is to end may wait for what runs on its machine.
DRAIN_S = 10.0
#: An actor that no driver has asked for so long, and whose daemon is gone, gives back what it holds.
UNASKED_S = 300.0
#: The kernel's PF_EXITING, in the flags of /proc/PID/stat.
EXITING = 0x4
#: Makes what it executes an orphan of init in a session of its own, that the kernel does not kill first and that every
#: signal reaches (Ray's workers block SIGINT): arguments are the file of its output and the command.
ORPHAN = """
import os, signal, sys
os.setsid()
signal.pthread_sigmask(signal.SIG_SETMASK, ())
if os.fork():
    os._exit(0)
try:
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("0")
except OSError:
    pass
out = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
null = os.open(os.devnull, os.O_RDONLY)
os.dup2(null, 0), os.dup2(out, 1), os.dup2(out, 2)
os.closerange(3, 65536)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class NodeActor:
    """Sees to it that one daemon lives here. Its methods may be called from several threads."""

    def __init__(
        self,
        gpu_ids: list[str] | None = None,
        *,
        unasked_s: float = UNASKED_S,
        leave: Callable[[], object] | None = None,
    ) -> None:
        """``gpu_ids`` are what Ray holds for us here (None: asked of Ray).

        ``leave`` is called once nobody has asked for ``unasked_s`` and no daemon lives; it ends the actor by default.
        """
        self._unasked_s = unasked_s
        self._leave = leave or (lambda: os._exit(0))
        self._asked_s = time.monotonic()
        self._gpus = _held_gpus() if gpu_ids is None else gpu_ids
        self._lock = threading.Lock()
        self._command: list[str] = []
        self._environment: dict[str, str] = {}
        self._state_dir = ""
        self._deaths = 0
        self._began_s = 0.0
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="tangram-actor", daemon=True)
        self._watcher.start()

    def facts(self) -> dict[str, object]:
        """What holds here: devices, the daemon's pid or 0, and how often it died."""
        self._asked_s = time.monotonic()
        with self._lock:
            return {"gpu_ids": self._gpus, "daemon": self._living(), "deaths": self._deaths, "pid": os.getpid()}

    def start(self, command: list[str], environment: dict[str, str], state_dir: str) -> dict[str, object]:
        """Start the daemon unless one lives, and watch it from now on; ``why`` says what kept it from being started.

        ``{gpus}`` in the command stands for the ids of the devices, separated by commas. ``environment`` is added to
        what is kept of our own. Nothing is raised: the driver would take a full disk for a dead actor.
        """
        try:
            with self._lock:
                Path(state_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
                held = ",".join(self._gpus)
                self._command = [word.replace("{gpus}", held) for word in command]
                self._environment, self._state_dir = environment, state_dir
                if not self._living():
                    self._spawn()
        except (OSError, subprocess.SubprocessError) as error:
            return {**self.facts(), "why": f"{type(error).__name__}: {error}"[:1000]}
        return self.facts()

    def stop(self, kill: bool = False) -> bool:
        """End the daemon, which drains first unless it is killed, and watch no more; whether it has gone."""
        self._stopped.set()
        with self._lock:
            pid = self._living()
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if kill else signal.SIGTERM)
        if pid and not self._gone(pid, START_S if kill else DRAIN_S) and not kill:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)  # which waits for nothing that still runs
            self._gone(pid, START_S)
        return not self._living()

    def _gone(self, pid: int, within_s: float) -> bool:
        """Wait until a daemon has gone; whether it has."""
        deadline_s = time.monotonic() + within_s
        while self._living() == pid and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return self._living() != pid

    def _watch(self) -> None:
        while not self._stopped.wait(WATCH_S):
            with self._lock:
                if self._living():
                    continue
                if time.monotonic() - self._asked_s > self._unasked_s:
                    self._leave()  # no gateway is left that could use the machine
                    return
                if not self._command:
                    continue
                lived_s = time.monotonic() - self._began_s
                self._deaths = 1 if lived_s > WELL_S else self._deaths + 1
                wait_s = min(BACKOFF_MAX_S, WATCH_S * 2 ** min(10, self._deaths - 1))
            if self._stopped.wait(wait_s):
                return
            with self._lock, contextlib.suppress(OSError, subprocess.SubprocessError):
                if not self._living() and not self._stopped.is_set():
                    self._spawn()

    def _spawn(self) -> None:
        """Start the daemon as an orphan, and return when it has written its pid file or START_S are over."""
        self._began_s = time.monotonic()
        log = str(Path(self._state_dir) / "daemon.log")
        words = [sys.executable, "-I", "-S", "-c", ORPHAN, log, *self._command]
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus), **self._environment}
        subprocess.run(words, env=environment, cwd=self._state_dir, check=True, timeout=START_S)
        while not self._living() and time.monotonic() < self._began_s + START_S:
            time.sleep(0.02)

    def _living(self) -> int:
        """Return the pid of the daemon whose pid file lies in the state directory; 0 if none lives."""
        if not self._state_dir:
            return 0
        try:
            pid = int((Path(self._state_dir) / PID_FILE).read_text())
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            state, flags = stat[0], int(stat[6])
        except (OSError, ValueError, IndexError):
            return 0
        # A pid that another program has by now is not it. One that is ending names nothing any more, and has not gone:
        # its files, and its locks on them, are closed last.
        ours = os.fsencode(self._state_dir) in words or flags & EXITING
        return pid if ours and state not in "ZX" else 0


def _held_gpus() -> list[str]:
    """Ask Ray which devices are this actor's."""
    import ray

    return [str(each) for each in ray.get_gpu_ids()]
