"""One bash on a terminal of its own, kept alive inside a sandbox between the actions that type to it.

Its text is sent into the sandbox by the action that opens the session (`gateway.facades.swerex.app`), so: one file,
standard library only, Python 3.8 on. The action that starts it leaves it behind; it waits on a socket in ``place``, and
each later action brings one request and takes one answer, both JSON with their length before them.

What ends a command is no text that a program could print by chance: bash itself sends a mark with the exit
status, under a number that is new for each command, and its prompt is one too.
"""

# It runs in sandboxes with older Pythons, and importing less starts sooner.
# ruff: noqa: PTH108, PTH118, PTH123, UP031
from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import socket
import struct
import subprocess
import termios
import time
from collections import deque

MYPY = False
if MYPY:  # importing it would cost every session a part of its start
    from collections.abc import Callable
    from re import Pattern
    from typing import Any

#: What clients are told that was matched where bash is ready for the next command: SWE-ReX's own prompt.
PROMPT_NAME = "SHELLPS1PREFIX"
#: How bash says so; in the variable it is escaped, so that showing the variable is no prompt.
PROMPT = "\x1b]7;tangram;prompt\x07" + PROMPT_NAME
PROMPT_SHOWN = r"\[\e]7;tangram;prompt\a\]" + PROMPT_NAME
PROMPT_SET = "PS1='" + PROMPT_SHOWN + "' PS2= PS0="
MARKS = re.compile(r"\x1b\]7;tangram;(?:prompt\x07" + PROMPT_NAME + r"|[0-9a-f]+;\d+\x07)")
CONTROL = re.compile(r"\x1B[@-_][0-?]*[ -/]*[@-~]")
#: Characters at the end of what was said in which a client's expression is looked for.
WINDOW = 16 * 1024
CHUNK_BYTES = 64 * 1024
#: Seconds for bash to start and to source what it is told; for its prompt after a command; for its exit status where a
#: client's expression ended the wait; and for its end.
START_S, PROMPT_S, STATUS_S, END_S = 30.0, 10.0, 1.0, 5.0
#: Seconds of silence after an interrupt that count as its end.
SILENCE_S = 0.2
REQUEST_MAX_BYTES = 64 * 2**20
SYNTAX_MAX_BYTES = 16 * 1024


class BashEnded(Exception):
    """Bash has ended."""


class ClientGone(Exception):
    """Whoever asked is not there any more."""


class UnreadOutput:
    """What bash said that nobody has been told yet: searched at its end, and without its middle if it is too long."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.first: list[str] = []
        self.last: deque[str] = deque()
        self.sizes = [0, 0]
        self.tail = ""
        self.left_out = 0

    def add(self, text: str) -> None:
        self.tail += text
        if len(self.tail) <= 4 * WINDOW:
            return
        part, self.tail = self.tail[: -2 * WINDOW], self.tail[-2 * WINDOW :]
        late = self.sizes[0] >= self.limit // 2
        (self.last if late else self.first).append(part)
        self.sizes[late] += len(part)
        while self.sizes[1] > self.limit // 2:
            dropped = len(self.last.popleft())
            self.sizes[1] -= dropped
            self.left_out += dropped

    def find(self, patterns: list[Pattern[str]]) -> tuple[int, str, str] | None:
        """Return the first match's number, what came before it, and the match, all taken out; None if there is none."""
        result = [
            (match.start(), i, match) for i, each in enumerate(patterns) for match in [each.search(self.tail)] if match
        ]
        if not result:
            return None
        _, number, match = min(result, key=lambda each: each[:2])
        rest = self.tail[match.end() :]
        self.tail = self.tail[: match.start()]
        before = self.take()
        self.tail = rest
        return number, before, match.group()

    def take(self) -> str:
        """Return all of it, which is then told."""
        first, last = "".join(self.first), "".join(self.last) + self.tail
        text = first + last
        if self.left_out or len(text) > self.limit:
            # A part may be as long as all that bash said at once. The note takes at most 60 characters.
            half = max(0, self.limit - 60) // 2
            if not self.left_out:
                first = last = text
            first, last = first[:half], last[max(0, len(last) - half) :]
            out = self.left_out + len(text) - len(first) - len(last)
            text = first + "\n[%d characters are left out here]\n" % out + last
        self.first, self.sizes, self.tail, self.left_out = [], [0, 0], "", 0
        self.last.clear()
        return text

    def put_back(self, text: str) -> None:
        """Let it begin with a text that was taken from it."""
        self.first.insert(0, text)


class BashTerminal:
    """Bash on its terminal."""

    def __init__(self, place: str, name: str, limit: int) -> None:
        self.place, self.name = place, name
        self.output = UnreadOutput(limit)
        self.dirty = False  # a command may still run, or its prompt is still to come
        self.keep_status = False  # the last command's exit status is the next one's to see
        self.count = int.from_bytes(os.urandom(6), "big")
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self.pid, self.fd = _spawn()
        self.modes = termios.tcgetattr(self.fd)
        self.modes[3] &= ~termios.ECHO
        termios.tcsetattr(self.fd, termios.TCSANOW, self.modes)

    # --- reading

    def read(self, within_s: float, client: socket.socket | None = None) -> bool:
        """Take in what bash says; return False after a silence of ``within_s``. Raises BashEnded and ClientGone."""
        watched: list[int | socket.socket] = [self.fd] if client is None else [self.fd, client]
        ready = select.select(watched, [], [], max(0.0, within_s))[0]
        if self.fd in ready:
            try:
                data = os.read(self.fd, CHUNK_BYTES)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                data = b""
            if not data:
                raise BashEnded
            self.output.add(self.decoder.decode(data))
            return True
        if client is not None and client in ready and not client.recv(1, socket.MSG_PEEK):
            raise ClientGone
        return False

    def wait(
        self, patterns: list[Pattern[str]], within_s: float, client: socket.socket | None = None
    ) -> tuple[int, str, str]:
        """Wait for the first of the patterns; return its number, what came before it, and the match, all taken out.

        The number is -1 if none came in time: then nothing is taken. Raises BashEnded and ClientGone.
        """
        until = time.monotonic() + within_s
        while True:
            result = self.output.find(patterns)
            if result is not None:
                return result
            left = until - time.monotonic()
            if left <= 0:
                return -1, "", ""
            self.read(min(left, 3600.0), client)

    # --- typing

    def type(self, line: str) -> None:
        data = line.encode("utf-8", "surrogateescape") + b"\n"
        while data:
            if not select.select([], [self.fd], [], 0.0)[1] and not self.read(END_S):
                return  # it reads nothing: what is typed would be lost
            data = data[os.write(self.fd, data[:1024]) :]

    def mark(self) -> tuple[str, Pattern[str]]:
        """Return the shell text that sends the next mark and sets the prompt again, and what to wait for."""
        self.count += 1
        number = f"{self.count:x}"
        text = (
            "{ builtin printf '\\033]7;tangram;%s;%d\\007' "
            + number
            + ' "$?" >/dev/tty; '
            + PROMPT_SET
            + "; } 2>/dev/null"
        )
        return text, re.compile(r"\x1b\]7;tangram;" + number + r";(\d+)\x07")

    def status(self, mark: str) -> int:
        return int(mark.rstrip("\x07").rpartition(";")[2])

    def calm(self) -> None:
        """Put the terminal's modes back where a program left others, at the prompt."""
        try:
            if os.tcgetpgrp(self.fd) == self.pid:
                termios.tcsetattr(self.fd, termios.TCSANOW, self.modes)
        except (OSError, termios.error):
            pass

    def to_prompt(self, client: socket.socket | None = None) -> str:
        """Wait for the prompt that follows a mark; return what came before it."""
        number, before, _ = self.wait([re.compile(re.escape(PROMPT))], PROMPT_S, client)
        self.dirty = number < 0
        return before

    def ask_status(self, client: socket.socket) -> int | None:
        """Return the exit status of what was run last, None if bash does not say."""
        text, pattern = self.mark()
        self.type(" " + text)
        number, before, mark = self.wait([pattern], STATUS_S, client)
        if number < 0:
            self.dirty = True
            return None
        self.output.put_back(before + self.to_prompt(client))
        return self.status(mark)

    # --- the requests

    def start(self, sources: list[str], within_s: float) -> str:
        """Wait until bash is ready; return what it said."""
        words = [f"source {source}" for source in sources] + (["sleep 0.3"] if sources else [])
        text, pattern = self.mark()
        # What is typed here is no user's history, and its file would lie in the middle of their work.
        self.type(" " + " ; ".join([*words, "export PS1 PS2 PS0", "HISTFILE=", text]))
        number, before, _ = self.wait([pattern], max(START_S, within_s))
        if number < 0:
            raise TimeoutError
        return shown(before + self.to_prompt())

    def run(self, request: dict[str, Any], client: socket.socket) -> tuple[str, dict[str, Any]]:
        """Run a command as if it were typed; return its output, and how it ended."""
        refused = _syntax(request["command"])
        if refused is not None:
            return "", refused
        expected = _compiled(request["expect"])
        self.calm()
        file = os.path.join(self.place, f"command-{self.count:x}")
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as sink:
            sink.write(request["command"].encode("utf-8", "surrogateescape"))
        try:
            return self.run_file(file, request, expected, client)
        finally:
            os.unlink(file)

    def run_file(
        self, file: str, request: dict[str, Any], expected: list[Pattern[str]], client: socket.socket
    ) -> tuple[str, dict[str, Any]]:
        text, pattern = self.mark()
        name, silent = shlex.quote(file), request["check"] == "ignore"
        read = '"$(r=$?; builtin printf %%s "$(<%s)"; builtin exit $r)"' if self.keep_status else '"$(<%s)"'
        was_dirty, self.dirty, self.keep_status = self.dirty, True, silent
        self.type(" builtin eval " + read % name + ("" if silent else "; " + text))
        # A prompt without the mark: it was interrupted from inside. One that is still to come from before says nothing.
        ends = [pattern, re.compile(re.escape(PROMPT))][: 1 if was_dirty and not silent else 2]
        number, before, mark = self.wait(expected + ends, request["timeout"], client)
        if number < 0:
            return "", {"end": "timeout"}
        number -= len(expected)
        fields: dict[str, Any] = {"end": "done", "exit_code": None, "expect_string": PROMPT_NAME}
        if number == 0:  # the mark
            before += self.to_prompt(client)
            fields["exit_code"] = self.status(mark)
        elif number == 1:
            self.dirty = False
            fields["exit_code"] = None if silent else self.ask_status(client)
        else:
            fields["expect_string"] = request["expect"][number + len(expected)]
            if not silent:
                before += self.late_status(pattern, fields, client)
        if fields["exit_code"] is None and request["check"] == "raise":
            return shown(before), {"end": "no_exit_code"}
        return shown(before), fields

    def late_status(self, pattern: Pattern[str], fields: dict[str, Any], client: socket.socket) -> str:
        """Look for the end of a command of which an expected text was seen; return what it said until then."""
        number, before, mark = self.wait([pattern], STATUS_S, client)
        if number < 0:
            return ""
        fields["exit_code"] = self.status(mark)
        return before + self.to_prompt(client)

    def interact(self, request: dict[str, Any], client: socket.socket) -> tuple[str, dict[str, Any]]:
        """Type a line to a program; return what it answered, up to an expected text or the prompt."""
        expected = _compiled(request["expect"])
        self.type(request["command"])
        number, before, _ = self.wait([*expected, re.compile(re.escape(PROMPT))], request["timeout"], client)
        if number < 0:
            self.dirty = True
            return "", {"end": "timeout"}
        self.dirty = number < len(expected)
        output = shown(before)
        if request["is_interactive_quit"]:
            termios.tcsetattr(self.fd, termios.TCSANOW, self.modes)
            self.ask_status(client)
        else:
            output = output.lstrip()
            output = (output[len(request["command"]) :] if output.startswith(request["command"]) else output).strip()
        matched = request["expect"][number] if number < len(expected) else PROMPT_NAME
        return output, {"end": "done", "exit_code": 0, "expect_string": matched}

    def interrupt(self, request: dict[str, Any], client: socket.socket) -> tuple[str, dict[str, Any]]:
        """End what runs in the foreground: by SIGINT as often as is asked, and then by SIGKILL."""
        expected = _compiled(request["expect"])
        patterns = [*expected, re.compile(re.escape(PROMPT))]
        tries = max(0, min(request["n_retry"], 100))
        for attempt in range(tries + 5):
            if attempt < tries:
                os.write(self.fd, b"\x03")
            else:
                self.kill_foreground()
            number, before, _ = self.wait(patterns, max(request["timeout"], 0.05 if attempt < tries else 1.0), client)
            if number >= 0:
                self.dirty = False
                try:
                    while self.read(SILENCE_S, client):
                        pass
                finally:
                    rest = self.output.take()
                self.calm()
                matched = request["expect"][number] if number < len(expected) else PROMPT_NAME
                return shown(before + rest).strip(), {"end": "done", "exit_code": 0, "expect_string": matched}
        return "", {"end": "uninterrupted"}

    def kill_foreground(self) -> None:
        try:
            group = os.tcgetpgrp(self.fd)
            if group != self.pid:
                os.killpg(group, signal.SIGKILL)
        except OSError:
            pass  # it has ended meanwhile, or is another user's

    def end(self) -> int:
        """End bash, what runs on its terminal and its name; return its exit status, a signal as -n."""
        groups = {self.pid}
        with contextlib.suppress(OSError):
            groups.add(os.tcgetpgrp(self.fd))
        os.close(self.fd)
        until, number = time.monotonic() + END_S, signal.SIGHUP
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            for group in groups:
                with contextlib.suppress(OSError):
                    os.killpg(group, number)
            time.sleep(0.02)
            if time.monotonic() > until - END_S / 2:
                number = signal.SIGKILL
        for remove, path in ((os.unlink, os.path.join(self.place, self.name)), (os.rmdir, self.place)):
            with contextlib.suppress(OSError):  # it has not begun to serve, or others do
                remove(path)
        return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)


def _spawn() -> tuple[int, int]:
    """Start bash on a terminal of its own; return its process and the terminal's other side."""
    environment = {name: value for name, value in os.environ.items() if name not in ("TRACEPARENT", "TRACESTATE")}
    environment.setdefault("TERM", "dumb")
    environment.update(PS1=PROMPT_SHOWN, PS2="", PS0="")
    pid, fd = pty.fork()
    if pid == 0:
        try:
            for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.execvpe("bash", ["bash", "--noediting"], environment)
        finally:
            os._exit(127)
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    return pid, fd


def shown(text: str) -> str:
    """Return what was said as SWE-ReX shows it."""
    return CONTROL.sub("", MARKS.sub("", text)).replace("\r\n", "\n")


def _compiled(patterns: list[str]) -> list[Pattern[str]]:
    return [re.compile(each, re.DOTALL) for each in patterns]


def _syntax(command: str) -> dict[str, Any] | None:
    """Return what bash has against a command; None if nothing."""
    text = (command + "\n").encode("utf-8", "surrogateescape")
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, check=False)
    if done.returncode == 0:
        return None
    pieces = [each[:SYNTAX_MAX_BYTES].decode("utf-8", "backslashreplace") for each in (done.stdout, done.stderr)]
    return {"end": "syntax", "exit_code": done.returncode, "stdout": pieces[0], "stderr": pieces[1]}


def need(conn: socket.socket, count: int) -> bytes:
    """Read so many bytes; raises ClientGone."""
    parts = []
    while count:
        part = conn.recv(min(count, 2**20))
        if not part:
            raise ClientGone
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def answer(terminal: BashTerminal, request: dict[str, Any], conn: socket.socket) -> tuple[str, dict[str, Any]]:
    """Return the output of a request, and how it ended."""
    terminal.output.limit = request["limit"]
    try:
        if request["verb"] == "interrupt":
            return terminal.interrupt(request, conn)
        interactive = request["is_interactive_command"] or request["is_interactive_quit"]
        return terminal.interact(request, conn) if interactive else terminal.run(request, conn)
    except re.error as error:
        return "", {"end": "pattern", "message": str(error)}
    except OSError as error:
        return "", {"end": "broken", "message": f"{type(error).__name__}: {error}"}


def serve(terminal: BashTerminal, listener: socket.socket) -> None:
    """Answer one request after the other, until bash ends or the session is closed."""
    while True:
        conn = listener.accept()[0]
        with conn:
            try:
                (size,) = struct.unpack("!I", need(conn, 4))
                request = json.loads(need(conn, min(size, REQUEST_MAX_BYTES)))
                if request["verb"] == "close":
                    terminal.end()
                    send_answer(conn, "", {"end": "done"})
                    return
                try:
                    send_answer(conn, *answer(terminal, request, conn))
                except BashEnded:
                    status = terminal.end()
                    ended = {"end": "done", "exit_code": status, "expect_string": ""}
                    send_answer(conn, shown(terminal.output.take()), dict(ended, ended=True))
                    return
            except (ClientGone, OSError, ValueError, KeyError):
                continue  # whoever asked is gone: what runs goes on


def send_answer(conn: socket.socket, output: str, fields: dict[str, Any]) -> None:
    parts = [json.dumps(fields).encode(), output.encode("utf-8", "backslashreplace")]
    conn.sendall(struct.pack("!II", *map(len, parts)) + b"".join(parts))


def open_session(place: str, name: str, request: dict[str, Any], report: Callable[[bytes, bytes], None]) -> None:
    """Leave a session behind that serves below ``place``; ``report`` is told once how it began."""
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.close(ours)
        os.setsid()
        if os.fork() > 0:
            os._exit(0)
        try:
            _begin(place, name, request, theirs)
        finally:
            os._exit(0)
    os.close(theirs)
    os.wait()
    with open(ours, "rb") as output:
        result = json.loads(output.read() or b'{"output": "", "end_fields": {"end": "not_started"}}')
    report(result["output"].encode("utf-8", "backslashreplace"), json.dumps(result["end_fields"]).encode())


def _begin(place: str, name: str, request: dict[str, Any], pipe: int) -> None:
    silence = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(silence, fd)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    terminal = BashTerminal(place, name, request["limit"])
    try:
        output = terminal.start(request["startup_source"], request["startup_timeout"])
    except (BashEnded, TimeoutError, OSError) as error:
        terminal.end()
        _report(pipe, shown(terminal.output.take()), {"end": "not_started", "why": type(error).__name__})
        return
    os.chdir(place)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen(16)
    _report(pipe, output, {"end": "done"})
    serve(terminal, listener)


def _report(pipe: int, output: str, fields: dict[str, Any]) -> None:
    with open(pipe, "wb") as sink:
        sink.write(json.dumps({"output": output[-65536:], "end_fields": fields}).encode())
