"""The gateway of this example: a process of its own, which can be killed and comes back with its state."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

from tangram import Client

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
START_S, STOP_S = 120.0, 60.0


class ServedGateway:
    """``tangram serve`` on a copy of this directory's configuration, with the models that were just made."""

    def __init__(self, work: Path, teachers: list[str]) -> None:
        self.starts = 0
        self._directory = work / "gateway"
        self._directory.mkdir()
        for name in ("tangram.yaml", "handler.py"):
            shutil.copy(HERE / name, self._directory)
        shutil.copytree(work / "models", self._directory / "models")
        assert sorted(path.name for path in (self._directory / "models").iterdir()) == teachers
        # The same port after a kill: a trainer's address does not change.
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.token = secrets.token_hex(16)
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._killer: threading.Thread | None = None

    def __enter__(self) -> ServedGateway:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._killer is not None:
            self._killer.join()
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(STOP_S)

    def kill_soon(self) -> None:
        """Kill it with -9 from a thread, as soon as an action runs, and start it again."""
        self._killer = threading.Thread(target=self._kill_and_start)
        self._killer.start()

    def living(self) -> int:
        """Return how many trajectories live."""
        with Client(self.url, token=self.token) as client:
            return len(client.trajectories())

    def _kill_and_start(self) -> None:
        assert self._process is not None
        with Client(self.url, token=self.token) as client:
            deadline_s = time.monotonic() + STOP_S
            while not list(client.list(state="running", limit=1)) and time.monotonic() < deadline_s:
                pass
        self._process.kill()
        self._process.wait(STOP_S)
        self._start()

    def _start(self) -> None:
        self.starts += 1
        log = self._directory / f"gateway-{self.starts}.log"
        with log.open("wb") as err:
            command = [ROOT / ".venv" / "bin" / "tangram", "serve", self._directory]
            # A session of its own: what a terminal sends to the trainer's group would end it before the trainer has.
            self._process = subprocess.Popen(
                command, env=self._environment(), stdout=subprocess.DEVNULL, stderr=err, start_new_session=True
            )
        serving = threading.Event()
        for _ in range(int(START_S * 10)):
            if self._process.poll() is not None or any(_says_serving(line) for line in log.read_text().splitlines()):
                break
            serving.wait(0.1)
        if self._process.poll() is not None:
            raise RuntimeError(f"the gateway does not start:\n{log.read_text()[-2000:]}")

    def _environment(self) -> dict[str, str]:
        binaries = ROOT / ".venv" / "bin"
        return os.environ | {
            "TANGRAM_TOKEN": self.token,
            "TANGRAM_PORT": str(self._port),
            "TANGRAM_STATE": str(self._directory / "state"),
            "TANGRAM_SANDBOX_PATH": f"{binaries}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
        }


def _says_serving(line: str) -> bool:
    try:
        return json.loads(line).get("event") == "serving"
    except ValueError:
        return False
