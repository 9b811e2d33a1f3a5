"""What is killed and started again on the same state and the same port: a gateway, and daemons of nodes beside it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import httpx
import yaml

from bench.kills.census import MARKER
from bench.serving import GATEWAY, IMAGE, ROOT, STOP_S, ServerProcess, free_port
from tangram.client.requests import Bearer

#: Seconds within which a node joins, on however busy a machine.
JOIN_S = 120.0


class KilledGateway(ServerProcess):
    """`tangram serve` in a directory of its own, with its temporary files in it."""

    def __init__(
        self,
        directory: Path,
        *,
        provider: str,
        upstream: int,
        environment: Mapping[str, str],
        config: str,
        handler: str,
    ) -> None:
        """``config`` is a template with directory, port, listen, provider, image, upstream; ``handler`` its module."""
        served = directory / "served"  # nothing but the handler, whose directory is copied to the nodes
        for place in (served, directory / "tmp"):
            place.mkdir()
        for place in (directory, served):
            place.chmod(0o755)  # the sandbox's user reads the handler in it
        (served / "handler.py").write_text(handler)
        port, self.listen = free_port(), f"127.0.0.1:{free_port()}"
        text = config.format(
            directory=directory, port=port, listen=self.listen, provider=provider, image=IMAGE, upstream=upstream
        )
        (served / "tangram.yaml").write_text(text)
        own = {"TMPDIR": str(directory / "tmp"), MARKER: directory.name}
        super().__init__(
            GATEWAY,
            str(served / "tangram.yaml"),
            environment={**environment, **own},
            log=directory / "gateway.log",
        )
        self.environment = {**environment, **own}
        self.url = f"http://127.0.0.1:{port}"
        self._http = httpx.AsyncClient(base_url=self.url, auth=Bearer(None), timeout=10.0, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()
        if self._process is not None and self._process.returncode is None:
            await self.end(signal.SIGKILL)

    async def ticket(self, node: str) -> dict[str, str]:
        """What lets a node join: ticket and fingerprint."""
        answer = (await self._http.post("/v1/node-tickets", json={"name": node})).raise_for_status()
        return dict(answer.json())

    async def has_ready(self, node: str) -> bool:
        """Whether a node has joined and can be given work."""
        try:
            nodes = (await self._http.get("/v1/nodes")).json()["nodes"]
        except (httpx.TransportError, ValueError, KeyError):
            return False
        return any(each["node"] == node and each["state"] == "ready" for each in nodes)

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


class KilledNode:
    """`tangram node join` with a state directory of its own, on the gateway's machine."""

    def __init__(self, directory: Path, gateway: KilledGateway, name: str, *, provider: str) -> None:
        self.name = name
        self._gateway = gateway
        self._log = directory / f"{name}.log"
        config = directory / f"{name}.yaml"
        sandbox = {"provider": provider, "image": IMAGE, "memory": "256Mi"}
        config.write_text(yaml.safe_dump({"sandbox": sandbox, "node": {"memory": "1Gi"}}))
        self._options = {
            "--gateway": gateway.listen,
            "--name": name,
            "--state-dir": str(directory / f"state-{name}"),
            "--config": str(config),
            "--labels": f"pool={name}",
            "--devices": "none",
            "--cores": "0",
            "--log-level": "warning",
        }
        self._process: asyncio.subprocess.Process | None = None

    async def join(self) -> None:
        """Start it for the first time, and return once the gateway may give it work."""
        told = await self._gateway.ticket(self.name)
        self._options["--fingerprint"] = told["fingerprint"]
        self._options["--ticket"] = told["ticket"]
        await self.start()
        del self._options["--ticket"]  # from now on it has a key
        await self.ready()

    async def ready(self) -> None:
        """Return once the gateway may give it work; raises TimeoutError."""
        deadline_s = time.monotonic() + JOIN_S
        while not await self._gateway.has_ready(self.name):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self.name} has not joined: {self._log.read_text()[-2000:]}")
            await asyncio.sleep(0.1)

    async def start(self) -> None:
        words = [word for pair in self._options.items() for word in pair]
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gateway", "node", "join", *words, stdout=log, stderr=log, cwd=ROOT,
                env={**os.environ, **self._gateway.environment, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip

    async def end(self, number: signal.Signals) -> int:
        """Send a signal that ends it, and return the exit status; raises TimeoutError."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(number)
        return await asyncio.wait_for(self._process.wait(), STOP_S)

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            await self.end(signal.SIGKILL)


def balanced(metrics: Mapping[str, float]) -> bool:
    """accepted = queued + running + terminal."""
    living = metrics.get("tangram_invocations_queued", 0) + metrics.get("tangram_invocations_running", 0)
    ended = metrics.get("tangram_invocations_ended_total", 0)
    return metrics.get("tangram_invocations_accepted_total", 0) == living + ended


def at_rest(metrics: Mapping[str, float]) -> bool:
    """Nothing lives and every unit is free."""
    gauges = ("tangram_invocations_queued", "tangram_invocations_running", "tangram_living")
    return balanced(metrics) and metrics["free"] == metrics["total"] and not any(metrics.get(name) for name in gauges)
