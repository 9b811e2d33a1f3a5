"""A server on this machine for a test: a handler for each connection, and none of them is left open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(handle: Handler, backlog: int = 100, path: Path | None = None) -> AsyncIterator[int]:
    """Serve on a free port, whose number it gives, or on a Unix socket at ``path``.

    At the end close every connection, whatever its handler waits for.

    Raises what a handler raised, but for the end of its connection.
    """
    open_: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def handled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        except (OSError, EOFError):
            pass  # the peer is gone
        finally:
            writer.close()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_[asyncio.get_running_loop().create_task(handled(reader, writer))] = writer

    if path is None:
        server = await asyncio.start_server(accepted, "127.0.0.1", 0, backlog=backlog)
    else:
        server = await asyncio.start_unix_server(accepted, path)
    try:
        yield 0 if path is not None else int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for _ in range(2):  # a connection that was accepted in this turn of the loop is known after two more
            await asyncio.sleep(0)
        for task, writer in open_.items():
            if not task.done():
                writer.transport.abort()  # also where the handler never began
                task.cancel()
        ended = await asyncio.gather(*open_, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error


async def piped(one: Streams, other: Streams) -> None:
    """Carry what each side says to the other, until both have ended."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # cut
        finally:
            writer.close()

    await asyncio.gather(carry(one[0], other[1]), carry(other[0], one[1]))
