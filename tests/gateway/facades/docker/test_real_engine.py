"""Each answer of the door is the real engine's to the same call, but for what is named here and in docs/CONNECT.md."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tangram import Client
from tests.e2e.gateway import ROOT, GatewayProcess, document
from tests.gateway.facades.docker.engine_scenes import SCENES, Scene
from tests.gateway.facades.docker.engine_talk import Answer, EngineTalk

pytestmark = [pytest.mark.docker, pytest.mark.slow]
ENGINE = Path("/var/run/docker.sock")
BOX = {
    "runtime": "exec", "cost": {"cpu": 1}, "timeout": "5m", "output_limit": "16Mi",
    "sandbox": {
        "user": "root", "users": ["root", "nobody"], "capabilities": "default", "background": "run",
        "trajectory": {"env": ["*"], "memory": "1Gi"},
    },
}  # fmt: skip
ABSENT = "(absent)"
#: The engine whose differences are named: Debian 12's.
COMPARED = "20.10."

#: Why something differs, in the words of docs/CONNECT.md.
ITSELF = "what the engine says of itself"
HOST = "where and how the engine keeps a container"
NETWORK = "its networks"
IMAGE = "what an image holds"
WORDS = "the words of an error"
WRONG = "what cannot be right is 400 or 404"
UNBEGUN = "what cannot be begun"
OVER = "what has ended or stands still is 409"
KINDS = "the kind of a stream is reported for logs too"
USERS = "users that the function does not allow"
PIECE = "`name` is a piece of a name"
SIZE = "the size of a directory"


#: Fields of a container that say where and how the engine keeps it.
KEPT = (
    "Driver", "GraphDriver.*", "*Path", "Config.Hostname", "HostConfig.CgroupnsMode", "HostConfig.IpcMode",
    "HostConfig.KernelMemory*", "HostConfig.MaskedPaths", "HostConfig.ReadonlyPaths", "HostConfig.Runtime",
    "HostConfig.ShmSize",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that may differ: where, and why."""

    scene: str
    label: str
    path: str
    why: str

    def names(self, scene: str, label: str, path: str) -> bool:
        """Return whether it is this one."""
        return all(map(fnmatchcase, (scene, label, path), (self.scene, self.label, self.path)))


DIFFERENCES: tuple[Difference, ...] = (
    Difference("engine", "version", "body.*", ITSELF),
    Difference("engine", "info", "body.*", ITSELF),
    Difference("engine", "old", "*", ITSELF),
    Difference("engine", "new", "*", ITSELF),
    Difference("engine", "no *", "body.message", WORDS),
    Difference("engine", "no *", "headers.*", WORDS),
    Difference("*", "*", "body.NetworkSettings.*", NETWORK),
    Difference("*", "*", "body.*.NetworkSettings.*", NETWORK),
    *(
        Difference(scene, label, f"body.{name}", HOST)
        for scene, label in (("*", "*inspect*"), ("life", "by the new name"))
        for name in KEPT
    ),
    Difference("*", "*", "body.Config.Env", IMAGE),
    Difference("images", "image *", "body.Co*", IMAGE),
    Difference("images", "image *", "body.Metadata.LastTagTime", IMAGE),
    Difference("images", "image *", "body.DockerVersion", IMAGE),
    Difference("images", "image *", "body.Created", IMAGE),
    Difference("images", "image *", "body.GraphDriver.*", IMAGE),
    Difference("images", "image *", "body.RootFS.Layers", IMAGE),
    Difference("images", "images", "body.0.Created", IMAGE),
    Difference("images", "image *", "body.message", WORDS),
    Difference("life", "kill by a wrong signal", "body.message", WORDS),
    Difference("life", "wait wrongly", "status", WRONG),
    Difference("unknown", "POST /containers/none/attach?stream=1", "headers.*", WORDS),
    Difference("unknown", "GET /images/none:1/json", "body.message", WORDS),
    Difference("unknown", "create by a wrong name", "body.message", WORDS),
    Difference("unknown", "exec by no JSON", "body.message", WORDS),
    Difference("unknown", "archive without a path", "body.message", WORDS),
    Difference("unknown", "create of no image", "status", WRONG),
    Difference("unknown", "create without an image", "status", WRONG),
    Difference("unknown", "create by no JSON", "status", WRONG),
    Difference("unknown", "create by a wrong type", "status", WRONG),
    Difference("commands", "number of a user: *", "body.*", USERS),
    Difference("commands", "no *: start", "body.std*", UNBEGUN),
    Difference("commands", "a directory: start", "body.std*", UNBEGUN),
    Difference("commands", "no *: inspect", "body.Pid", UNBEGUN),
    Difference("commands", "a directory: inspect", "body.Pid", UNBEGUN),
    Difference("commands", "no program: inspect", "body.ExitCode", UNBEGUN),
    Difference("command_line", "exec of no program", "*", UNBEGUN),
    Difference("main_commands", "start missing", "status", UNBEGUN),
    Difference("main_commands", "missing: wait", "body.Error*", UNBEGUN),
    Difference("main_commands", "missing: inspect", "body.State.*", UNBEGUN),
    Difference("commands", "start twice", "status", OVER),
    Difference("commands", "resize what has ended", "status", OVER),
    Difference("main_commands", "resize", "body.message", OVER),
    Difference("behind", "unstarted: start", "status", OVER),
    Difference("main_commands", "*logs*", "headers.*", KINDS),
    Difference("main_commands", "typed: attach", "headers.*", KINDS),
    Difference("files", "GET /tmp/tree*", "headers.X-Docker-Container-Path-Stat.size", SIZE),
    Difference("files", "HEAD /tmp/tree/run/below", "status", WRONG),
    Difference("files", "GET /tmp/tree/run/below", "status", WRONG),
    Difference("files", "put to a file", "status", WRONG),
    Difference("files", "put no tar", "status", WRONG),
    Difference("files", "put nothing", "status", WRONG),
    Difference("lists", "pattern", "body*", PIECE),
    Difference("lists", "wrong *", "body.message", WORDS),
    Difference("lists", "no JSON", "status", WRONG),
)


@pytest.fixture(scope="module")
def door(docker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a gateway with container sandboxes; nothing lives in it when its tests have ended."""
    told = EngineTalk(ENGINE, "none").ask("version", "GET", "/version", version="")
    if not told["Version"].startswith(COMPARED):
        pytest.skip(f"what differs is known of the engine {COMPARED}, not of {told['Version']}")
    directory = tmp_path_factory.mktemp("door")
    described = document("container", directory / "state", box=BOX)
    socket = directory / "docker.sock"
    described["server"] |= {"body_limit": "64Mi", "auth": "none"}
    described["server"]["facades"] = {"docker": {"socket": str(socket), "function": "box"}}
    process = GatewayProcess(directory, described)
    process.start()
    yield socket
    with Client(process.url) as client:
        assert [each.trajectory for each in client.trajectories()] == []
    assert process.stop() == 0, "\n".join(process.log[-30:])


@pytest.mark.promise("Docker's facade answers its clients' calls as the real engine does, except where named.")
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_every_answer_is_the_engines_but_for_what_is_named(door: Path, scene: Scene) -> None:
    prefix = f"same-{secrets.token_hex(4)}"
    engine, here = EngineTalk(ENGINE, prefix), EngineTalk(door, prefix)
    scene(engine)
    scene(here)
    assert engine.answers.keys() == here.answers.keys()
    found = {
        (label, path): values
        for label, answer in engine.answers.items()
        for path, values in differences(answer, here.answers[label])
    }
    unnamed = {
        place: values
        for place, values in found.items()
        if not any(each.names(scene.__name__, *place) for each in DIFFERENCES)
    }
    assert not unnamed, "\n".join(f"{place}: engine {one!r}, here {other!r}" for place, (one, other) in unnamed.items())
    for each in DIFFERENCES:
        if each.scene == scene.__name__:
            assert any(each.names(scene.__name__, *place) for place in found), f"it differs no longer: {each}"


def differences(engine: Answer, here: Answer) -> list[tuple[str, tuple[object, object]]]:
    """Return what differs; of two answers with different statuses, that alone."""
    paths = sorted(engine.keys() | here.keys())
    found = [(path, (engine.get(path, ABSENT), here.get(path, ABSENT))) for path in paths]
    found = [(path, (one, other)) for path, (one, other) in found if one != other]
    return [(path, values) for path, values in found if path == "status"] or found


def test_what_differs_is_named_in_the_documentation() -> None:
    page = " ".join((ROOT / "docs" / "CONNECT.md").read_text(encoding="utf-8").split())
    assert {each.why for each in DIFFERENCES if each.why not in page} == set()
