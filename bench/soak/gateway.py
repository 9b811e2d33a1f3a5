"""The gateway under the soak: killed, stopped and started again on the same state and the same port."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import httpx

from bench.gateway import GATEWAY, IMAGE, ROOT, START_S
from tangram.client.credentials import Bearer

#: What tells this soak's processes from all others.
MARKER = "TANGRAM_SOAK"
STOP_S = 60.0

CONFIG = """
version: 1
server: {{state_dir: {directory}/state, port: {port}, grpc_port: 0, drain_grace: 2s}}
sandbox:
  provider: {provider}
  image: "{image}"
  memory: 256Mi
  pids: 128
  engine_silence: 3s
  warm: {{min: 1, max: 1}}
node: {{devices: {{kind: cpu, count: 2, memory: 64Mi}}}}
models: {{host_memory: 64Mi, stuck: 3s}}
functions:
  shell: {{runtime: exec, cost: {{cpu: 1}}, timeout: 20s, queue_timeout: 120s}}
  count: {{runtime: handler, handler: "handler:count", cost: {{cpu: 1}}, scale: {{min: 1, max: 1}}, timeout: 20s}}
  call: {{runtime: api, request: {{method: GET, url: "http://127.0.0.1:{upstream}/do?{{name}}"}}, timeout: 20s}}
"""
SCORE = """
  score: {{runtime: model, model: {{path: {checkpoint}, action: score}}, cost: {{gpu: 1}}, timeout: 60s}}
"""
HANDLER = "def count(event, context):\n    return len(event)\n"


class SoakGateway:
    """`tangram serve` in a directory of its own, with its temporary files in it."""

    def __init__(
        self,
        directory: Path,
        *,
        provider: str,
        upstream: int,
        checkpoint: Path | None,
        environment: Mapping[str, str],
        config: str = CONFIG,
        handler: str = HANDLER,
    ) -> None:
        """``config`` is a template with directory, port, provider, image and upstream, ``handler`` its module."""
        directory.chmod(0o755)  # the sandbox's user reads the handler in it
        self.state = directory / "state"
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self._config = directory / "tangram.yaml"
        self._log = directory / "gateway.log"
        port = _free_port()
        text = config.format(directory=directory, port=port, provider=provider, image=IMAGE, upstream=upstream)
        self._config.write_text(text + ("" if checkpoint is None else SCORE.format(checkpoint=checkpoint)))
        (directory / "handler.py").write_text(handler)
        self._environment = {
            **os.environ,
            **environment,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"),  # torch's, one for all processes, and no leak
            MARKER: directory.name,
        }
        self._process: asyncio.subprocess.Process | None = None
        self.url = f"http://127.0.0.1:{port}"
        self._http = httpx.AsyncClient(base_url=self.url, auth=Bearer(None), timeout=10.0, trust_env=False)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start and wait until it serves; raises RuntimeError with the end of its log."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", GATEWAY, str(self._config)),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment,
            )
        assert self._process.stdout is not None
        async with asyncio.timeout(START_S):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the gateway does not serve:\n" + self.log(4000))
        json.loads(line)

    def log(self, chars: int) -> str:
        """The end of what it said."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-chars:]

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def end(self, number: signal.Signals) -> int:
        """Send a signal that ends it; the exit status. One that does not end is killed, and the soak fails."""
        assert self._process is not None
        self.send_signal(number)
        try:
            return await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            await self._process.wait()
            raise RuntimeError(f"the gateway did not end within {STOP_S:g} s of {number.name}") from None

    async def close(self) -> None:
        await self._http.aclose()
        if self._process is not None and self._process.returncode is None:
            self.send_signal(signal.SIGCONT)
            self.send_signal(signal.SIGKILL)
            await self._process.wait()

    async def metrics(self) -> dict[str, float]:
        """Sums by name, units as ``free`` and ``total``; raises httpx.TransportError while it is down."""
        found: defaultdict[str, float] = defaultdict(float)
        for line in (await self._http.get("/metrics")).text.splitlines():
            head, _, value = line.rpartition(" ")
            name, _, labels = head.partition("{")
            if name == "tangram_units":
                name = "free" if 'state="free"' in labels else "total"
            if not line.startswith("#"):
                found[name] += float(value)
        return dict(found)

    async def workers(self) -> list[int]:
        """The processes of the model devices."""
        described = (await self._http.get("/v1/resources")).json()
        return [device["pid"] for device in described["models"]["devices"] if device["pid"]]

    async def trajectories(self) -> list[str]:
        """Those that live."""
        return [each["trajectory"] for each in (await self._http.get("/v1/trajectories")).json()["trajectories"]]


def balanced(metrics: Mapping[str, float]) -> bool:
    """accepted = queued + running + terminal."""
    living = metrics.get("tangram_invocations_queued", 0) + metrics.get("tangram_invocations_running", 0)
    ended = metrics.get("tangram_invocations_ended_total", 0)
    return metrics.get("tangram_invocations_accepted_total", 0) == living + ended


def at_rest(metrics: Mapping[str, float]) -> bool:
    """Nothing lives and every unit is free."""
    gauges = ("tangram_invocations_queued", "tangram_invocations_running", "tangram_living")
    return balanced(metrics) and metrics["free"] == metrics["total"] and not any(metrics.get(name) for name in gauges)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
