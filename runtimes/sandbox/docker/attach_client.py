"""The client of a runner over attach streams, one after the other: sandbox and commands outlive each of them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Self, TypeVar

import structlog

from manager.errors import ActionFailed, CodedError
from runtimes.sandbox.command import (
    Command,
    CommandResult,
    FileContent,
    FileStat,
    FileStream,
    OnOutput,
    ResumableCommand,
)
from runtimes.sandbox.docker.spool import repeatable
from runtimes.sandbox.runner.conversation import SandboxProcess
from runtimes.sandbox.runner.protocol import cut_off, lost
from runtimes.sandbox.runner.stream_client import StreamClient

logger = structlog.get_logger("sandbox.attach")

T = TypeVar("T")

#: Seconds that an engine may be away (it restarts), and between two looks for it.
AWAY_S, LOOK_S = 30.0, 0.25
#: How many numbers there are for requests; they are given in a circle.
NUMBERS = 2**31


class AttachClient:
    """`runtimes.sandbox.sandbox.RunnerClient`: attaches again if a connection was cut and the container lives.

    Every command can be claimed over the next connection, so that a cut costs time and nothing else.
    """

    hides = True

    def __init__(
        self,
        attach: Callable[[int], Awaitable[StreamClient]],
        running: Callable[[], Awaitable[bool]],
        *,
        detachable: bool,
    ) -> None:
        #: Whether commands may outlast this gateway.
        self._detachable = detachable
        #: Opens a connection whose numbers go on from the last one's.
        self._attach = attach
        #: Asks the engine whether the container lives.
        self._running = running
        self._client: StreamClient | None = None
        self._attaching = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self.lost = asyncio.Event()

    async def attach(self) -> Self:
        """Attach for the first time; raises ActionFailed(environment_lost)."""
        await self._attached()
        return self

    @property
    def resumable(self) -> Mapping[str, ResumableCommand]:
        return {} if self._client is None else self._client.resumable

    @property
    def started(self) -> frozenset[str] | None:
        return None if self._client is None else self._client.started

    async def run(self, command: Command, on_output: OnOutput | None = None) -> CommandResult:
        claim = command.claim or f"attached/{secrets.token_hex(8)}"
        asked = replace(command, claim=claim, detached=command.detached and self._detachable)
        shown = Shown(on_output)
        client, number = await self._attached(), None
        while True:
            if claim not in client.resumable:
                number = (client.number + 1) % NUMBERS  # it is given before anything else can happen
            try:
                result = await client.run(asked, shown.again())
                if not asked.detached:
                    client.keep(claim, detached=False)
                return result
            except ActionFailed as failure:
                client = await self._after(client, failure, number, claim)

    def keep(self, claims: str, *, detached: bool) -> None:
        if self._client is not None:
            self._client.keep(claims, detached=detached and self._detachable)

    async def spawn(self, command: Command) -> SandboxProcess:
        return await (await self._attached()).spawn(command)

    async def read_file(self, path: str, *, limit_bytes: int) -> bytes:
        return await self._again(lambda client: client.read_file(path, limit_bytes=limit_bytes))

    async def open_file(self, path: str, *, limit_bytes: int, user: str = "") -> FileStream:
        return await self._again(lambda client: client.open_file(path, limit_bytes=limit_bytes, user=user))

    async def write_file(
        self, path: str, content: FileContent, *, mode: int | None, locked: bool = False, user: str = ""
    ) -> bool:
        """What cannot be had again is kept on this machine's disk until it has arrived."""
        async with repeatable(content) as kept:
            return await self._again(lambda client: client.write_file(path, kept, mode=mode, locked=locked, user=user))

    async def list_files(self, path: str, *, user: str = "") -> list[FileStat]:
        return await self._again(lambda client: client.list_files(path, user=user))

    async def rest(self, *, resting: bool) -> None:
        """Stop its processes, or let them run again. What has just been cut off is not waited for to be stopped."""
        client = self._client
        if not resting:
            await self._again(lambda client: client.rest(resting=False))
        elif client is not None and not client.lost.is_set():
            await client.rest(resting=True)

    def lend(self, fd: int) -> bool:
        """Return False: a descriptor does not pass through an engine."""
        return False

    async def sweep(self) -> int:
        return await self._again(lambda client: client.sweep())

    def close(self) -> None:
        self.lost.set()
        if self._watch is not None:
            self._watch.cancel()
        if self._client is not None:
            self._client.close()

    # --- inside

    async def _again(self, work: Callable[[StreamClient], Awaitable[T]]) -> T:
        """Repeat what can be done twice until it was done over one connection."""
        while True:
            client = await self._attached()
            try:
                return await work(client)
            except ActionFailed as failure:
                await self._reattached(client, failure)

    async def _after(self, client: StreamClient, failure: ActionFailed, number: int | None, claim: str) -> StreamClient:
        """Return a new connection, over which a command goes on, or is run if the runner never saw it."""
        made = await self._reattached(client, failure)
        if claim not in made.resumable and not _is_ahead(number, made.greeted.taken):
            message = "the connection was cut while the command was given its input, or it was forgotten"
            raise cut_off(message, result=failure.result)
        return made

    async def _reattached(self, client: StreamClient, failure: ActionFailed) -> StreamClient:
        """Return the next connection if the ``failure`` was that this one was cut, else raise it."""
        if not client.lost.is_set() or self.lost.is_set() or await self._ended(client):
            raise failure
        try:
            return await self._attached()
        except ActionFailed as another:
            raise ActionFailed(
                another.reason, another.message, component=another.component, result=failure.result
            ) from None

    async def _attached(self) -> StreamClient:
        """Return the connection, opened again if it was cut; raises ActionFailed."""
        async with self._attaching:
            client = self._client
            if client is not None and not client.lost.is_set():
                return client
            if client is None:
                made = await self._attach(secrets.randbits(31))
            else:
                made = await self._attach_again(client)
            self._client = made
            self._watch = asyncio.create_task(self._tell(made))
            return made

    async def _attach_again(self, client: StreamClient) -> StreamClient:
        """Open a connection in place of one that was cut, as soon as the engine is there again."""
        away_until_s = time.monotonic() + AWAY_S
        while True:
            if self.lost.is_set() or await self._ended(client):
                raise lost("the sandbox's runner is gone")
            try:
                await self._running()  # an engine that does not answer is not waited for any longer than need be
                made = await self._attach(client.number)
            except CodedError as error:
                if time.monotonic() >= away_until_s:
                    raise self._given_up(error) from None
                await asyncio.sleep(LOOK_S)
            else:
                logger.info("attached again")
                return made

    def _given_up(self, error: CodedError) -> ActionFailed:
        """Return why it was given up: a runner that does not answer while its engine does is gone."""
        if not isinstance(error, ActionFailed):
            return cut_off(error.message)
        self.lost.set()
        return error

    async def _tell(self, client: StreamClient) -> None:
        """Learn that the container has ended at once, not with the next action."""
        await client.lost.wait()
        await self._ended(client)

    async def _ended(self, client: StreamClient) -> bool:
        """Return whether the sandbox is gone, and not just the connection; False if the engine cannot tell."""
        try:
            over = client.distrusted or not await self._running()
        except CodedError:
            over = False
        if over:
            self.lost.set()
        return over


def _is_ahead(number: int | None, taken: int | None) -> bool:
    """Return whether a command's number comes after the last one that the runner took, if it took any."""
    if number is None or taken is None:
        return number is not None
    return 0 < (number - taken) % NUMBERS < NUMBERS // 2


class Shown:
    """Shows output once, though a claimed command repeats it from its beginning."""

    def __init__(self, on_output: OnOutput | None) -> None:
        self._on_output = on_output
        self._shown_bytes = {"stdout": 0, "stderr": 0}

    def again(self) -> OnOutput | None:
        """Return the callback for one telling."""
        on_output = self._on_output
        if on_output is None:
            return None
        told_bytes = {"stdout": 0, "stderr": 0}

        def show(stream: str, data: bytes) -> None:
            fresh = data[max(0, self._shown_bytes[stream] - told_bytes[stream]) :]
            told_bytes[stream] += len(data)
            if fresh:
                self._shown_bytes[stream] = told_bytes[stream]
                on_output(stream, fresh)

        return show
