"""Ids may be written short: what stands for several is refused with them, before anything is done."""

from __future__ import annotations

import pytest

from tests.gateway.conftest import RunningGateway
from tests.tangram.cli.conftest import Served


async def made(gateway: RunningGateway, count: int) -> list[str]:
    for number in range(count):
        assert (await gateway.invoke({"n": number})).status_code == 200
    listed = (await gateway.http.get("/v1/invocations", params={"order": "oldest"})).json()["invocations"]
    return [each["id"] for each in listed]


async def test_the_number_alone_or_the_beginning_of_an_id_stands_for_it(
    served: Served, gateway: RunningGateway
) -> None:
    ids = await made(gateway, 17)
    short = ids[4].partition("-")[0].lstrip("0")
    for text in (ids[4], short, short.upper(), ids[4].partition("-")[0], ids[4][:16]):
        status, out, err = await served("show", text, "--json")
        assert status == 0 and ids[4] in out, err
    number = f"{int(ids[-1].partition('-')[0], 16):x}"
    assert number.startswith("1") and len(number) == 2
    status, out, _ = await served("show", number, "--json")
    assert ids[-1] in out


async def test_what_begins_several_is_refused_with_them_and_nothing_is_done(
    served: Served, gateway: RunningGateway
) -> None:
    ids = await made(gateway, 40)
    assert len({id[:10] for id in ids}) > 1
    status, _, err = await served("cancel", ids[0][:9])
    assert status == 65
    assert "begins several ids" in err and "(echo, succeeded)" in err and "write more of it" in err


async def test_what_begins_no_id_is_said_to(served: Served, gateway: RunningGateway) -> None:
    await made(gateway, 1)
    for text in ("fffff", "0000000ffff-1", "nonsense"):
        status, _, err = await served("cancel", text)
        assert status == 66, err
    status, _, err = await served("dlq", "show", "ffff")
    assert status == 66 and "begins with ffff" in err


@pytest.mark.parametrize(
    "verb", [("show",), ("logs",), ("cancel",), ("dlq", "show"), ("dlq", "redrive"), ("dlq", "purge")]
)
async def test_every_verb_that_takes_an_id_takes_a_short_one(
    served: Served, gateway: RunningGateway, verb: tuple[str, ...]
) -> None:
    (id,) = await made(gateway, 1)
    status, _, err = await served(*verb, id.partition("-")[0].lstrip("0"))
    assert status == 0 or "conflict" in err, "it was found; whether the verb suits it is another matter"
