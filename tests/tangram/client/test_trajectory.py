"""The handle of a trajectory and of a session: after its end it raises; many share a bounded number of connections."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from tangram import AsyncClient, Client, InvalidInputError, NotFoundError, TrajectoryEndedError
from tangram.client import aio as aio_connections
from tangram.client.aio import ANSWER_S, CONNECTIONS, AsyncSessionHandle, AsyncTrajectory
from tangram.client.followers import SessionFollower
from tangram.client.requests import Retries
from tangram.errors import ConflictError, UnreadableAnswerError
from tangram.testing import ScriptedCall, ScriptedGateway, ScriptedTrajectory
from tests.gateway.conftest import DEADLINE_S, RunningGateway
from tests.house.source import ROOT
from tests.tangram.sockets import served, serving_script

TRAJECTORIES = 500


async def everything_raises(trajectory: AsyncTrajectory) -> None:
    for refused in (
        trajectory.exec("pwd"),
        trajectory.invoke("echo", {}),
        trajectory.upload("x", "1"),
        trajectory.download("x"),
        trajectory.list(),
    ):
        with pytest.raises(TrajectoryEndedError, match="'t'"):
            await refused


async def test_a_closed_handle_says_so_without_asking_anybody() -> None:
    gateway = ScriptedGateway({"shell": {}})
    async with AsyncClient(transport=gateway) as client:
        async with client.trajectory("t") as trajectory:
            await trajectory.exec("true")
        asked = len(gateway.requests)
        await everything_raises(trajectory)
        assert len(gateway.requests) == asked


@pytest.mark.promise("An ended trajectory is gone; a caller that expected it to live gets 410.")
async def test_an_end_by_another_client_is_noticed(gateway: RunningGateway) -> None:
    async with AsyncClient(f"http://127.0.0.1:{gateway.app.http_port}") as client, client.trajectory("t") as trajectory:
        assert (await trajectory.exec("pwd")).ok
        await client.end_trajectory("t")
        await everything_raises(trajectory)
        assert await client.trajectories() == [], "nothing began anew"


async def opened(trajectory: AsyncTrajectory) -> bool:
    """Whether it was; on a slow machine it may end while its sandbox is being made."""
    try:
        await trajectory.open()
    except NotFoundError:
        return False
    return True


async def test_an_end_is_noticed_while_another_goes_on_in_a_new_one(gateway: RunningGateway) -> None:
    async with AsyncClient(f"http://127.0.0.1:{gateway.app.http_port}") as client:
        first = client.trajectory("t")
        await first.open()
        await first.close()
        async with client.trajectory("t") as second:
            assert (await second.exec("pwd")).ok
            await everything_raises(first)
            # A closed handle that is opened again begins anew, or joins what lives.
            assert (await (await first.open()).exec("pwd")).ok


async def test_a_handle_that_was_never_opened_begins_with_its_first_action(gateway: RunningGateway) -> None:
    async with AsyncClient(f"http://127.0.0.1:{gateway.app.http_port}") as client:
        trajectory = client.trajectory("t")
        with pytest.raises(NotFoundError):
            await trajectory.download("/tmp/x")
        assert (await trajectory.exec("pwd")).ok
        assert [each.trajectory for each in await client.trajectories()] == ["t"]
        await trajectory.close()


async def test_what_is_expected_of_a_trajectory_must_be_known(gateway: RunningGateway) -> None:
    answer = await gateway.invoke({}, headers={"X-Trajectory-Id": "t", "X-Trajectory-Expect": "dead"})
    assert (answer.status_code, answer.json()["errors"]["path"]) == (422, "X-Trajectory-Expect")
    answer = await gateway.invoke({}, headers={"X-Trajectory-Id": "t", "X-Trajectory-Expect": "living"})
    assert (answer.status_code, answer.json()["code"]) == (410, "trajectory_ended")


async def test_a_handle_is_a_rollout_of_its_step(gateway: RunningGateway) -> None:
    async with AsyncClient(f"http://127.0.0.1:{gateway.app.http_port}") as client:
        told = await client.tell_step("math", 5, expected=4)
        assert (told.step, told.expected, told.ends_in_s) == (5, 4, None)
        async with client.trajectory("t", task="math", step=5) as trajectory:
            await trajectory.exec("true")
        await client.invoke("echo", {}, task="math", step=5)
        await client.map("echo", [{}], task="math", step=5)
        (step,) = await client.steps("math")
        assert (step.living, step.ended) == (0, 3)
        assert [each.step for task in await client.tasks() for each in task.steps] == [5]


def test_a_scripted_gateway_is_told_of_steps() -> None:
    gateway = ScriptedGateway({"echo": {}})
    with Client(transport=gateway) as client:
        assert client.tell_step("math", 5, expected=4).expected == 4
        client.invoke("echo", {}, task="math", step=5)
        assert [step.step for step in client.steps("math")] == [5]
    assert gateway.steps == {("math", 5): 4}
    assert gateway.calls[0].headers["x-step"] == "5"


def follower(input_offset: int | None = None) -> SessionFollower:
    return SessionFollower("s1", Retries(), input_offset=input_offset)


def test_output_that_was_seen_is_passed_over_after_a_cut() -> None:
    one = follower()
    first = one.feed('{"stream": "stdout", "offset": 0, "data": "YWJj"}')
    assert first is not None
    assert (first.data, one.offset) == (b"abc", 3)
    assert one.feed('{"stream": "stdout", "offset": 0, "data": "YWJj"}') is None
    rest = one.feed('{"stream": "stderr", "offset": 1, "data": "YmNkZQ=="}')
    assert rest is not None
    assert (rest.stream, rest.offset, rest.data, one.missing) == ("stderr", 3, b"de", 0)


def test_bytes_that_are_no_longer_kept_are_counted() -> None:
    one = follower()
    one.feed('{"stream": "stdout", "offset": 7, "data": "YQ=="}')
    assert (one.missing, one.offset) == (7, 8)


def test_where_the_input_stands_is_taken_from_the_gateway_only_if_it_is_unknown() -> None:
    unknown, known = follower(), follower(input_offset=5)
    for one in (unknown, known):
        assert one.feed('{"stream": "attached", "offset": 0, "input_offset": 9}') is None
    assert (unknown.input_offset, known.input_offset) == (9, 5)


def test_its_end_a_silence_and_another_caller_are_told_apart() -> None:
    one = follower()
    assert one.feed("") is None
    assert one.feed('{"stream": "heartbeat"}') is None
    one.feed(
        '{"stream": "eof", "offset": 3, "state": "succeeded", "reason": null, "message": "", "exit_code": 4,'
        ' "signal": null}'
    )
    assert one.end is not None
    assert one.end.exit_code == 4
    with pytest.raises(ConflictError, match="another caller"):
        one.feed('{"stream": "detached"}')
    with pytest.raises(UnreadableAnswerError):
        one.feed('{"stream": "stdout"}')


class Crowd:
    """A function whose calls end only once so many of them are under way at the same time."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._waiting: list[asyncio.Future[None]] = []

    async def __call__(self, call: ScriptedCall) -> object:
        self._missing -= 1
        if self._missing == 0:
            for waiting in self._waiting:
                waiting.set_result(None)
        elif self._missing > 0:
            self._waiting.append(asyncio.get_running_loop().create_future())
            await asyncio.wait_for(asyncio.shield(self._waiting[-1]), DEADLINE_S)
        return {"trajectory": call.trajectory}


@pytest.mark.slow
async def test_five_hundred_trajectories_act_at_once_over_one_pool() -> None:
    async with serving_script(ScriptedGateway({"shell": Crowd(TRAJECTORIES)})) as server:
        async with AsyncClient(server.address) as client:

            async def rollout(number: int) -> None:
                async with client.trajectory(f"t{number}") as trajectory:
                    done = await trajectory.exec("crowd")
                    assert done.result == {"trajectory": f"t{number}"}

            await asyncio.gather(*map(rollout, range(TRAJECTORIES)))
        assert server.opened <= CONNECTIONS
        assert server.gateway.trajectories == {}


async def test_connections_are_bounded_and_whoever_finds_none_waits() -> None:
    async with serving_script(ScriptedGateway({"f": lambda call: call.input})) as server:
        async with AsyncClient(server.address, connections=4) as client:
            results = await asyncio.gather(*(client.invoke("f", {"n": n}) for n in range(50)))
        assert [each.result for each in results] == [{"n": n} for n in range(50)]
        assert server.open_max <= 4


#: What hangs on something else, which may take as long as that does: memory, a snapshot, a build, the work.
HANGING: dict[str, Callable[[AsyncClient], Awaitable[object]]] = {
    "open": lambda client: client.trajectory("t").open(),
    "open with a choice": lambda client: client.trajectory("t", sandbox={"memory": "1Gi"}).open(),
    "fork": lambda client: client.trajectory("t").fork(["u"]),
    "snapshot": lambda client: client.trajectory("t").snapshot(),
    "end": lambda client: client.end_trajectory("t"),
    "upload": lambda client: client.trajectory("t").upload("f", b""),
    "download": lambda client: client.trajectory("t").download("f"),
    "list": lambda client: client.trajectory("t").list(),
    "upload an archive": lambda client: client.trajectory("t").upload_archive("d", b""),
    "download an archive": lambda client: client.trajectory("t").download_archive("d"),
    "register": lambda client: client.put_function("f", {"runtime": "exec"}),
    "apply": lambda client: client.apply({}),
    "pull": lambda client: client.pull_images(["i"], wait_s=300.0),
    "remove a snapshot": lambda client: client.remove_snapshot("s"),
    "end of input": lambda client: AsyncSessionHandle(client, "s", begun=True).close_input(),
    "invoke": lambda client: client.invoke("f", {}),
}


@pytest.mark.parametrize("call", HANGING)
async def test_an_answer_that_hangs_on_a_queue_is_waited_for(call: str) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        problem = {"type": "t", "title": "t", "status": 404, "code": "not_found", "detail": "seen", "component": "test"}
        return httpx.Response(404, json=problem)

    async with AsyncClient(transport=httpx.MockTransport(answer)) as client:
        with pytest.raises(NotFoundError, match="seen"):
            await HANGING[call](client)
    timeout = seen[0].extensions["timeout"]
    assert (timeout["read"], timeout["connect"]) == (None, ANSWER_S)


async def test_who_has_memory_acts_and_ends_while_all_others_wait_for_some() -> None:
    gateway, freed = ScriptedGateway({"f": {}, "shell": {}}), asyncio.Event()

    class Full(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.method == "PUT":
                await freed.wait()
            return await gateway.handle_async_request(request)

    gateway.trajectories["old"] = ScriptedTrajectory("old", "default")
    async with AsyncClient(transport=Full(), connections=4) as client:
        waiting = [asyncio.create_task(client.trajectory(f"t{n}").open()) for n in range(20)]
        async with asyncio.timeout(DEADLINE_S):
            assert (await client.invoke("f", {}, trajectory="old")).ok
            await client.end_trajectory("old")
            freed.set()
            await asyncio.gather(*waiting)


async def test_a_connection_is_used_again_also_after_a_refusal_and_a_failed_call() -> None:
    async with serving_script(ScriptedGateway({"f": {}})) as server:
        async with AsyncClient(server.address) as client:
            for _ in range(3):
                await client.invoke("f", {})
                with pytest.raises(Exception, match="no function 'g'"):
                    await client.invoke("g", {})
        assert server.opened == 1


async def test_a_cancelled_call_gives_its_place_back() -> None:
    async def wait(call: ScriptedCall) -> object:
        return await asyncio.Event().wait() if call.input else {}

    gateway = ScriptedGateway({"f": wait})
    async with serving_script(gateway) as server, AsyncClient(server.address, connections=3) as client:
        for _ in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.invoke("f", {"wait": True})
        assert (await client.invoke("f", {})).ok


async def test_connections_that_were_free_for_long_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio_connections, "IDLE_S", 0.0)
    async with serving_script(ScriptedGateway({"f": Crowd(5)})) as server, AsyncClient(server.address) as client:
        await asyncio.gather(*(client.invoke("f", {}) for _ in range(5)))
        await client.functions()
        async with asyncio.timeout(DEADLINE_S):
            while server.open > 1:
                await client.functions()


def test_the_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(ScriptedGateway({"f": {}})) as server:
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, server.address)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "127.0.0.1")
        with Client("http://gateway.example:8080") as client:
            assert len(client.functions()) == 1
            assert server.gateway.requests[0].url == "http://gateway.example:8080/v1/functions"
        with Client(server.address) as client:
            assert len(client.functions()) == 1
            assert server.gateway.requests[1].url == "http://server/v1/functions"


def test_a_client_needs_a_connection_for_an_opening_one_for_a_call_and_one_for_the_others() -> None:
    with pytest.raises(InvalidInputError, match="at least 3"):
        Client(connections=2)


async def test_output_is_told_line_by_line_as_it_is_said(gateway: RunningGateway) -> None:
    said: list[str] = []
    async with AsyncClient(f"http://127.0.0.1:{gateway.app.http_port}") as client, client.trajectory() as trajectory:
        done = await trajectory.exec("echo one; echo two >&2; printf three; exit 3", on_output=said.append)
        assert (done.exit_code, done.stdout, done.stderr) == (3, "one\nthree", "two\n")
        assert sorted(said) == ["one", "three", "two"]
        heard = asyncio.Event()
        waits = asyncio.create_task(trajectory.exec("echo ready; exec sleep 600", on_output=lambda line: heard.set()))
        await asyncio.wait_for(heard.wait(), DEADLINE_S)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        assert (await trajectory.exec("true")).ok, "who gives up ends the command"


def test_what_a_result_holds_are_its_attributes() -> None:
    results = {"command": {"exit_code": 1, "stdout": "o", "stderr": "e"}, "suite": {"reward": 1, "note": "n"}}
    results |= {"none": {"reward": None, "valid": False, "note": "", "reason": "no tests"}, "handler": {"x": 1}}
    with Client(transport=ScriptedGateway(results)) as client:
        command, suite, none, handler = (client.invoke(name, {}) for name in results)
    assert (command.exit_code, command.stdout, command.stderr, command.reward) == (1, "o", "e", None)
    assert (suite.reward, suite.note, suite.exit_code) == (1.0, "n", None)
    assert (none.reward, none.note) == (None, "no tests")
    assert (handler.stdout, handler.reward, handler.result) == ("", None, {"x": 1})


async def test_who_opens_what_lives_is_told_so_or_refused(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncClient(f"http://127.0.0.1:{gateway.app.http_port}") as client, client.trajectory("t") as first:
        assert not first.joined
        second = await client.trajectory("t").open()
        assert second.joined and "t lived already" in caplog.text
        with pytest.raises(ConflictError, match="lives already"):
            await client.trajectory("t", new=True).open()
        assert client.trajectory().id != client.trajectory().id


async def test_what_a_client_still_holds_ends_with_it(gateway: RunningGateway) -> None:
    address = f"http://127.0.0.1:{gateway.app.http_port}"
    async with AsyncClient(address, lease_s=None) as lasting, AsyncClient(address) as other:
        await lasting.trajectory("lasting").open()
        async with AsyncClient(address) as client:
            handles = [await client.trajectory(name).open() for name in ("left", "shared", "pickled")]
            joined = await other.trajectory("shared").open()
            handles[-1].__getstate__()  # as pickle does: another process goes on with it
        assert joined.joined
        living = {each.trajectory for each in await lasting.trajectories()}
        assert living == {"lasting", "shared", "pickled"}


def test_an_interpreter_that_ends_lets_go(tmp_path: Path) -> None:
    with served(ScriptedGateway({"shell": {}})) as server:
        script = f"from tangram import Client; c = Client({server.address!r}); t = c.trajectory('t').open(); 1 / 0"
        done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, check=False)
        assert (done.returncode, server.gateway.trajectories) == (1, {})
