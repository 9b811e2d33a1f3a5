"""A server of vLLM's API on a Unix socket, as an engine is: a tree of processes that holds a device's memory.

python -m bench.model.engine_stand_in SOCKET WORLD [NAME]

The directory WORLD is the outer world: ``awake`` lists who holds the device's memory, ``faults`` what goes wrong (one
word a line), and ``calls`` what was posted. Calls that come while it sleeps wait, and answers are slow to begin with.
"""

from __future__ import annotations

import fcntl
import json
import os
import socketserver
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any


class StandInEngine:
    """What the server knows of itself."""

    def __init__(self, world: Path, name: str) -> None:
        self.world, self.name = world, name
        self.awake = threading.Event()
        self.drift = 0.0
        # The worker holds the memory, and lives on when the server is killed.
        code = "import time\nwhile True: time.sleep(3600)"
        self.worker = subprocess.Popen([sys.executable, "-S", "-c", code, "engine-worker", str(world)])
        self.hold(True)

    def faults(self) -> set[str]:
        try:
            return set((self.world / "faults").read_text().split())
        except FileNotFoundError:
            return set()

    def note(self, file: str, line: str) -> None:
        with (self.world / file).open("a") as stream:
            stream.write(line + "\n")

    def hold(self, awake: bool) -> None:
        """Take or give back the device's memory; two that hold it at once are written down."""
        with (self.world / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = self.world / "awake"
            held = json.loads(path.read_text()) if path.exists() else {}
            living = {name: pid for name, pid in held.items() if name != self.name and Path(f"/proc/{pid}").exists()}
            if awake and living:
                self.note("together", f"{self.name} beside {sorted(living)}")
            if awake:
                living[self.name] = self.worker.pid
            path.write_text(json.dumps(living))
        (self.awake.set if awake else self.awake.clear)()


class StandInHandler(BaseHTTPRequestHandler):
    engine: StandInEngine

    def do_GET(self) -> None:
        self.answer(200, {"is_sleeping": not self.engine.awake.is_set()} if self.path == "/is_sleeping" else {})

    def do_POST(self) -> None:
        engine = self.engine
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        faults = engine.faults()
        engine.note("calls", f"{engine.name} {self.path}")
        if self.path.startswith("/sleep") and "sleep" in faults:
            self.answer(500, {"error": "no"})
        elif self.path.startswith("/sleep"):
            engine.hold(False)
            self.answer(200, {"status": "sleeping"})
        elif self.path == "/wake_up":
            if "wake" in faults:
                os._exit(1)
            engine.drift = 0.1 if "drift" in faults else 0.0
            engine.hold(True)
            self.answer(200, {"status": "awake"})
        else:
            engine.awake.wait()
            if "die" in faults:
                os._exit(3)
            if "slow" in faults:
                engine.note("slow", engine.name)
                time.sleep(0.5)
            rows = [{"index": i, "probs": [len(each) / 100 + engine.drift]} for i, each in enumerate(body["input"])]
            self.answer(200, {"data": rows})

    def answer(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def address_string(self) -> str:
        return "socket"

    def log_message(self, format: str, *args: object) -> None:
        pass


class StandInServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def main() -> None:
    path, world, name = sys.argv[1], Path(sys.argv[2]), (sys.argv[3:] or ["engine"])[0]
    StandInHandler.engine = engine = StandInEngine(world, name)
    if "start" in engine.faults():
        print("ValueError: no such model", flush=True)
        sys.exit(1)
    time.sleep(0.05)
    with StandInServer(path, StandInHandler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
