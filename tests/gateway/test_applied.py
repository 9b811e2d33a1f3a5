"""What was applied outlives a restart, and the files win for what they declare."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import httpx

from gateway.app import gateway as opened_gateway
from gateway.config.load import load
from runtimes.testing import ScriptedRuntime
from tests.gateway.conftest import DEADLINE_S, scripted_runtimes, step_of

OWN = "functions: {own: {runtime: exec}}\nserver: {port: 0, grpc_port: 0, drain_grace: 200ms, state_dir: state}\n"
TWO = "functions: {own: {runtime: exec}, one: {runtime: exec, timeout: 5s}, two: {runtime: exec, cost: {seats: 1}}}\n"
SEATS = "resources: {seats: {kind: concurrency, limit: 2}}\n"


@dataclass
class AppliedBench:
    """A gateway over files, and a client of it."""

    http: httpx.AsyncClient

    async def apply(self, text: str, query: str = "") -> dict[str, object]:
        answer = await self.http.put(f"/v1/config{query}", content=text)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert isinstance(found, dict)
        return found

    async def sources(self) -> Mapping[str, str]:
        found = (await self.http.get("/v1/functions")).json()["functions"]
        return {each["name"]: each["source"] for each in found}


@asynccontextmanager
async def serving(directory: Path, files: str = OWN) -> AsyncIterator[AppliedBench]:
    (directory / "tangram.yaml").write_text(files)
    make = scripted_runtimes(ScriptedRuntime(step_of), directory)
    async with opened_gateway(load([directory], {}), paths=[directory], env={}, make=make) as app:
        assert app.tokens is not None
        headers = {"Authorization": f"Bearer {app.tokens.admin}"}
        task = asyncio.create_task(app.serve())
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{app.http_port}", headers=headers, timeout=DEADLINE_S
        ) as client:
            try:
                yield AppliedBench(client)
            finally:
                app.stop()
                await task


async def test_what_was_applied_is_there_after_a_restart_with_its_resources_and_may_be_removed(tmp_path: Path) -> None:
    both = {"own": "files", "one": "applied", "two": "applied"}
    async with serving(tmp_path) as bench:
        await bench.apply(TWO + SEATS)
        assert await bench.sources() == both
    async with serving(tmp_path) as bench:
        assert await bench.sources() == both
        assert "seats" in (await bench.http.get("/v1/resources")).json()["pools"]
        own = await bench.http.delete("/v1/functions/own")
        assert (own.status_code, own.json()["code"]) == (409, "conflict") and "tangram.yaml:1" in own.json()["detail"]
        assert (await bench.http.delete("/v1/functions/one")).json()["removed"] == ["one"]
        assert (await bench.http.delete("/v1/functions/one")).status_code == 404
    async with serving(tmp_path) as bench:
        assert await bench.sources() == {"own": "files", "two": "applied"}


async def test_the_files_win_for_the_names_that_they_declare(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        await bench.apply(TWO + SEATS)
    files = OWN.replace("own: {runtime: exec}", "own: {runtime: exec}, one: {runtime: exec, timeout: 9s}")
    async with serving(tmp_path, files) as bench:
        assert await bench.sources() == {"own": "files", "one": "files", "two": "applied"}
        assert (await bench.http.get("/v1/functions/one")).json()["timeout_s"] == 9.0


async def test_what_cannot_be_had_any_more_keeps_no_gateway_from_starting(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text("def work(event, context):\n    return event\n")
    async with serving(tmp_path) as bench:
        await bench.apply("functions: {own: {runtime: exec}, work: {runtime: handler, handler: 'work:work'}}")
    (tmp_path / "work.py").unlink()
    async with serving(tmp_path) as bench:
        assert await bench.sources() == {"own": "files"}
    (tmp_path / "work.py").write_text("def work(event, context):\n    return event\n")
    async with serving(tmp_path) as bench:
        assert await bench.sources() == {"own": "files", "work": "applied"}


async def test_each_document_may_use_what_earlier_ones_and_the_caller_gave_and_prune_forgets_it(tmp_path: Path) -> None:
    text = "functions: {late: {runtime: exec, timeout: '${LIMIT}', cost: {seats: 1}}}"
    sent = {"files": [{"path": "late.yaml", "text": text}], "variables": {"LIMIT": "7s"}}
    for again in (False, True):
        async with serving(tmp_path) as bench:
            if not again:
                await bench.apply(SEATS)
                await bench.apply(json.dumps(sent))
            assert await bench.sources() == {"own": "files", "late": "applied"}
            assert (await bench.http.get("/v1/functions/late")).json()["timeout_s"] == 7.0
    database = tmp_path / "state" / "tangram.sqlite"
    async with serving(tmp_path) as bench:
        assert (await bench.apply("functions: {own: {runtime: exec}}", "?prune=true"))["removed"] == ["late"]
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT body FROM documents WHERE name = 'applied'").fetchall() == [("[]",)]
    async with serving(tmp_path) as bench:
        assert await bench.sources() == {"own": "files"}
        assert "seats" not in (await bench.http.get("/v1/resources")).json()["pools"]


async def test_the_files_of_a_registered_handler_come_with_the_record_wherever_it_lies(tmp_path: Path) -> None:
    """As where a backup of the record is restored, or the whole state directory was moved to another disk."""
    code = "def score(event, context):\n    return 'ä'\n"
    definition = {"runtime": "handler", "handler": "rewards.h:score"}
    body = {"definition": definition, "sources": {"rewards/h.py": code, "rewards/__init__.py": ""}}
    both = {"own": "files", "mine": "applied"}

    def kept(state: str) -> list[Path]:
        return [each for each in (tmp_path / state / "handlers").rglob("h.py") if each.read_text() == code]

    async with serving(tmp_path) as bench:
        dry = await bench.http.put("/v1/functions/other?dry_run=true", json=body)
        made = await bench.http.put("/v1/functions/mine", json=body)
        assert (dry.status_code, made.status_code) == (200, 200), made.text
    shutil.rmtree(tmp_path / "state" / "handlers")
    async with serving(tmp_path) as bench:
        assert await bench.sources() == both
        assert len(kept("state")) == 1
    (tmp_path / "state").rename(tmp_path / "moved")
    moved = OWN.replace("state_dir: state", "state_dir: moved")
    async with serving(tmp_path, moved) as bench:
        assert await bench.sources() == both
        assert len(kept("moved")) == 1
    assert not (tmp_path / "state").exists()
    async with serving(tmp_path, moved) as bench:
        assert (await bench.http.delete("/v1/functions/mine")).status_code == 200
    async with serving(tmp_path, moved) as bench:
        assert (await bench.sources(), kept("moved")) == ({"own": "files"}, [])
    with closing(sqlite3.connect(tmp_path / "moved" / "tangram.sqlite")) as record:
        assert record.execute("SELECT name FROM documents WHERE name LIKE 'handler:%'").fetchall() == []
