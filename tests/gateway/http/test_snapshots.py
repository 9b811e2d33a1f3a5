"""Snapshots of trajectories and forks over HTTP, with process sandboxes and with containers."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from manager.function import Background, Capabilities, SandboxSpec, TrajectoryChoices
from runtimes.sandbox.provider import ProviderSettings
from runtimes.sandbox.snapshots import SnapshotSettings
from runtimes.sandbox.spec import forked
from tangram import AsyncClient, ConflictError, InvalidInputError
from tests.gateway.conftest import FUNCTIONS, GatewayBench, RunningGateway, serving, until

SANDBOX = SandboxSpec(
    image="tangram-base:bookworm",
    memory_bytes=2**28,
    users=("1234", "root"),
    env={"OWN": "function"},
    trajectory=TrajectoryChoices(env=("TASK_*",), memory_bytes=2**29, idle_ttl_s=3600.0),
)
BENCH = {
    "shell": replace(FUNCTIONS["shell"], sandbox=SANDBOX),
    "strict": replace(FUNCTIONS["shell"], name="strict", sandbox=replace(SANDBOX, trajectory=TrajectoryChoices())),
    "elsewhere": replace(
        FUNCTIONS["shell"], name="elsewhere", sandbox=replace(SANDBOX, capabilities=Capabilities.DEFAULT)
    ),
    "awake": replace(FUNCTIONS["shell"], name="awake", sandbox=replace(SANDBOX, background=Background.RUN)),
}
KINDS = ["process", pytest.param("container", marks=[pytest.mark.docker, pytest.mark.slow])]
#: What a snapshot has to bring over: content, owner, mode, setgid, links, holes, an odd name, and /tmp.
LAID_OUT = (
    "echo kept > file; chmod 640 file; mkdir -p deep/er; chmod 2750 deep; echo in > deep/er/in; ln -s file link; "
    "ln file again; truncate -s 5M hole; printf x >> hole; touch -d @1000000000 old; echo temporary > /tmp/file; "
    "mkfifo pipe; printf odd > \"$(printf 'odd \\377 name')\""
)
SHOWN = (
    "cat file deep/er/in /tmp/file; stat -c '%n %a %U %s %h %F' file deep deep/er hole pipe; readlink link; "
    "stat -c %Y old; sha256sum < hole; cat odd*; stat -c %s . >/dev/null; id -u"
)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "container":
        request.getfixturevalue("docker")
    return str(request.param)


@pytest.fixture
async def bench(kind: str, tmp_path: Path) -> AsyncIterator[GatewayBench]:
    """What the gateways of a test are made from; nothing of theirs is left after it."""
    bounds = SnapshotSettings(count_max=3, total_max_bytes=64 * 2**20)
    sandboxes = ProviderSettings(kind=kind, snapshots=bounds)  # type: ignore[arg-type]  # of the parameters above
    yield GatewayBench(tmp_path, functions=BENCH, sandboxes=sandboxes)
    assert left(tmp_path) == []
    assert images(tmp_path) == []


@pytest.fixture
async def running(bench: GatewayBench) -> AsyncIterator[RunningGateway]:
    async with serving(bench) as gateway:
        yield gateway
        await clear(gateway)


async def clear(gateway: RunningGateway) -> None:
    """End every trajectory and remove every snapshot."""
    for each in (await gateway.http.get("/v1/trajectories")).json()["trajectories"]:
        await gateway.http.delete(f"/v1/trajectories/{each['trajectory']}")
    for each in (await gateway.http.get("/v1/snapshots")).json()["snapshots"]:
        assert (await gateway.http.delete(f"/v1/snapshots/{each['snapshot']}")).status_code == 204


def left(directory: Path) -> list[str]:
    return [path.name for path in (directory / "sandboxes" / "snapshots").glob("*")]


def images(directory: Path) -> list[str]:
    """Images of snapshots of gateways below a directory, if there is an engine; others take some meanwhile."""
    asked = ("docker", "images", "-q", "--filter", "label=tangram.snapshot")
    told = ("docker", "inspect", "--format", '{{index .Config.Labels "tangram.state"}} {{.Id}}')
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
        lines = subprocess.run((*told, *found), capture_output=True, text=True, check=False).stdout.splitlines()
    except FileNotFoundError:
        return []
    return [line for line in lines if line.startswith(str(directory))]


async def said(gateway: RunningGateway, trajectory: str, command: str, function: str = "shell", **more: str) -> str:
    headers = {"X-Trajectory-Id": trajectory}
    ended = await gateway.invoke({"command": command, **more}, function=function, headers=headers)
    assert ended.status_code == 200, ended.text
    record = ended.json()
    assert record["state"] == "succeeded", record
    return str(record["result"]["stdout"])


async def opened(gateway: RunningGateway, trajectory: str, **asked: object) -> httpx.Response:
    return await gateway.http.put(f"/v1/trajectories/{trajectory}", json={"function": "shell", **asked})


async def taken(gateway: RunningGateway, trajectory: str) -> dict[str, Any]:
    answer = await gateway.http.post(f"/v1/trajectories/{trajectory}/snapshots")
    assert answer.status_code == 201, answer.text
    told: dict[str, Any] = answer.json()
    return told


@pytest.mark.promise(
    "A fork begins with its source's files and has no more than its function allows; later changes stay apart."
)
async def test_a_fork_is_as_it_was_and_both_go_their_own_way(
    running: RunningGateway, kind: str, tmp_path: Path
) -> None:
    assert (await opened(running, "one", sandbox={"env": {"TASK_ID": "7"}, "memory": "384Mi"})).status_code == 200
    await said(running, "one", LAID_OUT)
    shown = await said(running, "one", SHOWN)
    answer = await running.http.post("/v1/trajectories/one/fork", json={"function": "shell", "to": ["two", "three"]})
    assert answer.status_code == 201, answer.text
    told = answer.json()
    assert [each["trajectory"] for each in told["trajectories"]] == ["two", "three"]
    assert {each["memory_bytes"] for each in told["trajectories"]} == {384 * 2**20}
    assert told["snapshot"]["in_use"]
    assert len(images(tmp_path)) == (1 if kind == "container" else 0)
    for name in ("two", "three"):
        assert await said(running, name, SHOWN) == shown
        assert await said(running, name, "echo $TASK_ID $OWN") == "7 function\n"
        again = f"kept\n{name}\n" if kind == "process" else "kept\n"  # an overlay parts two names at the first write
        assert await said(running, name, f"echo {name} >> file; rm deep/er/in; cat file") == f"kept\n{name}\n"
        assert await said(running, name, "cat again") == again
    assert await said(running, "one", SHOWN) == shown


async def test_a_record_holds_what_was_chosen_and_no_value_of_the_functions_own(running: RunningGateway) -> None:
    await opened(running, "one", sandbox={"env": {"TASK_ID": "7"}})
    snapshot = (await taken(running, "one"))["snapshot"]
    assert running.app.api is not None
    record = running.app.api.snapshots.get(snapshot).record
    assert record.spec.env == {"TASK_ID": "7"}
    changed = replace(SANDBOX, env={"OWN": "changed"})
    assert forked(changed, record, images=False).env == {"OWN": "changed", "TASK_ID": "7"}


async def test_owners_and_modes_of_other_users_are_kept(running: RunningGateway) -> None:
    await said(running, "one", "mkdir theirs; chmod 777 theirs; chmod 755 .")
    await said(running, "one", "umask 077; echo secret > theirs/file", user="1234")
    await said(running, "one", "umask 077; echo root > theirs/roots", user="root")
    shown = await said(running, "one", "stat -c '%n %u %a' . theirs theirs/file theirs/roots")
    await running.http.post("/v1/trajectories/one/fork", json={"function": "shell", "to": ["two"]})
    assert await said(running, "two", "stat -c '%n %u %a' . theirs theirs/file theirs/roots") == shown
    assert await said(running, "two", "cat theirs/file", user="1234") == "secret\n"
    assert await said(running, "two", "cat theirs/file 2>/dev/null || echo refused") == "refused\n"


async def test_a_snapshot_sees_what_was_asked_for_before_it(running: RunningGateway) -> None:
    await opened(running, "one")
    first = asyncio.create_task(said(running, "one", "sleep 0.3; echo done > file"))
    await until(lambda: (running.app.engine.trajectory("one") or {})["state"] == "running")
    snapshot = asyncio.create_task(taken(running, "one"))
    await first
    (await opened(running, "two", snapshot=(await snapshot)["snapshot"])).raise_for_status()
    assert await said(running, "two", "cat file") == "done\n"


@pytest.mark.promise("Snapshots outlive the gateway, stay within their bounds, and none in use goes.")
async def test_the_next_gateway_knows_a_snapshot_and_what_needs_it(bench: GatewayBench) -> None:
    async with serving(bench) as running:
        await said(running, "one", "echo kept > file; echo there > /tmp/file")
        snapshot = await taken(running, "one")
        await running.http.delete("/v1/trajectories/one")
    async with serving(bench) as running:
        (found,) = (await running.http.get("/v1/snapshots")).json()["snapshots"]
        assert found == snapshot
        (await opened(running, "two", snapshot=snapshot["snapshot"])).raise_for_status()
        assert await said(running, "two", "cat file /tmp/file") == "kept\nthere\n"
        running.app.runtimes.environments.keep()
    async with serving(bench) as running:
        assert await said(running, "two", "cat file; echo own > file") == "kept\n"
        refused = await running.http.delete(f"/v1/snapshots/{snapshot['snapshot']}")
        assert refused.status_code == 409
        assert "in use by trajectory 'two'" in refused.json()["detail"]
        sandbox = running.app.runtimes.environments.get("two")
        assert sandbox is not None
        await sandbox.kill_for("a test")
        lost = await running.invoke({"command": "true"}, function="shell", headers={"X-Trajectory-Id": "two"})
        assert "environment_lost" in lost.text
        assert await said(running, "two", "cat file") == "kept\n", "it begins anew as it began"
        await clear(running)


async def test_beyond_the_bound_the_least_recently_used_go_and_none_in_use(running: RunningGateway) -> None:
    await said(running, "one", "echo 1 > file")
    first, second, third = [(await taken(running, "one"))["snapshot"] for _ in range(3)]
    (await opened(running, "two", snapshot=first)).raise_for_status()
    fourth = (await taken(running, "one"))["snapshot"]
    assert await ids(running) == [first, third, fourth], "the second was used least recently"
    for name, snapshot in (("three", third), ("four", fourth)):
        (await opened(running, name, snapshot=snapshot)).raise_for_status()
    full = await running.http.post("/v1/trajectories/one/snapshots")
    assert (full.status_code, full.json()["code"]) == (503, "capacity_exceeded"), full.text
    assert "sandbox.snapshots.count_max" in full.json()["detail"]
    assert await ids(running) == [first, third, fourth]
    assert second not in left(Path(running.app.config.server.state_dir).parent)


async def ids(gateway: RunningGateway) -> list[str]:
    return [each["snapshot"] for each in (await gateway.http.get("/v1/snapshots")).json()["snapshots"]]


async def test_a_fork_has_no_more_than_its_function_allows(running: RunningGateway) -> None:
    await opened(running, "one", sandbox={"env": {"TASK_ID": "7"}, "memory": "384Mi"})
    snapshot = (await taken(running, "one"))["snapshot"]
    asked: dict[str, object] = {"snapshot": snapshot}
    refused = await opened(running, "two", function="strict", **asked)
    assert refused.status_code == 422, refused.text
    assert "sandbox.trajectory.env" in refused.json()["detail"]
    refused = await opened(running, "two", function="elsewhere", **asked)
    assert refused.status_code == 409, refused.text
    assert "sandbox.capabilities" in refused.json()["detail"]
    refused = await opened(running, "two", function="echo", **asked)
    assert refused.status_code == 422, refused.text
    refused = await opened(running, "two", sandbox={"workdir": "/box"}, **asked)
    assert refused.status_code == 422, refused.text
    refused = await running.http.post("/v1/trajectories/one/fork", json={"function": "strict", "to": ["two", "three"]})
    assert refused.status_code == 422, refused.text
    assert await ids(running) == [snapshot], "of a fork that could not be nothing is left"
    lives = await opened(running, "one", **asked)
    assert lives.status_code == 409, lives.text
    assert [each["trajectory"] for each in (await running.http.get("/v1/trajectories")).json()["trajectories"]] == [
        "one"
    ]


@pytest.mark.parametrize("kind", ["process"], indirect=True)
async def test_a_fork_comes_under_its_step_when_all_of_it_lives(bench: GatewayBench) -> None:
    async with serving(replace(bench, scheduler={"trajectories_max": 3})) as gateway:
        await opened(gateway, "one")
        asked = {"function": "shell", "task": "math", "step": 4}
        refused = await gateway.http.post("/v1/trajectories/one/fork", json=asked | {"to": ["two", "three", "four"]})
        assert refused.status_code == 503, refused.text
        assert (await gateway.http.get("/v1/tasks/math/steps")).json() == {"steps": []}
        forked = await gateway.http.post("/v1/trajectories/one/fork", json=asked | {"to": ["two", "three"]})
        assert forked.status_code == 201, forked.text
        (step,) = (await gateway.http.get("/v1/tasks/math/steps")).json()["steps"]
        assert (step["step"], step["living"], step["ended"]) == (4, 2, 0)
        await clear(gateway)


async def test_what_is_unknown_or_lives_already_is_refused_by_name(running: RunningGateway) -> None:
    http = running.http
    for answer in (
        await http.post("/v1/trajectories/nobody/snapshots"),
        await http.post("/v1/trajectories/nobody/fork", json={"function": "shell", "to": ["two"]}),
        await http.delete("/v1/snapshots/0123456789ab"),
        await opened(running, "two", snapshot="0123456789ab"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), answer.text
    await opened(running, "one")
    await opened(running, "two")
    for to, status in ((["two"], 409), (["one"], 409), (["three", "three"], 409), ([], 422)):
        answer = await http.post("/v1/trajectories/one/fork", json={"function": "shell", "to": to})
        assert answer.status_code == status, answer.text
    answer = await http.post("/v1/trajectories/one/fork", json={"function": "nothing", "to": ["three"]})
    assert answer.status_code == 404, answer.text
    assert await ids(running) == [], "nothing was taken for what cannot be"


@pytest.mark.parametrize("kind", ["process"], indirect=True)
async def test_files_on_their_way_are_not_kept_half(running: RunningGateway) -> None:
    await opened(running, "one")
    begun, going_on = asyncio.Event(), asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"first "
        begun.set()
        await going_on.wait()
        yield b"second"

    place = "/v1/trajectories/one/files?path=file"
    upload = asyncio.create_task(running.http.put(place, content=pieces()))
    await begun.wait()
    sandbox = running.app.runtimes.environments.get("one")
    assert sandbox is not None
    await until(lambda: sandbox.in_transfer)
    refused = await running.http.post("/v1/trajectories/one/snapshots")
    assert refused.status_code == 409, refused.text
    assert "on their way" in refused.json()["detail"]
    going_on.set()
    assert (await upload).status_code == 201
    (await opened(running, "two", snapshot=(await taken(running, "one"))["snapshot"])).raise_for_status()
    assert await said(running, "two", "cat file") == "first second"


async def test_processes_stand_still_while_their_files_are_kept_and_go_on(running: RunningGateway) -> None:
    writer = "while :; do echo line >> one; echo line >> two; sleep 0.01; done >/dev/null 2>&1 &"
    await said(running, "one", f"{writer} until [ -s two ]; do sleep 0.01; done", "awake")
    snapshot = (await taken(running, "one"))["snapshot"]
    answer = await opened(running, "two", function="awake", snapshot=snapshot)
    assert answer.status_code == 200, answer.text
    one, two = (await said(running, "two", "cat one | wc -l; cat two | wc -l", "awake")).split()
    assert int(one) - int(two) in (0, 1), "of one moment"
    assert await said(running, "two", "ps -e | grep -c sleep; true", "awake") == "0\n", "no process comes with them"
    before = int(await said(running, "one", "cat two | wc -l", "awake"))
    grown = f"until [ $(cat two | wc -l) -gt {before} ]; do sleep 0.01; done; echo goes on"
    assert await said(running, "one", grown, "awake") == "goes on\n"


@pytest.mark.parametrize("kind", ["process"], indirect=True)
async def test_the_client_forks_a_handle_and_begins_with_a_snapshot(running: RunningGateway) -> None:
    address = f"http://127.0.0.1:{running.app.http_port}"
    async with AsyncClient(address) as client, client.trajectory("one", sandbox={"env": {"TASK_ID": "7"}}) as one:
        await one.exec("echo kept > file")
        two, three = await one.fork(["two", "three"])
        assert (await two.exec("cat file; echo $TASK_ID; echo own >> file")).result["stdout"] == "kept\n7\n"
        assert await three.download("file") == b"kept\n"
        with pytest.raises(ConflictError, match="lives already"):
            await one.fork(["two"])
        taken = await two.snapshot()
        async with client.trajectory("four", snapshot=taken.snapshot) as four:
            assert await four.download("file") == b"kept\nown\n"
            with pytest.raises(ConflictError, match="in use by trajectory 'four'"):
                await client.remove_snapshot(taken.snapshot)
        with pytest.raises(InvalidInputError, match="open"):
            await client.trajectory("five", snapshot=taken.snapshot).exec("true")
        assert [(each.snapshot, each.in_use) for each in await client.snapshots()][1:] == [(taken.snapshot, False)]
        await client.remove_snapshot(taken.snapshot)
        await two.close()
        assert await (await two.open()).download("file") == b"kept\n", "a handle of a fork begins anew as it began"
