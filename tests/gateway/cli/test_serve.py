"""The verbs for who begins and on configuration files: what init writes serves, and doctor tells what is missing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

import gateway
import runtimes
from gateway.cli import serve
from gateway.config.load import load
from runtimes.kinds import KINDS
from tests.gateway.conftest import DEADLINE_S
from tests.tangram.cli.conftest import Tangram

#: A Python that has pytest, or has none.
PYTHON = """#!/bin/sh
[ "$2" = "import pytest" ] && exit {status}
exec /usr/bin/python3 "$@"
"""


def findings(out: str) -> dict[str, dict[str, str]]:
    return {each["what"]: each for each in json.loads(out)["findings"]}


def written(directory: Path, **sections: object) -> str:
    """A configuration without sandboxes, which need nothing of this machine."""
    api = {"runtime": "api", "request": {"method": "GET", "url": "http://127.0.0.1:1/"}}
    document = {"version": 1, "functions": {"search": api}, "sandbox": {"provider": "plain", "plain_as_root": True}}
    server = {"port": 0, "grpc_port": 0, "state_dir": str(directory / "state")}
    (directory / "tangram.yaml").write_text(yaml.safe_dump({"server": server, **document, **sections}))
    return str(directory)


def test_what_init_writes_is_a_function_of_each_kind_and_is_valid(tangram: Tangram, tmp_path: Path) -> None:
    status, out, err = tangram("init", str(tmp_path))
    assert (status, err) == (0, f"next: tangram doctor {tmp_path}; tangram serve {tmp_path}\n")
    assert {Path(line) for line in out.splitlines()} == {file for file in tmp_path.rglob("*") if file.is_file()}
    assert tangram("validate", str(tmp_path))[0] == 0
    config = load([tmp_path], {})
    shown = {function.runtime for function in config.functions.values()}
    # A model needs a checkpoint, so it is a comment there; it is one that would be taken.
    text = (tmp_path / "tangram.yaml").read_text()
    model = yaml.safe_load(text[text.index("# functions:") :].replace("# ", "", 1).replace("\n# ", "\n"))
    assert shown | {each["runtime"] for each in model["functions"].values()} == set(KINDS)
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "function.yaml").write_text(yaml.safe_dump(model))
    assert tangram("validate", "--no-look", str(tmp_path))[0] == 0


def test_init_writes_nothing_where_something_is(tangram: Tangram, tmp_path: Path) -> None:
    (tmp_path / "tangram.yaml").write_text("mine")
    status, out, err = tangram("init", str(tmp_path))
    assert (status, out) == (73, "")
    assert err.startswith(f"init: conflict: {tmp_path / 'tangram.yaml'}: there already")
    assert [file.name for file in tmp_path.iterdir()] == ["tangram.yaml"]
    assert (tmp_path / "tangram.yaml").read_text() == "mine"


def test_where_there_is_no_configuration_shell_and_pytest_are_served(
    tangram: Tangram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert serve.chosen(()) == (serve.NONE,)
    config = load([serve.NONE], {})
    assert {name: each.runtime for name, each in config.functions.items()} == {
        "shell": "exec",
        "pytest_reward": "pytest",
    }
    assert config.server.state_dir == tmp_path / ".tangram", "not beside the file of the package"
    (tmp_path / "tangram.yaml").touch()
    assert serve.chosen(()) == (Path(),)
    assert serve.chosen([tmp_path]) == (tmp_path,)


def test_who_serves_no_function_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve.tell_no_function(load([Path(written(tmp_path))], {}))
    assert capsys.readouterr().err == ""
    serve.tell_no_function(load([Path(written(tmp_path, functions={}))], {}))
    assert "no function is served" in capsys.readouterr().err


def test_doctor_finds_what_is_there(tangram: Tangram, tmp_path: Path) -> None:
    status, out, _ = tangram("doctor", "--json", written(tmp_path))
    found = findings(out)
    assert (status, json.loads(out)["ok"]) == (0, True), out
    assert {"configuration", "server.port", "server.grpc_port", "disk", "sandboxes"} <= set(found)
    assert not (tmp_path / "state").exists(), "it only looks"


def test_doctor_beside_ones_own_gateway_finds_nothing_missing(
    tangram: Tangram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.cli.serve.find_token", lambda host, port: "token")
    status, out, _ = tangram("doctor", "--json", written(tmp_path))
    assert status == 0 and findings(out)["server.port"]["detail"] == "your own gateway serves here"


def test_doctor_finds_a_secret_that_is_not_there(tangram: Tangram, tmp_path: Path) -> None:
    request = {"method": "GET", "url": "http://search.example/?q={q}", "headers": {"X-Key": "${secret:SEARCH_KEY}"}}
    functions = {"search": {"runtime": "api", "request": request}}
    _, out, _ = tangram("doctor", "--json", written(tmp_path, functions=functions))
    found = findings(out)["function search"]
    assert found["state"] == "missing"
    assert "start the gateway with TANGRAM_SECRET_SEARCH_KEY, or name server.secrets_dir" in found["detail"]


def test_doctor_tells_what_is_missing_and_what_mends_it(tangram: Tangram, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = {"port": port, "grpc_port": 0, "free_min": "1000Ti", "state_dir": str(tmp_path / "state")}
        status, out, _ = tangram("doctor", "--json", written(tmp_path, server=server))
    found = findings(out)
    assert status == 1
    assert found["server.port"]["state"] == found["disk"]["state"] == "missing"
    assert found["server.port"]["detail"].endswith("Address already in use; set server.port, or end who has it")
    assert "set server.state_dir or server.free_min" in found["disk"]["detail"]
    (tmp_path / "tangram.yaml").write_text("version: 2")
    status, out, _ = tangram("doctor", "--json", str(tmp_path))
    assert (status, [*findings(out)]) == (1, ["configuration"])


def test_doctor_tells_a_door_that_cannot_listen(tangram: Tangram, tmp_path: Path) -> None:
    functions = {"shell": {"runtime": "exec", "cost": {"cpu": 1}}}
    places = {"taken": tmp_path / "tangram.yaml", "lost": tmp_path / "nowhere" / "docker.sock"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for place in places.values():
            facades = {
                "swerex": {"function": "shell", "port": port},
                "docker": {"socket": str(place), "function": "shell"},
            }
            server = {"port": 0, "grpc_port": 0, "state_dir": str(tmp_path / "state"), "facades": facades}
            status, out, _ = tangram("doctor", "--json", written(tmp_path, server=server, functions=functions))
            found = findings(out)
            assert status == 1
            assert "set server.facades.swerex.port" in found["server.facades.swerex.port"]["detail"]
            assert found["server.facades.docker.socket"]["state"] == "missing"
            assert "sandbox.image to the name that clients say" in found["server.facades.docker"]["detail"]
            assert place.exists() == (place == places["taken"]), "it only looks"


def test_doctor_looks_for_pytest_where_the_host_has_it_or_not(tangram: Tangram, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as path:  # pytest's own is closed to the users of sandboxes
        Path(path).chmod(0o755)
        sandbox = {"provider": "plain", "plain_as_root": True, "path": f"{path}:/usr/bin:/bin"}
        directory = written(tmp_path, functions={"reward": {"runtime": "pytest", "cost": {"cpu": 1}}}, sandbox=sandbox)
        python = Path(path) / "python3"
        for status, state, expected in (
            (0, "ok", "its sandbox can be made"),
            (1, "missing", "its sandbox has no pytest: "),
        ):
            python.unlink(missing_ok=True)
            python.write_text(PYTHON.format(status=status))
            python.chmod(0o755)
            ended, out, _ = tangram("doctor", "--json", directory)
            told = findings(out)["function reward"]
            assert (ended, told["state"]) == (status, state), told
            assert told["detail"].startswith(expected)


def test_a_gateway_that_is_told_to_end_while_it_starts_has_ended_well(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "gateway", "serve", written(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(gateway.__file__).parents[1])}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as starting:
        deadline_s = time.monotonic() + DEADLINE_S
        while not catches(starting.pid, signal.SIGTERM):
            assert starting.poll() is None and time.monotonic() < deadline_s
        starting.terminate()
        output, _ = starting.communicate(timeout=DEADLINE_S)
    assert (starting.returncode, b"page:" in output) == (0, False), output


def test_a_start_that_is_ended_before_it_has_loaded_anything_ends_in_good_order() -> None:
    program = """
import os, signal, sys, types
loading = sys.modules["tangram.cli.main"] = types.ModuleType("tangram.cli.main")
loading.main = lambda: os.kill(os.getpid(), signal.SIGTERM)
sys.argv = ["tangram", "serve"]
from tangram.cli import run
run()
"""
    environment = os.environ | {"PYTHONPATH": str(Path(gateway.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 0


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler of a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) & 1 << number - 1)


def test_hints_name_no_file_of_a_checkout() -> None:
    rooms = [Path(gateway.__file__).parent, Path(runtimes.__file__).parent]
    files = [file for room in rooms for file in room.rglob("*.py") if file.parent.name != "generated"]
    assert [file for file in files if "scripts/" in file.read_text(encoding="utf-8")] == []


def test_validate_tells_every_problem_and_says_so_with_its_status(tangram: Tangram, tmp_path: Path) -> None:
    file = tmp_path / "tangram.yaml"
    file.write_text("server: {prot: 1}\nnod: {}\n")
    status, out, err = tangram("validate", str(tmp_path))
    assert (status, out) == (78, "")
    assert f"{file}:1: server.prot: unknown key 'prot'; did you mean 'port'?" in err
    assert f"{file}:2: nod: unknown key 'nod'; did you mean 'node'?" in err
    status, out, _ = tangram("validate", "--json", str(tmp_path))
    assert status == 78
    assert [each["line"] for each in json.loads(out)["problems"]] == [2, 1]
    file.write_text("functions: {f: {runtime: exec}}")
    assert tangram("validate", str(tmp_path))[:2] == (0, "1 files, 1 functions: f\n")


def test_the_schema_is_printed(tangram: Tangram) -> None:
    assert json.loads(tangram("config-schema")[1])["title"] == "tangram configuration"


def test_the_machine_is_shown(tangram: Tangram, tmp_path: Path) -> None:
    (tmp_path / "tangram.yaml").write_text("node: {name: here, devices: {kind: cpu}}")
    described = json.loads(tangram("node", "show", "--json", str(tmp_path))[1])
    assert described["name"] == "here" and described["numa"]


def test_validate_warns_of_what_this_machine_would_refuse(tangram: Tangram, tmp_path: Path) -> None:
    file = tmp_path / "tangram.yaml"
    file.write_text("functions: {wide: {runtime: exec, cost: {cpu: 60000}}}")
    status, _, err = tangram("validate", str(file))
    assert status == 0, "it is valid"
    assert "warning: function wide" in err and "60000" in err
    status, out, _ = tangram("validate", "--json", str(file))
    assert any("60000" in each for each in json.loads(out)["warnings"])
    assert "warning" not in tangram("validate", "--no-look", str(file))[2]


def test_serve_refuses_a_level_that_there_is_not(tangram: Tangram, tmp_path: Path) -> None:
    status, _, err = tangram("serve", "--log-level", "bogus", str(tmp_path))
    assert status == 2
    assert "'bogus' is not one of" in err
