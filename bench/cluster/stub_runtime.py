"""A runtime without sandboxes, for both sides of the comparison: it says lines, waits, and ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

from runtimes.runtime import Execution, Result, Runtime
from runtimes.sandbox.command import ResumableCommand
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.sandbox import Sandbox
from runtimes.sandbox.session import SessionTable

LINE = "x" * 59 + "\n"


class StubRuntime(Runtime):
    """Executes ``{"lines": so many, "command": "sleep SECONDS"}``: lines one by one, then the wait; both may be absent.

    It asks whether it may begin, as every runtime with sandboxes does.
    """

    def __init__(self, on_first: Callable[[float], None] | None = None) -> None:
        """``on_first`` is told when the first action began, by the machine's monotonic clock."""
        self._on_first = on_first

    async def execute(self, execution: Execution) -> Result:
        await execution.call.hooks.commit_begin()
        execution.begin()
        if self._on_first is not None:
            self._on_first(time.monotonic())
            self._on_first = None
        given = execution.call.input
        for _ in range(int(str(given.get("lines", 0)))):
            execution.call.log.write("stdout", LINE)
        _, _, wait_s = str(given.get("command", "")).partition("sleep ")
        if wait_s:
            await asyncio.sleep(float(wait_s))
        execution.end()
        return Result(value={"exit_code": 0, "stdout": ""})


class NoEnvironments(Environments):
    """The environments of a machine that has none."""

    def __init__(self) -> None:
        self.sessions = SessionTable()

    async def start(self, trajectories: Collection[str] | None = None) -> list[str]:
        return []

    def resumable(self) -> dict[str, ResumableCommand]:
        return {}

    async def end_unclaimed(self, taken: Collection[str]) -> None: ...

    def get(self, trajectory: str) -> Sandbox | None:
        return None

    def list(self) -> list[dict[str, object]]:
        return []

    def acknowledge(self, trajectory: str | None, claims: str) -> None: ...

    def keep(self) -> None: ...

    async def leave(self, claims: str) -> bool:
        return False
