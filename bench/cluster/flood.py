"""Strangers at the nodes' door, in a process of their own: ``python -m bench.cluster.flood HOST PORT COUNT``.

A third of them say nothing, a third spell the beginning of TLS byte by byte, and a third greet slowly over TLS; none
reads. They come from another loopback address than nodes do. When each has dialled once, a line says how many that
were; from then on some dial again each second, until standard input ends. A last line says how many dialled in all.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from collections.abc import Awaitable, Callable

import uvloop

from runtimes.node.certificate import node_side
from runtimes.node.protocol import HANDSHAKE_BYTES
from tangram.frames import HEADER

SOURCE = "127.0.0.2"
#: Dialling at once; dials in a second after the first wave; descriptors left for other things than connections.
DIALLING, AGAIN_PER_S, SPARE = 256, 100, 200
#: Seconds between two bytes of who spells; connections that spell over TLS, as each costs this side a handshake.
SPELL_S, TLS_MAX = 0.25, 500
#: A TLS record of a greeting (ClientHello), of which more is announced than ever comes.
HELLO = bytes([22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3])


class Strangers:
    """Who dials, and what has become of it."""

    def __init__(self, host: str, port: int, count: int) -> None:
        self._place = (host, port)
        self._count = count
        self._gate = asyncio.Semaphore(DIALLING)
        self._context = node_side()
        self._held: set[asyncio.Task[None]] = set()
        self.dialled = self.failed = 0

    async def wave(self) -> None:
        """Have each dial once."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._dial(number))

    async def again_for_ever(self) -> None:
        """Dial again, each time in place of one that has been cut or would be."""
        number = 0
        while True:
            await asyncio.sleep(1 / AGAIN_PER_S)
            if len(self._held) >= self._count:
                next(iter(self._held)).cancel()
            await self._dial(number)
            number += 1

    async def _dial(self, number: int) -> None:
        over_tls = number % 3 == 2 and number < 3 * TLS_MAX
        ways: tuple[Callable[[asyncio.StreamWriter], Awaitable[None]], ...] = (_mute, _spelling_tls, _spelling_hello)
        async with self._gate:
            self.dialled += 1
            try:
                _, writer = await asyncio.open_connection(
                    *self._place,
                    local_addr=(SOURCE, 0),
                    ssl=self._context if over_tls else None,
                    server_hostname="" if over_tls else None,
                )
            except OSError:
                self.failed += 1
                return
        way = ways[number % 3 if over_tls else number % 2]
        task = asyncio.create_task(_held(writer, way))
        self._held.add(task)
        task.add_done_callback(self._held.discard)


async def _held(writer: asyncio.StreamWriter, way: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> None:
    """Stay on a connection, also when the other side has hung up, until there is no place for it."""
    try:
        await way(writer)
        await asyncio.get_running_loop().create_future()
    finally:
        writer.transport.abort()


async def _mute(writer: asyncio.StreamWriter) -> None: ...


async def _spelling_tls(writer: asyncio.StreamWriter) -> None:
    for byte in HELLO:
        writer.write(bytes([byte]))
        await asyncio.sleep(SPELL_S)


async def _spelling_hello(writer: asyncio.StreamWriter) -> None:
    writer.write(HEADER.pack(HANDSHAKE_BYTES, 1))
    while not writer.is_closing():
        writer.write(b"\x90")
        await asyncio.sleep(SPELL_S)


async def main() -> None:
    host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: None)  # connections that are cut are what this is about
    strangers = Strangers(host, port, min(count, most - SPARE))
    await strangers.wave()
    print(json.dumps({"dialled": strangers.dialled, "failed": strangers.failed}), flush=True)
    again = asyncio.create_task(strangers.again_for_ever())
    await loop.run_in_executor(None, sys.stdin.read)
    again.cancel()
    print(json.dumps({"dialled": strangers.dialled, "failed": strangers.failed}), flush=True)
    os._exit(0)  # thousands of connections need no farewell


if __name__ == "__main__":
    uvloop.run(main())
