"""The traffic of the soak: agents, handlers, rewards and calls that submit until they are accepted and want an end."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from bench.report import percentile
from bench.soak.gateway import SoakGateway
from tangram import AsyncClient, ConflictError, InvocationResult, NotFoundError, Retries, TangramError

T = TypeVar("T")
TRAJECTORIES = 10
#: Nothing may take longer, whatever is killed meanwhile.
HUNG_S = 180.0
PAUSE_S = 0.2
COMMAND_S = 1.5
#: What an agent does, and what goes wrong with it.
DEEDS: tuple[dict[str, object], ...] = (
    {"argv": ["true"]},
    {"command": "echo x >> file; wc -l < file"},
    {"command": "sleep 0.3"},
    {"command": "sleep 500 >/dev/null 2>&1 &"},
    {"command": "head -c 300000 /dev/urandom"},
    {"command": "trap '' TERM; (setsid sleep 100 &); sleep 100"},
    {"command": "exit 3"},
    {"argv": ["python3", "-c", "x = bytearray(10**11)"]},
    {"command": ":(){ :|:& };: ; sleep 50"},
)


class Traffic:
    """Everything that is asked of the gateway, and how it ended."""

    def __init__(self, gateway: SoakGateway, seed: int, *, scores: bool) -> None:
        self._gateway = gateway
        self._random = random.Random(seed)
        self._scores = scores
        self._until_s = 0.0
        #: (function, state or reason) -> how often.
        self.ends: Counter[tuple[str, str]] = Counter()
        #: Ends that are no typed end, and what never came to one.
        self.untyped: list[str] = []
        self.hung: list[str] = []
        #: Submissions refused or cut off, and sent again.
        self.repeated = 0
        self._complaint = ""
        self._call_s: list[float] = []

    @property
    def call_p99_s(self) -> float:
        """Of the calls that need neither sandbox nor device: how long the gateway keeps anybody waiting."""
        return percentile(self._call_s, 0.99)

    async def run(self, seconds: float) -> None:
        """Everybody acts for so long, and then waits for the last end."""
        self._until_s = time.monotonic() + seconds
        retries = Retries(max_attempts=1)
        async with AsyncClient(self._gateway.url, retries=retries) as client, asyncio.TaskGroup() as group:
            for number in range(TRAJECTORIES):
                group.create_task(self._live(client, f"soak-{number}"))
            group.create_task(self._repeat(client, "shell", {"command": "echo alone"}))
            group.create_task(self._repeat(client, "count", {"a": 1}))
            group.create_task(self._repeat(client, "call", {"name": "soak"}))
            if self._scores:
                for _ in range(2):
                    group.create_task(self._repeat(client, "score", {"token_ids": [[7, 3, 99, 12]] * 64}))

    async def _live(self, client: AsyncClient, trajectory: str) -> None:
        while time.monotonic() < self._until_s:
            await self._act(client, "shell", self._random.choice(DEEDS), trajectory=trajectory, timeout_s=COMMAND_S)
            if self._random.random() < 0.03:
                await self._end(client, trajectory)
        await self._end(client, trajectory)

    async def _repeat(self, client: AsyncClient, function: str, input: Mapping[str, object]) -> None:
        while time.monotonic() < self._until_s:
            began_s = time.monotonic()
            await self._act(client, function, input)
            if function == "call":
                self._call_s.append(time.monotonic() - began_s)
            await asyncio.sleep(PAUSE_S)

    async def _act(
        self,
        client: AsyncClient,
        function: str,
        input: Mapping[str, object],
        trajectory: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """One invocation, accepted once under a key of its own, now and then cancelled."""
        key, name = secrets.token_hex(8), f"{function} {trajectory or ''} {input}"
        try:
            async with asyncio.timeout(HUNG_S):
                accepted = await self._insist(
                    lambda: client.submit(function, input, trajectory=trajectory, timeout_s=timeout_s, key=key)
                )
                assert accepted is not None
                name = f"{accepted.id} {name}"
                if self._random.random() < 0.05:
                    await asyncio.sleep(self._random.random())
                    await self._insist(lambda: client.cancel(accepted.id))
                ended = await self._insist(lambda: client.wait(accepted.id))
        except TimeoutError:
            self.hung.append(f"{name}: {self._complaint}")
            return
        if ended is None:
            self.untyped.append(f"{name}: its record is gone")
        else:
            self._count(function, ended)

    async def _end(self, client: AsyncClient, trajectory: str) -> None:
        try:
            async with asyncio.timeout(HUNG_S):
                await self._insist(lambda: client.end_trajectory(trajectory))
        except TimeoutError:
            self.hung.append(f"end of {trajectory}")

    async def _insist(self, ask: Callable[[], Awaitable[T]]) -> T | None:
        """Ask until there is an answer; None where there is nothing (more) of the kind."""
        while True:
            try:
                return await ask()
            except (NotFoundError, ConflictError):
                return None
            except TangramError as error:
                self.repeated += 1
                self._complaint = str(error)
                await asyncio.sleep(min(error.retry_after_s or PAUSE_S, 5.0))

    def _count(self, function: str, ended: InvocationResult) -> None:
        how = str(ended.state) if ended.reason is None else str(ended.reason)
        self.ends[function, how] += 1
        if not ended.ok and (ended.reason is None or how == "internal"):
            self.untyped.append(f"{ended.id}: {ended.state} {how} {ended.message}")
