"""Build both wheels, and try them as a user would: outside the repository, in a fresh environment of each interpreter.

``make wheels``, or ``python .ci/wheels.py [3.12 ...]``. The wheels lie in .cache/wheels afterwards. An interpreter
that is not here is named at the end. ``make release`` first checks what a version says of itself (``--release``).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / ".cache" / "wheels"
VERSIONS = ("3.11", "3.12", "3.13")
#: Interpreters for the client alone.
CLIENT_ONLY = ("3.10",)
CLIENT_PROJECT = "client/pyproject.toml"
COMMAND_S = 300
CLIENT = """
from pathlib import Path
import tangram
from tangram import Client
from tangram.testing import ScriptedGateway
with Client(transport=ScriptedGateway({"double": lambda call: {"n": 2 * call.input["n"]}})) as client:
    assert client.invoke("double", {"n": 21}).result == {"n": 42}
print(Path(tangram.__file__).parent)
"""
CONFIGURATION = """
version: 1
server: {port: 0, grpc_port: 0, state_dir: state}
sandbox: {provider: plain, plain_as_root: true}
functions:
  shell: {runtime: exec, cost: {cpu: 1}}
"""
FUNCTION = """
version: 1
functions:
  score: {runtime: handler, handler: "handler:score", cost: {cpu: 1}, scale: {min: 0, max: 1, idle: 1m}}
"""
HANDLER = "def score(event, context):\n    return {'reward': float(event['answer'] == 42)}\n"


def main(words: Sequence[str]) -> int:
    """Return 0 if all went well with at least one interpreter; for a release with each."""
    is_release = "--release" in words
    versions = [word for word in words if word != "--release"] or [*CLIENT_ONLY, *VERSIONS]
    if is_release and (found := list(problems())):
        print("\n".join(f"release: {each}" for each in found))
        return 1
    WHEELS.mkdir(parents=True, exist_ok=True)
    tried, missing = [], []
    with tempfile.TemporaryDirectory(prefix="tangram-wheels-") as room:
        Path(room).chmod(0o711)  # plain sandboxes work below it as another user
        client, server = built("client", Path(room)), built(".", Path(room))
        for version in versions:
            interpreter = find(version)
            if interpreter is None:
                missing.append(version)
                continue
            attempt(interpreter, client, None if version in CLIENT_ONLY else server, Path(room) / version)
            tried.append(version)
            print(f"wheels: Python {version}: installed, imported and called", flush=True)
    for version in missing:
        print(f"wheels: Python {version} is not here: not tried")
    return 0 if tried and not (is_release and missing) else 1


def problems() -> Iterator[str]:
    """What a release lacks: one version everywhere, its page of CHANGELOG, classifiers of the tried interpreters."""
    server, client = (
        tomllib.loads((ROOT / name).read_text())["project"] for name in ("pyproject.toml", CLIENT_PROJECT)
    )
    version = server["version"]
    if client["version"] != version or f"tangram-client[cli]=={version}" not in server["dependencies"]:
        yield f"the client is {client['version']} or not what the gateway {version} depends on"
    parts = [part.partition("\n") for part in (ROOT / "CHANGELOG.md").read_text().split("\n## ")]
    changes = {title: text.strip() for title, _, text in parts}
    if not changes.get(version):
        yield f"CHANGELOG.md says nothing of {version}"
    if changes.get("Unreleased"):
        yield f"CHANGELOG.md has changes that are not of {version}"
    for project, versions in ((server, VERSIONS), (client, (*CLIENT_ONLY, *VERSIONS))):
        said = {each.rpartition(" :: ")[2] for each in project.get("classifiers", ()) if "Python :: 3." in each}
        if said != set(versions):
            yield f"{project['name']} is classified for Python {sorted(said)}, and tried on {list(versions)}"


def built(project: str, room: Path) -> Path:
    """The wheel of a project of this repository, built from a copy, so that nothing is written beside it."""
    copy = room / f"source-{'server' if project == '.' else project}"
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT).split("\0")
    for name in filter(None, listed):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    for link in ("client/tangram", "client/LICENSE"):
        if (copy / link).is_symlink():
            original = (copy / link).resolve()
            (copy / link).unlink()
            (shutil.copytree if original.is_dir() else shutil.copy2)(original, copy / link)
    code = f"import setuptools.build_meta as backend; print(backend.build_wheel({str(WHEELS)!r}))"
    return WHEELS / run([sys.executable, "-c", code], copy / project).splitlines()[-1]


def find(version: str) -> Path | None:
    """An interpreter of that version: of the search path, or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [Path(place) for place in [shutil.which(f"python{version}")] if place]
    found += sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)
    for interpreter in found:
        code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, timeout=COMMAND_S)
        if done.returncode == 0 and done.stdout.strip() == version:
            return interpreter
    return None


def attempt(interpreter: Path, client: Path, server: Path | None, room: Path) -> None:
    """Install the client alone and try it, then the server (if any) beside it, which serves and is called."""
    room.mkdir()
    run([interpreter, "-m", "venv", room / "venv"], room)
    python = room / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "-qq", "install"]
    run([*pip, client], room)
    place = run([python, "-c", CLIENT], room).strip()
    assert place.startswith(str(room)), f"imported from {place}"
    if server is None:
        run([*pip, f"{client}[cli]"], room)
        run([room / "venv" / "bin" / "tangram", "top", "--help"], room)
        return
    run([*pip, "--find-links", WHEELS, server], room)
    command, site = room / "venv" / "bin" / "tangram", room / "site"
    run([command, "init", "fresh"], room)
    run([command, "validate", "fresh"], room)
    (site / "functions" / "score").mkdir(parents=True)
    (site / "tangram.yaml").write_text(CONFIGURATION)
    (site / "functions" / "score" / "function.yaml").write_text(FUNCTION)
    (site / "functions" / "score" / "handler.py").write_text(HANDLER)
    serve_and_call(command, site)


def serve_and_call(command: Path, room: Path) -> None:
    """Serve on a free port, run a command and a handler, and end it as a person does."""
    with (room / "serve.log").open("w") as log:
        words = [command, "serve", "."]
        gateway = subprocess.Popen(words, cwd=room, env=outside(), stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert gateway.stdout is not None
        said = re.search(r"http://[^/\s]+", gateway.stdout.readline())
        assert said is not None, (room / "serve.log").read_text()
        token = (room / "state" / "invoke.token").read_text().strip()
        call = [command, "invoke", "--server", said[0], "--token", token]
        answer = run([*call, "score", '{"answer": 42}'], room)
        assert '"reward"' in answer and "1.0" in answer, answer
        answer = run([*call, "shell", '{"command": "echo $((6 * 7))"}'], room)
        assert "42" in answer, answer
    finally:
        gateway.send_signal(signal.SIGINT)  # its sandboxes end with it
        gateway.wait(COMMAND_S)
        if gateway.stdout is not None:
            gateway.stdout.close()


def outside() -> dict[str, str]:
    """The environment without what would lead back into the repository."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "TANGRAM_"))}


def run(words: Sequence[object], place: Path) -> str:
    """What a command prints; a failure is told with all that it said."""
    line = [str(word) for word in words]
    done = subprocess.run(line, cwd=place, env=outside(), capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
