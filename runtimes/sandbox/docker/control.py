"""How a container is governed from outside: by writes to its cgroup if that is visible, else by its engine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from manager.errors import CapacityExceeded, CodedError, NotFound
from manager.function import SandboxSpec
from runtimes.sandbox.cgroup import Cgroup, CpuWeight, Freezer
from runtimes.sandbox.disk.bound import DiskBound
from runtimes.sandbox.docker.engine import DockerEngine, known_here
from runtimes.sandbox.docker.leftovers import LeftoverCleaner
from runtimes.sandbox.record import noted_bounded
from runtimes.sandbox.runner.protocol import cut_off, lost
from runtimes.sandbox.snapshots.record import LABEL, REPOSITORY

logger = structlog.get_logger("sandbox.container")


class ContainerControl:
    """`runtimes.sandbox.sandbox.SandboxControl`.

    What is asked of the engine takes tens of milliseconds instead of 20 us.
    """

    def __init__(
        self,
        engine: DockerEngine,
        container: str,
        directory: Path,
        cgroup: Cgroup | None,
        cleaner: LeftoverCleaner,
        bound: DiskBound,
        runner: int,
        *,
        removed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``runner`` is its first process as this machine knows it, 0 if it does not.

        ``removed`` is called after the container has gone.
        """
        self._engine = engine
        self._container = container
        self._directory = directory
        self._cgroup = cgroup
        self._cleaner = cleaner
        self._bound = bound
        self._runner = runner
        self._freezer = Freezer(cgroup, runner)
        self._removed = removed

    def processes(self) -> list[int]:
        """Return every process in it, in this machine's numbers; none if they cannot be seen."""
        return [] if self._cgroup is None else self._cgroup.processes()

    async def set_cores(self, cores: Sequence[int], weight: CpuWeight = CpuWeight.ACTION) -> None:
        with _out_of_reach():
            if self._cgroup is None:
                await self._engine.limit_cores(self._container, cores, weight)
            else:
                self._cgroup.set_cores(cores, weight)

    async def freeze(self, lend: Callable[[int], bool]) -> bool:
        with suppress(FileNotFoundError):
            return self._freezer.freeze(lend)
        return True

    async def thaw(self) -> None:
        with suppress(FileNotFoundError):
            self._freezer.thaw()

    def oom_kills(self) -> int:
        return 0 if self._cgroup is None else self._cgroup.oom_kills()

    def forks_refused(self) -> int:
        return 0 if self._cgroup is None else self._cgroup.forks_refused()

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

    async def snapshot(self, spec: SandboxSpec, id: str, place: Path, limit_bytes: int) -> int:
        bounded = await asyncio.to_thread(noted_bounded, self._directory)
        if bounded is not None and not await asyncio.to_thread(self._bound.shows, bounded):
            # Its processes still see it; the engine would keep an empty directory in its place.
            raise lost("the image of its disk is not mounted any more where its engine keeps its files")
        size_bytes = await self._engine.layer_bytes(self._container)
        if size_bytes <= limit_bytes:
            await self._engine.commit(self._container, f"{REPOSITORY}:{id}", {LABEL: id}, without=spec.env)
        return size_bytes

    async def remove(self) -> None:
        await self.thaw()
        await asyncio.to_thread(release_noted, self._bound, self._directory)
        try:
            if end_here(self._runner, self._container):
                with suppress(CodedError):
                    await self._engine.ended(self._container)
            await self._engine.remove(self._container)
        except CodedError:
            if self._cgroup is not None:  # what it holds of the machine is given back even so
                await asyncio.to_thread(self._cgroup.kill)
            raise
        await asyncio.to_thread(self._forget)
        if self._removed is not None:
            await self._removed()

    def _forget(self) -> None:
        """Remove the directory last: while it is there the next gateway knows of the container."""
        self._cleaner.watch(self._container)
        if self._cgroup is not None:
            self._cgroup.remove_aside()
        shutil.rmtree(self._directory, ignore_errors=True)


def end_here(runner: int, container: str) -> bool:
    """End a container by its first process, and with that all others in it; return whether that is on its way.

    The engine would start a program for it. Return False if that process (0: unknown) is not, or no longer, its first.
    """
    if not runner:
        return False
    try:
        held = os.pidfd_open(runner)
    except OSError:
        return False
    try:
        if known_here(runner, container):  # and as it is held, it cannot become another
            signal.pidfd_send_signal(held, signal.SIGKILL)
            return True
    except OSError:
        pass
    finally:
        os.close(held)
    return False


def release_noted(bound: DiskBound, directory: Path) -> None:
    """Take away the bound that was noted in a sandbox's directory, if any was."""
    place = noted_bounded(directory)
    if place is not None:
        bound.release(place)


@contextmanager
def _out_of_reach() -> Iterator[None]:
    """Raise the loss of a container, or of the engine, as the end of the action that wanted it."""
    try:
        yield
    except (FileNotFoundError, NotFound):
        raise lost("the container is gone; its files and processes are lost") from None
    except CapacityExceeded as error:
        raise cut_off(error.message) from None
