"""State directories of earlier gateways, kept as they were after kill -9: today's gateway opens each and goes on."""

from __future__ import annotations

import json
import queue
import shutil
import sqlite3
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.store.file import schema
from tangram.client.credentials import Bearer
from tests.e2e.gateway import GatewayProcess

STATES = Path(__file__).resolve().parents[1] / "data" / "states"
KEPT = sorted(STATES.glob("schema-*.tar.gz"))
DEADLINE_S = 60.0
LARGEST_BYTES = 100_000


class Told(ThreadingHTTPServer):
    """Takes callbacks."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Callback)
        self.records: queue.Queue[dict[str, Any]] = queue.Queue()

    @contextmanager
    def listening(self) -> Iterator[Told]:
        thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            thread.join()


class _Callback(BaseHTTPRequestHandler):
    server: Told

    def do_POST(self) -> None:
        self.server.records.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


def unpacked(archive: Path, directory: Path, callbacks_at: str) -> tuple[GatewayProcess, dict[str, Any]]:
    """A gateway, not started, on a copy of the archive, and what is expected of it."""
    gateway = GatewayProcess(directory / "opened", {})
    killed = directory / "killed"
    with tarfile.open(archive) as packed:
        packed.extractall(killed, filter="data")
    expected: dict[str, Any] = json.loads((killed / "expected.json").read_text())
    # Callbacks go to a port that is ours now. The copy is made before the file is closed, so its log stays unmerged.
    with closing(sqlite3.connect(killed / "state" / "tangram.sqlite")) as file:
        file.execute("PRAGMA wal_autocheckpoint = 0")
        with file:
            addresses = (expected["callbacks_to"], callbacks_at)
            file.execute(
                "UPDATE invocations SET options = replace(options, ?, ?) WHERE callback = 'pending'", addresses
            )
        shutil.copytree(killed, gateway.directory, dirs_exist_ok=True)
    assert (gateway.directory / "state" / "tangram.sqlite-wal").stat().st_size > 0
    return gateway, expected


def test_each_schema_version_has_its_kept_directory_and_each_is_small() -> None:
    kept = {int(path.name.removeprefix("schema-").removesuffix(".tar.gz")) for path in KEPT}
    assert kept == set(schema()), "run scripts/keep_state.py on the last commit of the schema version that has none"
    assert [path.name for path in KEPT if path.stat().st_size > LARGEST_BYTES] == []


@pytest.mark.parametrize("archive", KEPT, ids=lambda path: path.name.partition(".")[0])
def test_a_kept_directory_opens_with_every_record_and_its_pending_work_ends(archive: Path, tmp_path: Path) -> None:
    with Told().listening() as told:
        gateway, expected = unpacked(archive, tmp_path, f"127.0.0.1:{told.server_address[1]}")
        gateway.start()
        try:
            with httpx.Client(base_url=gateway.url, auth=Bearer(None), timeout=DEADLINE_S, trust_env=False) as http:
                reads_as_it_was(http, expected)
                goes_on(http, expected, told)
                keys_latch_on(http, expected)
        finally:
            assert gateway.stop() == 0, "\n".join(gateway.log[-30:])
        # Brought up to date, it opens once more and says the same.
        gateway.start()
        try:
            with httpx.Client(base_url=gateway.url, auth=Bearer(None), timeout=DEADLINE_S, trust_env=False) as http:
                records_read_as_they_were(http, expected)
        finally:
            assert gateway.stop() == 0, "\n".join(gateway.log[-30:])


def reads_as_it_was(http: httpx.Client, expected: Mapping[str, Any]) -> None:
    """Every record that had ended, its log, and what was learned."""
    for name, keys in expected["learned"].items():
        learned = http.get(f"/v1/functions/{name}").json()["learned"]
        assert {key: known(learned[key], old) for key, old in keys.items()} == keys
    records_read_as_they_were(http, expected)


def records_read_as_they_were(http: httpx.Client, expected: Mapping[str, Any]) -> None:
    for invocation_id, old in expected["records"].items():
        assert known(http.get(f"/v1/invocations/{invocation_id}").json(), old) == known(old, old)
        assert streams(http, invocation_id) == dict(expected["logs"][invocation_id])
    listed = [each["id"] for each in http.get("/v1/invocations?limit=1000").json()["invocations"]]
    assert listed[-len(expected["records"]) :] == sorted(expected["records"], reverse=True)
    dead = {each["id"] for each in http.get("/v1/invocations?dead=true").json()["invocations"]}
    assert {key for key, old in expected["records"].items() if old["dead"]} <= dead


def goes_on(http: httpx.Client, expected: Mapping[str, Any], told: Told) -> None:
    """What waited or ran at the kill ends as it has to, and whoever asked for it is told."""
    for invocation_id, fate in expected["fates"].items():
        record = http.get(f"/v1/invocations/{invocation_id}?wait={DEADLINE_S:g}s").json()
        wanted = {key: value for key, value in fate.items() if key not in ("stdout", "callback")}
        assert known(record, wanted) == wanted, json.dumps(record)
        if "stdout" in fate:
            assert streams(http, invocation_id)["stdout"] == fate["stdout"]
    awaited = {key for key, fate in expected["fates"].items() if fate.get("callback")}
    while awaited:
        record = told.records.get(timeout=DEADLINE_S)
        assert record["state"] == "succeeded"
        awaited.discard(record["id"])


def keys_latch_on(http: httpx.Client, expected: Mapping[str, Any]) -> None:
    for each in expected["keys"]:
        path, headers = f"/v1/functions/{each['function']}/invocations", {"Idempotency-Key": each["key"]}
        assert http.post(path, json=each["body"], headers=headers).json()["id"] == each["id"]
        assert http.post(path, json=each["body"] | {"n": -1}, headers=headers).status_code == 422


def streams(http: httpx.Client, invocation_id: str) -> dict[str, str]:
    """What an invocation said, by stream."""
    said: dict[str, str] = {}
    for line in http.get(f"/v1/invocations/{invocation_id}/logs").text.splitlines():
        if "data" in (record := json.loads(line)):
            said[record["stream"]] = said.get(record["stream"], "") + record["data"]
    return said


def known(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Of what is said today only what was said then: more may be said."""
    return {key: _as_then(key, new.get(key)) for key in old}


def _as_then(key: str, value: object) -> object:
    """Return an instant with the milliseconds that it was written with then; anything else as it is."""
    if isinstance(value, list):
        return (
            [{inner: _as_then(inner, each[inner]) for inner in each} for each in value] if key == "attempts" else value
        )
    if not key.endswith("_at") or not isinstance(value, str):
        return value
    return datetime.fromisoformat(value).isoformat(timespec="milliseconds").replace("+00:00", "Z")
