"""Commands in containers, as clients ask for them: described, started, looked at."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from gateway import wire
from gateway.facades.calls import ForeignCalls
from gateway.facades.docker.commands import PIDS_FROM, ContainerExec
from gateway.facades.docker.containers import Container
from gateway.facades.docker.exchange import EngineExchange
from gateway.facades.docker.lifecycle import PATIENCE_S, ContainerLife
from gateway.facades.docker.options import console_size, exec_wish
from gateway.facades.docker.records import KILLED
from gateway.facades.docker.shapes import exec_shape
from gateway.facades.docker.streams import attend, media_type
from gateway.facades.faults import fault_of_end
from gateway.invocations.invocation import InvocationRequest, LiveInvocation
from gateway.services import Services
from manager.errors import ActionFailed, CodedError, Conflict, InvalidInput, NotFound, Reason, TooLarge, Unsupported
from manager.function import Background
from runtimes.sandbox.session import SIGNALS

COMPONENT = "docker"
#: Starts what runs behind, and leaves its exit status in a file when it ends.
LAUNCH = (
    'status=$1; shift; ( "$@" </dev/null >/dev/null 2>&1; printf %s "$?" >"$status.part" && '
    'mv "$status.part" "$status" ) &'
)
STATUS_FILE = "/tmp/.tangram-exec-{}"
STATUS_BYTES = 64
#: Files of commands that are remembered no more, removed at once.
LEFT_MAX = 64
#: Seconds for which the removal of that file may stand in line: whoever asks for the status waits with it.
REMOVE_S = 1.0
#: What the sandbox's user may have written there is not to be believed.
EXIT_STATUS = re.compile(rb"[0-9]{1,3}")
#: A `kill` of a process that only this door knows, as the SWE-bench harness sends it when a command takes too long.
PID = re.compile(r"[0-9]{1,18}")
KILL = re.compile(r"(?:-s )?-?(?:SIG)?([A-Z0-9]+) ")


class ContainerExecs:
    """The endpoints."""

    def __init__(self, services: Services, calls: ForeignCalls, life: ContainerLife) -> None:
        self._services = services
        self._calls = calls
        self._life = life

    def create(self, container: Container, body: Mapping[str, object]) -> ContainerExec:
        """Know a command; raises InvalidInput, Unsupported, Conflict."""
        container.require_running()
        sandbox = self._services.environments.get(container.record.trajectory)
        wish = exec_wish(body, container.record.cwd, None if sandbox is None else sandbox.spec)
        return self._life.exec(container, wish)

    async def start(
        self, exchange: EngineExchange, command: ContainerExec, body: Mapping[str, object], patience_s: float
    ) -> None:
        """Run a command, and answer with its output, or at once if it is to run behind."""
        container = self._life.containers.home(command)
        if command.started:
            told = f"Error: Exec command {command.id} is already running, or has run"
            raise Conflict(told, component=COMPONENT)
        container.require_running()
        unknown = sorted(name for name in body if name not in ("Detach", "Tty", "ConsoleSize"))
        if unknown:
            raise Unsupported(f"{unknown[0][:64]}: is not done by this door; leave it out", component=COMPONENT)
        rows, columns = console_size(body)
        if rows and columns:
            command.wish = replace(command.wish, rows=rows, columns=columns)
        command.started = True
        behind = body.get("Detach") is True
        try:
            if (victim := self._victim(command)) is not None:
                await self._kill(command, victim)
                if not behind:
                    await exchange.upgraded(media_type(exchange, tty=command.wish.tty))
                    return
            elif not behind:
                command.start(self._life.slots, asyncio.get_running_loop().time() + PATIENCE_S)
                await attend(exchange, command, patience_s)
                return
            else:
                await self._launch(command, patience_s)
        except CodedError as error:
            command.settle(None, error)  # if it never began
            raise
        finally:
            self._life.mark_lost(container, command.error)
        await exchange.answer(200)

    async def inspect(self, exchange: EngineExchange, command: ContainerExec) -> None:
        """Answer how a command stands; raises what kept it from having an exit status: none is made up."""
        if command.status_file and not command.ended.is_set():
            await self._look_behind(command)
        if command.error is not None:
            raise command.error
        running = command.running
        await exchange.answer(200, exec_shape(command, None if running else command.exit_code, running=running))

    async def _launch(self, command: ContainerExec, patience_s: float) -> None:
        """Start what runs behind: an action that ends at once, of which a process is left."""
        container, wish = self._life.containers.home(command), command.wish
        sandbox = self._services.environments.get(container.record.trajectory)
        if sandbox is not None and sandbox.spec.background is Background.KILL:
            told = "Detach: the function's processes end with each command (sandbox.background: kill)"
            raise Unsupported(told, component=COMPONENT)
        command.status_file = STATUS_FILE.format(command.id[:32])
        left, container.left_files[:] = container.left_files[:LEFT_MAX], container.left_files[LEFT_MAX:]
        script = f"rm -f -- {' '.join(left)}; {LAUNCH}" if left else LAUNCH  # names of ours, without odd characters
        given = {**wish.input(), "argv": ["/bin/sh", "-c", script, "sh", command.status_file, *wish.argv]}
        del given["session"]
        invocation = await self._accepted(container, given, patience_s)
        await invocation.has_ended(None)
        error = invocation.refusal
        if error is None and (fault := fault_of_end(invocation.record)) is not None:
            reason = invocation.record.reason or Reason.INTERNAL
            error = ActionFailed(reason, fault.message, component=COMPONENT)
        if error is not None:
            raise error

    async def _look_behind(self, command: ContainerExec) -> None:
        """Read the exit status of what runs behind, if it has ended."""
        container = self._life.containers.home(command)
        sandbox = self._services.environments.get(container.record.trajectory)
        if sandbox is None or not container.running:
            command.settle(KILLED)
            return
        try:
            text = await sandbox.read_file(command.status_file, limit_bytes=STATUS_BYTES)
        except NotFound:
            return
        except (InvalidInput, TooLarge):  # the sandbox's user has put something else there
            text = b""
        except CodedError as error:
            self._life.mark_lost(container, error)
            raise
        command.settle(int(text) if EXIT_STATUS.fullmatch(text) else KILLED)
        with suppress(CodedError):  # else its container goes, and the file with it
            await self._accepted(container, {"argv": ["rm", "-f", "--", command.status_file]}, REMOVE_S)

    async def _accepted(self, container: Container, given: Mapping[str, object], patience_s: float) -> LiveInvocation:
        """Return an action of a container, which goes on though nobody attends; raises CodedError."""
        record = container.record
        call = InvocationRequest(
            function=record.function, input=given, body=wire.dumps(given), task=record.task,
            trajectory=record.trajectory, living=True, detached=True,
        )  # fmt: skip
        return await self._calls.accept(call, asyncio.get_running_loop().time() + patience_s)

    def _victim(self, command: ContainerExec) -> tuple[ContainerExec, str] | None:
        """Return which of our commands a `kill` means, and the signal; None for any other command."""
        words = command.wish.argv
        if words[0] not in ("kill", "/bin/kill", "/usr/bin/kill") or not 2 <= len(words) <= 4:
            return None
        if PID.fullmatch(words[-1]) is None or int(words[-1]) < PIDS_FROM:
            return None
        found = KILL.fullmatch(" ".join(words[1:-1]) + " ")
        name = "TERM" if len(words) == 2 else found[1] if found is not None else ""
        name = {str(number): each for each, number in SIGNALS.items()}.get(name, name)
        if name not in SIGNALS:
            raise InvalidInput(f"{words}: no signal that is known: {', '.join(SIGNALS)}", component=COMPONENT)
        execs = self._life.containers.home(command).execs.values()
        victim = next((each for each in execs if each.pid == int(words[-1]) and each.running), None)
        return (command, name) if victim is None else (victim, name)

    async def _kill(self, command: ContainerExec, victim: tuple[ContainerExec, str]) -> None:
        """Do what `kill` would: its own exit status is 1 where there is no such process any more."""
        whom, name = victim
        if whom is command:
            command.settle(1)
            return
        if whom.session is None:
            await whom.cancel("it was killed")
        else:
            await whom.signal(name)
        command.settle(0)
