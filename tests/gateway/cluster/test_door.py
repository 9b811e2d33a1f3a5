"""The nodes' door: who does not show who he is costs nothing but his own connection, and not for long."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from gateway.cluster.listener import NodeListener, bind
from manager.errors import InvalidConfig
from runtimes.node.certificate import NodeCertificate, ensure_certificate, node_side, server_side
from runtimes.node.protocol import (
    PROTOCOL,
    Beat,
    LinkSettings,
    NodeHello,
    NodeLink,
    encode,
)
from tests.gateway.conftest import until
from tests.runtimes.node.session import hello

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> NodeCertificate:
    return ensure_certificate(tmp_path_factory.mktemp("certificate"))


class Porter:
    """Greets: takes a hello, and holds the link until it is closed."""

    def __init__(self) -> None:
        self.met: asyncio.Queue[NodeLink] = asyncio.Queue()

    async def greet(self, link: NodeLink, authenticated: Callable[[], None]) -> None:
        await link.receive(NodeHello, DEADLINE_S)
        authenticated()
        self.met.put_nowait(link)
        await link.closed.wait()


@asynccontextmanager
async def opened(
    certificate: NodeCertificate,
    porter: Porter,
    *,
    handshakes_max: int = 4,
    handshake_s: float = DEADLINE_S,
    settings: LinkSettings | None = None,
) -> AsyncIterator[NodeListener]:
    door = NodeListener(
        bind("127.0.0.1:0"),
        server_side(certificate),
        settings or LinkSettings(),
        handshake_s=handshake_s,
        handshakes_max=handshakes_max,
        greet=porter.greet,
    )
    door.open()
    try:
        yield door
    finally:
        await door.close()


async def dialled(
    door: NodeListener, context: ssl.SSLContext | None, source: str = "127.0.0.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    named = None if context is None else ""
    return await asyncio.open_connection(
        "127.0.0.1", door.port, ssl=context, server_hostname=named, local_addr=(source, 0)
    )


async def linked(door: NodeListener) -> NodeLink:
    """Dial as a node does."""
    loop = asyncio.get_running_loop()
    _, link = await loop.create_connection(NodeLink, "127.0.0.1", door.port, ssl=node_side(), server_hostname="")
    return link


async def cut(reader: asyncio.StreamReader) -> bool:
    """Wait until the other side has hung up."""
    async with asyncio.timeout(DEADLINE_S):
        try:
            return await reader.read(1) == b""
        except OSError:
            return True


async def test_connections_that_say_nothing_are_bounded_and_those_beyond_are_cut_at_once(
    certificate: NodeCertificate,
) -> None:
    async with opened(certificate, Porter(), handshakes_max=3) as door:
        silent = [await dialled(door, None) for _ in range(3)]
        for _ in range(20):
            reader, writer = await dialled(door, None)
            assert await cut(reader)
            writer.close()
        assert (door.handshaking, door.cut) == (3, 20)
        for _, writer in silent:
            writer.close()


async def test_an_address_that_has_most_places_makes_room_for_another_one_and_not_for_itself(
    certificate: NodeCertificate,
) -> None:
    porter = Porter()
    async with opened(certificate, porter, handshakes_max=4) as door:
        crowd = [await dialled(door, None, "127.0.0.2") for _ in range(4)]
        late, writer = await dialled(door, None, "127.0.0.2")
        assert await cut(late)
        writer.close()
        others = [await dialled(door, None, "127.0.0.3") for _ in range(2)]
        for reader, _ in crowd[:2]:
            assert await cut(reader), "its oldest go first"
        assert (door.handshaking, door.cut) == (4, 3)
        even, writer = await dialled(door, None, "127.0.0.3")
        assert await cut(even), "both have the same share now"
        writer.close()
        link = await linked(door)
        link.send(hello(PROTOCOL))
        async with asyncio.timeout(DEADLINE_S):
            await porter.met.get()
        assert (door.handshaking, door.cut) == (3, 5)
        for _, writer in (*crowd, *others):
            writer.close()
        link.close("the test is over")


async def test_one_that_spells_its_greeting_byte_by_byte_has_no_more_time_than_others(
    certificate: NodeCertificate,
) -> None:
    porter = Porter()
    async with opened(certificate, porter, handshake_s=0.5) as door:
        reader, writer = await dialled(door, node_side())
        over = asyncio.ensure_future(cut(reader))
        for byte in encode(hello(PROTOCOL))[:-1]:
            writer.write(bytes([byte]))
            done, _ = await asyncio.wait({over}, timeout=0.02)
            if done:
                break
        assert await over
        writer.close()
        assert porter.met.empty()
        await until(lambda: not door.handshaking)


def test_an_address_that_cannot_be_listened_on_is_told() -> None:
    with bind("127.0.0.1:0") as taken, pytest.raises(InvalidConfig, match=r"cluster\.listen"):
        bind(f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize(
    ("data", "tls"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", False),
        (b"\0" * 4096, False),
        (b"\x7f\xff\xff\xff\x01", True),
        (encode(Beat()), True),
        (encode(hello(PROTOCOL + 1)), True),
        (b"", False),
    ],
    ids=["no TLS", "zeros", "too large", "no hello", "another protocol", "nothing"],
)
async def test_what_is_no_hello_is_cut_at_once_or_after_its_time(
    certificate: NodeCertificate, data: bytes, tls: bool
) -> None:
    porter = Porter()
    async with opened(certificate, porter, handshakes_max=1, handshake_s=DEADLINE_S if data else 0.05) as door:
        reader, writer = await dialled(door, node_side() if tls else None)
        writer.write(data)
        received = b""
        async with asyncio.timeout(DEADLINE_S):
            while piece := await reader.read(4096):  # an alert, perhaps, or why it is refused
                received += piece
        writer.close()
        assert porter.met.empty() and (b"protocol" in received) is (data == encode(hello(PROTOCOL + 1)))
