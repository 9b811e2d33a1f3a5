"""The E2B API as it travels: sandboxes, Connect's messages, files, and what must not come through."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from manager.action import UnitSet
from manager.function import Background, FunctionSpec, SandboxSpec
from runtimes.testing import ScriptStep
from tests.e2e.gateway import GatewayProcess, document
from tests.gateway.conftest import GatewayBench, RunningGateway, serving, until
from tests.gateway.facades.world import doors

BOX = FunctionSpec(
    name="box",
    runtime="exec",
    cost={"cpu": UnitSet.fixed(1)},
    timeout_s=60.0,
    output_limit_bytes=256 * 1024,
    sandbox=SandboxSpec(background=Background.FREEZE),
)
STREAM = "application/connect+json"


def enveloped(message: object, flags: int = 0, size: int | None = None) -> bytes:
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data) if size is None else size) + data


def messages(data: bytes) -> list[tuple[int, Any]]:
    """Return the messages of a stream with their flags; nothing is left of it."""
    found = []
    while data:
        flags, size = struct.unpack_from(">BI", data)
        found.append((flags, json.loads(data[5 : 5 + size])))
        data = data[5 + size :]
    return found


@dataclass(slots=True)
class Envd:
    """A client of one sandbox."""

    http: httpx.AsyncClient
    id: str
    token: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def own(self) -> dict[str, str]:
        return {"E2b-Sandbox-Id": self.id, "X-Access-Token": self.token, **self.headers}

    async def call(self, verb: str, body: Mapping[str, object]) -> httpx.Response:
        return await self.http.post(f"/e2b/{verb}", json=body, headers=self.own)

    def starting(self, script: str, **more: object) -> tuple[bytes, dict[str, str]]:
        process = {"cmd": "/bin/bash", "args": ["-l", "-c", script]}
        return enveloped({"process": process, **more}), {**self.own, "Content-Type": STREAM}

    async def run(self, script: str, timeout_ms: int | None = None, **more: object) -> list[tuple[int, Any]]:
        content, headers = self.starting(script, **more)
        headers |= {} if timeout_ms is None else {"Connect-Timeout-Ms": str(timeout_ms)}
        told = await self.http.post("/e2b/process.Process/Start", content=content, headers=headers)
        assert told.status_code == 200, told.text
        assert told.headers["content-type"] == STREAM
        return messages(told.content)


@dataclass(slots=True)
class E2bWorld:
    """A gateway with tokens and the facade."""

    running: RunningGateway
    http: httpx.AsyncClient

    async def create(self, **body: object) -> Envd:
        told = await self.http.post("/e2b/v2/sandboxes", json={"templateID": "base", **body})
        assert told.status_code == 201, told.text
        return Envd(self.http, told.json()["sandboxID"], told.json()["envdAccessToken"])


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[E2bWorld]:
    """The facade; nothing lives in it once the sandboxes were killed."""
    server: dict[str, object] = {"auth": "token", "body_limit": "1Mi"}
    async with doors(tmp_path, {"e2b": {"function": "box"}}, lambda _: ScriptStep(), {"box": BOX}, **server) as running:
        async with httpx.AsyncClient(base_url=running.http.base_url, timeout=60) as http:
            http.headers["X-API-KEY"] = running.app.tokens.admin if running.app.tokens is not None else ""
            yield E2bWorld(running, http)
            for each in (await http.get("/e2b/v2/sandboxes")).json():
                assert (await http.delete(f"/e2b/sandboxes/{each['sandboxID']}")).status_code == 204
        await until(lambda: not running.app.invocations.living)
        assert (await running.http.get("/v1/trajectories")).json()["trajectories"] == []


async def test_a_command_says_its_pid_then_its_output_then_its_end(world: E2bWorld) -> None:
    envd = await world.create(envVars={"A": "sandbox", "B": "sandbox"})
    script = 'printf "$A $B"; printf err >&2; exit 3'
    told = await envd.run(script, process={"cmd": "/bin/sh", "args": ["-c", script], "envs": {"B": "own"}})
    [first, *data, (_, end), last] = told
    assert first[1]["event"]["start"]["pid"] > 2**22
    said = {name: text for _, each in data for name, text in each["event"]["data"].items()}
    assert {name: base64.b64decode(text) for name, text in said.items()} == {"stdout": b"sandbox own", "stderr": b"err"}
    assert end["event"]["end"] == {
        "exitCode": 3,
        "exited": True,
        "status": "exit status 3",
        "error": "exit status 3",
    }
    assert last == (2, {})


async def test_commands_of_one_sandbox_run_beside_each_other_and_none_freezes_or_ends_another(world: E2bWorld) -> None:
    envd = await world.create()
    content, headers = envd.starting("until [ -e go ]; do sleep 0.01; done; echo gone")
    async with world.http.stream("POST", "/e2b/process.Process/Start", content=content, headers=headers) as server:
        pieces = server.aiter_bytes()
        told = await anext(pieces)
        assert "start" in told.decode()
        beside = await asyncio.gather(*(envd.run(f"sleep 0.2; echo {n}") for n in range(4)))
        assert [base64.b64decode(each[1][1]["event"]["data"]["stdout"]) for each in beside] == [
            b"0\n",
            b"1\n",
            b"2\n",
            b"3\n",
        ]
        assert (await envd.call("filesystem.Filesystem/ListDir", {"path": "."})).json() == {"entries": []}
        assert len((await envd.call("process.Process/List", {})).json()["processes"]) == 1
        await envd.http.post(
            "/e2b/files",
            params={"path": "go"},
            content=b"",
            headers={**envd.own, "Content-Type": "application/octet-stream"},
        )
        rest = b"".join([each async for each in pieces])
        assert base64.b64encode(b"gone\n").decode() in rest.decode()


async def test_a_cut_client_ends_no_command_and_its_own_time_does(world: E2bWorld) -> None:
    envd = await world.create()
    content, headers = envd.starting("echo $$ > pid; sleep 1000")
    headers["Connect-Timeout-Ms"] = "1500"
    async with world.http.stream("POST", "/e2b/process.Process/Start", content=content, headers=headers) as server:
        await anext(server.aiter_bytes())
    [command] = (await envd.call("process.Process/List", {})).json()["processes"]
    attach = enveloped({"process": {"pid": command["pid"]}})
    headers = {**envd.own, "Content-Type": STREAM}
    told = messages((await world.http.post("/e2b/process.Process/Connect", content=attach, headers=headers)).content)
    assert told[0][1]["event"]["start"]["pid"] == command["pid"]
    assert told[-1][1]["error"]["code"] == "deadline_exceeded"
    assert (await envd.call("process.Process/List", {})).json()["processes"] == []
    assert (await envd.run("! kill -0 $(cat pid)"))[-2][1]["event"]["end"]["exitCode"] == 0


async def test_what_is_no_message_of_the_protocol_is_refused_before_it_is_held(world: E2bWorld) -> None:
    envd = await world.create()
    headers = {**envd.own, "Content-Type": STREAM}
    start = {"process": {"cmd": "true"}}
    refused = {
        "resource_exhausted": [enveloped(b"", size=2**32 - 1), enveloped(b"{", size=2**30)],
        "invalid_argument": [
            b"", b"\0", enveloped(start)[:-1], enveloped(start, flags=1), enveloped(start, flags=2),
            enveloped(start) * 2, enveloped(b"[]"), enveloped(b"\xff{"), enveloped({"process": {"cmd": 1}}),
            enveloped({}), enveloped({"process": {"cmd": "true"}, "pty": {"size": {"cols": -1}}}),
        ],
    }  # fmt: skip
    for code, bodies in refused.items():
        for body in bodies:
            told = await world.http.post("/e2b/process.Process/Start", content=body, headers=headers)
            assert told.json()["code"] == code, (body, told.text)
    for body in (enveloped({"data": {"input": {"stdin": "YQ=="}}}), enveloped({"start": {"process": {"pid": 1}}})):
        told = await world.http.post("/e2b/process.Process/StreamInput", content=body, headers=headers)
        assert told.status_code in (400, 404), told.text
    for name, value in {"Connect-Timeout-Ms": "\xb2", "Keepalive-Ping-Interval": "9" * 5000}.items():
        odd = httpx.Headers({**headers, name: value}, encoding="latin-1")
        told = await world.http.post("/e2b/process.Process/Start", content=enveloped(start), headers=odd)
        assert told.status_code == 200


async def test_an_access_token_is_good_for_its_own_sandbox_and_for_nothing_else(world: E2bWorld) -> None:
    mine, other = await world.create(), await world.create()
    async with httpx.AsyncClient(base_url=world.http.base_url, timeout=60) as stranger:

        async def status(path: str, *headers: tuple[str, str], method: str = "POST") -> int:
            return (
                await stranger.request(
                    method, path, headers=[*headers, ("Content-Type", "application/json")], content="{}"
                )
            ).status_code

        token, own, victim = ("X-Access-Token", mine.token), ("E2b-Sandbox-Id", mine.id), ("E2b-Sandbox-Id", other.id)
        listing = "/e2b/process.Process/List"
        assert await status(listing, own, token) == 200
        assert await status(listing, victim, token) == 401
        assert await status(listing, victim, own, token) == 401
        assert await status(listing, own, victim, token) == 200  # the first counts, for the proof as for the use
        assert await status(listing, own) == 401
        assert await status(listing, token) == 401
        assert await status("/e2b/v2/sandboxes", own, token, method="GET") == 401
        assert await status(f"/e2b/sandboxes/{mine.id}", own, token, method="DELETE") == 401
        assert await status("/v1/trajectories", own, token, method="GET") == 401
        assert await status("/e2b/files/../v2/sandboxes", own, token, method="GET") in (401, 404)
        assert await status(f"/e2b/sandboxes/{mine.id}", ("X-API-KEY", mine.token), method="GET") == 401


async def test_files_stay_in_the_sandbox_and_come_back_as_they_were(world: E2bWorld) -> None:
    envd = await world.create()
    data = bytes(range(256)) * 100 + b"\r\n--x\r\n"
    form = {"file": ("a b/ü.bin", data)}
    told = await world.http.post("/e2b/files", params={"path": "a b/ü.bin"}, files=form, headers=envd.own)
    assert told.json() == [{"name": "ü.bin", "path": "/workspace/a b/ü.bin", "type": "file"}]
    read = await world.http.get("/e2b/files", params={"path": "a b/ü.bin"}, headers=envd.own)
    assert read.content == data
    many = [("file", ("one", b"1")), ("file", ("d/two", b"2"))]
    assert len((await world.http.post("/e2b/files", files=many, headers=envd.own)).json()) == 2
    assert (await world.http.get("/e2b/files", params={"path": "none"}, headers=envd.own)).status_code == 404
    assert (await world.http.get("/e2b/files", params={"path": "d"}, headers=envd.own)).status_code == 400
    for path in ("../../../../etc/shadow", "/proc/1/environ", "/root/.ssh", "a\0b", "x" * 5000):
        for method in ("GET", "POST"):
            headers = {**envd.own, "Content-Type": "application/octet-stream"}
            told = await world.http.request(method, "/e2b/files", params={"path": path}, headers=headers, content=b"x")
            assert told.status_code in (400, 403, 404), (method, path, told.text)
    for body in (b"", b"--x", b"--x\r\n\r\n--x--", b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\nb\r\n--x--"):
        headers = {**envd.own, "Content-Type": "multipart/form-data; boundary=x"}
        told = await world.http.post("/e2b/files", params={"path": "p"}, content=body, headers=headers)
        assert told.status_code == 400
    large = {"file": ("large", bytes(2**20 + 1))}
    told = await world.http.post("/e2b/files", params={"path": "large"}, files=large, headers=envd.own)
    assert told.status_code == 413


async def test_names_of_files_are_names_whatever_is_in_them(world: E2bWorld) -> None:
    envd = await world.create()
    script = (
        "mkdir -p 'd/$(touch pwned)' $'d/line\\nE41ed 1 1 root root evil' 'd/-rf' 'd/ sp'; "
        "ln -s -- -rf d/link; ln -s gone d/broken"
    )
    await envd.run(script)
    told = (await envd.call("filesystem.Filesystem/ListDir", {"path": "d"})).json()["entries"]
    assert {each["name"]: each["type"].rpartition("_")[2] for each in told} == {
        "$(touch pwned)": "DIRECTORY", "line\nE41ed 1 1 root root evil": "DIRECTORY", "-rf": "DIRECTORY",
        " sp": "DIRECTORY", "link": "DIRECTORY", "broken": "UNSPECIFIED",
    }  # fmt: skip
    assert [each["symlinkTarget"] for each in told if each.get("isSymlink")] == ["gone", "-rf"]
    for verb, path, code in (
        ("Stat", "pwned", 404),
        ("MakeDir", "d", 409),
        ("Remove", "d/-rf", 200),
        ("Stat", "d/-rf", 404),
    ):
        assert (await envd.call(f"filesystem.Filesystem/{verb}", {"path": path})).status_code == code
    moved = await envd.call("filesystem.Filesystem/Move", {"source": "d/ sp", "destination": "new/place"})
    assert moved.json()["entry"]["path"] == "/workspace/new/place"


async def test_a_sandbox_ends_in_its_time_and_is_paused_if_that_was_asked(world: E2bWorld) -> None:
    short, kept = await world.create(timeout=0), await world.create(autoPause=True, metadata={"k": "v w"})
    await until(lambda: world.running.app.api.engine.trajectory(short.id) is None)
    gone = await world.http.get("/e2b/health", headers=short.own)
    assert gone.status_code == 502
    assert "was not found" in gone.json()["message"]
    assert (await world.http.get(f"/e2b/sandboxes/{short.id}")).status_code == 404
    await kept.run("echo kept > file; sleep 1000 & ")
    assert (await world.http.post(f"/e2b/sandboxes/{kept.id}/timeout", json={"timeout": 0})).status_code == 204
    await until(lambda: world.running.app.api.engine.trajectory(kept.id) is None)
    found = (await world.http.get("/e2b/v2/sandboxes", params={"metadata": "k=v%2520w", "state": "paused"})).json()
    assert [each["sandboxID"] for each in found] == [kept.id]
    assert (await world.http.post(f"/e2b/v2/sandboxes/{kept.id}/connect", json={"timeout": 60})).status_code == 201
    assert (await world.http.get("/e2b/files", params={"path": "file"}, headers=kept.own)).content == b"kept\n"
    assert (await world.http.post(f"/e2b/sandboxes/{kept.id}/pause", json={})).status_code == 204
    assert (await world.http.post(f"/e2b/sandboxes/{kept.id}/pause", json={})).status_code == 409
    forks = await world.http.post(f"/e2b/sandboxes/{kept.id}/fork", json={"count": 2})
    assert forks.status_code == 404
    assert (await world.http.post(f"/e2b/sandboxes/{kept.id}/connect", json={})).status_code == 201
    forks = await world.http.post(f"/e2b/sandboxes/{kept.id}/fork", json={"count": 2})
    ids = [each["sandbox"]["sandboxID"] for each in forks.json()]
    for id in (*ids, kept.id):
        assert (await world.http.delete(f"/e2b/sandboxes/{id}")).status_code == 204
    snapshots = world.running.app.api.snapshots
    await until(lambda: not snapshots.all())


async def test_the_same_creation_again_is_the_same_sandbox(world: E2bWorld) -> None:
    headers = {"Idempotency-Key": "once-1"}
    body = {"templateID": "box"}
    told = await asyncio.gather(*(world.http.post("/e2b/v2/sandboxes", json=body, headers=headers) for _ in range(3)))
    assert len({each.json()["sandboxID"] for each in told}) == 1


async def test_what_the_facade_has_not_is_refused_by_name(world: E2bWorld) -> None:
    envd = await world.create()
    for body, name in (
        ({"mcp": {"a": 1}}, "mcp"), ({"network": {"allowOut": []}}, "network"), ({"volumeMounts": [1]}, "volumeMounts"),
        ({"autoResume": {"enabled": True}}, "autoResume"),
    ):  # fmt: skip
        told = await world.http.post("/e2b/v2/sandboxes", json={"templateID": "base", **body})
        assert (told.status_code == 501 and name in told.json()["message"]) or body == {"network": {"allowOut": []}}, (
            told.text
        )
    assert "metrics" in (await world.http.get(f"/e2b/sandboxes/{envd.id}/metrics")).json()["message"]
    watch = await envd.call("filesystem.Filesystem/CreateWatcher", {"path": "."})
    assert (watch.status_code, "watch_dir" in watch.json()["message"]) == (501, True)
    envd.headers = {"E2b-Sandbox-Port": "8000"}
    port = await envd.call("process.Process/List", {})
    assert (port.status_code, "port 8000" in port.json()["message"]) == (501, True)
    image = await world.http.post("/e2b/v2/sandboxes", json={"templateID": "python:3.12"})
    assert image.status_code in (400, 501)


async def test_a_reader_that_reads_nothing_holds_no_more_than_is_kept_and_ends_with_its_sandbox(
    world: E2bWorld,
) -> None:
    envd = await world.create()
    content, headers = envd.starting("yes")
    async with world.http.stream("POST", "/e2b/process.Process/Start", content=content, headers=headers) as server:
        await anext(server.aiter_bytes(16))
        assert (await envd.run("echo beside"))[-2][1]["event"]["end"]["exitCode"] == 0
        assert (await world.http.delete(f"/e2b/sandboxes/{envd.id}")).status_code == 204
    await until(lambda: not world.running.app.invocations.living)


async def test_a_reader_that_reads_nothing_is_dropped_and_others_go_on(tmp_path: Path) -> None:
    bench = GatewayBench(
        tmp_path, functions={"box": BOX}, server={"facades": {"e2b": {"function": "box"}}}, bounds={"stall_s": 0.1}
    )
    async with serving(bench) as running:
        made = (await running.http.post("/e2b/v2/sandboxes", json={"templateID": "base"})).json()
        envd = Envd(running.http, made["sandboxID"], "")
        content, headers = envd.starting("yes")
        lines = [f"{name}: {value}" for name, value in {**headers, "Content-Length": str(len(content))}.items()]
        head = "\r\n".join(["POST /e2b/process.Process/Start HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""])
        stuck = socket.create_connection(("127.0.0.1", running.app.http_port))
        stuck.sendall(head.encode() + content)
        listed: list[Any] = []
        while not listed:
            listed = (await envd.call("process.Process/List", {})).json()["processes"]
        attach, size_bytes = enveloped({"process": {"pid": listed[0]["pid"]}}), 0
        headers = {**envd.own, "Content-Type": STREAM}
        async with running.http.stream("POST", "/e2b/process.Process/Connect", content=attach, headers=headers) as told:
            async for chunk in told.aiter_bytes():
                size_bytes += len(chunk)
                if size_bytes > 8 * 2**20:
                    break
        assert size_bytes > 8 * 2**20
        stuck.close()
        assert (await running.http.delete(f"/e2b/sandboxes/{envd.id}")).status_code == 204
        await until(lambda: not running.app.invocations.living)


async def test_input_of_many_comes_whole_to_a_command_that_reads_slowly(world: E2bWorld) -> None:
    envd = await world.create()
    size_bytes, typed = 200_000, "abcd"
    content, headers = envd.starting("sleep 0.3; sort | tr -d '\\n' | fold -w 200000 | cut -c1-3", stdin=True)
    async with world.http.stream("POST", "/e2b/process.Process/Start", content=content, headers=headers) as told:
        pieces = told.aiter_bytes()
        [(_, first)] = messages(await anext(pieces))
        process = {"pid": first["event"]["start"]["pid"]}

        async def send(letter: str) -> httpx.Response:
            line = base64.b64encode((letter * (size_bytes - 1) + letter + "\n").encode()).decode()
            return await envd.call("process.Process/SendInput", {"process": process, "input": {"stdin": line}})

        assert [each.status_code for each in await asyncio.gather(*map(send, typed))] == [200] * 4
        unspecified = await envd.call("process.Process/SendSignal", {"process": process})
        assert unspecified.json()["code"] == "invalid_argument"
        assert (await envd.call("process.Process/CloseStdin", {"process": process})).status_code == 200
        said = messages(b"".join([each async for each in pieces]))
    lines = b"".join(
        base64.b64decode(each["event"]["data"]["stdout"]) for _, each in said if "data" in each.get("event", {})
    )
    assert lines.split() == [letter.encode() * 3 for letter in typed]


async def test_a_lost_sandbox_is_gone_and_none_takes_its_place(world: E2bWorld) -> None:
    envd = await world.create()
    sandbox = world.running.app.api.environments.get(envd.id)
    assert sandbox is not None
    await sandbox.kill_for("a test")
    told = (await envd.call("process.Process/List", {})).json()
    assert ("was not found" in told["message"], told["code"]) == (True, "unavailable")
    assert (await world.http.get("/e2b/v2/sandboxes")).json() == []


def test_sandboxes_and_their_ends_outlast_a_killed_gateway(tmp_path: Path) -> None:
    described = document("process", tmp_path / "state", box={"runtime": "exec", "cost": {"cpu": 1}})
    described["server"] |= {"auth": "none", "facades": {"e2b": {"function": "box"}}}
    process = GatewayProcess(tmp_path, described)
    process.start()
    with httpx.Client(base_url=f"{process.url}/e2b", timeout=60) as http:
        make = [{"templateID": "base", "metadata": {"n": str(number)}, "timeout": 300} for number in range(3)]
        made = [http.post("/v2/sandboxes", json=body).json()["sandboxID"] for body in make]
        own = {"E2b-Sandbox-Id": made[0], "Content-Type": "application/octet-stream"}
        assert http.post("/files", params={"path": "file"}, content=b"kept", headers=own).status_code == 200
        assert http.post(f"/sandboxes/{made[1]}/pause", json={}).status_code == 204
        assert http.post(f"/sandboxes/{made[2]}/timeout", json={"timeout": 2}).status_code == 204
    process.kill()
    process.start()
    with httpx.Client(base_url=f"{process.url}/e2b", timeout=60) as http:
        assert http.get("/files", params={"path": "file"}, headers=own).content == b"kept"
        deadline_s = time.monotonic() + 60
        while http.get(f"/sandboxes/{made[2]}").status_code == 200 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        listed = http.get("/v2/sandboxes", params={"order": "asc"}).json()
        assert [(each["metadata"]["n"], each["state"]) for each in listed] == [("0", "running"), ("1", "paused")]
        assert http.post(f"/sandboxes/{made[1]}/connect", json={}).status_code == 201
        for id in made[:2]:
            assert http.delete(f"/sandboxes/{id}").status_code == 204
    assert process.stop() == 0, "\n".join(process.log[-30:])
