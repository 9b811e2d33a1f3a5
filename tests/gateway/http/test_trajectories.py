"""Trajectories that choose their sandbox, and their sessions, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.generated.tangram_grpc import GatewayStub
from manager.function import SandboxSpec, TrajectoryChoices
from tangram import AsyncClient, ConflictError, InvalidInputError, NotFoundError, UnsupportedError
from tangram.client.aio import AsyncSessionHandle
from tangram.types import SessionEnd
from tests.gateway.conftest import DEADLINE_S, FUNCTIONS, GatewayBench, RunningGateway, function, serving, until
from tests.gateway.grpc.test_service import channel

ECHO = 'echo begun; while read -r line; do echo "said $line"; done; exit 9'

SANDBOX = SandboxSpec(
    image="any",
    memory_bytes=2**28,
    trajectory=TrajectoryChoices(env=("TASK_*",), memory_bytes=2**29, idle_ttl_s=3600.0),
)

BENCH = {
    "shell": replace(FUNCTIONS["shell"], sandbox=SANDBOX),
    "elsewhere": replace(FUNCTIONS["shell"], name="elsewhere", sandbox=SandboxSpec(image="any", workdir="/elsewhere")),
    "larger": replace(FUNCTIONS["shell"], name="larger", sandbox=SandboxSpec(image="any", memory_bytes=2**30)),
}


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    async with serving(GatewayBench(tmp_path, functions=BENCH)) as gateway:
        yield gateway


def client_of(running: RunningGateway) -> AsyncClient:
    return AsyncClient(f"http://127.0.0.1:{running.app.http_port}")


async def said(client: AsyncClient, command: str, function: str = "shell") -> str:
    ended = await client.invoke(function, {"command": command}, trajectory="t")
    return str(ended.raise_for_failure().result["stdout"])


async def test_a_trajectory_lives_in_what_it_chose(running: RunningGateway) -> None:
    asked = {"env": {"TASK_ID": "7"}, "workdir": "/box", "memory": "512Mi", "idle_ttl": 60}
    async with client_of(running) as client, client.trajectory("t", sandbox=asked) as opened:
        assert (await opened.exec("echo $TASK_ID $PWD")).result["stdout"] == "7 /box\n"
        await opened.upload("note", "here")
        assert await said(client, "cat /box/note") == "here"
        (info,) = await client.trajectories()
        assert (info.memory_bytes, info.ttl_s) == (2**29, 60.0)
        told = (await running.http.get("/v1/trajectories/t")).json()["sandbox"]
        assert told == {
            "image": "any", "workdir": "/box", "user": "auto", "network": "none", "memory_bytes": 2**29,
        }  # fmt: skip


async def test_what_is_not_allowed_begins_nothing(running: RunningGateway) -> None:
    async with client_of(running) as client:
        with pytest.raises(InvalidInputError, match=r"sandbox\.trajectory.memory"):
            await client.trajectory("t", sandbox={"memory": "1Gi"}).open()
        with pytest.raises(UnsupportedError, match="no images"):
            await client.trajectory("t", sandbox={"image": "any"}).open()
        with pytest.raises(InvalidInputError, match="imago"):
            client.trajectory("t", sandbox={"imago": "any"})
        with pytest.raises(InvalidInputError, match="has no sandbox"):
            await client.trajectory("t", function="echo", sandbox={"workdir": "/box"}).open()
        assert await client.trajectories() == []


async def test_a_handle_with_a_choice_acts_in_no_other_sandbox(running: RunningGateway) -> None:
    async with client_of(running) as client:
        with pytest.raises(InvalidInputError, match="open"):
            await client.trajectory("t", sandbox={"workdir": "/box"}).exec("pwd")
        assert await client.trajectories() == []


async def test_an_opening_finds_the_same_sandbox_and_is_refused_another_which_lives_on(running: RunningGateway) -> None:
    async with client_of(running) as client:
        await client.trajectory("t", sandbox={"workdir": "/box"}).open()
        await said(client, "echo kept > file")
        await client.trajectory("t", sandbox={"workdir": "/box"}).open()
        with pytest.raises(ConflictError, match=r"sandbox\.workdir"):
            await client.trajectory("t", sandbox={"workdir": "/other"}).open()
        with pytest.raises(ConflictError, match=r"sandbox\.memory"):
            await client.trajectory("t", sandbox={"workdir": "/box", "memory": "64Mi"}).open()
        assert await said(client, "cat file") == "kept\n"


async def test_a_second_function_that_says_otherwise_is_refused_by_name(running: RunningGateway) -> None:
    async with client_of(running) as client:
        assert await said(client, "pwd") == "/workspace\n"
        refused = await client.invoke("elsewhere", {"command": "pwd"}, trajectory="t")
        assert (refused.state, refused.reason) == ("failed", "invalid_input")
        assert "sandbox.workdir is '/elsewhere' here, and '/workspace' in the sandbox that lives" in refused.message
        assert await said(client, "pwd", "larger") == "/workspace\n", "amounts are the living sandbox's"
        assert await said(client, "pwd") == "/workspace\n"


async def test_the_next_gateway_knows_what_was_chosen(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path, functions=BENCH)
    async with serving(bench) as running, client_of(running) as client:
        await client.trajectory("t", sandbox={"workdir": "/box", "env": {"TASK_ID": "7"}}).open()
        running.app.runtimes.environments.keep()
        sandbox = running.app.runtimes.environments.get("t")
        assert sandbox is not None
    async with serving(bench) as running, client_of(running) as client:
        assert await said(client, "echo $TASK_ID $PWD") == "7 /box\n"
        environments = running.app.runtimes.environments
        adopted = environments.get("t")
        assert adopted is not None
        await adopted.kill_for("a test")
        lost = await client.invoke("shell", {"command": "pwd"}, trajectory="t")
        assert lost.reason == "environment_lost"
        assert await said(client, "echo $TASK_ID $PWD") == "7 /box\n", "the next one is as it was chosen"


async def test_grpc_opens_and_ends(running: RunningGateway) -> None:
    async with channel(running) as opened:
        stub = GatewayStub(opened)
        chosen = pb.ChosenSandbox(workdir="/box", env={"TASK_ID": "7"}, memory="512Mi", idle_ttl="1m")
        request = pb.OpenTrajectoryRequest(trajectory="t", function="shell", sandbox=chosen)
        answer = await stub.OpenTrajectory(request)
        told = orjson.loads(answer.json)
        assert (answer.trajectory, told["ttl_s"], told["sandbox"]["workdir"]) == ("t", 60.0, "/box")
        refused = pb.ChosenSandbox(network="egress")
        with pytest.raises(GRPCError) as caught:
            await stub.OpenTrajectory(pb.OpenTrajectoryRequest(trajectory="u", function="shell", sandbox=refused))
        assert caught.value.status is Status.INVALID_ARGUMENT
        with pytest.raises(GRPCError) as caught:
            await stub.OpenTrajectory(pb.OpenTrajectoryRequest(trajectory="u", function="shell", snapshot="0" * 12))
        assert caught.value.status is Status.NOT_FOUND
        for lease_s in (600.0, 30.0):  # opened again, it renews its lease
            request.lease_s = lease_s
            left_s = orjson.loads((await stub.OpenTrajectory(request)).json)["lease_left_s"]
            assert lease_s - 30 < left_s <= lease_s
        await stub.EndTrajectory(pb.EndTrajectoryRequest(trajectory="t"))
        with pytest.raises(GRPCError) as caught:
            await stub.EndTrajectory(pb.EndTrajectoryRequest(trajectory="t"))
        assert caught.value.status is Status.NOT_FOUND


async def test_files_and_trees_with_their_errors_over_http(running: RunningGateway) -> None:
    async with client_of(running) as client, client.trajectory("t") as opened:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            info = tarfile.TarInfo("deep/file")
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
        await opened.upload_archive("tree", packed.getvalue())
        assert (await opened.exec("cat tree/deep/file")).result["stdout"] == "abc"
        with tarfile.open(fileobj=io.BytesIO(await opened.download_archive("tree"))) as tar:
            assert "./deep/file" in tar.getnames()
        for work, kind in (
            (opened.download("tree"), "is_a_directory"),
            (opened.download("nothing"), "not_found"),
            (opened.upload("tree", b"x"), "is_a_directory"),
            (opened.download_archive("nothing"), "not_found"),
            (opened.upload_archive("/usr/x", packed.getvalue()), None),
        ):
            with pytest.raises((ConflictError, NotFoundError)) as caught:
                await work
            assert caught.value.detail["file_error"] in (kind, "permission_denied", "read_only")
        with pytest.raises(ConflictError, match=r"sandbox\.users"):
            await opened.upload("f", b"x", user="root")
        assert not [entry.path for entry in await opened.list() if "tangram" in entry.path], "nothing is left behind"


async def test_bytes_in_and_streams_in_order(running: RunningGateway) -> None:
    async with client_of(running) as client, client.trajectory("t") as opened:
        assert (await opened.exec("od -An -tx1", stdin=b"\xff\x00\n")).result["stdout"].split() == ["ff", "00", "0a"]
        merged = (await opened.exec("echo o; echo e >&2; echo o", merge=True)).result
        assert (merged["stdout"], merged["stderr"]) == ("o\ne\no\n", "")
        both = await client.invoke("shell", {"command": "cat", "stdin": "a", "stdin_base64": "YQ=="}, trajectory="t")
        assert both.reason == "invalid_input" and "stdin_base64" in both.message
        odd = await client.invoke("shell", {"command": "cat", "stdin_base64": "no base64!"}, trajectory="t")
        assert odd.reason == "invalid_input"


async def test_the_record_says_which_bound_held(running: RunningGateway) -> None:
    slow = {"held": True}
    answer = await running.invoke(slow, function="short", headers={"X-Timeout": "9s"})
    record = answer.json()["invocation"]
    assert (record["reason"], record["timeout_capped_s"]) == ("timeout", 0.05)
    assert "the function's timeout of 0.05 s held, 9 s were asked for" in record["message"]
    answer = await running.invoke(slow, function="short", headers={"X-Timeout": "10ms"})
    assert "timeout_capped_s" not in answer.json()["invocation"]


async def test_process_sandboxes_have_no_images_to_pull(running: RunningGateway) -> None:
    async with client_of(running) as client:
        for work in (client.images(), client.pull_images(["debian:bookworm"])):
            with pytest.raises(UnsupportedError, match="no images"):
                await work


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


async def test_a_name_that_does_not_live_is_told_the_nearest_that_does(gateway: RunningGateway) -> None:
    assert (await gateway.http.put("/v1/trajectories/django-11099", json={"function": "echo"})).status_code == 200
    path = "/v1/trajectories/django-11909"
    for method, where in (("GET", path), ("DELETE", path), ("POST", f"{path}/snapshots")):
        told = (await gateway.http.request(method, where)).json()
        assert (told["status"], "did you mean 'django-11099'?" in told["detail"]) == (404, True)
    assert "did you mean" not in (await gateway.http.get("/v1/trajectories/x")).json()["detail"]
