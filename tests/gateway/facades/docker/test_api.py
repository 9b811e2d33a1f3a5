"""docker-py as it is works in trajectories, and what is not done is refused by its name."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from functools import partial
from pathlib import Path

import docker
import pytest

from gateway.facades.docker import containers
from gateway.facades.docker.api import STATUS_FILE
from gateway.facades.docker.http import bound
from manager.errors import Conflict, InvalidConfig
from tests.gateway.conftest import until
from tests.gateway.facades.docker.world import IMAGE, EngineWorld, ask, engine_world, upgraded
from tests.gateway.facades.test_facade import ODD, SECRETS, almost

#: What is asked of a container, the status of its refusal, and the name that it bears.
REFUSALS: list[tuple[dict[str, object], int, str]] = [
    ({"HostConfig": {"Binds": ["/a:/b"]}}, 501, "HostConfig.Binds"),
    ({"HostConfig": {"Privileged": True}}, 501, "HostConfig.Privileged"),
    ({"HostConfig": {"CapAdd": ["SYS_ADMIN", "NET_ADMIN"]}}, 501, "NET_ADMIN"),
    ({"HostConfig": {"NetworkMode": "host"}}, 501, "HostConfig.NetworkMode"),
    ({"HostConfig": {"NetworkMode": "egress"}}, 400, "network"),
    ({"HostConfig": {"Memory": 2**40}}, 400, "memory"),
    ({"HostConfig": {"RestartPolicy": {"Name": "always"}}}, 501, "RestartPolicy"),
    ({"Volumes": {"/data": {}}}, 501, "Volumes"),
    ({"User": "root"}, 400, "user"),
    ({"User": "1000:1000"}, 501, "User"),
    ({"Env": ["A"]}, 400, "Env"),
    ({"Image": "strange:1"}, 400, "image"),
    ({"Image": "other/one"}, 501, "Image"),
    ({"Image": ""}, 400, "Image"),
    ({"Cmd": 7}, 400, "Cmd"),
    ({"UnheardOf": "x"}, 501, "UnheardOf"),
    ({"Labels": {"tangram.function": "nowhere"}}, 404, "nowhere"),
]
COUNT, SEED = 60, 15
CREATE = {
    "Image": IMAGE, "Cmd": ["sleep", "1h"], "Entrypoint": None, "Env": ["A=1"], "WorkingDir": "/tmp", "User": "",
    "Labels": {"k": "v"}, "Tty": False, "AttachStdin": False, "HostConfig": {"Memory": 0, "NetworkMode": "default"},
}  # fmt: skip
EXEC = {"Cmd": ["true"], "Env": [], "WorkingDir": "/", "User": "", "Tty": False, "AttachStdout": True}
PATHS = (
    "/containers/%s/json", "/containers/%s/exec", "/containers/json?all=1&filters=%s", "/images/%s/json",
    "/exec/%s/json",
    "/containers/%s/archive?path=%s", "/v1.41/%s", "/%s", "/containers/create?name=%s", "/exec/%s/start",
)  # fmt: skip


@pytest.mark.promise("A container holds no core until a command runs, and a command whose client goes is ended.")
async def test_a_container_is_a_trajectory_that_holds_no_core_until_a_command_runs(engine: EngineWorld) -> None:
    box = await engine.keep_alive(environment={"A": "1"}, labels={"k": "v"}, mem_limit="512m")
    trajectories = (await engine.running.http.get("/v1/trajectories")).json()["trajectories"]
    assert [(each["trajectory"][:4], each["state"], each["memory_bytes"]) for each in trajectories] == [
        ("box-", "idle", 2**29)
    ]
    assert len(box.id) == 64
    assert (box.status, box.name, box.labels) == ("running", "box", {"k": "v"})
    ran = await engine.do(lambda: box.exec_run(["sh", "-c", "echo $A $B; pwd; echo bad >&2; exit 3"], demux=True,
                                               environment={"B": "2"}, workdir="/tmp"))  # fmt: skip
    assert ran == (3, (b"1 2\n/tmp\n", b"bad\n"))
    assert (await engine.do(lambda: box.exec_run("sh -c 'kill -9 $$'"))).exit_code == 137
    assert (await engine.do(lambda: box.exec_run("no_such_program"))).exit_code == 127
    assert (await engine.do(lambda: box.exec_run(["printf", "\\303("]))).output == b"\xc3("
    await engine.do(lambda: box.stop(timeout=1))
    await engine.do(box.reload)
    assert (box.status, box.attrs["State"]["ExitCode"]) == ("exited", 137)
    with pytest.raises(docker.errors.APIError, match="is not running"):
        await engine.do(lambda: box.exec_run("true"))


def read_frames(stream: socket.socket, count: int | None) -> bytes:
    """Return what frames hold, so many of them or all to the end."""
    with stream.makefile("rb") as file:
        heard = b""
        while count is None or count > 0:
            head = file.read(8)
            if not head:
                break
            assert head[1:4] == b"\0\0\0"
            assert head[0] in (1, 2)
            heard += file.read(struct.unpack(">I", head[4:])[0])
            count = None if count is None else count - 1
        return heard


async def test_a_command_whose_client_goes_away_is_ended(engine: EngineWorld) -> None:
    box = await engine.keep_alive()
    api = engine.client.api

    def begin() -> tuple[str, socket.socket]:
        made = api.exec_create(box.id, ["sh", "-c", "echo up; sleep 1000"])["Id"]
        stream = upgraded(engine.socket, made)
        assert read_frames(stream, 1) == b"up\n"
        return made, stream

    made, stream = await engine.do(begin)
    stream.shutdown(socket.SHUT_WR)  # ended its input only: it still listens
    assert engine.running.app.invocations.living
    stream.close()
    await until(lambda: not engine.running.app.invocations.living)
    async with asyncio.timeout(30.0):  # the door hears of the end a moment later
        while (told := (await engine.ask("GET", f"/exec/{made}/json"))[1])["Running"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert told["ExitCode"] == 137
    assert (await engine.do(lambda: box.exec_run("pgrep -c sleep"))).exit_code != 0


async def test_a_status_file_that_was_forged_is_no_status_and_no_loss_of_the_container(engine: EngineWorld) -> None:
    box = await engine.keep_alive()
    api = engine.client.api
    for forged in ("seq 1000 > {}", "mkdir {}"):
        made = (await engine.do(lambda: api.exec_create(box.id, ["sh", "-c", "until [ -e /x/never ]; do :; done"])))[
            "Id"
        ]
        await engine.do(partial(api.exec_start, made, detach=True))
        words = ["sh", "-c", forged.format(STATUS_FILE.format(made[:32]))]
        assert (await engine.do(partial(box.exec_run, words))).exit_code == 0
        told = await engine.do(partial(api.exec_inspect, made))
        assert (told["Running"], told["ExitCode"]) == (False, 137)
    assert (await engine.do(lambda: box.exec_run("true"))).exit_code == 0, "its container lives"


async def test_the_status_file_of_a_command_that_is_forgotten_goes_with_the_next(
    engine: EngineWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await engine.keep_alive()
    api = engine.client.api
    monkeypatch.setattr("gateway.facades.docker.containers.EXECS_MAX", 1)
    for _ in range(3):
        made = (await engine.do(lambda: api.exec_create(box.id, ["true"])))["Id"]
        await engine.do(partial(api.exec_start, made, detach=True))
        wait = f"until [ -e {STATUS_FILE.format(made[:32])} ]; do sleep 0.01; done"
        assert (await engine.do(partial(box.exec_run, ["timeout", "30", "sh", "-c", wait]))).exit_code == 0
    there = await engine.do(lambda: box.exec_run(["sh", "-c", "ls -A /tmp | grep -c tangram-exec"]))
    assert int(there.output) <= 2, "those before the last are gone"


async def test_a_kill_of_the_process_that_was_told_reaches_the_command(engine: EngineWorld) -> None:
    """The SWE-bench harness ends what takes too long by ``kill -TERM PID`` inside, beside the command that runs."""
    box = await engine.keep_alive()
    api = engine.client.api
    made = (
        await engine.do(
            lambda: api.exec_create(box.id, ["sh", "-c", "trap 'exit 9' TERM; echo up; while :; do sleep 0.05; done"])
        )
    )["Id"]
    heard = asyncio.create_task(engine.do(lambda: api.exec_start(made)))
    await until(lambda: bool(engine.running.app.invocations.living))
    async with asyncio.timeout(30):
        while not (pid := (await engine.do(lambda: api.exec_inspect(made)))["Pid"]):
            pass
        while not heard.done():
            await engine.do(lambda: box.exec_run(f"kill -TERM {pid}", detach=True))
    assert (await heard).removesuffix(b"Terminated\n") in (b"up\n", b"")  # the shell may say it of its `sleep`
    assert (await engine.do(lambda: api.exec_inspect(made)))["ExitCode"] in (9, 143)
    assert (await engine.do(lambda: box.exec_run(f"kill -TERM {pid}"))).exit_code == 1


async def test_a_container_that_sleeps_ends_when_its_sleep_does_and_goes_if_it_is_to(engine: EngineWorld) -> None:
    run = engine.client.containers.run
    short = await engine.do(lambda: run(IMAGE, "sleep 0.1", detach=True))
    assert (await engine.do(short.wait))["StatusCode"] == 0
    gone = await engine.do(lambda: run(IMAGE, "sleep 0.1", detach=True, auto_remove=True))
    assert (await engine.do(lambda: gone.wait(condition="removed")))["StatusCode"] == 0
    with pytest.raises(docker.errors.NotFound):
        await engine.do(gone.reload)


async def test_a_container_ends_with_its_trajectory(engine: EngineWorld) -> None:
    box = await engine.keep_alive()
    trajectory = (await engine.running.http.get("/v1/trajectories")).json()["trajectories"][0]["trajectory"]
    await engine.running.http.delete(f"/v1/trajectories/{trajectory}")
    await engine.do(box.reload)
    assert box.status == "exited"
    assert "its trajectory has ended" in box.attrs["State"]["Error"]
    with pytest.raises(docker.errors.APIError, match="make a new one"):
        await engine.do(box.start)


@pytest.mark.promise("Options that a container of Docker's facade cannot have are refused by name.")
async def test_what_a_container_may_not_be_is_refused_by_name(engine: EngineWorld) -> None:
    for body, status, named in REFUSALS:
        told = await engine.ask("POST", "/v1.41/containers/create", {"Image": IMAGE, "Cmd": ["sleep", "1"], **body})
        assert told[0] == status, told
        assert named in told[1]["message"], told
    assert (await engine.ask("GET", "/containers/json?all=1"))[1] == []


async def test_a_capability_that_is_not_given_is_a_warning(engine: EngineWorld) -> None:
    body = {"Image": IMAGE, "Cmd": ["sleep", "1h"], "HostConfig": {"CapAdd": ["SYS_ADMIN"]}}
    status, told = await engine.ask("POST", "/v1.41/containers/create", body)
    assert (status, len(told["Warnings"])) == (201, 1)
    assert told["Warnings"][0].startswith("HostConfig.CapAdd: SYS_ADMIN is not given")


async def test_routes_versions_and_options_that_are_not_done_are_refused_by_name(engine: EngineWorld) -> None:
    for method, path, status, named in (
        ("GET", "/v1.41/events", 501, "no events"),
        ("POST", "/v1.41/networks/create", 501, "sandbox.network"),
        ("GET", "/v1.41/containers/x/top", 404, "no such route: GET /containers/x/top"),
        ("PATCH", "/_ping", 404, "PATCH /_ping"),
        ("POST", "/v1.41/containers/x/stopp", 404, "the nearest is POST /containers/{id}/stop"),
        ("GET", "/v1.99/info", 400, "too new. Maximum supported API version is 1.44"),
        ("GET", "/v1.12/info", 400, "too old"),
        ("GET", "/containers/json?unheard=1", 501, "unheard"),
        ("GET", "/containers/json?filters=%7B%22volume%22%3A%5B%22x%22%5D%7D", 400, "volume"),
        ("POST", "/images/create?fromImage=a", 501, "serve it with Docker"),
        ("GET", "/exec/none/json", 404, "No such exec"),
    ):
        told = await engine.ask(method, path)
        assert (told[0], named in told[1]["message"]) == (status, True), told
        assert len(told[1]["message"]) < 250, "it is read on a terminal"


async def test_no_more_containers_than_the_bound_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "CONTAINERS_MAX", 1)
    async with engine_world(tmp_path) as engine:
        await engine.keep_alive("one")
        with pytest.raises(docker.errors.APIError, match="there are 1 containers"):
            await engine.keep_alive("two")


@pytest.mark.promise("Nobody but the gateway's own user opens the socket of Docker's facade.")
async def test_only_our_own_user_opens_the_socket_and_a_living_one_is_not_taken(
    engine: EngineWorld, tmp_path: Path
) -> None:
    assert engine.socket.stat().st_mode & 0o777 == 0o600
    with pytest.raises(Conflict, match="something listens"):
        bound(engine.socket)
    left = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(left))
    bound(left).close()
    (tmp_path / "file").touch()
    with pytest.raises(Conflict, match="no socket"):
        bound(tmp_path / "file")
    with pytest.raises(InvalidConfig, match="bytes"):
        bound(tmp_path / ("x" * 120))


async def test_the_gateway_does_not_take_itself_for_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with pytest.raises(InvalidConfig, match="its own socket"):
        bound(path)


@pytest.mark.slow
async def test_random_bytes_are_answered_as_no_request_and_let_go(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    async with engine_world(tmp_path) as engine:
        for number in range(COUNT):
            data = chance.randbytes(chance.randrange(1, 400))
            if number % 3 == 0:
                data = b"POST /containers/create HTTP/1.1\r\n" + data
            if number % 10 == 0:
                data = b"GET /_ping HTTP/1.1\r\nX: " + b"x" * 200_000
            said = await engine.do(lambda data=data: spoken(engine.socket, data))  # type: ignore[misc]
            assert not said or said.startswith(b"HTTP/1.1 4"), said[:200]
            assert not [word for word in SECRETS if word.encode() in said], said
        assert await engine.do(engine.client.ping)


@pytest.mark.slow
async def test_bodies_and_paths_almost_right_end_in_its_error(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    async with engine_world(tmp_path) as engine:
        box = await engine.keep_alive()
        for _ in range(COUNT):
            await sound(engine, "POST", "/v1.41/containers/create", almost(CREATE, chance))
            await sound(engine, "POST", f"/containers/{box.id}/exec", almost(EXEC, chance))
            odd = "".join(chance.choice("ab/.%25%00?=~é{}[]") for _ in range(chance.randrange(0, 30)))
            target = chance.choice(PATHS).replace("%s", odd).encode("ascii", "ignore").decode()
            await sound(engine, chance.choice(["GET", "POST", "HEAD", "DELETE", "PUT"]), target, chance.choice(ODD))
        for body in (b"{", b"[" * 50_000, b"\xff", b"null", b"1", b'{"a":' * 300 + b"1" + b"}" * 300):
            await sound(engine, "POST", "/containers/create", body)


async def sound(engine: EngineWorld, method: str, target: str, body: object) -> None:
    """Send it, and look at what comes back."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, told = await engine.do(lambda: ask(engine.socket, method, target, data))
    assert status != 500, (method, target, body, told)
    if status >= 400 and method != "HEAD":
        assert told.keys() == {"message"}, told
        assert not [word for word in SECRETS if word in told["message"]], told


def spoken(path: Path, data: bytes) -> bytes:
    """Send bytes, end the input, and return all that is said."""
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(30)
        stream.connect(str(path))
        said = b""
        try:
            stream.sendall(data)
            stream.shutdown(socket.SHUT_WR)
            while more := stream.recv(65536):
                said += more
        except (BrokenPipeError, ConnectionResetError):
            pass
        return said
