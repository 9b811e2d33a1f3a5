"""What clients do with an engine, scene by scene: the same calls for whichever engine is asked."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.gateway.facades.docker.engine_talk import TIMEOUT_S, EngineTalk, entries, path_query, tree

IMAGE = "tangram-base:bookworm"
BOX = {"Image": IMAGE, "Cmd": ["sleep", "infinity"], "WorkingDir": "/tmp"}
HEARD = {"AttachStdout": True, "AttachStderr": True}
START = {"Detach": False, "Tty": False}

#: Looks at a command that is about to end.
LOOKS_MAX = 20_000

Scene = Callable[[EngineTalk], None]


@contextmanager
def made(talk: EngineTalk, word: str, body: dict[str, Any] | None = None, *, started: bool = True) -> Iterator[str]:
    """A container of a name, made and started; gone when the block ends."""
    name = talk.name(word)
    try:
        id = talk.ask(f"create {word}", "POST", f"/containers/create?name={name}", BOX | (body or {})).get("Id", "")
        if started:
            talk.ask(f"start {word}", "POST", f"/containers/{name}/start")
        yield id
    finally:
        talk.gone(name)


def ran(talk: EngineTalk, label: str, id: str, argv: list[str], typed: bytes = b"", **asked: object) -> str:
    """Describe a command, start it, hear it to its end, and look at it; return its id."""
    tty = {"Tty": asked.get("Tty", False)}
    command = talk.ask(f"{label}: create", "POST", f"/containers/{id}/exec", {"Cmd": argv, **HEARD, **asked})
    exec_id = str(command.get("Id", ""))
    talk.hear(f"{label}: start", f"/exec/{exec_id}/start", START | tty, typed, half_close=not tty["Tty"])
    talk.ask(f"{label}: inspect", "GET", f"/exec/{exec_id}/json")
    return exec_id


def engine(talk: EngineTalk) -> None:
    """The engine itself."""
    for method in ("GET", "HEAD"):
        talk.ask(f"{method} ping", method, "/_ping", version="")
        talk.ask(f"{method} ping of a version", method, "/_ping")
    talk.ask("version", "GET", "/version", version="")
    talk.ask("info", "GET", "/info")
    talk.ask("old", "GET", "/info", version="/v1.11")
    talk.ask("new", "GET", "/info", version="/v9.99")
    talk.ask("no route", "GET", "/nowhere")
    talk.ask("no network", "GET", "/networks/nowhere")
    talk.ask("no volume", "GET", "/volumes/nowhere")
    talk.ask("no method", "PATCH", "/info")


def life(talk: EngineTalk) -> None:
    """From its creation to its removal."""
    with made(talk, "life", {"Env": ["A=1"], "Labels": {"k": "v"}}, started=False) as id:
        talk.ask("inspect created", "GET", f"/containers/{id}/json")
        talk.ask("exec created", "POST", f"/containers/{id}/exec", {"Cmd": ["true"]})
        talk.ask("stop created", "POST", f"/containers/{id}/stop")
        talk.ask("kill created", "POST", f"/containers/{id}/kill")
        talk.ask("start", "POST", f"/containers/{id}/start")
        talk.ask("start again", "POST", f"/containers/{id[:12]}/start")
        talk.ask("inspect running", "GET", f"/containers/{id[:12]}/json")
        talk.ask("remove running", "DELETE", f"/containers/{id}")
        talk.ask("name taken", "POST", f"/containers/create?name={talk.name('life')}", BOX)
        talk.ask("rename", "POST", f"/containers/{id}/rename?name={talk.name('new')}")
        talk.ask("by the new name", "GET", f"/containers/{talk.name('new')}/json")
        talk.ask("rename back", "POST", f"/containers/{talk.name('new')}/rename?name={talk.name('life')}")
        talk.ask("restart", "POST", f"/containers/{id}/restart?t=0")
        talk.ask("inspect restarted", "GET", f"/containers/{id}/json")
        talk.ask("stop", "POST", f"/containers/{id}/stop?t=0")
        talk.ask("stop again", "POST", f"/containers/{id}/stop")
        talk.ask("kill stopped", "POST", f"/containers/{id}/kill")
        talk.ask("exec stopped", "POST", f"/containers/{id}/exec", {"Cmd": ["true"]})
        talk.ask("inspect stopped", "GET", f"/containers/{id}/json")
        talk.ask("wait stopped", "POST", f"/containers/{id}/wait")
        talk.ask("restart stopped", "POST", f"/containers/{id}/restart?t=0")
        talk.ask("inspect restarted again", "GET", f"/containers/{id}/json")
        talk.ask("kill by a wrong signal", "POST", f"/containers/{id}/kill?signal=SIGNONE")
        talk.ask("kill", "POST", f"/containers/{id}/kill?signal=SIGKILL")
        talk.ask("wait killed", "POST", f"/containers/{id}/wait?condition=not-running")
        talk.ask("inspect killed", "GET", f"/containers/{id}/json")
        talk.ask("wait wrongly", "POST", f"/containers/{id}/wait?condition=asleep")
        talk.ask("remove", "DELETE", f"/containers/{id}")
        talk.ask("remove again", "DELETE", f"/containers/{id}")
        talk.ask("inspect removed", "GET", f"/containers/{id}/json")


def unknown(talk: EngineTalk) -> None:
    """What is not there, and what cannot be asked."""
    for method, target in (
        ("GET", "/containers/none/json"), ("POST", "/containers/none/start"), ("POST", "/containers/none/stop"),
        ("POST", "/containers/none/kill"), ("POST", "/containers/none/wait"), ("POST", "/containers/none/restart"),
        ("POST", "/containers/none/rename?name=x"), ("DELETE", "/containers/none"),
        ("DELETE", "/containers/none?force=1"), ("GET", "/containers/none/logs?stdout=1"),
        ("GET", "/containers/none/archive?path=%2F"), ("HEAD", "/containers/none/archive?path=%2F"),
        ("GET", "/exec/none/json"), ("POST", "/exec/none/resize?h=2&w=2"), ("GET", "/images/none:1/json"),
        ("POST", "/containers/none/attach?stream=1"), ("POST", "/containers/none/resize?h=2&w=2"),
    ):  # fmt: skip
        talk.ask(f"{method} {target}", method, target)
    talk.ask("exec start of none", "POST", "/exec/none/start", START)
    talk.ask("exec of none", "POST", "/containers/none/exec", {"Cmd": ["true"]})
    talk.ask("put to none", "PUT", "/containers/none/archive?path=%2Ftmp", tree())
    talk.ask("create of no image", "POST", "/containers/create", {**BOX, "Image": "tangram-none:1"})
    talk.ask("create by a wrong name", "POST", "/containers/create?name=-x", BOX)
    talk.ask("create by no JSON", "POST", "/containers/create", b"{")
    talk.ask("create by a wrong type", "POST", "/containers/create", {**BOX, "Env": 7})
    with made(talk, "unknown") as id:
        talk.ask("exec without a command", "POST", f"/containers/{id}/exec", {"Cmd": []})
        talk.ask("exec by no JSON", "POST", f"/containers/{id}/exec", b"{")
        talk.ask("archive without a path", "GET", f"/containers/{id}/archive")
        talk.ask("logs of no stream", "GET", f"/containers/{id}/logs")
    talk.ask("create without an image", "POST", f"/containers/create?name={talk.name('bare')}", {"Cmd": ["true"]})
    talk.gone(talk.name("bare"))


def commands(talk: EngineTalk) -> None:
    """Commands that are heard to their end."""
    with made(talk, "commands", {"Env": ["A=1"]}) as id:
        ran(talk, "both streams", id, ["sh", "-c", "echo out; echo err >&2; exit 3"])
        ran(talk, "one stream", id, ["sh", "-c", "echo out; echo err >&2"], AttachStderr=False)
        ran(talk, "environment", id, ["sh", "-c", "echo $A $B; pwd"], Env=["B=2"], WorkingDir="/usr")
        ran(talk, "place", id, ["sh", "-c", "echo $A; pwd"])
        ran(talk, "user", id, ["id", "-un"], User="nobody")
        ran(talk, "number of a user", id, ["id", "-u"], User="65534")
        ran(talk, "no user", id, ["true"], User="strangers")
        ran(talk, "no program", id, ["no_such_program"])
        ran(talk, "no executable", id, ["/etc/passwd"])
        ran(talk, "a directory", id, ["/etc"])
        ran(talk, "no place", id, ["pwd"], WorkingDir="/none")
        ran(talk, "killed", id, ["sh", "-c", "kill -9 $$"])
        ran(talk, "terminated", id, ["sh", "-c", "kill -TERM $$"])
        ran(talk, "bytes", id, ["printf", "\\303(\\0x"])
        ran(talk, "large", id, ["sh", "-c", "seq 40000 | head -c 200000"])
        ran(talk, "input", id, ["sh", "-c", "read x; echo got $x; cat; echo end"], b"one\nrest", AttachStdin=True)
        ran(talk, "input of nobody", id, ["cat"], b"lost")
        ran(talk, "empty input", id, ["cat"], AttachStdin=True)
        ran(talk, "terminal", id, ["sh", "-c", "test -t 0 && test -t 1 && echo terminal; echo e >&2"], Tty=True)
        ran(talk, "typed", id, ["sh", "-c", "read x; echo got $x"], b"one\n", Tty=True, AttachStdin=True)
        again = ran(talk, "once", id, ["true"])
        talk.ask("start twice", "POST", f"/exec/{again}/start", START)
        talk.ask("resize what has ended", "POST", f"/exec/{again}/resize?h=2&w=2")
        talk.ask("inspect with what ran", "GET", f"/containers/{id}/json")


def behind(talk: EngineTalk) -> None:
    """Commands that nobody hears, and commands of a container that ends."""
    with made(talk, "behind") as id:
        code = "for n in 1 2 3; do :; done; echo written > /tmp/behind; exit 7"
        command = talk.ask("create", "POST", f"/containers/{id}/exec", {"Cmd": ["sh", "-c", code], **HEARD})
        talk.ask("inspect before", "GET", f"/exec/{command['Id']}/json")
        talk.ask("start", "POST", f"/exec/{command['Id']}/start", {"Detach": True, "Tty": False})
        status = ended(talk, str(command["Id"]))
        talk.put("ended", code=status["ExitCode"], running=status["Running"])
        ran(talk, "look", id, ["cat", "/tmp/behind"])
        left = talk.ask("left: create", "POST", f"/containers/{id}/exec", {"Cmd": ["sleep", "1000"]})
        talk.ask("left: start", "POST", f"/exec/{left['Id']}/start", {"Detach": True})
        talk.ask("left: inspect", "GET", f"/exec/{left['Id']}/json")
        waits = talk.ask("unstarted: create", "POST", f"/containers/{id}/exec", {"Cmd": ["true"]})
        talk.ask("kill", "POST", f"/containers/{id}/kill")
        talk.ask("left: inspect after", "GET", f"/exec/{left['Id']}/json")
        talk.ask("unstarted: start", "POST", f"/exec/{waits['Id']}/start", START)
        talk.ask("remove", "DELETE", f"/containers/{id}?force=1")
        talk.ask("left: inspect removed", "GET", f"/exec/{left['Id']}/json")


def ended(talk: EngineTalk, exec_id: str) -> dict[str, Any]:
    """Return how a command ended, when it has; what was told until then is not kept."""
    told: dict[str, Any] = {}
    for number in range(LOOKS_MAX):
        told = talk.ask(f"look {number}", "GET", f"/exec/{exec_id}/json")
        del talk.answers[f"look {number}"]
        if not told["Running"]:
            return told
    raise AssertionError(f"the command runs on: {told}")


def main_commands(talk: EngineTalk) -> None:
    """Containers whose main command works: logs, attachment, the end that is waited for."""
    code = "echo one; echo two; echo err >&2; exit 4"
    with made(talk, "works", {"Cmd": ["sh", "-c", code]}) as id:
        talk.ask("wait", "POST", f"/containers/{id}/wait")
        talk.ask("inspect", "GET", f"/containers/{id}/json")
        for query in ("stdout=1&stderr=1", "stdout=1", "stderr=1", "stdout=1&follow=1"):
            talk.ask(f"logs {query}", "GET", f"/containers/{id}/logs?{query}")
        talk.ask("resize", "POST", f"/containers/{id}/resize?h=2&w=2")
        talk.ask("attach logs", "POST", f"/containers/{id}/attach?logs=1&stdout=1&stderr=1")
    with made(talk, "lines", {"Cmd": ["seq", "3"]}) as id:
        talk.ask("lines: wait", "POST", f"/containers/{id}/wait")
        for tail in ("0", "1", "2", "9", "all", "-1"):
            talk.ask(f"lines: logs {tail}", "GET", f"/containers/{id}/logs?stdout=1&tail={tail}")
    with made(talk, "terminal", {"Cmd": ["sh", "-c", "echo one; echo err >&2"], "Tty": True}) as id:
        talk.ask("terminal: wait", "POST", f"/containers/{id}/wait")
        talk.ask("terminal: logs", "GET", f"/containers/{id}/logs?stdout=1&stderr=1")
    typed = {"Cmd": ["sh", "-c", "read x; echo got $x; cat"], "OpenStdin": True, "StdinOnce": True, "AttachStdin": True,
             **HEARD}  # fmt: skip
    with made(talk, "typed", typed, started=False) as id:
        talk.ask("typed: start", "POST", f"/containers/{id}/start")
        talk.hear(
            "typed: attach", f"/containers/{id}/attach?stream=1&stdin=1&stdout=1&stderr=1&logs=1", None, b"a\nrest"
        )
        talk.ask("typed: wait", "POST", f"/containers/{id}/wait")
    with made(talk, "missing", {"Cmd": ["no_such_program"]}) as id:
        talk.ask("missing: wait", "POST", f"/containers/{id}/wait")
        talk.ask("missing: inspect", "GET", f"/containers/{id}/json")
    with made(talk, "slept", {"Cmd": ["sleep", "0.2"]}) as id:
        talk.ask("slept: wait", "POST", f"/containers/{id}/wait")
        talk.ask("slept: logs", "GET", f"/containers/{id}/logs?stdout=1")
    with made(talk, "goes", {"Cmd": ["sleep", "0.5"], "HostConfig": {"AutoRemove": True}}) as id:
        talk.ask("goes: wait", "POST", f"/containers/{id}/wait?condition=removed")
        talk.ask("goes: inspect", "GET", f"/containers/{id}/json")


def files(talk: EngineTalk) -> None:
    """Files and trees, there and back."""
    with made(talk, "files") as id:
        archive = f"/containers/{id}/archive?path="
        talk.ask("put", "PUT", archive + "%2Ftmp", tree())
        ran(talk, "run", id, ["sh", "-c", "cd tree && ./run && readlink link && ls -A && stat -c '%a %s' *"])
        for path in ("/tmp/tree", "/tmp/tree/", "/tmp/tree/.", "/tmp/tree/run", "/tmp/tree/link", "/tmp/tree/empty",
                     "/tmp/tree/na me é", "tmp/tree/run", "/tmp/none", "/tmp/tree/run/below"):  # fmt: skip
            talk.ask(f"HEAD {path}", "HEAD", archive + path_query(path))
            talk.ask(f"GET {path}", "GET", archive + path_query(path))
        talk.ask("put to none", "PUT", archive + "%2Fnone", tree())
        talk.ask("put to a file", "PUT", archive + "%2Ftmp%2Ftree%2Frun", tree())
        talk.ask("put no tar", "PUT", archive + "%2Ftmp", b"no tar" * 500)
        talk.ask("put nothing", "PUT", archive + "%2Ftmp", b"")
        talk.ask("put over", "PUT", archive + "%2Ftmp", tree())
        talk.ask("stop", "POST", f"/containers/{id}/stop?t=0")
        talk.ask("GET stopped", "GET", archive + "%2Ftmp%2Ftree%2Frun")
        talk.ask("put stopped", "PUT", archive + "%2Ftmp", tree())


def lists(talk: EngineTalk) -> None:
    """Lists and their filters."""
    label = f"{talk.prefix}.task"
    labels = {"Labels": {label: "a", "more": "1"}}
    with made(talk, "one", labels), made(talk, "two", {"Labels": {label: "b"}}, started=False):
        for word, asked, every in (
            ("running", {"label": [label]}, 0), ("all", {"label": [label]}, 1), ("value", {"label": [f"{label}=b"]}, 1),
            ("two labels", {"label": [f"{label}=a", "more"]}, 1), ("object", {"label": {f"{label}=a": True}}, 1),
            ("name", {"name": [talk.name("o")]}, 1), ("slash", {"name": [f"^/{talk.name('one')}$"]}, 1),
            ("pattern", {"name": [f"^{talk.name('t')}.o$"]}, 1), ("no name", {"name": ["nowhere"]}, 1),
            ("created", {"label": [label], "status": ["created"]}, 0),
            ("exited", {"label": [label], "status": ["exited"]}, 0), ("wrong status", {"status": ["asleep"]}, 0),
            ("ancestor", {"label": [label], "ancestor": [IMAGE]}, 0), ("wrong filter", {"colour": ["blue"]}, 0),
            ("no ancestor", {"ancestor": ["tangram-none:1"]}, 0),
        ):  # fmt: skip
            query = f"all={every}&filters={path_query(json.dumps(asked))}"
            talk.ask(word, "GET", f"/containers/json?{query}")
        query = f"limit=1&filters={path_query(json.dumps({'label': [label]}))}"
        talk.ask("limit", "GET", f"/containers/json?{query}")
        talk.ask("no JSON", "GET", "/containers/json?filters=%7B")


def images(talk: EngineTalk) -> None:
    """Images, as far as they are told."""
    for name in (IMAGE, f"docker.io/library/{IMAGE}", "tangram-base", "none/none"):
        talk.ask(f"image {name}", "GET", f"/images/{path_query(name).replace('%2F', '/')}/json")
    wanted = path_query(json.dumps({"reference": ["tangram-base:*"]}))
    talk.ask("images", "GET", f"/images/json?filters={wanted}")
    talk.ask("none", "GET", f"/images/json?filters={path_query(json.dumps({'reference': ['none:*']}))}")


def command_line(talk: EngineTalk) -> None:
    """The docker CLI: its output and its exit status."""
    name = talk.name("cli")
    shown = "{{.Names}} {{.Image}} {{.State}} {{.Command}} {{.Labels}}"
    looked = "{{.Name}} {{.State.Status}} {{.Config.WorkingDir}} {{.Config.Image}} {{.HostConfig.Memory}}"
    try:
        cli(talk, "run", "run", "-d", "--name", name, "-w", "/tmp", "-e", "A=1", "--label", "k=v", IMAGE, "sleep", "2h")
        cli(talk, "exec", "exec", name, "sh", "-c", "echo $A; pwd; echo e >&2; exit 3")
        cli(
            talk,
            "exec there",
            "exec",
            "-w",
            "/usr",
            "-e",
            "B=2",
            "-u",
            "root",
            name,
            "sh",
            "-c",
            "echo $B; pwd; id -un",
        )
        cli(talk, "exec typed", "exec", "-i", name, "sh", "-c", "cat; echo end")
        cli(talk, "exec of no program", "exec", name, "no_such_program")
        cli(talk, "exec behind", "exec", "-d", name, "sh", "-c", "echo behind > /tmp/behind")
        cli(talk, "ps", "ps", "--filter", f"name={name}", "--format", shown)
        cli(talk, "inspect", "inspect", "-f", looked, name)
        cli(talk, "inspect nothing", "inspect", "nowhere")
        cli(talk, "rename", "rename", name, f"{name}-new")
        cli(talk, "rename back", "rename", f"{name}-new", name)
        cli(talk, "restart", "restart", "-t", "0", name)
        cli(talk, "exec after", "exec", name, "cat", "/tmp/behind")
        cli(talk, "rm running", "rm", name)
        cli(talk, "stop", "stop", "-t", "0", name)
        cli(talk, "exec stopped", "exec", name, "true")
        cli(talk, "start", "start", name)
        cli(talk, "kill", "kill", name)
        cli(talk, "wait", "wait", name)
        cli(talk, "rm", "rm", name)
        cli(talk, "rm again", "rm", name)
        cli(talk, "run to its end", "run", "--rm", IMAGE, "sh", "-c", "seq 3; exit 5")
        cli(talk, "run typed", "run", "--rm", "-i", IMAGE, "cat")
    finally:
        talk.gone(name)


def copies(talk: EngineTalk) -> None:
    """`docker cp` in both directions: what a name, a trailing dot and a link mean."""
    with made(talk, "copies") as id, tempfile.TemporaryDirectory() as kept:
        talk.ask("put", "PUT", f"/containers/{id}/archive?path=%2Ftmp", tree())
        name, here = talk.name("copies"), Path(kept)
        for label, path, *options in (
            ("a file", "/tmp/tree/run"), ("from the root", "tmp/tree/run"), ("a tree", "/tmp/tree"),
            ("what a tree holds", "/tmp/tree/."), ("a link", "/tmp/tree/link"),
            ("through a link", "/tmp/tree/link", "-L"), ("nothing", "/tmp/none"),
        ):  # fmt: skip
            place = here / label
            place.mkdir()
            cli(talk, label, "cp", *options, f"{name}:{path}", str(place))
            talk.put(f"{label}: came", found=listing(place))
        cli(talk, "to the output", "cp", f"{name}:/tmp/tree/run", "-")
        cli(talk, "a tree back", "cp", str(here / "a tree" / "tree"), f"{name}:/tmp/back")
        cli(talk, "beside it", "cp", str(here / "a tree" / "tree" / "run"), f"{name}:/tmp/back/other")
        cli(talk, "to nowhere", "cp", str(here / "a tree" / "tree" / "run"), f"{name}:/tmp/none/other")
        cli(talk, "came back", "exec", name, "sh", "-c", "cd /tmp/back && ls -A && readlink link && cat other")


def listing(place: Path) -> list[str]:
    """Return what lies below a directory, with modes and the targets of links."""
    return [
        f"{path.relative_to(place)} {path.readlink()}" if path.is_symlink()
        else f"{path.relative_to(place)} {path.stat().st_mode & 0o777:o}"
        for path in sorted(place.rglob("*"))
    ]  # fmt: skip


def cli(talk: EngineTalk, label: str, *argv: str) -> None:
    """Run the docker CLI, with a line to read, and keep what it says."""
    done = subprocess.run(
        ["docker", *argv], input=b"typed\n", capture_output=True, timeout=TIMEOUT_S, check=False,
        env=os.environ | {"DOCKER_HOST": f"unix://{talk.path}"},
    )  # fmt: skip
    said = entries(done.stdout) if argv[-1] == "-" and done.returncode == 0 else done.stdout
    talk.put(label, code=done.returncode, out=said, err=done.stderr)


SCENES: tuple[Scene, ...] = (
    engine, life, unknown, commands, behind, main_commands, files, lists, images, command_line, copies,
)  # fmt: skip
