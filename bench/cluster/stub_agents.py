"""Many agents in one process, which join and beat and can run nothing; or one that floods its link, or never reads.

``python -m bench.cluster.stub_agents HOST PORT`` reads ``{"tickets": {name: ticket}}``, ``{"flood": bytes}`` or
``{"deaf": true}`` from standard input, prints ``joined`` when all have been welcomed, and lives until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys

import uvloop

from manager.config import NodeSpec
from manager.errors import CodedError, Unsupported
from runtimes.node import protocol
from runtimes.node.certificate import node_side
from runtimes.node.protocol import LinkSettings, Message, NodeLink, Pulse, facts_of

#: Connections that are being made at once, and seconds until a cut one tries again.
DIALLING, AGAIN_S, HANDSHAKE_S = 64, 0.05, 30.0
SETTINGS = LinkSettings(beat_s=1.0, silent_s=60.0)


def hello(name: str, ticket: str) -> protocol.NodeHello:
    """Return what an agent of 64 cores says first."""
    return protocol.NodeHello(
        protocol=protocol.PROTOCOL,
        version="bench",
        name=name,
        epoch=name,
        instance=name,
        ticket=ticket,
        key="",
        spec=NodeSpec(name=name, numa=(tuple(range(64)),), memory_bytes=2**38),
        labels={},
        isolation="",
    )


class StubAgent:
    """One agent: it says that it has nothing and is able to run nothing, and beats."""

    def __init__(
        self, name: str, ticket: str, place: tuple[str, int], context: ssl.SSLContext, pulse: Pulse | None = None
    ) -> None:
        self._name, self._ticket, self._place, self._context = name, ticket, place, context
        self._pulse = pulse
        self.link: NodeLink | None = None

    async def join(self) -> NodeLink:
        """Dial until it is let in."""
        while True:
            loop = asyncio.get_running_loop()
            _, link = await loop.create_connection(
                lambda: NodeLink(SETTINGS, pulse=self._pulse), *self._place, ssl=self._context, server_hostname=""
            )
            self.link = link
            link.send(hello(self._name, self._ticket))
            try:
                await link.receive(protocol.NodeWelcome, HANDSHAKE_S)
            except CodedError:  # too many are at it: it was cut
                await asyncio.sleep(AGAIN_S)
                continue
            link.send(protocol.Inventory(epoch=self._name, attempts=[], trajectories=[]))
            return link

    def handle(self, message: Message) -> None:
        """Answer a request: it cannot be done here."""
        if isinstance(message, protocol.NodeRequest) and self.link is not None:
            self.link.send(protocol.NodeAnswer(message.number, facts_of(Unsupported("a stub", component="bench"))))


async def join_all(tickets: dict[str, str], place: tuple[str, int]) -> None:
    """Join with all of them, and beat for ever."""
    gate, context, pulse = asyncio.Semaphore(DIALLING), node_side(), Pulse()

    async def one(name: str, ticket: str) -> asyncio.Task[str]:
        agent = StubAgent(name, ticket, place, context, pulse)
        async with gate:
            link = await agent.join()
        return asyncio.create_task(link.run(agent.handle))

    running = await asyncio.gather(*[one(*each) for each in tickets.items()])
    print("joined", flush=True)
    await asyncio.gather(*running)


async def flood(size_bytes: int, place: tuple[str, int]) -> None:
    """Send pieces of a log as fast as they are taken."""
    agent = StubAgent("flood", "", place, node_side())
    link = await agent.join()
    piece = bytes(size_bytes)
    print("joined", flush=True)
    while not link.closed.is_set():
        for number in range(64):
            link.send(protocol.AttemptLog("flood.1/", number, piece))
        await link.drained()


async def be_deaf(place: tuple[str, int]) -> None:
    """Join, and read nothing more than arrives by itself."""
    link = await StubAgent("deaf", "", place, node_side()).join()
    print("joined", flush=True)
    await link.closed.wait()


async def main() -> None:
    place, given = (sys.argv[1], int(sys.argv[2])), json.loads(sys.stdin.readline())
    if "flood" in given:
        await flood(int(given["flood"]), place)
    elif "deaf" in given:
        await be_deaf(place)
    else:
        await join_all(given["tickets"], place)


if __name__ == "__main__":
    uvloop.run(main())
