"""``tangram port-forward``: a TCP port of this machine that leads to a server in a trajectory's sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import click

from tangram import Client
from tangram.cli.options import connected, living
from tangram.cli.output import say

#: Bytes that are read at once.
PIECE_BYTES = 64 * 2**10


class PortNumbers(click.ParamType[tuple[int, int]]):
    """``PORT`` or ``PORT:LOCAL``."""

    name = "port"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        remote, _, local = str(value).partition(":")
        numbers = [int(each) if each.isascii() and each.isdigit() else -1 for each in (remote, local or remote)]
        if not 0 < numbers[0] < 2**16 or not 0 <= numbers[1] < 2**16:
            self.fail(f"{value!r} is not PORT or PORT:LOCAL, each below 65536", param, ctx)
        return numbers[0], numbers[1]


@click.command("port-forward")
@click.argument("trajectory")
@click.argument("ports", metavar="PORT[:LOCAL]", type=PortNumbers())
@click.option(
    "--function", metavar="NAME", default="shell", show_default=True, help="The exec function whose cores it has."
)
@connected
def port_forward(client: Client, trajectory: str, ports: tuple[int, int], function: str) -> int:
    """Lead connections to LOCAL on this machine to PORT in the sandbox of TRAJECTORY, until Ctrl-C.

    LOCAL is PORT if it is not given, and 0 takes a free one. The server has cores only while it answers.

    \b
    tangram port-forward t1 8000:9000
    """
    remote, local = ports
    with (
        living(client, trajectory, function, new=False).port(remote) as port,
        contextlib.suppress(KeyboardInterrupt),
    ):
        asyncio.run(_forward(port.tcp_url, port.trust if port.url.startswith("https:") else None, local))
    return 0


async def _forward(url: str, trust: ssl.SSLContext | None, local: int) -> None:
    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await carry(url, trust, reader, writer)
        except OSError as error:
            say(f"a connection has ended: {error}")
        finally:
            writer.close()

    leading = set[asyncio.Task[None]]()

    def connected_to(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: of one that is cancelled by Ctrl-C asyncio's streams print a traceback.
        task = asyncio.get_running_loop().create_task(lead(reader, writer))
        leading.add(task)
        task.add_done_callback(leading.discard)

    server = await asyncio.start_server(connected_to, "127.0.0.1", local)
    say(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server:
        await server.serve_forever()


async def carry(
    url: str, trust: ssl.SSLContext | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Carry one connection to its end; raises OSError if the server or the gateway cannot be reached."""
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

    try:
        socket = await connect(url, compression=None, max_size=None, ssl=trust, proxy=None)
    except InvalidStatus as error:
        raise ConnectionRefusedError((error.response.body or b"").decode("utf-8", "replace")[:500]) from None
    except InvalidHandshake as error:
        raise ConnectionError(str(error)) from None

    async def upward() -> None:
        while data := await reader.read(PIECE_BYTES):
            await socket.send(data)
        await socket.send(b"")

    async def downward() -> None:
        async for data in socket:
            if not data:
                writer.write_eof()
                return
            writer.write(data if isinstance(data, bytes) else data.encode())
            await writer.drain()
        raise ConnectionResetError(socket.close_reason or "the connection was lost")

    tasks = [asyncio.ensure_future(each) for each in (upward(), downward())]
    try:
        await asyncio.gather(*tasks)
    except ConnectionClosed as error:
        raise ConnectionResetError(str(error)) from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await socket.close()
