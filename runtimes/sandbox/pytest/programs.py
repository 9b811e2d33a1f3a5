"""Runs the programs of a solution for the tests that judge it, as another user. Standard library only, Python 3.7 on.

Tests import `run_solution` from ``tangram_grading``, which is this module. The gateway starts it a second time in the
same sandbox, as ``python3 -I -S -c SOURCE NAME`` and as `runtimes.sandbox.sandbox.Sandbox.solution_user`: there it
waits on an abstract socket of that name and runs what it is asked to. Who takes its place is of that user, too, and can
say no more than the programs themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

#: Bytes that a program may write to one file, and print on one stream; it is ended beyond.
FILE_MAX_BYTES = 16 * 2**20
#: Seconds for which a connection is tried again: whoever runs the programs is started anew if it ends.
PATIENCE_S, PAUSE_S = 20.0, 0.05
#: Times that a program is run whose end is not told, and seconds beyond its own until no answer is awaited.
TRIES, GRACE_S = 3, 5.0
NOT_STARTED = 127
PLUGIN = "tangram_pytest"
#: Empty while nobody could be reached.
_patience_s = [PATIENCE_S]


def run_solution(
    argv: Sequence[str],
    *,
    input: str = "",
    timeout_s: float = 10.0,
    cwd: str = "",
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program of the solution, and return its exit status and what it printed.

    It runs in the working directory of the tests, or in ``cwd``, and cannot write there. Its HOME and TMPDIR are an
    empty directory of its own. It can read neither the given tests nor the memory of their process. Its process group
    is ended with it. One that cannot be started has exit status 127, and the reason on standard error. Raises
    subprocess.TimeoutExpired after ``timeout_s`` seconds.
    """
    argv = [os.fspath(word) for word in argv]
    told = {"argv": argv, "input": input, "timeout_s": timeout_s, "env": dict(env or {})}
    told["cwd"] = os.path.abspath(cwd or os.curdir)  # noqa: PTH100
    plugin: Any = sys.modules.get(PLUGIN)
    place = plugin._project.get("programs", "") if plugin is not None else ""
    if place:
        uid, ended = _asked(place, told)
    else:
        uid, ended = os.getuid(), answer(told)
    if uid == os.getuid() and plugin is not None:
        plugin.note_inside(plugin.PROGRAM + argv[0])
    if ended["timed_out"]:
        raise subprocess.TimeoutExpired(argv, timeout_s, ended["stdout"], ended["stderr"])
    return subprocess.CompletedProcess(argv, ended["code"], ended["stdout"], ended["stderr"])


def _asked(place: str, told: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
    """Return whose process answered, and what; raises OSError if nobody does.

    The gateway starts that process anew if it ends. A program may end or stop it, as it is of the same user.
    """
    until_s, tries = time.monotonic() + (_patience_s.pop() if _patience_s else 0.0), 0
    while True:
        with socket.socket(socket.AF_UNIX) as line:
            try:
                line.connect("\0" + place)
            except OSError as error:
                if time.monotonic() > until_s:
                    raise OSError(f"nobody runs the programs of the solution any more: {error}") from error
                time.sleep(PAUSE_S)
                continue
            _patience_s[:] = [PATIENCE_S]
            _, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            line.settimeout(told["timeout_s"] + GRACE_S)
            try:
                line.sendall(json.dumps(told).encode())
                line.shutdown(socket.SHUT_WR)
                return uid, json.loads(_read(line))
            except socket.timeout:  # noqa: UP041  # Python 3.7
                return uid, {"code": None, "timed_out": True, "stdout": "", "stderr": ""}
            except (OSError, ValueError) as error:
                tries += 1
                if tries == TRIES:
                    raise OSError("the program ended the process that ran it") from error
                until_s = time.monotonic() + PATIENCE_S


def _read(line: socket.socket) -> bytes:
    with line.makefile("rb") as file:
        return file.read()


def answer(told: Mapping[str, Any]) -> dict[str, Any]:
    """Run a program to its end; return {"code", "timed_out", "stdout", "stderr"}."""
    home = tempfile.mkdtemp(prefix="solution-")
    environment = {**os.environ, "HOME": home, "TMPDIR": home, **told["env"]}
    try:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code, timed_out = NOT_STARTED, False
            try:
                process = subprocess.Popen(
                    told["argv"],
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=err,
                    cwd=told["cwd"],
                    env=environment,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                err.write(f"{told['argv'][0]}: {error}\n".encode())
            else:
                try:
                    process.communicate(told["input"].encode(), told["timeout_s"])
                except subprocess.TimeoutExpired:
                    timed_out = True
                _end(process.pid)
                code = process.wait()
            said = {}
            for name, file in (("stdout", out), ("stderr", err)):
                file.seek(0)
                said[name] = file.read().decode("utf-8", "replace")
        return {"code": code, "timed_out": timed_out, **said}
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _end(group: int) -> None:
    with contextlib.suppress(OSError):  # there is none left
        os.killpg(group, signal.SIGKILL)


def serve(name: str) -> None:
    """Run what is asked for, each in a process of its own, until this one is ended."""
    import resource  # what the tests' own process does without

    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_MAX_BYTES, FILE_MAX_BYTES))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        while True:
            line, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                try:
                    line.sendall(json.dumps(answer(json.loads(_read(line)))).encode())
                finally:
                    os._exit(0)
            line.close()
            while True:
                try:
                    if os.waitpid(-1, os.WNOHANG)[0] == 0:
                        break
                except ChildProcessError:
                    break


if __name__ == "__main__":
    serve(sys.argv[1])
