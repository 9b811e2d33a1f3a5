"""The bytes of one transfer leave room for everybody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from runtimes.node.files.flow import PIECE_BYTES, WINDOW_BYTES, Outflow
from tests.runtimes.node.memory_stream import close_all, pair


async def test_others_have_a_turn_between_two_pieces_where_the_link_has_room_for_all() -> None:
    near, _ = pair()
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def chunks() -> AsyncIterator[bytes]:
        yield bytes(WINDOW_BYTES)

    running = asyncio.create_task(others())
    await Outflow(1, near).send(chunks())
    running.cancel()
    assert turns >= WINDOW_BYTES // PIECE_BYTES
    await close_all()
