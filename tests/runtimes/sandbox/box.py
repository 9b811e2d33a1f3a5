"""A box: a real runner without a sandbox round it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from runtimes.sandbox.runner import runner as wire
from runtimes.sandbox.runner.client import SocketStream, StreamClient

DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Box:
    """A runner and its directories."""

    directory: Path
    process: subprocess.Popen[bytes]

    @property
    def work(self) -> Path:
        return self.directory / "work"

    async def connect(self, unattended_s: float = 60.0, token: str = "secret", **more: object) -> StreamClient:
        """A gateway; ``more`` is of its greeting."""
        hello: dict[str, object] = {
            "token": token,
            "user": str(os.getuid()),
            "workdir": str(self.work),
            "base": "",
            "env": {},
        }
        hello |= {"orphan_s": 60.0, "unattended_s": unattended_s, **more}
        return await StreamClient.open(SocketStream(self.directory), hello, within_s=DEADLINE_S)

    def open_gate(self) -> None:
        (self.work / "go").touch()

    @property
    def runs(self) -> int:
        return (self.work / "runs").read_text().count("run")


#: Runs the runner with something in it replaced first.
CHANGED = """
import importlib.util, os, sys
sys.argv = sys.argv[1:]
spec = importlib.util.spec_from_file_location("runner", sys.argv[0])
runner = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runner)
{change}
runner.main()
"""


@contextmanager
def running_box(*, change: str = "") -> Iterator[Box]:
    """``change`` is Python that replaces something in the module ``runner``."""
    with TemporaryDirectory(prefix="tangram-runner-") as place:
        directory = Path(place)
        (directory / "work").mkdir()
        program = ["-c", CHANGED.replace("{change}", change)] if change else []
        argv = [sys.executable, "-I", "-S", *program, wire.__file__, place, "--shed"]
        process = subprocess.Popen(argv)
        try:
            yield Box(directory, process)
        finally:
            with suppress(FileNotFoundError):
                for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                    with suppress(ProcessLookupError):
                        os.killpg(int(child), signal.SIGKILL)  # what a test left running would outlive its runner
            process.kill()
            process.wait(DEADLINE_S)
