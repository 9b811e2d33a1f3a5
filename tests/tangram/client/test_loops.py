"""One asynchronous client in several event loops: each opens connections of its own."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from tangram import AsyncClient
from tangram.testing import ScriptedGateway
from tests.tangram.sockets import DEADLINE_S, served


# A loop that has ended cannot close its sockets any more; the garbage collector does, and says so.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_client_goes_on_in_the_next_loop() -> None:
    with served(ScriptedGateway({"f": {}})) as server:
        client = AsyncClient(server.address)

        async def use() -> bool:
            return (await client.invoke("f", {})).ok and (await client.invoke("f", {})).ok

        assert asyncio.run(use()) and asyncio.run(use())
        assert server.opened == 2
        asyncio.run(client.close())
        gc.collect()


def test_two_loops_at_once_do_not_disturb_each_other() -> None:
    with served(ScriptedGateway({"f": {}})) as server:
        client = AsyncClient(server.address)
        here, there = threading.Event(), threading.Event()
        done: list[bool] = []

        async def use(mine: threading.Event, other: threading.Event) -> None:
            await client.functions()
            mine.set()
            await asyncio.to_thread(other.wait, DEADLINE_S)
            done.append((await client.invoke("f", {})).ok)
            link = client._opened.take()
            assert link is not None
            await link.http.aclose()

        threads = [
            threading.Thread(target=asyncio.run, args=(use(*events),)) for events in ((here, there), (there, here))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert done == [True, True]
        assert server.opened == 2


async def test_a_closed_client_says_so() -> None:
    client = AsyncClient(transport=ScriptedGateway())
    async with client:
        assert await client.functions() == ()
    with pytest.raises(RuntimeError, match="the client is closed"):
        await client.functions()
    await client.close()
