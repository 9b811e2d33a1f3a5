"""An engine that we start: a process tree that never outlives the gateway, and the address at which it answers."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from manager.action import Chunk
from manager.function import ModelSpec

#: Characters of the log that are looked at for the reason of an end.
_TAIL_CHARS = 20_000
#: Seconds until the keeper is killed itself.
_END_S = 10.0
#: Adopts what the engine leaves behind, and kills the whole tree when the gateway closes the pipe, dies, or the engine
#: has ended. A multiprocessing resource tracker goes last: it removes the shared memory of the dead. Of a gateway that
#: is gone it removes the directory, too.
_KEEPER = """
import ctypes, os, select, shutil, signal, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
poll = select.poll()
poll.register(0, select.POLLIN)
poll.register(os.pidfd_open(child.pid), select.POLLIN)
let_go = 0 in dict(poll.poll())
def tree():
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = open(f"/proc/{name}/stat").read().rpartition(") ")[2].split()[:2]
        except OSError:
            continue
        parents[int(name)] = int(parent), state
    found, new = set(), {os.getpid()}
    while new:
        new = {pid for pid, (parent, _) in parents.items() if parent in new} - found
        found |= new
    return [pid for pid in found if parents[pid][1] != "Z"]
def is_tracker(pid):
    try:
        return b"resource_tracker" in open(f"/proc/{pid}/cmdline", "rb").read()
    except OSError:
        return False
for turn in range(200):
    left = tree()
    if not left:
        break
    for pid in left:
        if turn > 50 or not is_tracker(pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
    time.sleep(0.02)
status = child.wait()
while True:
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        break
if let_go:
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
sys.exit(status if status >= 0 else 128 - status)
"""


class EngineProcess:
    """One start of an engine on one chunk of devices."""

    def __init__(self, model: ModelSpec, chunk: Chunk, devices: Mapping[str, str]) -> None:
        """``devices`` is the environment that shows it its devices."""
        assert model.engine is not None, "an engine is started from its section"
        self.chunk = chunk
        #: Its socket, its log and its temporary files, for this user alone. The path of a socket is short.
        self._directory = Path(tempfile.mkdtemp(prefix="tangram-engine-"))
        self.socket: Path | None = None
        self.url = "http://engine"
        words = {"path": str(model.path), "devices": str(chunk.size)}
        if any("{port}" in word for word in model.engine.command):
            port = _free_port()
            words["port"] = str(port)
            self.url = f"http://127.0.0.1:{port}"
        else:
            self.socket = self._directory / "socket"
            words["socket"] = str(self.socket)
        self._command = [
            re.sub(r"\{(path|devices|port|socket)\}", lambda match: words.get(match[1], match[0]), word)
            for word in model.engine.command
        ]
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TANGRAM_")},
            "VLLM_SERVER_DEV_MODE": "1",  # without it there is no sleep and no wake
            **devices,
            **model.engine.environment,
            "TMPDIR": str(self._directory),
        }
        self._keeper: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it; raises OSError if the keeper cannot be started."""
        with (self._directory / "log").open("wb") as log:
            self._keeper = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", "-c", _KEEPER, *self._command),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    @property
    def is_over(self) -> bool:
        """Return whether it has ended, and its children with it."""
        return self._keeper is not None and self._keeper.returncode is not None

    async def wait(self) -> None:
        """Return once it has ended."""
        assert self._keeper is not None, "start it first"
        await self._keeper.wait()

    def reason(self) -> str:
        """Return the line of its log that tells best why it ended."""
        try:
            text = (self._directory / "log").read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARS:]
        except OSError:
            text = ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return next(iter([*errors[::-1], *lines[::-1]]), "it wrote nothing")[-500:]

    async def end(self) -> None:
        """Kill it with all its children, and return when nothing of it is left. Idempotent."""
        keeper = self._keeper
        if keeper is not None and keeper.returncode is None:
            assert keeper.stdin is not None
            keeper.stdin.close()
            try:
                await asyncio.wait_for(keeper.wait(), _END_S)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    keeper.kill()
                await keeper.wait()
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
