"""One function over a door: added, changed, kept over a restart with its handler's files, and removed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tangram import AsyncClient, ConflictError, InvalidConfigError, NotFoundError
from tangram.types import ValueChange
from tests.gateway.conftest import GatewayBench, RunningGateway, serving

EXEC: dict[str, Any] = {"runtime": "exec", "timeout": "30s"}
HANDLER: dict[str, Any] = {"runtime": "handler", "handler": "mine:reward"}
SOURCE = "def reward(event, context):\n    return {'doubled': 2 * event['n']}\n"


def reward(event: dict[str, Any], context: object) -> dict[str, Any]:
    """What a training script may have."""
    return {"tripled": FACTOR * event["n"]}


FACTOR = 3


def client_of(gateway: RunningGateway) -> AsyncClient:
    return AsyncClient(f"http://127.0.0.1:{gateway.app.http_port}", token="")


async def test_a_function_is_added_changed_and_removed(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        assert (await client.put_function("mine", EXEC, dry_run=True)).added == ("mine",)
        with pytest.raises(NotFoundError):
            await client.function("mine")
        assert (await client.put_function("mine", EXEC)).applied
        diff = await client.put_function("mine", EXEC | {"timeout": "1m"})
        assert diff.changed == {"mine": ("timeout_s",)}
        assert diff.values["mine"] == {"timeout_s": ValueChange(was="30.0", now="60.0")}, "old and new are told"
        assert (await client.function("mine")).timeout_s == 60.0
        assert (await client.put_function("mine", EXEC | {"timeout": "1m"})).empty
        assert (await client.remove_function("mine")).removed == ("mine",)


async def test_what_is_of_the_files_or_no_function_is_refused(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        with pytest.raises(ConflictError):
            await client.put_function("echo", EXEC)
        with pytest.raises(InvalidConfigError, match="runtim"):
            await client.put_function("mine", {"runtim": "exec"})
        with pytest.raises(InvalidConfigError, match="has no 'other'"):
            await client.put_function("mine", HANDLER | {"handler": "mine:other"}, sources={"mine.py": SOURCE})
        for path in ("../mine.py", "/mine.py", "a/../mine.py", "mine.so", "", "a\x00.py", "./mine.py"):
            with pytest.raises(InvalidConfigError, match="sources"):
                await client.put_function("mine", HANDLER, sources={path: SOURCE})
        with pytest.raises(InvalidConfigError, match="at most"):
            await client.put_function("mine", HANDLER, sources={f"m{each}.py": "" for each in range(201)})
        assert "mine" not in [each.name for each in await client.functions()]
    answer = await gateway.http.put("/v1/functions/mine", json={"definitions": {}})
    assert answer.status_code == 422


async def test_a_mistake_in_what_was_sent_is_told_in_the_senders_words(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        with pytest.raises(InvalidConfigError) as failure:
            await client.put_function("mine", HANDLER | {"handler": "mine:rewrd"}, sources={"mine.py": SOURCE})
        assert "rewrd" in str(failure.value) and "uploads" not in str(failure.value), failure.value
        with pytest.raises(InvalidConfigError, match="the function that was sent") as failure:
            await client.put_function("mine", {"runtim": "exec"})
        assert "function.yaml" not in str(failure.value)


async def test_what_was_applied_over_a_function_of_the_files_is_removed_there_first(tmp_path: Path) -> None:
    declared = tmp_path / "function.yaml"
    declared.write_text("functions: {mine: {runtime: exec, timeout: 10s}}")
    async with serving(GatewayBench(tmp_path)) as gateway, client_of(gateway) as client:
        sent = {"files": [{"path": "other.yaml", "text": "functions: {mine: {runtime: exec, timeout: 20s}}"}]}
        answer = await gateway.http.put("/v1/config", json=sent)
        assert answer.status_code == 200, answer.text
        with pytest.raises(ConflictError, match=r"function\.yaml.* declares .*remove it there first"):
            await client.remove_function("mine")
        assert (await client.function("mine")).timeout_s == 20.0
        declared.unlink()
        assert (await client.remove_function("mine")).removed == ("mine",)


async def test_a_handler_of_a_script_is_kept_over_a_restart_and_its_files_go_with_it(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path)
    async with serving(bench) as gateway, client_of(gateway) as client:
        diff = await client.register(reward, cost={"cpu": 1}, timeout="20s")
        assert diff.added == ("reward",)
        assert (await client.put_function("gone", HANDLER, sources={"mine.py": SOURCE})).applied
        await client.remove_function("gone")
        assert len(list((tmp_path / "state" / "handlers").iterdir())) == 2
    async with serving(bench) as gateway, client_of(gateway) as client:
        found = await client.function("reward")
        assert (found.source, found.timeout_s) == ("applied", 20.0)
        (directory,) = (tmp_path / "state" / "handlers").iterdir()
        assert "FACTOR = 3" in (directory / "registered.py").read_text(), "and what it needs of its module"


async def test_many_at_once_are_one_after_the_other(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        await asyncio.gather(
            *(client.put_function("mine", HANDLER, sources={"mine.py": f"{SOURCE}# {n}\n"}) for n in range(20))
        )
        found = await client.function("mine")
        assert found.source == "applied"
