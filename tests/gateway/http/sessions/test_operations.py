"""Sessions over HTTP and through the client: opened, typed to, attached to again, refused, and ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tangram import AsyncClient
from tangram.client.aio import AsyncSessionHandle
from tangram.errors import ConflictError, InvalidInputError, NotFoundError
from tangram.types import SessionEnd
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, function, serving, until

ECHO = 'echo begun; while read -r line; do echo "said $line"; done; exit 9'


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"http://127.0.0.1:{gateway.app.http_port}") as made:
        yield made


async def drained(session: AsyncSessionHandle) -> tuple[bytes, SessionEnd]:
    """All that a session says from now on, and its end."""
    said = b""
    async with asyncio.timeout(3 * DEADLINE_S):
        async for piece in session.output():
            said += piece.data
    assert session.end is not None
    return said, session.end


async def test_a_session_is_typed_to_and_tells_its_exit_status(client: AsyncClient) -> None:
    async with client.trajectory("t1") as trajectory:
        session = await trajectory.session(ECHO)
        assert await session.write("one\n")
        await session.close_input()
        said, end = await drained(session)
        assert said == b"begun\nsaid one\n"
        assert (end.state, end.exit_code, end.signal, end.reason) == ("succeeded", 9, None, None)
        assert session.missing == 0
        record = await client.get(session.id)
        assert (record.trajectory, record.result["exit_code"]) == ("t1", 9)
        again, end = await drained(await client.session(session.id))
        assert (again, end.exit_code) == (said, 9), "an ended one is told again while it is kept"
        with pytest.raises(ConflictError, match="has ended"):
            await session.write("late")


@pytest.mark.slow
async def test_who_attaches_elsewhere_goes_on_and_the_first_is_told(client: AsyncClient) -> None:
    async with client.trajectory("t1") as trajectory:
        first = await trajectory.session(["cat"], terminal=(30, 100))
        await first.write("hello\n")
        listening = first.output()
        async with asyncio.timeout(3 * DEADLINE_S):
            await anext(listening)
        rest = asyncio.create_task(drained(first))
        second = await client.session(first.id)
        reading = asyncio.create_task(drained(second))
        with pytest.raises(ConflictError, match="another caller"):
            await rest
        await second.resize(40, 120)
        await second.cancel()
        said, end = await reading
        assert said.startswith(b"hello\r\n")
        assert (end.state, end.exit_code) == ("cancelled", None)


@pytest.mark.slow
async def test_a_session_that_waits_is_attached_to_and_may_be_cancelled(client: AsyncClient) -> None:
    async with client.trajectory("t1") as trajectory:
        first = await trajectory.session(["cat"])
        second = await trajectory.session(["cat"])
        reading = asyncio.create_task(drained(second))
        await second.cancel()
        said, end = await reading
        assert (said, end.state) == (b"", "cancelled")
        await first.signal("TERM")
        assert (await first.wait()).signal == 15


@pytest.mark.slow
async def test_the_end_of_the_input_reaches_a_command_that_waits_for_its_turn(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtimes.sandbox.session.INPUT_PATIENCE_S", 0.05)
    async with client.trajectory("t1") as trajectory:
        first = await trajectory.session(["cat"])
        second = await trajectory.session(["cat"])
        ending = asyncio.create_task(second.close_input())
        await asyncio.wait([ending], timeout=0.3)
        assert not ending.done(), "it has not begun"
        await first.cancel()
        said, end = await drained(second)
        await ending
        assert (said, end.exit_code) == (b"", 0)


@pytest.mark.slow
async def test_what_cannot_be_is_refused_with_its_field(client: AsyncClient, gateway: RunningGateway) -> None:
    async with client.trajectory("t1") as trajectory:
        path = "/v1/trajectories/t1/sessions"
        for body, place in (
            ({"function": "echo", "argv": ["sh"]}, "$.function"),
            ({"argv": ["sh"], "terminal": {"rows": 0}}, "$.terminal.rows"),
            ({"argv": []}, "$.argv"),
            ({"argv": ["sh"], "colour": 1}, "$.colour"),
        ):
            answer = await gateway.http.post(path, json=body)
            assert (answer.status_code, answer.json()["errors"]["path"]) == (422, place), answer.text
        none = await trajectory.exec("true")
        for verb in ("session/input", "session/control"):
            answer = await gateway.http.post(f"/v1/invocations/{none.id}/{verb}", json={})
            assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
        assert (await gateway.http.get(f"/v1/invocations/{none.id}/session")).status_code == 409
        with pytest.raises(NotFoundError):
            await client.session("00000000001-000000000000")
        session = await trajectory.session(["cat"])
        answer = await gateway.http.post(f"/v1/invocations/{session.id}/session/input?offset=5", json={})
        assert (answer.status_code, answer.json()["errors"]) == (409, {"input_offset": 0})
        with pytest.raises(ConflictError, match="no terminal"):
            await session.resize(1, 1)
        with pytest.raises(InvalidInputError):
            await session.signal("SEGV")
        both = await trajectory.session(["cat"])
        await session.cancel()
        await both.cancel()


async def test_there_are_no_more_than_may_live(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path, functions={"held": function("held")})
    async with serving(bench) as gateway:
        table = gateway.app.api.sessions
        for index in range(table.settings.living_max):
            table.living(f"s{index}", None)
        answer = await gateway.http.post("/v1/trajectories/t1/sessions", json={"argv": ["cat"]})
        assert (answer.status_code, answer.json()["code"]) == (503, "capacity_exceeded")
        table.close("s0")
        assert table.get("s0") is not None, "its last output is kept"
        for index in range(table.settings.living_max):
            table.close(f"s{index}")
        assert table.get("s0") is None, "but not for ever"


@pytest.mark.slow
async def test_the_stream_begins_where_it_was_asked_to(client: AsyncClient, gateway: RunningGateway) -> None:
    async with client.trajectory("t1") as trajectory:
        session = await trajectory.session(["printf", "0123456789"])
        await session.wait()
        answer = await gateway.http.get(f"/v1/invocations/{session.id}/session?offset=4")
        records = [json.loads(line) for line in answer.text.splitlines()]
        assert [each["stream"] for each in records] == ["attached", "stdout", "eof"]
        assert (records[1]["offset"], records[1]["data"]) == (4, "NDU2Nzg5")
        assert (records[2]["offset"], records[2]["exit_code"]) == (10, 0)
        await until(lambda: not gateway.app.invocations.living)
