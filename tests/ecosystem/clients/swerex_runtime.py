"""SWE-ReX's RemoteRuntime on a table of what can be asked: ``HOST PORT TOKEN DIRECTORY``; ``-`` for no port.

One JSON object: what was asked -> what came back, or the class of what was raised. Paths below DIRECTORY, and numbers
of processes, are made the same for every server.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import sys
import tempfile
from pathlib import Path

from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)
from swerex.runtime.remote import RemoteRuntime

host, port, token, place = sys.argv[1:5]
told: dict[str, object] = {}

#: Typed one after the other to one session.
COMMANDS: list[tuple[str, dict[str, object]]] = [
    ("echo hello", {}),
    ("echo ''", {}),
    ("printf '\\n\\nx\\n'", {}),
    ("printf 'no newline'", {}),
    ("", {}),
    ("   \n\n  # only a comment\n", {}),
    ("echo a\necho b\n\necho c", {}),
    ("cat <<'EOF'\n a\n\n'b' \"c\" $HOME\nEOF\necho after", {}),
    ("for i in 1 2 3; do\n  echo $i\ndone", {}),
    ("echo a \\\n b", {}),
    ("[[ 1 == 1 ]] && echo yes", {}),
    ("A=(x y z); echo ${A[1]}", {}),
    ("f() { echo in f $1; return 3; }", {}),
    ("f 1", {"check": "silent"}),
    ("echo ${A[2]}", {}),
    ("export X=1; cd /; pwd; echo $X", {}),
    ("pwd", {}),
    ("cd - > /dev/null; test $X = 1", {}),
    ("(echo out; echo err >&2)", {}),
    ("echo é 漢 🙂", {}),
    ("printf '\\303('; echo", {}),
    ("printf '\\033[31mred\\033[0m\\n'", {}),
    ("false", {"check": "silent"}),
    ("false", {"check": "ignore"}),
    ("false", {}),
    ("false", {"error_msg": "it failed"}),
    ("false && true", {"check": "silent"}),
    ("no_such_command_here", {"check": "silent"}),
    ("(exit 77)", {"check": "silent"}),
    ("echo 'unclosed", {}),
    ("if true; then", {}),
    ("echo still here", {}),
    ("stty size; tty | cut -c1-9; stty -a | grep -o ' -echo '", {}),
    ("(sleep 60 >/dev/null 2>&1 &); echo at once", {}),
    ("seq 1 3000", {}),
    ("sleep 30", {"timeout": 0.5}),
    ("interrupt sleep", {}),
    ("echo usable", {}),
    ("echo pre; sleep 30", {"timeout": 1.0}),
    ("interrupt what spoke", {}),
    ("echo again", {}),
    (
"python3 -c 'import time, signal; signal.signal(2, lambda *a: None)\n"
        "print(\"deaf\", flush=True)\ntime.sleep(99)'",
        {"timeout": 1.5},
    ),
    ("interrupt a deaf program", {}),
    ("echo usable after a deaf program", {}),
    ("echo one; echo two", {"expect": ["two"], "check": "ignore"}),
    ("read x; echo got $x", {"timeout": 1.0}),
    ("interrupt a read", {}),
    ("python3 -q", {"is_interactive_command": True, "expect": [">>> "]}),
    ("1 + 1", {"is_interactive_command": True, "expect": [">>> "]}),
    ("print('x' * 5)", {"is_interactive_command": True, "expect": [">>> "]}),
    ("exit()", {"is_interactive_quit": True}),
    ("echo back", {}),
    ("x=$(cat /dev/null); echo \"[$x]\"", {}),
    ("set -o pipefail; false | true", {"check": "silent"}),
    ("set +o pipefail; false | true", {"check": "silent"}),
    ("trap 'echo trapped' USR1; kill -USR1 $$; trap - USR1", {}),
    ("type f | head -n 1", {}),
    ("alias greet='echo aliased'", {}),
    ("greet", {}),
    ("cat > in.txt <<EOF\n$((1+2))\nEOF\ncat in.txt", {"timeout": 3}),
]  # fmt: skip

#: Run one by one, in no session.
EXECUTED: list[dict[str, object]] = [
    {"command": "echo out; echo err >&2; exit 3", "shell": True},
    {"command": "echo out; echo err >&2", "shell": True, "merge_output_streams": True},
    {"command": ["echo", "a b", "*"]},
    {"command": ["sh", "-c", "kill -9 $$"]},
    {"command": "kill -TERM $$", "shell": True},
    {"command": "printf '\\303('", "shell": True},
    {"command": "no-such-program"},
    {"command": "echo split"},
    {"command": ["/"]},
    {"command": ["echo $0 $1", "a", "b"], "shell": True},
    {"command": "echo $HOME:$Y", "shell": True, "env": {"Y": "2", "PATH": "/usr/bin:/bin"}},
    {"command": ["env"], "env": {"Y": "2", "PATH": "/usr/bin:/bin"}},
    {"command": "pwd", "shell": True, "cwd": "/"},
    {"command": "pwd", "shell": True, "cwd": "/no/such/place"},
    {"command": "sleep 30", "shell": True, "timeout": 0.3},
    {"command": "exit 4", "shell": True, "check": True},
    {"command": "exit 4", "shell": True, "check": True, "error_msg": "badly"},
    {"command": "", "shell": True},
    {"command": "cat", "shell": True},
    {"command": "head -c 300000 /dev/zero | tr '\\0' x", "shell": True},
    {"command": "echo a\0b", "shell": True},
]


def plain(value: object) -> object:
    """Make what differs between two servers the same: where they are, and the numbers of processes."""
    text = json.dumps(value).replace(place, "PLACE")
    text = re.sub(r"(\[\d+\]) +\d+", r"\1 PID", text)
    return json.loads(re.sub(r"tangram-\d+|/tmp/tmp\w+", "TMP", text))


async def keep(name: str, call: object) -> None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # their client prints what it raises
            answer = await call  # type: ignore[misc]
        told[name] = plain(answer.model_dump())
    except Exception as error:  # whatever it is, it is the answer
        extra = sorted(getattr(error, "extra_info", {}) or {})
        told[name] = plain([type(error).__name__, str(error), extra])


async def sessions(runtime: RemoteRuntime) -> None:
    await keep("not there", runtime.run_in_session(BashAction(command="echo")))
    await runtime.create_session(CreateBashSessionRequest(startup_timeout=10))
    await runtime.run_in_session(BashAction(command=f"cd {place}", check="silent"))
    await keep("twice", runtime.create_session(CreateBashSessionRequest(startup_timeout=10)))
    for number, (command, how) in enumerate(COMMANDS):
        action = (
            BashInterruptAction(timeout=1.0)
            if command.startswith("interrupt")
            else BashAction(command=command, **{"timeout": 20, **how})  # type: ignore[arg-type]
        )
        await keep(f"{number:02}: {command[:40]} {how or ''}", runtime.run_in_session(action))
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        await runtime.write_file(WriteFileRequest(path=f"{place}/start.sh", content="export STARTED=yes; PS1=mine"))
        file.flush()
    source = CreateBashSessionRequest(session="other", startup_source=[f"{place}/start.sh"], startup_timeout=10)
    await runtime.create_session(source)
    await runtime.run_in_session(BashAction(command="true", session="other", check="silent"))
    await keep("sourced", runtime.run_in_session(BashAction(command="echo $STARTED $X.", session="other")))
    await keep("close", runtime.close_session(CloseBashSessionRequest(session="other")))
    await keep("closed", runtime.run_in_session(BashAction(command="echo", session="other")))
    await keep("close again", runtime.close_session(CloseBashSessionRequest(session="other")))


async def files(runtime: RemoteRuntime) -> None:
    text = "a\r\nb\tc é 漢\n" * 1000
    await keep("write", runtime.write_file(WriteFileRequest(path=f"{place}/deep/er/file", content=text)))
    await keep("read", runtime.read_file(ReadFileRequest(path=f"{place}/deep/er/file")))
    await keep("read nothing", runtime.read_file(ReadFileRequest(path=f"{place}/nowhere")))
    await keep("read below a file", runtime.read_file(ReadFileRequest(path=f"{place}/deep/er/file/x")))
    await keep("read a directory", runtime.read_file(ReadFileRequest(path=f"{place}/deep")))
    await keep("write a directory", runtime.write_file(WriteFileRequest(path=f"{place}/deep", content="")))
    await keep("latin", runtime.read_file(ReadFileRequest(path=f"{place}/deep/er/file", encoding="latin-1")))
    await runtime.execute(Command(command=f"printf '\\377x' > {place}/binary", shell=True, check=True))
    await keep("bytes", runtime.read_file(ReadFileRequest(path=f"{place}/binary")))
    await keep("replaced", runtime.read_file(ReadFileRequest(path=f"{place}/binary", errors="replace")))
    await keep("codec", runtime.read_file(ReadFileRequest(path=f"{place}/binary", encoding="no-such-codec")))
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory, "tree")
        (tree / "empty").mkdir(parents=True)
        (tree / "a" / "b").mkdir(parents=True)
        (tree / "a" / "b" / "x.sh").write_text("#!/bin/sh\necho ran\n")
        (tree / "a" / "b" / "x.sh").chmod(0o755)
        (tree / "ümlaut").write_bytes(bytes(range(256)) * 40)
        (tree / "large").write_bytes(b"\r\n--x" * 700_000)
        asked = [(tree, "up"), (tree / "large", "new/place/one"), (tree / "ümlaut", "odd name \"'")]
        for source, target in asked:
            await keep(target, runtime.upload(UploadRequest(source_path=str(source), target_path=f"{place}/{target}")))
    listed = f"cd {place} && find up new odd* | LC_ALL=C sort | while read f; do stat -c '%A %s %n' \"$f\"; done"
    await keep("listed", runtime.execute(Command(command=f"{listed} | grep -v '^d' ; ls -d up/empty", shell=True)))
    await keep(
        "sums", runtime.execute(Command(command=f"cd {place} && md5sum up/large new/place/one odd*", shell=True))
    )


async def together(runtime: RemoteRuntime) -> None:
    """Sessions beside each other, 10 commands each."""

    async def one(number: int) -> str:
        name = f"s{number}"
        await runtime.create_session(CreateBashSessionRequest(session=name, startup_timeout=20))
        await runtime.run_in_session(BashAction(command=f"N={number}; I=0", session=name, check="silent"))
        for _ in range(10):
            await runtime.run_in_session(BashAction(command="I=$((I+1))", session=name))
        answer = await runtime.run_in_session(BashAction(command="echo $N $I", session=name))
        return str(answer.output)

    told["together"] = await asyncio.gather(*(one(number) for number in range(4)))


async def main() -> None:
    runtime = RemoteRuntime(host=host, port=None if port == "-" else int(port), auth_token=token, timeout=10)
    wrong = RemoteRuntime(host=host, port=runtime._config.port, auth_token="wrong.key", timeout=10)
    told["wrong key"] = (await wrong.is_alive()).is_alive
    told["alive"] = (await runtime.is_alive()).is_alive
    for number, how in enumerate(EXECUTED):
        await keep(f"execute {number:02}: {how}", runtime.execute(Command(**how)))  # type: ignore[arg-type]
    await sessions(runtime)
    await files(runtime)
    await together(runtime)
    await keep("end", runtime.close())


asyncio.run(main())
print(json.dumps(told))
