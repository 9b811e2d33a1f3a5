"""The life of containers: made, begun as trajectories, ended and removed with them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog

from gateway import wire
from gateway.access.connections import ended_chore
from gateway.config.facades import DockerFacade
from gateway.facades.calls import ForeignCalls
from gateway.facades.docker.commands import CommandWish, ContainerExec, MainCommand
from gateway.facades.docker.containers import Container, Containers, identity
from gateway.facades.docker.options import FUNCTION_LABEL, TASK_LABEL, ContainerWish, container_wish, image_names
from gateway.facades.docker.records import KILLED, LOST_EXIT, ContainerRecord
from gateway.services import Services
from gateway.trajectories import open_trajectory, with_choice
from manager.errors import (
    ActionFailed,
    CapacityExceeded,
    CodedError,
    Conflict,
    InvalidInput,
    NotFound,
    Reason,
    Unsupported,
)
from manager.function import FunctionSpec
from runtimes.sandbox.sandbox import Sandbox
from tangram.types import TrajectoryOpening

COMPONENT = "docker"
#: Seconds between two looks at whether the trajectories of running containers still live.
LOOK_S = 5.0
#: Seconds for which an action may stand in line before its client, that has no bound, is told.
PATIENCE_S = 3600.0
#: Signals that end a container whose main command only keeps it alive.
ENDING_SIGNALS = frozenset({"KILL", "TERM", "INT", "QUIT", "HUP"})

logger = structlog.get_logger("gateway.facades")


@dataclass(slots=True)
class _Pids:
    """Numbers for processes that clients are told."""

    last: int

    def next(self) -> int:
        self.last += 1
        return self.last


class ContainerLife:
    """Makes, begins, ends and removes containers."""

    def __init__(self, services: Services, calls: ForeignCalls, settings: DockerFacade) -> None:
        self.containers = Containers(services.store, settings)
        self.slots = asyncio.Semaphore(services.sessions.settings.living_max)
        self._services = services
        self._calls = calls
        self._settings = settings
        self._pids = _Pids(2**22)
        self._chores: set[asyncio.Task[None]] = set()
        self._loading = asyncio.get_running_loop().create_task(self._load())
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def ready(self) -> None:
        """Return when what an earlier gateway kept is taken up; raises StorageUnavailable."""
        await asyncio.shield(self._loading)

    async def close(self) -> None:
        """Stop watching; the containers' trajectories stay or go with the gateway's."""
        await ended_chore(self._watching)
        for container in self.containers.all():
            if container.timer is not None:
                container.timer.cancel()
        for task in tuple(self._chores):
            await ended_chore(task)
        await asyncio.gather(self._loading, return_exceptions=True)

    # --- making

    async def create(self, body: Mapping[str, object], name: str) -> tuple[Container, tuple[str, ...]]:
        """Keep a new container, and return it with what it asked for and does not get.

        Its trajectory begins when it is started.

        Raises InvalidInput and Unsupported for what the function does not allow, NotFound for an image that is not
        there (its client pulls it then), Conflict for a name.
        """
        name = self.containers.check(name)
        labels = body.get("Labels")
        labels = labels if isinstance(labels, dict) else {}
        function = self.function(str(labels.get(FUNCTION_LABEL) or self._settings.function))
        wish = container_wish(body, function)
        task = wire.name(wish.labels.get(TASK_LABEL, "default"), f"Labels.{TASK_LABEL}")
        if wish.sandbox is not None:
            with_choice(function, wish.sandbox)
        await self._require_image(wish)
        trajectory, id = identity(name)
        host = body.get("HostConfig")
        record = ContainerRecord(
            id=id, name=self.containers.check(name), trajectory=trajectory, function=function.name, task=task,
            image=wish.image, config={key: value for key, value in body.items() if key != "HostConfig"},
            host_config=host if isinstance(host, dict) else {}, sandbox=wish.sandbox, argv=wish.argv,
            cwd=wish.cwd, labels=wish.labels, idles=wish.idles, idles_s=wish.idles_s, tty=wish.tty,
            reads_stdin=wish.reads_stdin, auto_remove=wish.auto_remove, created_s=self._services.wall(),
        )  # fmt: skip
        return await self.containers.add(record), wish.warnings

    def function(self, name: str) -> FunctionSpec:
        """Return an exec function; raises NotFound, InvalidInput."""
        function = self._services.functions.get(wire.name(name, "function"))
        if function.runtime != "exec":
            raise InvalidInput(f"{name!r} is no exec function", component=COMPONENT)
        return function

    async def _require_image(self, wish: ContainerWish) -> None:
        """Raise NotFound for an image that must be pulled first, Unsupported where sandboxes have none."""
        image = None if wish.sandbox is None else wish.sandbox.image
        if image is None:
            return
        if self._services.images is None:
            kind = self._services.sandboxes().kind
            told = f"Image: this gateway's sandboxes are of kind {kind}, and have no images but the function's own"
            raise Unsupported(told, component=COMPONENT)
        present = {each.image for each in await self._services.images.states() if each.state == "present"}
        if present.isdisjoint(image_names(image)):
            raise NotFound(f"No such image: {wish.image}", component=COMPONENT)

    # --- beginning

    async def open(self, container: Container, timeout_s: float) -> None:
        """Begin its trajectory: its sandbox is made, and waits; raises CapacityExceeded after ``timeout_s``.

        Raises NotFound for one that is removed, also if that happens meanwhile: nothing of it is left.
        """
        record = container.record
        container.require_kept()
        if record.opened:
            if self._services.engine.trajectory(record.trajectory) is None:
                told = f"container {record.id} ended with its trajectory, and its files with it: make a new one"
                raise Conflict(told, component=COMPONENT)
            return
        asked = TrajectoryOpening(function=record.function, task=record.task, sandbox=record.sandbox)
        done = False
        try:
            async with asyncio.timeout(timeout_s):
                await open_trajectory(self._services, record.trajectory, asked)
                container.require_kept()
                done = True
        except TimeoutError:
            told = "the container was not begun in the time that its client waits; start it again"
            raise CapacityExceeded(told, component=COMPONENT, retry_after_s=1.0) from None
        finally:
            if not done:
                self._chore(self._end_trajectory(record.trajectory))
        record.opened = True
        self.containers.save(container)

    async def start(self, container: Container, timeout_s: float) -> bool:
        """Begin it; return whether that is news."""
        async with container.lock:
            if container.running:
                return False
            await self.open(container, timeout_s)
            record = container.record
            record.status, record.started_s = "running", self._services.wall()
            record.exit_code, record.error, record.out_of_memory = 0, "", False
            self.containers.save(container)
            if record.idles:
                self._arm(container)
            else:
                self._begin_main(container)
            await self._services.store.commit()  # who is told that it runs finds it so at the next gateway
            return True

    def _begin_main(self, container: Container) -> None:
        main = container.main = container.next_main or self._main(container)
        container.next_main = None
        main.start(self.slots, asyncio.get_running_loop().time() + PATIENCE_S)
        self._chore(self._attend_main(container, main))

    def main_of(self, container: Container) -> MainCommand | None:
        """Return its main command, the next where it does not run; None if it only keeps the container alive."""
        if container.record.idles or container.running:
            return container.main
        container.next_main = container.next_main or self._main(container)
        return container.next_main

    def _main(self, container: Container) -> MainCommand:
        record = container.record
        wish = CommandWish(argv=record.argv, cwd=record.cwd, tty=record.tty, stdin=record.reads_stdin)
        keep_bytes = self._services.sessions.settings.output_bytes
        return MainCommand(self._services, self._calls, record, wish, keep_bytes)

    async def _attend_main(self, container: Container, main: MainCommand) -> None:
        """Keep its output, and end its container with it."""
        if not container.record.reads_stdin:
            self._chore(main.end_input())
        await main.keep_output()
        await main.ended.wait()
        if main is not container.main or not container.running:
            return
        if main.error is not None:
            self._ended(container, KILLED if main.cancelled else LOST_EXIT, main.error.message)
            self.mark_lost(container, main.error)
            return
        container.record.out_of_memory = main.out_of_memory
        self._ended(container, LOST_EXIT if main.exit_code is None else main.exit_code, main.told.strip())

    def _arm(self, container: Container) -> None:
        """End it when its ``sleep`` would."""
        record = container.record
        if container.timer is not None:
            container.timer.cancel()
            container.timer = None
        if record.idles_s:
            left_s = max(0.0, record.started_s + record.idles_s - self._services.wall())
            loop = asyncio.get_running_loop()
            container.timer = loop.call_later(left_s, self._chore_later, container)

    def _chore_later(self, container: Container) -> None:
        self._chore(self.end(container, exit_code=0))

    # --- commands

    def exec(self, container: Container, wish: CommandWish) -> ContainerExec:
        """Know a command that may be started; raises Conflict unless the container runs."""
        container.require_running()
        self.look(container)
        container.require_running()
        if container.main is not None and not container.main.ended.is_set():
            told = (
                f"the main command of container {container.record.id} runs, and commands of one container run one "
                "after another: let it be kept alive by 'sleep infinity', and begin servers by exec -d"
            )
            raise Conflict(told, component=COMPONENT)
        command = ContainerExec(self._services, self._calls, container.record, wish, self._pids.next())
        self.containers.add_exec(command)
        return command

    def mark_lost(self, container: Container, error: CodedError | None) -> None:
        """End a container whose sandbox is gone: what was in it is lost, and no later command may begin in another."""
        if isinstance(error, ActionFailed) and error.reason in (Reason.ENVIRONMENT_LOST, Reason.NODE_LOST):
            self._ended(container, KILLED, error.message)
            self._chore(self._end_trajectory(container.record.trajectory))

    async def sandbox(self, container: Container, timeout_s: float) -> Sandbox:
        """Return its sandbox, made if it has not begun; raises NotFound, Conflict, CapacityExceeded."""
        async with container.lock:
            await self.open(container, timeout_s)
        trajectory = container.record.trajectory
        found = self._services.environments.get(trajectory)
        if found is None:
            self._services.require_here(trajectory)
            raise NotFound(f"container {container.record.id} has no sandbox any more", component=COMPONENT)
        return found

    # --- ending

    async def stop(self, container: Container, grace_s: float) -> bool:
        """End it, its main command with a word before; return whether it ran."""
        async with container.lock:
            if not container.running:
                return False
            main = container.main
            if main is not None and not main.ended.is_set():
                with suppress(CodedError):
                    await main.signal("TERM")
                with suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await main.drained.wait()
        await self.end(container, exit_code=KILLED)
        return True

    async def restart(self, container: Container, grace_s: float, timeout_s: float) -> None:
        """End it if it runs, and begin it again with its files; raises as `start`."""
        container.restarting = True
        try:
            await self.stop(container, grace_s)
        finally:
            container.restarting = False
        await self.start(container, timeout_s)

    async def kill(self, container: Container, name: str) -> None:
        """Signal its main command; raises Conflict, InvalidInput."""
        container.require_running()
        main = container.main
        if name == "KILL" or (main is None and name in ENDING_SIGNALS):
            if main is not None:  # before what waits for its turn to end it: a stop gives it time
                await main.cancel("the container was killed")
            await self.end(container, exit_code=KILLED)
        elif main is not None:
            await main.signal(name)

    async def end(self, container: Container, *, exit_code: int) -> None:
        """End what runs in it; its files stay until it is removed."""
        async with container.lock:
            if not container.running:
                return
            commands = [each for each in container.execs.values() if each.running]
            main = container.main
            living = [] if main is None or main.ended.is_set() else [main]
            await asyncio.gather(*(each.cancel("the container was ended") for each in (*commands, *living)))
            sandbox = self._services.environments.get(container.record.trajectory)
            if sandbox is not None and sandbox.alive:
                with suppress(CodedError):
                    await sandbox.sweep()
            if container.running:
                self._ended(container, main.exit_code or exit_code if living and main else exit_code, "")
                await self._services.store.commit()

    async def remove(self, container: Container, *, force: bool) -> None:
        """Remove it with its trajectory; raises Conflict for one that runs, unless it is forced."""
        if container.running and not force:
            told = (
                f"You cannot remove a running container {container.record.id}. Stop the container before attempting "
                "removal or force remove"
            )
            raise Conflict(told, component=COMPONENT)
        if container.timer is not None:
            container.timer.cancel()
        if container.running:
            self._ended(container, KILLED, "", removes=False)
        container.record.removing = True
        self.containers.save(container)
        await self._end_trajectory(container.record.trajectory)
        self.containers.forget(container)
        if container.next_main is not None:
            container.next_main.forgo()

    def look(self, container: Container) -> None:
        """See whether its trajectory has ended."""
        record = container.record
        if record.status == "running" and self._services.engine.trajectory(record.trajectory) is None:
            told = "its trajectory has ended: it was idle for its idle_ttl, or somebody ended it"
            self._ended(container, KILLED, told)

    def _ended(self, container: Container, exit_code: int, why: str, *, removes: bool = True) -> None:
        record = container.record
        if record.status != "running":
            return
        record.status, record.exit_code, record.error = "exited", exit_code, why
        record.finished_s = self._services.wall()
        container.ends += 1
        if container.timer is not None:
            container.timer.cancel()
        self.containers.save(container)
        if record.auto_remove and removes and not container.restarting:
            self._chore(self.remove(container, force=True))

    async def _end_trajectory(self, trajectory: str) -> None:
        await self._services.engine.end_trajectory(trajectory)

    # --- chores

    async def _load(self) -> None:
        await self.containers.load()
        for container in self.containers.all():
            if container.record.removing:
                self._chore(self.remove(container, force=True))
            elif container.running and not container.record.idles:
                self._ended(container, LOST_EXIT, "the gateway that ran its main command has ended")
            elif container.running:
                self._arm(container)
            elif container.record.status == "exited" and container.record.auto_remove:
                self._chore(self.remove(container, force=True))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for container in self.containers.all():
                self.look(container)

    def _chore(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chore_done)

    def _chore_done(self, task: asyncio.Task[None]) -> None:
        self._chores.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a container's chore failed", door=COMPONENT, error=str(error))
