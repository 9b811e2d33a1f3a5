"""``python -m gateway ...`` in a process of its own, forked from one that has it all imported.

A start costs a second or two of a core, nearly all of it imports, and the tests start hundreds. What runs is the same:
its arguments, environment, directory and output are its own, and it ends as it would. Tests of the start itself, or of
what others see of the command, start it afresh.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
#: What a gateway, a node and the commands that clean up after them import.
PRELOADED = (
    "gateway.app",
    "gateway.cli.main",
    "gateway.cli.serve",
    "gateway.cli.node",
    "gateway.cli.maintenance",
    "uvloop",
)
REQUEST_MAX_BYTES = 2**17
START_S = 120.0
#: Of each number that is told.
NUMBER_BYTES = 12


class WarmProcess:
    """One process of `start`, with what `subprocess.Popen` has of it."""

    def __init__(self, arguments: Sequence[str], told: int, stderr: IO[str] | None) -> None:
        self.args = list(arguments)
        self.stderr = stderr
        self.returncode: int | None = None
        self._told = told
        self._looking = threading.Lock()
        self.pid = self._number(START_S)

    def poll(self) -> int | None:
        """Return how it ended, None while it lives."""
        with self._looking:
            if self.returncode is None and _readable(self._told, 0.0):
                self.returncode = self._number(0.0)
                os.close(self._told)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and _readable(self._told, timeout):
            self.poll()
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _number(self, within_s: float) -> int:
        """Return what is told next: the process id, then how it ended."""
        assert _readable(self._told, within_s), f"nothing within {within_s:g} s"
        said = os.read(self._told, NUMBER_BYTES)
        assert said, "the process that forks is gone"
        return int(said)


class _Forks:
    """Our side of the process that forks."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        atexit.register(self.close)

    def start(
        self, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], stdout: int, stderr: int
    ) -> int:
        """Return where the process id is told, and later how it ended."""
        request = json.dumps({"arguments": list(arguments), "cwd": str(cwd), "environment": dict(environment)}).encode()
        assert len(request) < REQUEST_MAX_BYTES
        ours, theirs = os.pipe()
        try:
            with self._asking:
                socket.send_fds(self._control, [request], [stdout, stderr, theirs])
        finally:
            os.close(theirs)
        return ours

    def close(self) -> None:
        """End it; what it has forked lives on."""
        self._control.close()
        self._process.wait(START_S)


_FORKS: list[_Forks] = []
_MAKING = threading.Lock()


def start(
    arguments: Sequence[str], stdout: IO[Any], stderr: IO[Any] | None = None, env: Mapping[str, str] | None = None
) -> WarmProcess:
    """Start ``python -m gateway ARGUMENTS`` in the root directory; without ``stderr`` that is read as text here."""
    with _MAKING:
        if not _FORKS:
            _FORKS.append(_Forks())
    lines: IO[str] | None = None
    if stderr is None:
        read, written = os.pipe()
        lines = os.fdopen(read)
    else:
        written = os.dup(stderr.fileno())
    try:
        told = _FORKS[0].start(arguments, ROOT, os.environ if env is None else env, stdout.fileno(), written)
    finally:
        os.close(written)
    return WarmProcess(arguments, told, lines)


def run(arguments: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> None:
    """Run ``python -m gateway ARGUMENTS`` to its end; another status than 0 is an error with what it said."""
    with (ROOT / os.devnull).open("w") as nothing:
        process = start(arguments, stdout=nothing, env=env)
    assert process.stderr is not None
    with process.stderr as lines:
        said = lines.read()
    assert process.wait(timeout_s) == 0, f"{' '.join(arguments)}: {said}"


def _readable(descriptor: int, within_s: float | None) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(within_s))


def _serve(control: socket.socket) -> list[str]:
    """Fork until nobody asks any more; return in each fork, with its arguments."""
    living: dict[int, tuple[int, int]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in living:
                    selector.unregister(key.fd)
                    _tell_end(key.fd, *living.pop(key.fd))
                    continue
                body, descriptors, _, _ = socket.recv_fds(control, REQUEST_MAX_BYTES, 3)
                if not body:
                    os._exit(0)
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    control.close()
                    return _become(json.loads(body), descriptors)
                *written, told = descriptors
                for descriptor in written:
                    os.close(descriptor)
                _tell(told, pid)
                process = os.pidfd_open(pid)
                living[process] = (pid, told)
                selector.register(process, selectors.EVENT_READ)


def _become(request: dict[str, Any], descriptors: list[int]) -> list[str]:
    """Take the fork's own place in the world, as if it had been started there."""
    os.dup2(descriptors[0], 1)
    os.dup2(descriptors[1], 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    arguments: list[str] = request["arguments"]
    return arguments


def _tell_end(process: int, pid: int, told: int) -> None:
    os.close(process)
    _tell(told, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.close(told)


def _tell(told: int, number: int) -> None:
    """Tell who started it; who has gone is not told."""
    try:
        os.write(told, b"%*d" % (NUMBER_BYTES, number))
    except BrokenPipeError:
        return


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    arguments = _serve(control)
    command = importlib.import_module("gateway.cli.main")
    sys.argv[:] = [str(ROOT / "gateway" / "__main__.py"), *arguments]
    command.main()


if __name__ == "__main__":
    main()
