"""Programs that mean harm or behave oddly, in the form of recorded ones, and the judge of what they assert."""

from __future__ import annotations

import ast
import asyncio
import builtins
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from manager.errors import ActionFailed, CodedError
from runtimes.sandbox.command import Command
from runtimes.sandbox.sandbox import Sandbox

RECORDED = "security_exec_sandbox_A.jsonl"
DEADLINE_S = 30.0
#: Most seconds of a case: many of them never end by themselves.
HASTE_S, PATIENCE_S = 2.0, 20.0
AT_ONCE = 6
#: A loop's variable in an assert stands for one of these.
LOOP = range(4)
#: Programs in the form of the recorded ones, with what holds of their ends.
CASES: list[dict[str, Any]] = [
    {"test": test, "runs": [{"language": language, "code": code, "opts": options}], "asserts": asserts}
    for test, language, code, options, asserts in (
        ("null_bytes", "PYTHON", r"print('a\0b')", {}, [r"result.stdout == 'a\0b\n'", "result.exit_code == 0"]),
        ("binary", "PYTHON", "import sys; sys.stdout.buffer.write(bytes(range(256)))", {}, ["result.exit_code == 0"]),
        ("exit_code", "RAW", "echo said; exit 41", {}, ["result.exit_code == 41", "'said' in result.stdout"]),
        ("own_signal", "RAW", "kill -SEGV $$", {}, ["result.exit_code == 128 + 11"]),
        ("raises", "PYTHON", "raise KeyError('x')", {}, ["'KeyError' in result.stderr", "result.exit_code == 1"]),
        ("env", "RAW", "echo $GIVEN", {"env_vars": "{'GIVEN': 'it is'}"}, ["result.stdout == 'it is\\n'"]),
        ("ignores_sigterm", "RAW", "trap '' TERM; echo on; sleep 60", {"timeout_seconds": "1"},
         ["result.exit_code != 0", "result.stdout == 'on\\n'"]),
        ("endless_output", "RAW", "yes", {"timeout_seconds": "1"}, ["len(result.stdout) > 1000"]),
        ("deep_recursion", "PYTHON", "f = lambda: f()\nf()", {}, ["'RecursionError' in result.stderr"]),
        ("no_network", "PYTHON", "import socket; socket.create_connection(('192.0.2.1', 80), 1)", {},
         ["result.exit_code == 1"]),
        ("forks_and_ends", "RAW", "sleep 60 & echo left", {}, ["result.stdout == 'left\\n'"]),
        ("closes_its_output", "PYTHON", "import os; os.close(1); os.close(2)", {}, ["result.stdout == ''"]),
    )
]  # fmt: skip
#: Recorded cases that ask for another product's features or for programs that the base image does not have.
NOT_OURS = {
    "home is /home/user there": ("home", "tilde", "expanduser", "cwd", "symlink_write_through", "rename_into_etc",
                                 "shutil_copy_into_etc"),
    "source is not rewritten (byte order marks, shebangs)": ("bom_prefix", "shebang"),
    "a busy image (ip, nc, cloudpickle)": ("loopback_up_shell", "shell_tcp_loopback", "lambda", "cloudpickle"),
    "standard input is at its end, and not blocked": ("fd0_blocks", "stdin_blocks"),
    "bounds of another size": ("memory_allocation_large", "escalates_to_sigkill"),
    "any port may be bound in the sandbox's own network": ("privileged_port",),
}  # fmt: skip
#: Recorded asserts that speak of values which only the other project's tests have.
UNREADABLE = frozenset(
    {
        "int(port_str) > 1024",
        "len(joined) == expected_len",
        "session_result.exit_code == 0",
        "'session' in session_result.stdout",
        "run_result.exit_code == 0",
        "'run' in run_result.stdout",
    }
)


async def failures_of(cases: Sequence[dict[str, Any]], sandbox: Sandbox, user: str = "") -> dict[str, list[str]]:
    """Play the cases that are in our languages; return what did not hold of each, by its name."""
    deviations = [word for words in NOT_OURS.values() for word in words]
    at_once = asyncio.Semaphore(AT_ONCE)

    async def failures(case: dict[str, Any]) -> list[str]:
        """On a busy machine the first patience may have been too short for what ends by itself."""
        return await played(case, HASTE_S) and await played(case, PATIENCE_S)

    async def played(case: dict[str, Any], most_s: float) -> list[str]:
        async with at_once:
            results = [await run_case(sandbox, run, most_s, user) for run in case["runs"]]
        result = results[-1] if results else None
        if result is None or any(word in case["test"] for word in deviations):
            return []
        return [f"{text}: {why}: {result}" for text in case["asserts"] if (why := complaint(text, result))]

    ours = [case for case in cases if all(run["language"] in ("PYTHON", "RAW") for run in case["runs"])]
    found = await asyncio.gather(*map(failures, ours))
    return {case["test"]: failed for case, failed in zip(ours, found, strict=True)}


async def run_case(sandbox: Sandbox, run: dict[str, object], most_s: float, user: str) -> SimpleNamespace | None:
    """How one program ended, in the words of the recorded asserts; None where it was refused as invalid."""
    options = run["opts"] if isinstance(run["opts"], dict) else {}
    literal = str(options.get("env_vars", ""))
    code = str(run["code"])
    command = Command(
        argv=("python3", "-c", code) if run["language"] == "PYTHON" else (),
        shell="" if run["language"] == "PYTHON" else code,
        env=ast.literal_eval(literal) if literal.startswith("{") else {},
        user=user,
        timeout_s=min(most_s, float(str(options.get("timeout_seconds", 10)))),
        kill_grace_s=0.2,
    )
    began_s = time.monotonic()
    pieces: list[tuple[str, bytes, float]] = []
    try:
        async with asyncio.timeout(DEADLINE_S):
            result = await sandbox.run(
                command, lambda stream, data: pieces.append((stream, data, time.monotonic() - began_s))
            )
    except ActionFailed:
        raise
    except CodedError:
        return None
    return SimpleNamespace(
        stdout=result.stdout.decode("utf-8", "replace"),
        stderr=result.stderr.decode("utf-8", "replace"),
        exit_code=result.exit_code if result.exit_code is not None else 128 + (result.signal or 0),
        timing=SimpleNamespace(execute_ms=result.duration_s * 1e3),
        pieces=pieces,
        elapsed_s=time.monotonic() - began_s,
    )


def complaint(text: str, result: SimpleNamespace) -> str:
    """Return why a recorded assert does not hold, empty if it does; one that cannot be read does not hold."""
    if text in UNREADABLE:
        return ""
    chunks = {name: [data.decode("utf-8", "replace") for stream, data, _ in result.pieces if stream == name]
              for name in ("stdout", "stderr")}  # fmt: skip
    times_s = [at_s for _, _, at_s in result.pieces]
    names = {
        "result": result,
        "lines": result.stdout.splitlines(),
        "joined": result.stdout or result.stderr,
        "stdout_chunks": chunks["stdout"],
        "stderr_chunks": chunks["stderr"],
        "chunk_times": times_s,
        "time_spread": times_s[-1] - times_s[0] if times_s else 0.0,
        "first_chunk_time": times_s[:1],
        "first_chunk_elapsed": times_s[0] if times_s else result.elapsed_s,
        "total_elapsed": result.elapsed_s,
        "exec_time": result.timing.execute_ms,
        **{name: allowed for name, allowed in vars(builtins).items() if name in ("len", "all", "any")},
    }
    try:
        tree = ast.parse(text, mode="eval")
        looped = any(isinstance(node, ast.Name) and node.id == "i" for node in ast.walk(tree))
        code = compile(tree, "assert", "eval")
        held = [bool(eval(code, {"__builtins__": {}, **names, "i": i})) for i in (LOOP if looped else [0])]
    except (ArithmeticError, AttributeError, LookupError, NameError, SyntaxError, TypeError, ValueError) as error:
        return f"cannot be read: {error!r}"
    return "" if any(held) else "does not hold"
