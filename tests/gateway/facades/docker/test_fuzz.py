"""Random bytes, and requests almost like the engine's own, end in its error and leave nothing."""

from __future__ import annotations

import json
import random
import socket
from pathlib import Path

import pytest

from tests.gateway.facades.docker.world import IMAGE, EngineWorld, ask, engine_world
from tests.gateway.facades.test_fuzz import ODD, SECRETS, almost

pytestmark = pytest.mark.slow


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
