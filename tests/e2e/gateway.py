"""A real gateway in a process of its own: configuration files, `tangram serve`, real sockets."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

import yaml

from bench.inputs import OWN_PATH, unplugged
from tests import warm

ROOT = Path(__file__).resolve().parents[2]
START_S, STOP_S = 120.0, 60.0

HANDLER = '''
"""Handlers of the end-to-end tests."""

import logging
import os

LOADED_BY = os.getpid()


def score(event, context):
    print("scoring", event["value"])
    logging.getLogger("score").warning("careful with %s", event["value"])
    return {"double": event["value"] * 2, "pid": LOADED_BY, "trajectory": context.trajectory}


def broken(event, context):
    raise ValueError("the reward cannot be computed")
'''


Process = subprocess.Popen[str] | warm.WarmProcess


class GatewayProcess:
    """`tangram serve` on its own files; `start`, `kill`, `start` again with the same state."""

    def __init__(
        self,
        directory: Path,
        document: dict[str, Any],
        environment: dict[str, str] | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        """``fresh``: it imports everything itself, as the command does; others are forked (`tests.warm`)."""
        self.directory = directory
        self._fresh = fresh
        self.log: list[str] = []
        self._environment = environment or {}
        self._document = document
        self._serving: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._process: Process | None = None
        self.url = ""
        self.http, self.grpc = ("", 0), ("", 0)
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)  # the sandbox's user reads the handlers
        (directory / "handler.py").write_text(HANDLER)
        self.write(document)

    def write(self, document: dict[str, Any]) -> None:
        """Replace the configuration file; the gateway reads it at its start or when it is told to."""
        (self.directory / "tangram.yaml").write_text(yaml.safe_dump(document))

    def add(self, **functions: dict[str, Any]) -> None:
        """Replace the configuration file by itself as it was first written, and these functions."""
        self.write({**self._document, "functions": {**self._document["functions"], **functions}})

    def start(self) -> None:
        """Start and wait for the line that says it serves."""
        self._serving = queue.Queue()
        with (self.directory / "stdout").open("w") as out:
            words = ["serve", str(self.directory / "tangram.yaml")]
            self._process = (_started if self._fresh else warm.start)(words, out, env=os.environ | self._environment)
        threading.Thread(target=self._read, args=(self._process, self._serving), daemon=True).start()
        try:
            serving = self._serving.get(timeout=START_S)
        except queue.Empty:
            serving = None
        if serving is None:
            self.kill()
            raise AssertionError("the gateway does not serve:\n" + "\n".join(self.log[-30:]))
        self.url = f"http://{serving['http']}"
        self.http, self.grpc = _address(serving["http"]), _address(serving["grpc"])

    def _read(self, process: Process, serving: queue.Queue[dict[str, Any] | None]) -> None:
        """Follow one process to its end; its own queue, so that a dead one cannot speak for the next."""
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                self.log.append(line.rstrip())
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict) and record.get("event") == "serving":
                    serving.put(record)
        serving.put(None)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """kill -9, as a crash would."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(timeout=STOP_S)

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """SIGINT as a person would, or SIGTERM as an orchestrator would; the exit status."""
        if self._process is None:
            return 0
        if (ended := self._process.poll()) is not None:
            return ended
        self._process.send_signal(number)
        try:
            return self._process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise


def _started(words: list[str], out: IO[str], *, env: dict[str, str]) -> Process:
    command = [sys.executable, "-m", "gateway", *words]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.PIPE, text=True)


def _address(text: object) -> tuple[str, int]:
    host, _, port = str(text).rpartition(":")
    return host, int(port)


def document(provider: str, state: Path, **functions: dict[str, Any]) -> dict[str, Any]:
    """A configuration with a shell, tests and handlers, and what is given besides."""
    return {
        "version": 1,
        "server": {
            "port": 0,
            "grpc_port": 0,
            "ports": {"port": 0},
            "state_dir": str(state),
            "body_limit": "64Ki",
            "drain_grace": "5s",
        },
        "sandbox": {
            "provider": provider,
            "image": "tangram-base:bookworm",
            "memory": "256Mi",
            "path": OWN_PATH,  # whose pytest runs the tests of process sandboxes
        },
        "functions": {
            "shell": {"runtime": "exec", "cost": {"cpu": 1}, "timeout": "30s"},
            "daemon": {"runtime": "exec", "sandbox": {"background": "run"}, "cost": {"cpu": 1}, "timeout": "30s"},
            "small": {
                "runtime": "exec",
                "sandbox": {"memory": "128Mi"},
                "cost": {"cpu": 1},
                "timeout": "60s",
            },
            "choosy": {
                "runtime": "exec",
                "sandbox": {
                    "images": ["docker.io/library/*"],
                    "users": ["root"],
                    "trajectory": {"env": ["TASK_*"], "memory": "1Gi"},
                },
                "cost": {"cpu": 1},
                "timeout": "30s",
            },
            "tests": {
                "runtime": "pytest",
                "pytest": {"args": list(unplugged())},
                "cost": {"cpu": {"min": 1, "max": 2}},
                "timeout": "60s",
            },
            "double": {"runtime": "handler", "handler": "handler:score", "cost": {"cpu": 1}, "idempotent": True},
            "broken": {"runtime": "handler", "handler": "handler:broken", "cost": {"cpu": 1}},
            **functions,
        },
    }
