"""SandboxFusion's verdicts: of real programs in real sandboxes, none of them wrong, none of them ours."""

from __future__ import annotations

import base64
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manager.action import UnitSet
from manager.function import FunctionSpec, SandboxSpec
from runtimes.testing import ScriptStep
from tests.gateway.conftest import RunningGateway, until
from tests.gateway.facades.world import doors

LANGUAGES = dict.fromkeys(("python", "pytest", "bash", "nodejs", "cpp"), "programs")
OPEN = {"sandboxfusion": {"languages": LANGUAGES}}
PROGRAMS = FunctionSpec(
    name="programs",
    runtime="exec",
    cost={"cpu": UnitSet.fixed(1)},
    timeout_s=30.0,
    output_limit_bytes=64 * 1024,
    idempotent=True,
)


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway whose door runs programs in process sandboxes; nothing is left when the test has ended."""
    functions = {"programs": PROGRAMS}
    async with doors(tmp_path, OPEN, lambda _: ScriptStep(), functions) as running:
        yield running
        await until(lambda: not running.app.invocations.living)
        assert (await running.http.get("/v1/trajectories")).json()["trajectories"] == []


async def run(running: RunningGateway, code: str, language: str = "python", **given: object) -> dict[str, Any]:
    body = {"code": code, "language": language, "run_timeout": 10, "compile_timeout": 10, **given}
    answer = await running.http.post("/sandboxfusion/run_code", json=body, timeout=40)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-invocation-id"]
    told: dict[str, Any] = answer.json()
    return told


@pytest.mark.promise("A program cannot fake an error of SandboxFusion.")
async def test_a_program_is_judged_by_its_own_end(door: RunningGateway) -> None:
    for code, status, return_code, stdout, stderr in [
        ("print(input())", "Success", 0, "7\n", ""),
        ("assert 1 == 2, 'no'", "Failed", 1, "", "AssertionError: no"),
        ("def f(:", "Failed", 1, "", "SyntaxError"),
        ("raise SystemExit(3)", "Failed", 3, "", ""),
        ("import os; os.kill(os.getpid(), 9)", "Failed", -9, "", ""),
        ("import sys; sys.stdout.buffer.write(b'a\\xff')", "Success", 0, "a\ufffd", ""),
        ("raise SystemExit(125)", "Failed", 125, "", ""),
        (
            "import sys; print('tangram: the program could not be started: no', file=sys.stderr); sys.exit(125)",
            *("Failed", 125, "", "tangram: the program could not be started: no"),
        ),
    ]:
        told = await run(door, code, stdin="7\n")
        ran = told["run_result"]
        assert (told["status"], ran["status"], ran["return_code"], ran["stdout"]) == (
            status,
            "Finished",
            return_code,
            stdout,
        )
        assert stderr in ran["stderr"]
        assert told["compile_result"] is None
        assert told["files"] == {}


async def test_a_program_that_takes_too_long_keeps_what_it_said(door: RunningGateway) -> None:
    told = await run(door, "print('before', flush=True)\nwhile True: pass", run_timeout=3)
    ran = told["run_result"]
    assert (told["status"], ran["status"], ran["return_code"]) == ("Failed", "TimeLimitExceeded", None)
    assert (ran["stdout"], ran["stderr"]) == ("before\n", "")


async def test_files_are_laid_out_and_brought_back(door: RunningGateway) -> None:
    code = "import shutil; shutil.copy('in/a.bin', 'b.bin'); print(open('in/a.bin','rb').read())"
    data = base64.b64encode(b"\x00\xff").decode()
    files = {"in/a.bin": data, "skipped": None, "IGNORE_THIS_FILE_1": data}
    told = await run(door, code, files=files, fetch_files=["b.bin", "nowhere"])
    assert told["status"] == "Success"
    assert told["files"] == {"b.bin": data}


async def test_an_end_for_want_of_memory_is_the_programs_own_where_it_had_what_was_asked_for(tmp_path: Path) -> None:
    functions = {"programs": replace(PROGRAMS, sandbox=SandboxSpec(memory_bytes=64 * 2**20))}
    code = "x = bytearray(400 * 2**20); print(len(x))"
    async with doors(tmp_path, OPEN, lambda _: ScriptStep(), functions) as running:
        short = await run(running, code, memory_limit_MB=1024)
        own = await run(running, code)
    assert (short["status"], short["run_result"]) == ("SandboxError", None)
    assert "64 MiB of the 1024 that were asked for; raise its sandbox.memory" in short["message"]
    assert own["status"] == "Failed"


async def test_tests_are_run_as_tests_and_shell_as_shell(door: RunningGateway) -> None:
    tests = "def test_one(capfd, tmp_path):\n    assert 1 + 1 == 3\n"
    assert (await run(door, tests, "python"))["status"] == "Success"
    told = await run(door, tests, "pytest")
    assert (told["status"], told["run_result"]["return_code"]) == ("Failed", 1)
    assert (await run(door, "yes | head -n 2; cat", "bash", stdin="in"))["run_result"]["stdout"] == "y\ny\nin"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
async def test_a_program_is_compiled_before_it_runs(door: RunningGateway) -> None:
    good = "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << n * 2; return n; }"
    told = await run(door, good, "cpp", stdin="3")
    assert (told["compile_result"]["status"], told["compile_result"]["return_code"]) == ("Finished", 0)
    assert (told["status"], told["run_result"]["stdout"], told["run_result"]["return_code"]) == ("Failed", "6", 3)
    told = await run(door, "int main( {}", "cpp")
    assert (told["status"], told["run_result"], told["compile_result"]["return_code"]) == ("Failed", None, 1)
    assert "error" in told["compile_result"]["stderr"]


@pytest.mark.parametrize("code", ["print('x' * 200_000)", "import sys; print('x' * 200_000, file=sys.stderr)"])
async def test_output_that_is_not_whole_is_no_verdict(door: RunningGateway, code: str) -> None:
    told = await run(door, code)
    assert told["status"] == "SandboxError"
    assert "output_limit of programs" in told["message"]


async def test_what_could_not_be_laid_out_is_no_verdict(door: RunningGateway) -> None:
    told = await run(door, "print(1)", files={"/proc/nowhere/x": ""})
    assert told["status"] == "SandboxError"
    assert "could not be started" in told["message"]


async def test_what_cannot_be_run_is_refused_as_fastapi_does(door: RunningGateway) -> None:
    for body, named in [
        ({"language": "python"}, "code"),
        ({"code": "1", "language": "cobol"}, "'cobol' is not offered here; known here: "),
        ({"code": "1", "language": "pyton"}, "did you mean 'python'?"),
        ({"code": "1", "language": "python", "run_timeout": 31}, "run_timeout"),
        ({"code": "1", "language": "python", "compile_timeout": 0}, "compile_timeout"),
        ({"code": "1", "language": "python", "files": {"a": "%"}}, "files"),
        ({"code": 1, "language": "python"}, "code"),
    ]:
        answer = await door.http.post("/sandboxfusion/run_code", json=body)
        assert answer.status_code == 422
        (detail,) = answer.json()["detail"]
        assert named in detail["msg"]
        assert detail["loc"][0] == "body"


async def test_other_routes_answer_as_there(door: RunningGateway) -> None:
    assert (await door.http.get("/sandboxfusion/v1/ping")).json() == "pong"
    assert (await door.http.get("/sandboxfusion/")).headers["content-type"].startswith("text/html")
    assert (await door.http.post("/sandboxfusion/run_jupyter", json={})).status_code == 501
    assert (await door.http.post("/sandboxfusion/submit", json={})).status_code == 404
