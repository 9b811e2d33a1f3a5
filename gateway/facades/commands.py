"""Commands of foreign clients: an action with a session, from its turn to its end, and what it said last."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from gateway import serialization
from gateway.api import Api
from gateway.facades.facade import ForeignCalls
from gateway.invocations.invocations import InvocationRequest, LiveInvocation
from gateway.invocations.record import Record
from manager.errors import ActionFailed, CapacityExceeded, CodedError, Conflict, Reason
from runtimes.sandbox.session import PAGE_BYTES, ByteLog, InteractiveSession, TerminalSize

COMPONENT = "facades"
#: Exit status of what was killed.
KILLED = 137
HEARTBEAT_S = 30.0
#: Seconds for which an action that was cancelled may take to end.
ENDING_S = 15.0
#: Ids of processes that clients are told: beyond every real one, so that a `kill` of one is known to mean ours.
PIDS_FROM = 2**22 + 1
#: Exit status of a command that could not be begun for what it asks: its user, its directory.
NOT_BEGUN = 126

#: Takes a piece of output: its stream, and its bytes.
Send = Callable[[str, bytes], Awaitable[None]]


class CommandPlace(Protocol):
    """Where a command belongs."""

    @property
    def function(self) -> str: ...

    @property
    def task(self) -> str: ...

    @property
    def trajectory(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """What a command is to be."""

    argv: tuple[str, ...]
    cwd: str = ""
    env: tuple[tuple[str, str], ...] = ()
    user: str = ""
    tty: bool = False
    stdin: bool = False
    stdout: bool = True
    stderr: bool = True
    rows: int = 0
    columns: int = 0

    def input(self) -> dict[str, object]:
        """Return it as the input of an exec action with a session."""
        session: dict[str, object] = {"terminal": True} if self.tty else {}
        if self.tty and self.rows and self.columns:
            session |= {"rows": self.rows, "columns": self.columns}
        fields: dict[str, object] = {"argv": list(self.argv), "session": session}
        named = {"cwd": self.cwd, "user": self.user, "env": dict(self.env)}
        return fields | {name: value for name, value in named.items() if value}


class AttendedCommand:
    """A command from the moment it waits for its turn to its end."""

    def __init__(self, api: Api, calls: ForeignCalls, place: CommandPlace, spec: CommandSpec) -> None:
        self.spec = spec
        self.place = place
        #: Set once its session is there, or never will be.
        self.begun = asyncio.Event()
        #: Set once its program runs, or never will.
        self.opened = asyncio.Event()
        self.ended = asyncio.Event()
        self.session: InteractiveSession | None = None
        self.exit_code: int | None = None
        self.out_of_memory = False
        #: What is told beside its output: why it was ended.
        self.end_message = ""
        #: The invocation of its trajectory beside which it runs; None if it waits its turn.
        self.parent: str | None = None
        #: How its action ended; None for well.
        self.reason: Reason | None = None
        #: Why there is no exit status; None if there is one.
        self.error: CodedError | None = None
        self.invocation_id = ""
        self._api = api
        self._calls = calls
        self._cancelled = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def cancelled(self) -> bool:
        """Whether somebody ended it."""
        return bool(self._cancelled)

    def start(self, slots: asyncio.Semaphore, until_s: float) -> None:
        """Begin; ``slots`` are those of the sessions that may live at once."""
        self._task = asyncio.get_running_loop().create_task(self._run(slots, until_s))

    async def cancel(self, why: str) -> None:
        """End it, whether it runs or waits; return when it has ended."""
        self._cancelled = self._cancelled or why
        if self._task is None:
            self.settle(KILLED)
            return
        if self.ended.is_set():
            return
        if not self.invocation_id:
            self._task.cancel()
        else:
            with suppress(CodedError):
                await self._api.invocations.cancel(self.invocation_id, why)
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S):
                await self.ended.wait()

    def settle(self, exit_code: int | None, error: CodedError | None = None) -> None:
        """It has ended, without an action that told so; idempotent."""
        if not self.ended.is_set():
            self.exit_code, self.error = exit_code, error
            self._wake_all()

    async def end_input(self) -> None:
        """Let it find the end of its input."""
        await self.opened.wait()
        session = self.session
        with suppress(CodedError):
            while session is not None and session.reads:
                with suppress(CapacityExceeded):
                    await session.write(b"", end=True)

    async def signal(self, name: str) -> None:
        """Signal what runs in its foreground; raises InvalidInput, Conflict."""
        if self.session is None or self.ended.is_set():
            raise Conflict("the command does not run", component=COMPONENT)
        await self.session.signal(name)

    async def resize(self, rows: int, columns: int) -> None:
        """Tell its terminal how large it is; raises Conflict."""
        if self.session is None or self.ended.is_set():
            raise Conflict("the command does not run", component=COMPONENT)
        await self.session.resize(TerminalSize(rows, columns))

    async def _run(self, slots: asyncio.Semaphore, until_s: float) -> None:
        try:
            async with slots:
                invocation = await self._calls.attend(self._call(), until_s)
                try:
                    self.invocation_id = invocation.record.id
                    await self._followed(invocation)
                finally:
                    self._calls.leave(invocation)
        except asyncio.CancelledError:
            self.error = Conflict(self._cancelled or "the gateway ends", component=COMPONENT)
        except CodedError as error:
            self.error = error
        except Exception:
            self.error = CodedError("a fault of the gateway: its log tells more", component=COMPONENT)
            raise
        finally:
            self._wake_all()

    def _wake_all(self) -> None:
        for event in (self.ended, self.begun, self.opened):
            event.set()

    def _call(self) -> InvocationRequest:
        """Return what is asked of the gateway: an action that ends with it, as whoever hears this command does."""
        place, value = self.place, self.spec.input()
        return InvocationRequest(
            function=place.function, input=value, body=serialization.dumps(value), task=place.task,
            trajectory=place.trajectory, living=True, parent=self.parent,
        )  # fmt: skip

    async def _followed(self, invocation: LiveInvocation) -> None:
        """Return when it has ended; raises CapacityExceeded if it could have no session."""
        terminal = TerminalSize(self.spec.rows or 24, self.spec.columns or 80) if self.spec.tty else None
        self.session = self._api.sessions.living(invocation.record.id, terminal)
        self.begun.set()
        while not await self.session.opened(HEARTBEAT_S):
            pass
        self.opened.set()
        await invocation.has_ended(None)
        self._conclude(invocation)

    def _conclude(self, invocation: LiveInvocation) -> None:
        """Read how it ended: an exit status where the command has one, an error where the gateway has."""
        if invocation.refusal is not None:
            self.error = invocation.refusal
            return
        record = invocation.record
        result = {} if record.result is None else serialization.loads_object(record.result)
        code, number = result.get("exit_code"), result.get("signal")
        self.reason, self.out_of_memory = record.reason, record.reason is Reason.OUT_OF_MEMORY
        if record.reason in (Reason.TIMEOUT, Reason.OUT_OF_MEMORY) or self._cancelled:
            self.exit_code = KILLED
            self.end_message = "" if self._cancelled else f"tangram: {record.message}\n"
        elif record.reason is Reason.INVALID_INPUT:  # what the engine says of a user or directory that is not there
            self.exit_code, self.end_message = NOT_BEGUN, f"tangram: {record.message}\n"
        elif record.reason is not None:
            self.error = _error_of(record)
        elif isinstance(number, int):
            self.exit_code = 128 + number
        else:
            self.exit_code = code if isinstance(code, int) else None


class KeptCommand(AttendedCommand):
    """A command, and the end of its output that is kept for who comes later."""

    def __init__(self, api: Api, calls: ForeignCalls, place: CommandPlace, spec: CommandSpec, keep_bytes: int) -> None:
        super().__init__(api, calls, place, spec)
        self._keep_bytes = keep_bytes
        self._output = ByteLog(keep_bytes)
        #: Where each of those stands who are attached and are waited for.
        self._readers: dict[object, int] = {}
        self._moved = asyncio.Event()
        self.drained = asyncio.Event()

    def forgo(self) -> None:
        """It will never begin: who is attached already hears the end."""
        if self._task is None:
            self.settle(None)
            self.drained.set()
            self._wake()

    async def keep_output(self) -> None:
        """Take its output until it ends; whoever is attached is waited for when slow."""
        try:
            await self.begun.wait()
            if self.session is None:
                return
            async for page in self.session.read(0, HEARTBEAT_S):
                for piece in page:
                    await self._room()
                    self._output.add(piece.stream, piece.data)
                self._wake()
            await self.ended.wait()
            if self.end_message:
                self._output.add("stderr", self.end_message.encode())
        finally:
            self.drained.set()
            self._wake()

    async def follow(self, send: Send, *, late: bool = False, tail: int | None = None) -> None:
        """Send its output from the oldest that is kept (``late``: from now) to its end, or only what there is now.

        Raises ClientDisconnect.
        """
        reader = object()
        position = self._output.end if late else self._tail(tail)
        self._readers[reader] = position
        try:
            while True:
                for piece in self._output.pieces(position, PAGE_BYTES):
                    await send(piece.stream, piece.data)
                    position = self._readers[reader] = piece.offset + len(piece.data)
                    self._wake()
                if self.drained.is_set() and position >= self._output.end:
                    return
                moved = self._moved
                if position >= self._output.end:
                    await moved.wait()
        finally:
            del self._readers[reader]
            self._wake()

    async def show(self, send: Send, tail: int | None = None) -> None:
        """Send what is kept of its output now; raises ClientDisconnect."""
        position, end = self._tail(tail), self._output.end
        while position < end and (pieces := self._output.pieces(position, PAGE_BYTES)):
            for piece in pieces:
                await send(piece.stream, piece.data)
                position = piece.offset + len(piece.data)

    def _tail(self, lines: int | None) -> int:
        """Return where the last so many lines begin."""
        start, end = self._output.start, self._output.end
        if lines is None:
            return start
        data = self._output.joined()
        begin = len(data) - (1 if data.endswith(b"\n") else 0)
        for _ in range(lines):
            begin = data.rfind(b"\n", 0, max(begin, 0))
            if begin < 0:
                return start
        return start + begin + 1 if lines else end

    async def _room(self) -> None:
        """Wait for those who are attached and far behind; who takes nothing is cut off by the bound of a write."""
        while any(self._output.end - position > self._keep_bytes // 2 for position in self._readers.values()):
            await self._moved.wait()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()


def _error_of(record: Record) -> CodedError:
    """Return why an action has no exit status, as an error that a client is told."""
    message = f"{record.function}: {record.reason}: {record.message}"
    if record.reason in (Reason.QUEUE_TIMEOUT, Reason.QUOTA):
        return CapacityExceeded(message, component=COMPONENT, invocation_id=record.id)
    return ActionFailed(record.reason or Reason.INTERNAL, message, component=COMPONENT)
