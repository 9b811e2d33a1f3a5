"""The world outside the gateway: an upstream that counts, and a receiver of callbacks that now and then refuses one."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from bench.kills.history import KillHistory

#: What the upstream takes for an answer, so that there is work to kill.
WORK_S = 0.03
REFUSED = 0.1


@asynccontextmanager
async def outside(history: KillHistory, random_: random.Random) -> AsyncIterator[int]:
    """Serve on loopback and write down what comes: ``/do?NAME``, ``/metered?NAME`` and ``/told``; yields the port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):  # whoever asked was killed: that is the bench
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                path, _, name = head.split(" ", 2)[1].partition("?")
                length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0] or 0)
                body = await reader.readexactly(length)
                refused = False
                if path == "/told":
                    record = json.loads(body)
                    history.callbacks[record["id"]].append(record)
                    refused = random_.random() < REFUSED
                else:
                    history.done[name] += 1
                    if path == "/metered":
                        history.arrivals.append(time.monotonic())
                    await asyncio.sleep(WORK_S)
                status = "503 Busy" if refused else "200 OK"
                writer.write(f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n".encode())
                writer.write(b"Content-Length: 2\r\n\r\n{}")
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
