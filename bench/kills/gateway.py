"""The gateway that is killed and started again on the same state and the same port, and what its metrics say."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import httpx

from bench.kills.census import MARKER
from bench.serving import GATEWAY, IMAGE, ServerProcess, free_port
from tangram.client.requests import Bearer


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
        """``config`` is a template with directory, port, provider, image and upstream, ``handler`` its module."""
        directory.chmod(0o755)  # the sandbox's user reads the handler in it
        (directory / "tmp").mkdir()
        (directory / "handler.py").write_text(handler)
        port = free_port()
        text = config.format(directory=directory, port=port, provider=provider, image=IMAGE, upstream=upstream)
        (directory / "tangram.yaml").write_text(text)
        own = {"TMPDIR": str(directory / "tmp"), MARKER: directory.name}
        super().__init__(
            GATEWAY,
            str(directory / "tangram.yaml"),
            environment={**environment, **own},
            log=directory / "gateway.log",
        )
        self.url = f"http://127.0.0.1:{port}"
        self._http = httpx.AsyncClient(base_url=self.url, auth=Bearer(None), timeout=10.0, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()
        if self._process is not None and self._process.returncode is None:
            await self.end(signal.SIGKILL)

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


def balanced(metrics: Mapping[str, float]) -> bool:
    """accepted = queued + running + terminal."""
    living = metrics.get("tangram_invocations_queued", 0) + metrics.get("tangram_invocations_running", 0)
    ended = metrics.get("tangram_invocations_ended_total", 0)
    return metrics.get("tangram_invocations_accepted_total", 0) == living + ended


def at_rest(metrics: Mapping[str, float]) -> bool:
    """Nothing lives and every unit is free."""
    gauges = ("tangram_invocations_queued", "tangram_invocations_running", "tangram_living")
    return balanced(metrics) and metrics["free"] == metrics["total"] and not any(metrics.get(name) for name in gauges)
