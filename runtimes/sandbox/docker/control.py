"""How a container is governed from outside: by writes to its cgroup if that is visible, else by its engine."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from manager.errors import CapacityExceeded, CodedError, NotFound
from runtimes.sandbox.cgroup import Cgroup
from runtimes.sandbox.docker.engine import DockerEngine
from runtimes.sandbox.docker.leftovers import LeftoverCleaner
from runtimes.sandbox.runner.protocol import cut_off, lost

logger = structlog.get_logger("sandbox.container")

SNAPSHOTS = "tangram-snapshot"
#: How often an engine that is away is asked to thaw, and the seconds between two times: half a minute in all.
THAW_TRIES, THAW_STEP_S = 120, 0.25


class ContainerControl:
    """`runtimes.sandbox.sandbox.SandboxControl`.

    What is asked of the engine takes tens of milliseconds instead of 20 us.
    """

    def __init__(
        self, engine: DockerEngine, container: str, directory: Path, cgroup: Cgroup | None, cleaner: LeftoverCleaner
    ) -> None:
        self._engine = engine
        self._container = container
        self._directory = directory
        self._cgroup = cgroup
        self._cleaner = cleaner
        #: The cgroup, if freezing is a write.
        self._freezer = cgroup if cgroup is not None and cgroup.freezable else None

    async def set_cores(self, cores: Sequence[int], *, background: bool = False) -> None:
        with _out_of_reach():
            if self._cgroup is None:
                await self._engine.limit_cores(self._container, cores, background=background)
            else:
                self._cgroup.set_cores(cores, background=background)

    async def freeze(self) -> None:
        if self._freezer is not None:
            with suppress(FileNotFoundError):
                self._freezer.freeze()
            return
        try:
            await self._engine.pause(self._container)
        except CapacityExceeded as error:  # what the action has done is done
            logger.warning("a sandbox is not frozen", container=self._container[:12], why=error.message)

    async def thaw(self) -> None:
        if self._freezer is not None:
            with suppress(FileNotFoundError):
                self._freezer.thaw()
            return
        for tries_left in reversed(range(THAW_TRIES)):
            try:
                await self._engine.unpause(self._container)
                return
            except CapacityExceeded as error:  # a connection that was cut, or an engine that is away and may come back
                if not tries_left:
                    raise cut_off(f"the sandbox cannot be thawed: {error.message}") from None
                await asyncio.sleep(THAW_STEP_S)
            except CodedError:
                return  # it was not paused, or whoever runs something in it is told

    def oom_kills(self) -> int:
        return 0 if self._cgroup is None else self._cgroup.oom_kills()

    def peak_memory_bytes(self) -> int:
        return 0 if self._cgroup is None else self._cgroup.peak_memory_bytes()

    async def cause_of_death(self) -> str:
        try:
            found = await self._engine.inspect(self._container)
        except NotFound:
            return "the container was removed"
        except CodedError as error:
            return error.message
        if found.out_of_memory:
            return "out_of_memory"
        return "its runner fell silent" if found.running else f"its first process ended with status {found.exit_code}"

    async def snapshot(self, name: str) -> str:
        return await self._engine.commit(self._container, f"{SNAPSHOTS}:{name}", {"tangram.snapshot": name})

    async def remove(self) -> None:
        await self.thaw()
        try:
            await self._engine.remove(self._container)
        except CodedError:
            if self._cgroup is not None:  # what it holds of the machine is given back even so
                await asyncio.to_thread(self._cgroup.kill)
            raise
        await asyncio.to_thread(self._forget)

    def _forget(self) -> None:
        """Remove the directory last: while it is there the next gateway knows of the container."""
        self._cleaner.watch(self._container)
        shutil.rmtree(self._directory, ignore_errors=True)


@contextmanager
def _out_of_reach() -> Iterator[None]:
    """Raise the loss of a container, or of the engine, as the end of the action that wanted it."""
    try:
        yield
    except (FileNotFoundError, NotFound):
        raise lost("the container is gone; its files and processes are lost") from None
    except CapacityExceeded as error:
        raise cut_off(error.message) from None
