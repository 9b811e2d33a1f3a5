"""What a client hears of a command and types to it, over a connection that is bytes from its upgrade on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress

from gateway.facades.docker.commands import HEARTBEAT_S, AttendedCommand, ContainerExec, MainCommand, frame
from gateway.facades.docker.exchange import ClientGone, EngineExchange, EnginePipe
from manager.errors import CapacityExceeded, CodedError, InvalidInput

RAW, MULTIPLEXED = "application/vnd.docker.raw-stream", "application/vnd.docker.multiplexed-stream"
#: Why a command is ended whose client went away.
WENT = "its client went away"


async def attend(exchange: EngineExchange, command: ContainerExec, patience_s: float) -> None:
    """Answer the start of a command: all that it says, to its end; it ends with its client.

    A command that could not begin within ``patience_s`` is a stream that is silent yet. Raises what kept the command
    from beginning, as long as that can still be said.
    """
    loop = asyncio.get_running_loop()
    gone, upgraded = loop.create_task(exchange.peer.gone()), asyncio.Event()
    pipes: list[EnginePipe] = []
    hearing = loop.create_task(_hear(command, upgraded, pipes))
    try:
        opened = loop.create_task(command.opened.wait())
        await asyncio.wait({opened, gone}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if gone.done():
            raise ClientGone
        if command.error is not None:
            raise command.error
        pipe = await exchange.upgraded(media_type(exchange, tty=command.wish.tty))
        pipes.append(pipe)
        upgraded.set()
        typing = loop.create_task(type_to(command, pipe))
        try:
            await asyncio.wait({hearing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not hearing.done():
                raise ClientGone
            hearing.result()
        finally:
            typing.cancel()
            await asyncio.gather(typing, return_exceptions=True)
    except ClientGone:
        await command.cancel(WENT)
        raise
    finally:
        for task in (hearing, gone):
            task.cancel()
        await asyncio.gather(hearing, gone, return_exceptions=True)


async def _hear(command: ContainerExec, upgraded: asyncio.Event, pipes: list[EnginePipe]) -> None:
    """Send what a command says; it waits for a client that is slow. Raises ClientGone."""
    wish = command.wish
    streams = {name for name, wanted in (("stdout", wish.stdout), ("stderr", wish.stderr)) if wanted}
    await command.begun.wait()
    if command.session is not None:
        async for page in command.session.read(0, HEARTBEAT_S):
            await upgraded.wait()
            said = [piece for piece in page if piece.stream in streams]
            data = b"".join([piece.data if wish.tty else frame(piece.stream, piece.data) for piece in said])
            if data:
                await pipes[0].send(data)
    await command.ended.wait()
    await upgraded.wait()
    told = command.told or ("" if command.error is None else f"tangram: {command.error.message}\n")
    if told:
        await pipes[0].send(told.encode() if wish.tty else frame("stderr", told.encode()))


async def type_to(command: AttendedCommand, pipe: EnginePipe) -> None:
    """Pass on what a client types, and the end of it; a command without input finds its end at once."""
    await command.opened.wait()
    session = command.session
    if session is None:
        return
    with suppress(CodedError):
        while command.wish.stdin:
            data = await pipe.read()
            if not data:
                break
            end = session.input_offset + len(data)
            while session.reads and session.input_offset < end:
                with suppress(CapacityExceeded):  # its node is not reached now: the input waits, until that is lost
                    await session.write(data[len(data) - (end - session.input_offset) :])
    if not command.wish.tty:
        await command.end_input()


async def attach(
    exchange: EngineExchange, main: MainCommand | None, ended: Callable[[], Coroutine[None, None, None]]
) -> None:
    """Answer an attachment to a main command: its output from now on, and what is typed to it.

    Without ``stream`` that is what is kept of its output, if it asks for ``logs``.
    """
    query = exchange.query
    logs, stream = flag(query.get("logs")), flag(query.get("stream"))
    streams = frozenset(name for name in ("stdout", "stderr") if flag(query.get(name)))
    tty = main is not None and main.wish.tty
    pipe = await exchange.upgraded(media_type(exchange, tty=tty))
    if main is None:  # it says nothing, and ends with its container
        if stream:
            await either(ended(), exchange.peer.gone())
        return
    if not stream:
        if logs:
            await main.show(pipe.send, not tty, streams, None)
        return
    loop = asyncio.get_running_loop()
    typing = loop.create_task(type_to(main, pipe)) if flag(query.get("stdin")) else None
    try:
        follow = main.follow(pipe.send, not tty, streams, late=not logs, tail=None)
        await either(follow, exchange.peer.gone())
    finally:
        if typing is not None:
            typing.cancel()
            await asyncio.gather(typing, return_exceptions=True)


async def send_logs(exchange: EngineExchange, main: MainCommand | None, tail: int | None) -> None:
    """Answer with a main command's output, as far as it is kept; with ``follow`` to its end."""
    query = exchange.query
    streams = frozenset(name for name in ("stdout", "stderr") if flag(query.get(name)))
    if not streams:
        raise InvalidInput("Bad parameters: you must choose at least one stream", component="docker")
    tty = main is not None and main.wish.tty
    async with exchange.streamed(media_type(exchange, tty=tty)) as body:
        if main is None:
            return
        if flag(query.get("follow")):
            follow = main.follow(body.send, not tty, streams, late=False, tail=tail)
            await either(follow, exchange.peer.gone())
        else:
            await main.show(body.send, not tty, streams, tail)


def flag(text: str | None) -> bool:
    """Return whether a query says yes, as the engine reads it."""
    return (text or "").strip().lower() not in ("", "0", "no", "false", "none")


def media_type(exchange: EngineExchange, *, tty: bool) -> str:
    """Return how the stream is named: since 1.42 by whether it has frames."""
    return MULTIPLEXED if not tty and version_of(exchange.path) >= (1, 42) else RAW


def version_of(path: str) -> tuple[int, int]:
    """Return the version that a path begins with; zeros for none."""
    first = path.lstrip("/").partition("/")[0]
    numbers = first.removeprefix("v").split(".")
    if (
        not first.startswith("v")
        or len(numbers) != 2
        or not all(part.isdecimal() and len(part) < 5 for part in numbers)
    ):
        return 0, 0
    return int(numbers[0]), int(numbers[1])


async def either(work: Coroutine[None, None, None], gone: Coroutine[None, None, None]) -> None:
    """Do the work unless its client goes, which raises ClientGone; raises what the work raises."""
    loop = asyncio.get_running_loop()
    working, going = loop.create_task(work), loop.create_task(gone)
    try:
        await asyncio.wait({working, going}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        working.result()
    finally:
        for task in (working, going):
            task.cancel()
        await asyncio.gather(working, going, return_exceptions=True)
