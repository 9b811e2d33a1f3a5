"""SWE-ReX's runtime: shells that live between actions, commands and files, and its exceptions for what is not well."""

from __future__ import annotations

import asyncio
import io
import re
import zipfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.facades.swerex.bash_server import WINDOW, UnreadOutput
from manager.action import UnitSet
from manager.function import FunctionSpec
from runtimes.testing import ScriptStep
from tests.gateway.conftest import DEADLINE_S, RunningGateway, until
from tests.gateway.facades.world import doors

PROMPT = "SHELLPS1PREFIX"

BOX = FunctionSpec(
    name="box", runtime="exec", cost={"cpu": UnitSet.fixed(1)}, timeout_s=60.0, output_limit_bytes=256 * 1024
)


@dataclass(frozen=True, slots=True)
class RuntimeClient:
    """A client of one trajectory's runtime."""

    running: RunningGateway
    place: str = "/swerex/box/one"

    async def post(self, verb: str, body: Mapping[str, object] | None = None) -> httpx.Response:
        return await self.running.http.post(f"{self.place}/{verb}", json=body)

    async def ask(self, verb: str, **body: object) -> Any:
        answer = await self.post(verb, body)
        assert answer.status_code == 200, answer.text
        assert verb not in ("run_in_session", "execute") or answer.headers["x-invocation-id"]
        return answer.json()

    async def raised(self, verb: str, **body: object) -> dict[str, Any]:
        """Return the exception that a request ends in, as its client reads it."""
        answer = await self.post(verb, body)
        assert answer.status_code == 511, answer.text
        told: dict[str, Any] = answer.json()["swerexception"]
        assert told["traceback"] == "", "a client logs it as critical"
        return told

    async def run(self, command: str, **how: object) -> tuple[str, int | None]:
        """Return a command's output and exit status, as bash gave it."""
        told = await self.ask("run_in_session", command=command, check="silent", **how)
        return told["output"], told["exit_code"]


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[RuntimeClient]:
    """A runtime in a process sandbox; nothing is left of it when it was closed."""
    async with doors(tmp_path, {"swerex": {"function": "box"}}, lambda _: ScriptStep(), {"box": BOX}) as running:
        yield RuntimeClient(running)
        assert (await running.http.post("/swerex/box/one/close")).json() == {}
        await until(lambda: not running.app.invocations.living)
        assert (await running.http.get("/v1/trajectories")).json()["trajectories"] == []


async def test_a_session_keeps_its_shell_between_commands_and_says_what_a_terminal_says(runtime: RuntimeClient) -> None:
    await runtime.ask("create_session")
    assert await runtime.run("export A=1; cd /; f() { echo in f $1; return 3; }") == ("", 0)
    assert await runtime.run("f $A") == ("in f 1\n", 3)
    assert await runtime.run("pwd") == ("/\n", 0)
    assert await runtime.run("echo out; echo err >&2; no_such_command") == (
        "out\nerr\nbash: no_such_command: command not found\n",
        127,
    )
    assert await runtime.run("printf '\\n\\033[31mx\\033[0m\\303('") == ("\nx\\xc3(", 0)
    assert await runtime.run("cat <<'EOF'\n a\n\n$A\nEOF\nfor i in 1 2; do\n  echo $i\ndone") == (" a\n\n$A\n1\n2\n", 0)
    assert await runtime.run(" \n\n# nothing\n") == ("", 0)
    assert await runtime.run("stty size; test -t 0 && echo terminal; echo $PS1 | grep -c $'\\e'") == (
        "24 80\nterminal\n0\n",
        1,
    )
    assert await runtime.run("PS1=mine PROMPT_COMMAND=") == ("", 0)
    assert await runtime.run("echo the prompt is set again") == ("the prompt is set again\n", 0)
    told = await runtime.ask("run_in_session", command="false", check="ignore")
    assert (told["exit_code"], told["expect_string"]) == (None, PROMPT)
    assert await runtime.run("echo $?") == ("1\n", 0)


async def test_a_command_that_is_late_goes_on_until_it_is_interrupted(runtime: RuntimeClient) -> None:
    await runtime.ask("create_session")
    for command in ("echo begun; sleep 600", "trap '' INT; echo begun; (trap '' INT; exec sleep 600)"):
        told = await runtime.raised("run_in_session", command=command, timeout=2)
        assert told["class_path"] == "swerex.exceptions.CommandTimeoutError"
        interrupted = await runtime.ask("run_in_session", action_type="bash_interrupt", timeout=0.3)
        assert "begun" in interrupted["output"]
        assert (interrupted["exit_code"], interrupted["expect_string"]) == (0, PROMPT)
        assert await runtime.run("trap - INT; echo usable") == ("usable\n", 0)


async def test_a_file_and_a_tree_are_uploaded(runtime: RuntimeClient) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as tree:
        tree.writestr("a/b/x.txt", "in the tree")
        tree.mkdir("empty")
    odd = b"\r\n--\r\n\xff" * 1000
    for data, fields in (
        (packed.getvalue(), {"target_path": "tree", "unzip": "true"}),
        (odd, {"target_path": "new/one", "unzip": "false"}),
    ):
        assert (await upload(runtime, fields, data)).json() == {}
    listed = await runtime.ask("execute", command="find . | sort; cat tree/a/b/x.txt; wc -c < new/one", shell=True)
    assert listed["stdout"].split("\n")[1:] == [
        *("./new", "./new/one", "./tree", "./tree/a", "./tree/a/b", "./tree/a/b/x.txt", "./tree/empty"),
        "in the tree7000",
        "",
    ]
    bad = await upload(runtime, {"target_path": "x", "unzip": "true"}, b"no zip")
    assert bad.json()["swerexception"]["class_path"] == "zipfile.BadZipFile"
    shapeless = await upload(runtime, {"unzip": "true"}, b"")
    assert (shapeless.status_code, "target_path" in shapeless.json()["detail"]) == (422, True)
    assert (await upload(runtime, {"target_path": "new", "unzip": "no"}, b"into")).json() == {}
    left = await runtime.ask("execute", command=["ls", "-A", ".", "new"])
    assert left["stdout"] == ".:\nnew\ntree\n\nnew:\none\ntemp_file_transfer\n", "nothing of ours is left"


@pytest.mark.parametrize("unzip", ["true", "false"])
async def test_an_upload_that_ends_before_it_was_taken_apart_leaves_nothing(runtime: RuntimeClient, unzip: str) -> None:
    """Its bytes are in the sandbox when the action that takes them apart waits for its turn."""
    await runtime.ask("execute", command=["true"])
    hold = asyncio.create_task(runtime.ask("execute", command="while [ ! -e go ]; do sleep 0.01; done", shell=True))
    await until(lambda: states(runtime) == ["running"])
    going = asyncio.create_task(upload(runtime, {"target_path": "x", "unzip": unzip}, b"not taken apart"))
    await until(lambda: states(runtime) == ["running", "queued"])
    place = "/v1/trajectories/one/files"
    listed = (await runtime.running.http.get(place, params={"path": ".", "list": "true"})).json()["files"]
    assert sum(".swerex-" in entry["path"] for entry in listed) == 1
    _, waiting = runtime.running.app.invocations.living
    await runtime.running.http.post(f"/v1/invocations/{waiting.record.id}/cancel")
    assert (await going).status_code == 511
    await runtime.running.http.put(place, params={"path": "go"}, content=b"")
    await hold
    assert (await runtime.ask("execute", command=["ls", "-A"]))["stdout"] == "go\n"


def states(runtime: RuntimeClient) -> list[str]:
    """Return how the calls stand that have not ended, in the order of their acceptance."""
    return [str(each.record.state) for each in runtime.running.app.invocations.living]


async def upload(runtime: RuntimeClient, fields: Mapping[str, str], data: bytes) -> httpx.Response:
    request = httpx.Request(
        "POST", "http://gateway/", data=dict(fields), files={"file": ("x", data)}, headers={"X-API-Key": "any"}
    )
    kind = request.headers["content-type"]
    headers = {"content-type": kind, "x-api-key": "any"}
    await request.aread()
    return await runtime.running.http.post(f"{runtime.place}/upload", content=request.content, headers=headers)


async def test_a_form_of_a_strange_page_is_refused_where_there_are_no_tokens(runtime: RuntimeClient) -> None:
    form = {"content-type": "multipart/form-data; boundary=b"}
    answer = await runtime.running.http.post(f"{runtime.place}/upload", content=b"", headers=form)
    assert (answer.status_code, "X-API-Key" in answer.json()["detail"]) == (403, True)


async def test_a_request_that_comes_again_is_answered_again_and_not_run(runtime: RuntimeClient) -> None:
    body = {"command": "echo x >> runs; wc -l < runs", "shell": True}
    tries = [
        await runtime.running.http.post(f"{runtime.place}/execute", json=body, headers={"X-Request-ID": id})
        for id in ("a", "a", "b")
    ]
    assert [each.json()["stdout"] for each in tries] == ["1\n", "1\n", "2\n"]


async def test_the_gateways_troubles_are_its_own_exceptions_and_no_exit_codes(tmp_path: Path) -> None:
    functions = {"box": replace(BOX, timeout_s=1.0), "blind": replace(BOX, name="blind")}
    facade = {"swerex": {"function": "box", "client_timeout": "4s", "keep": True}}
    async with doors(tmp_path, facade, lambda _: ScriptStep(), functions) as running:
        late = RuntimeClient(running)
        told = await late.raised("execute", command="sleep 600", shell=True)
        assert told["class_path"] == "swerex.exceptions.CommandTimeoutError"
        assert "the timeout of box" in told["message"]
        lost = RuntimeClient(running, "/swerex/blind/two")
        ended = asyncio.create_task(lost.raised("execute", command="sleep 600", shell=True))
        await until(lambda: running.app.api.environments.get("two") is not None)
        await running.http.delete("/v1/trajectories/two")
        assert (await ended)["class_path"] == "swerex.exceptions.SwerexException"
        waits = await RuntimeClient(running, "/swerex/blind/three").raised("execute", command="sleep 600", shell=True)
        assert waits["extra_info"] == {"code": "capacity_exceeded"}
        await late.ask("create_session", session="kept")
        await late.ask("close")
        gone = await late.raised("run_in_session", command="echo", session="kept")
        assert gone["class_path"] == "swerex.exceptions.SessionDoesNotExistError"
        living = (await running.http.get("/v1/trajectories")).json()["trajectories"]
        assert "one" in {each["trajectory"] for each in living}


async def test_the_key_names_the_trajectory_where_the_path_does_not(tmp_path: Path) -> None:
    facade = {"swerex": {"function": "box", "port": 0}}
    async with doors(tmp_path, facade, lambda _: ScriptStep(), {"box": BOX}, auth="token", token="s3.cret") as running:
        port = running.app.facades.ports["swerex"]
        asked = {"command": "pwd", "shell": True}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:
            answers = {
                key: await client.post("/execute", json=asked, headers={"X-API-Key": key})
                for key in ("s3.cret.mine", "s3.wrong.mine", "s3.cret", "wrong")
            }
            alive = await client.get("/is_alive", headers={"X-API-Key": "s3.cret.mine"})
            below = await client.get("/box/mine/is_alive", headers={"X-API-Key": "s3.cret"})
            keyless = await client.get("/box/mine/is_alive")
            unknown = await client.post("/run_jupyter", headers={"X-API-Key": "s3.cret.mine"})
        assert [answer.status_code for answer in answers.values()] == [200, 403, 403, 403]
        assert (await running.http.get("/v1/trajectories/mine")).status_code == 200
        assert alive.json() == below.json() == {"is_alive": True, "message": ""}
        assert (keyless.status_code, unknown.status_code) == (403, 404)


TEXT = "".join(f"{number}\n" for number in range(20_000))


@pytest.mark.parametrize("piece", [7, 1000, 4 * WINDOW, 30_000, len(TEXT)])
@pytest.mark.parametrize("limit", [16_000, 40_000, len(TEXT) - 1])
def test_it_keeps_both_ends_within_its_limit_and_counts_what_is_left_out(piece: int, limit: int) -> None:
    said = UnreadOutput(limit)
    for begin in range(0, len(TEXT), piece):
        said.add(TEXT[begin : begin + piece])
    told = said.take()
    assert len(told) <= limit
    note = re.search(r"\n\[(\d+) characters are left out here\]\n", told)
    assert note is not None
    first, last = told[: note.start()], told[note.end() :]
    assert TEXT.startswith(first)
    assert TEXT.endswith(last)
    assert len(first) > limit // 4 and len(last) > limit // 4
    assert len(first) + int(note.group(1)) + len(last) == len(TEXT)
    assert said.take() == "", "it was told"
