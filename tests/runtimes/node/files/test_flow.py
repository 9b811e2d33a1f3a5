"""The bytes of one transfer leave room for everybody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from runtimes.node.protocol import (
    AHEAD_BYTES,
    PIECE_BYTES,
    WINDOW_BYTES,
    FileTransfer,
    TransferCredit,
    TransferPiece,
    TransferRequest,
    TransferVerb,
)
from tests.runtimes.node.memory_stream import close_all, pair

ASK = TransferRequest(transfer=1, verb=TransferVerb.READ, trajectory="t", path="f", user="")


async def test_others_have_a_turn_between_two_pieces_where_the_link_has_room_for_all() -> None:
    near, _ = pair()
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def chunks() -> AsyncIterator[bytes]:
        yield bytes(AHEAD_BYTES)

    running = asyncio.create_task(others())
    await FileTransfer(ASK, near).send(chunks())
    running.cancel()
    assert turns >= AHEAD_BYTES // PIECE_BYTES
    await close_all()


@pytest.mark.parametrize("chunk_bytes", [1000, 10_007, PIECE_BYTES, 100_003])
async def test_one_that_tells_of_what_it_took_a_quarter_of_the_old_window_at_once_is_sent_all(chunk_bytes: int) -> None:
    """So do gateways and nodes of before; what is under way stays within what every receiver allows."""
    near, far = pair()
    taken = untold = 0
    transfer = FileTransfer(ASK, near)
    size_bytes = 100 * chunk_bytes

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield bytes(chunk_bytes)

    def take(message: object) -> None:
        nonlocal taken, untold
        assert isinstance(message, TransferPiece)
        taken, untold = taken + len(message.data), untold + len(message.data)
        assert untold <= WINDOW_BYTES
        if untold >= WINDOW_BYTES // 4:
            transfer.take(TransferCredit(1, untold))
            untold = 0

    running = asyncio.create_task(far.run(take))
    async with asyncio.timeout(60):
        await transfer.send(chunks())
        while taken < size_bytes:  # noqa: ASYNC110  # what is waited for has no event, and every turn may bring it
            await asyncio.sleep(0)
    await close_all()
    await running
