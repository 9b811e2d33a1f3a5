"""The faults of the soak: what is killed and stopped at random, from a runner to the engine and the gateway."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import httpx

from bench.private_docker import PrivateDocker
from bench.soak.census import Census
from bench.soak.gateway import SoakGateway

#: Every other second something small, and at these intervals something large.
SMALL_S, ENGINE_S, GATEWAY_S = 2.0, 20.0, 25.0
#: Longest time that the engine is stopped or dead, and the gateway.
OUTAGE_S, PAUSE_S = 10.0, 3.0
KINDS = ("runner", "container", "worker", "engine", "gateway")


class Faults:
    """Goes on for as long as it is told, and leaves everything alive."""

    def __init__(self, gateway: SoakGateway, census: Census, docker: PrivateDocker | None, seed: int) -> None:
        self._gateway = gateway
        self._census = census
        self._docker = docker
        self._random = random.Random(seed)
        self._kinds: Sequence[str] = ()
        #: What was done how often.
        self.done: Counter[str] = Counter()

    async def run(self, seconds: float, kinds: Sequence[str]) -> None:
        """One fault after the other, of these kinds."""
        self._kinds = kinds
        until_s = time.monotonic() + seconds
        due_s = {"engine": time.monotonic() + ENGINE_S / 2, "gateway": time.monotonic() + GATEWAY_S / 2}
        while time.monotonic() < until_s:
            await asyncio.sleep(SMALL_S * self._random.random())
            await asyncio.to_thread(self._census.look)
            now_s = time.monotonic()
            if "engine" in kinds and now_s > due_s["engine"]:
                await self._engine()
                due_s["engine"] = time.monotonic() + ENGINE_S * self._random.uniform(0.5, 1.5)
            elif "gateway" in kinds and now_s > due_s["gateway"]:
                await self._gateway_itself()
                due_s["gateway"] = time.monotonic() + GATEWAY_S * self._random.uniform(0.5, 1.5)
            else:
                await self._small()

    async def _small(self, *, engine: bool = True) -> None:
        usual = ("runner", "runner", "container", "worker") if engine else ("runner", "worker")
        possible = [kind for kind in usual if kind in self._kinds]
        match self._random.choice(possible) if possible else "":
            case "runner":
                self._hit("runner", await asyncio.to_thread(self._census.runners))
            case "worker":
                with suppress(httpx.HTTPError):
                    self._hit("worker", await self._gateway.workers())
            case "container":
                await asyncio.to_thread(self._remove_container)

    def _hit(self, what: str, pids: Sequence[int]) -> None:
        """SIGKILL, or now and then SIGSTOP, to one of them."""
        if not pids:
            return
        number = signal.SIGSTOP if self._random.random() < 0.2 else signal.SIGKILL
        with suppress(ProcessLookupError):
            os.kill(self._random.choice(pids), number)
            self.done[f"{what} {number.name}"] += 1

    def _remove_container(self) -> None:
        assert self._docker is not None
        with suppress(subprocess.SubprocessError):  # it may be on its way out already
            if names := self._docker.containers():
                self._docker.docker("rm", "--force", self._random.choice(names))
                self.done["container removed"] += 1

    async def _engine(self) -> None:
        """Killed and started again, or stopped and continued; meanwhile the small faults go on."""
        assert self._docker is not None
        killed = self._random.random() < 0.5
        if killed:
            await asyncio.to_thread(self._docker.kill)
        else:
            self._docker.signal(signal.SIGSTOP)
        until_s = time.monotonic() + OUTAGE_S * self._random.random()
        while time.monotonic() < until_s:
            await asyncio.sleep(SMALL_S * self._random.random())
            await self._small(engine=False)
        if killed:
            self._docker.live_restore = self._random.random() < 0.7
            await asyncio.to_thread(self._docker.start)
        else:
            self._docker.signal(signal.SIGCONT)
        keeps = "keeps its containers" if self._docker.live_restore else "ends its containers"
        self.done[f"engine SIGKILL, {keeps}" if killed else "engine SIGSTOP"] += 1

    async def _gateway_itself(self) -> None:
        """Killed, restarted in good order, or stopped for a moment."""
        number = self._random.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP))
        if number is signal.SIGSTOP:
            self._gateway.send_signal(number)
            await asyncio.sleep(PAUSE_S * self._random.random())
            self._gateway.send_signal(signal.SIGCONT)
        else:
            await self._gateway.end(number)
            await asyncio.sleep(PAUSE_S * self._random.random())
            await self._gateway.start()
        self.done[f"gateway {number.name}"] += 1
