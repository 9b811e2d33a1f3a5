"""A running gateway is written as a snapshot that `tangram plan` decides on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.gateway.conftest import RunningGateway, until
from tests.tangram.cli.conftest import Served


async def test_a_plan_is_made_of_what_a_gateway_holds_and_what_waits(
    served: Served, gateway: RunningGateway, tmp_path: Path
) -> None:

    calls = [asyncio.create_task(gateway.invoke({"held": True})) for _ in range(64)]
    await until(lambda: len(gateway.runtime.running) > 0)
    file = tmp_path / "snapshot.json"
    async with asyncio.timeout(30):
        waiting = 0
        while not waiting:
            waiting = (await gateway.http.get("/v1/queue")).json()["waiting"]
    status, _, err = await served("plan", "--export", str(file))
    assert status == 0, err
    snapshot = json.loads(file.read_text())
    (pool,) = [each for name, each in snapshot["resources"].items() if name.startswith("cpu")]
    assert pool["free"] == pool["total"] - len(gateway.runtime.running)
    assert [each["function"] for each in snapshot["queue"]] == ["echo"] * len(snapshot["queue"])
    status, out, err = await served("plan", str(file), "--json")
    assert status == 0, err
    assert not json.loads(out)["started"] and len(json.loads(out)["waiting"]) == len(snapshot["queue"])
    assert (await served("plan"))[0] == 2
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
