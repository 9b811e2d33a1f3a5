"""The SWE-ReX server protocol."""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import io
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from typing import Annotated, ClassVar, Literal

import msgspec
import orjson
import structlog
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from gateway import serialization
from gateway.api import Api, placed_path
from gateway.config.schema import SwerexFacade
from gateway.errors import FaultKind
from gateway.facades.facade import (
    STATUSES,
    Facade,
    Fault,
    ForeignCalls,
    ForeignRoute,
    answer,
    fault_of,
    fault_of_end,
    read_shape,
    result_of,
)
from gateway.http.messages import body_chunks
from gateway.invocations.record import Record
from manager.errors import CodedError, Forbidden, InvalidInput, NotFound, Reason
from manager.function import FunctionSpec
from runtimes.sandbox.files import SandboxFiles

Timeout = Annotated[float, Meta(ge=0)]
SessionName = Annotated[str, Meta(max_length=1024)]


class CreateSession(Struct, forbid_unknown_fields=True):
    """Begin a bash."""

    startup_source: list[str] = []
    session: SessionName = "default"
    session_type: Literal["bash"] = "bash"
    startup_timeout: Timeout = 1.0


class BashAction(Struct, forbid_unknown_fields=True):
    """Type a command to a session."""

    command: str
    session: SessionName = "default"
    timeout: Timeout | None = None
    is_interactive_command: bool = False
    is_interactive_quit: bool = False
    check: Literal["silent", "raise", "ignore"] = "raise"
    error_msg: str = ""
    expect: list[str] = []
    action_type: Literal["bash"] = "bash"


class BashInterrupt(Struct, forbid_unknown_fields=True):
    """End what runs in a session's foreground."""

    session: SessionName = "default"
    timeout: Timeout = 0.2
    n_retry: int = 3
    expect: list[str] = []
    action_type: Literal["bash_interrupt"] = "bash_interrupt"


class CloseSession(Struct, forbid_unknown_fields=True):
    """End a session."""

    session: SessionName = "default"
    session_type: Literal["bash"] = "bash"


class ExecuteCommand(Struct, forbid_unknown_fields=True):
    """Run a command outside of any session."""

    command: str | list[str]
    timeout: float | None = None
    shell: bool = False
    check: bool = False
    error_msg: str = ""
    env: dict[str, str] | None = None
    cwd: str | None = None
    merge_output_streams: bool = False


class ReadFile(Struct, forbid_unknown_fields=True):
    """Read a text."""

    path: str
    encoding: str | None = None
    errors: str | None = None


class WriteFile(Struct, forbid_unknown_fields=True):
    """Write a text."""

    content: str
    path: str


#: The status whose body its client raises as an exception.
RAISED = 511
#: The module of its exceptions.
ERRORS = "swerex.exceptions."
#: Codecs whose time is the square of the text's length; the gateway serves nobody else meanwhile.
SLOW_CODECS = frozenset({"idna", "punycode"})
#: Machine-readable file errors -> what Python raises for them: number, text and class.
FILE_ERRORS = {
    "not_found": (2, "No such file or directory", "FileNotFoundError"),
    "is_a_directory": (21, "Is a directory", "IsADirectoryError"),
    "not_a_directory": (20, "Not a directory", "NotADirectoryError"),
    "permission_denied": (13, "Permission denied", "PermissionError"),
    "outside": (13, "Permission denied", "PermissionError"),
    "read_only": (30, "Read-only file system", "OSError"),
}


class RaisedAtClient(Exception):
    """An exception that the client is to raise: class path, text, what else it carries, and whose end it is."""

    def __init__(
        self, path: str, message: str, extra: Mapping[str, object] | None = None, record: Record | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.extra = extra or {}
        self.record = record


def transfer(path: str, message: str, extra: Mapping[str, object]) -> object:
    """Return an exception as it travels; a traceback would be logged as critical by its client."""
    return {"swerexception": {"message": message, "class_path": path, "traceback": "", "extra_info": dict(extra)}}


def result_object(record: Record) -> dict[str, object]:
    result = result_of(record)
    return result if isinstance(result, dict) else {}


def text_of(result: Mapping[str, object], name: str) -> str:
    """Return what was said as SWE-ReX decodes it: bytes that are no UTF-8 as escapes."""
    encoded = result.get(f"{name}_base64")
    if isinstance(encoded, str):
        return msgspec.convert(encoded, bytes).decode("utf-8", "backslashreplace")
    return str(result.get(name) or "")


def decoded(data: bytes, request: ReadFile) -> str:
    """Return a file's text as Path.read_text does; raises what the client is to raise."""
    encoding = request.encoding or "utf-8"
    try:
        if encoding != "locale" and codecs.lookup(encoding).name in SLOW_CODECS:
            raise LookupError(f"{encoding} is for names of hosts, and takes hours for a file")
        return io.TextIOWrapper(io.BytesIO(data), encoding=encoding, errors=request.errors).read()
    except (UnicodeError, LookupError, ValueError, TypeError) as error:  # TypeError: a handler that only encodes
        raise RaisedAtClient(f"builtins.{type(error).__name__}", str(error)) from None


def as_python(error: CodedError, path: str) -> RaisedAtClient:
    """Return a refused file access as Python raises it."""
    number, text, kind = FILE_ERRORS.get(str(error.detail.get("file_error", "")), (0, "", ""))
    if not kind:
        fault = fault_of(error)
        return RaisedAtClient(f"{ERRORS}SwerexException", f"{fault.code}: {fault.message}", {"code": fault.code})
    return RaisedAtClient(f"builtins.{kind}", f"[Errno {number}] {text}: {path!r}")


def prefixed(error_msg: str, message: str) -> str:
    return f"{error_msg}: {message}" if error_msg else message


# What the facade runs in a sandbox, shown to `LOADER` on standard input: each an action of the trajectory.
#
# Each begins with ``request`` as a literal (`script_input`). What a session said is standard output,
# and how it ended is JSON on standard error, where nobody but these scripts writes.
#
# A command is often shorter than the start of the Python that becomes it, so the scripts import as little as they can:
# ``json``, ``signal`` and ``socket`` together take twice as long as that start, and are taken where they are needed
# only.

#: How `BOOT` ends if it could not become the command.
REFUSED = 125
PYTHON = ("python3", "-I", "-S", "-c")
#: Reads a script from its input, of as many bytes as its last argument says: a list of processes then does not show it.
LOADER = "import sys; exec(sys.stdin.buffer.read(int(sys.argv.pop())))"

#: Becomes the command, as subprocess would: what could not be begun is the error that it raises, after a word that the
#: command never sees. ``stdin`` of the command is empty.
BOOT = r"""
import _signal, os, sys
place = ""
try:
    if request["cwd"] is not None:
        place = request["cwd"]
        os.chdir(place)
    place = request["argv"][0]
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    os.execvpe(place, request["argv"], os.environ if request["env"] is None else request["env"])
except Exception as error:
    import json
    if isinstance(error, OSError) and error.errno:
        error = type(error)(error.errno, os.strerror(error.errno), place)
    sys.stderr.write(request["word"] + " " + json.dumps([type(error).__name__, str(error)]))
    sys.stderr.flush()
    os._exit(125)
"""

#: Speaks to the sessions of a trajectory: opens one with the text of its server, or brings one a request.
SESSION = r"""
import _socket, os, sys
place = os.path.join(os.environ.get("TMPDIR") or "/tmp", ".tangram-swerex-%d" % os.getuid())
home = os.getcwd()
def report(output, end):
    sys.stdout.buffer.write(output)
    sys.stdout.flush()
    sys.stderr.buffer.write(end)
def connected(name):
    conn = _socket.socket(_socket.AF_UNIX)
    try:
        conn.connect(name)
    except OSError:
        return None
    return conn
def speak(name, request):
    conn = connected(name)
    if conn is None:
        return None
    parts = []
    try:
        conn.sendall(len(request).to_bytes(4, "big") + request)
        while True:
            part = conn.recv(2**20)
            if not part:
                break
            parts.append(part)
    except OSError:
        pass
    reply = b"".join(parts)
    if len(reply) < 8:
        return b"", b'{"end": "vanished"}'
    end, output = int.from_bytes(reply[:4], "big"), int.from_bytes(reply[4:8], "big")
    return reply[8 + end:][:output], reply[8:8 + end]
if request["verb"] == "open" and not os.path.lexists(place):
    os.mkdir(place, 0o700)
there = os.path.lexists(place)
if there and os.lstat(place).st_uid != os.getuid():
    raise SystemExit(place + " is another user's")
if there:
    os.chdir(place)
if request["verb"] == "open":
    if connected(request["name"]) is not None:
        report(b"", b'{"end": "exists"}')
    else:
        if os.path.lexists(request["name"]):
            os.unlink(request["name"])
        os.chdir(home)
        server = {"__name__": "bash_server"}
        exec(compile(request["server"], "bash_server", "exec"), server)
        server["open_session"](place, request["name"], request, report)
elif request["verb"] == "close all":
    for name in os.listdir(".") if there else ():
        if name.startswith(request["name"]):
            speak(name, b'{"verb": "close"}')
    report(b"", b'{"end": "done"}')
else:
    report(*(there and speak(request["name"], request["request"]) or (b"", b'{"end": "missing"}')))
"""

#: Takes a multipart body apart that lies in a file, and puts its file where its fields say, as SWE-ReX's server does.
#: The body loses its name at once, so that nothing of it is left whatever ends the action.
UNPACK = r"""
import json, mmap, os, re, shutil, sys, zipfile
def parts(body, mark):
    start = body.find(mark)
    while start >= 0:
        start += len(mark)
        end = body.find(b"\r\n" + mark, start)
        if end < 0:
            return
        head = body.find(b"\r\n\r\n", start, end)
        if head >= 0:
            name = re.search(rb'[; ]name="([^"]*)"', body[start:head])
            if name:
                yield name[1].decode(), head + 4, end
        start = end + 2
def place():
    part = request["body"] + ".part"
    with open(request["body"], "rb") as file:
        os.unlink(request["body"])
        body = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        fields = {name: (start, end) for name, start, end in parts(body, request["mark"].encode())}
        missing = [name for name in ("file", "target_path") if name not in fields]
        if missing:
            return {"end": "shape", "missing": missing}
        unknown = sorted(set(fields) - {"file", "target_path", "unzip"})
        if unknown:
            return {"end": "shape", "unknown": unknown}
        text = {name: body[slice(*fields[name])].decode() for name in fields if name != "file"}
        unzip = text.get("unzip", "false").lower() in ("true", "1", "on", "yes", "t", "y")
        target = text["target_path"]
        start, end = fields["file"]
        with open(part, "w+b") as sink:
            try:
                if unzip:
                    os.unlink(part)
                while start < end:
                    sink.write(body[start:min(end, start + 2**20)])
                    start += 2**20
                sink.flush()
                os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
                if unzip:
                    with zipfile.ZipFile(sink) as zipped:
                        zipped.extractall(target)
                else:
                    shutil.move(part, os.path.join(target, "temp_file_transfer") if os.path.isdir(target) else target)
            finally:
                if os.path.lexists(part):
                    os.unlink(part)
    return {"end": "done"}
try:
    answer = place()
except Exception as error:
    answer = {"end": "raised", "class": "%s.%s" % (type(error).__module__, type(error).__name__), "message": str(error)}
sys.stderr.write(json.dumps(answer))
"""


@cache
def server_text() -> str:
    """Return the text of what a session leaves behind in its sandbox."""
    return files(__package__).joinpath("bash_server.py").read_text(encoding="utf-8")


def script_input(text: str, request: Mapping[str, object]) -> dict[str, object]:
    """Return the input of an exec action that runs a script of this module with what it is asked.

    Of texts, bytes, numbers, truths, None, and lists and mappings of them, ``ascii`` is a literal on every Python.
    """
    script = f"request = {dict(request)!a}\n{text}"
    return {"argv": [*PYTHON, LOADER, str(len(script.encode()))], "stdin": script}


# SWE-ReX's runtime server: what `RemoteRuntime`, and SWE-agent through it, asks of the machine that it works on.
#
# One runtime is one trajectory, which the path names (``/swerex/FUNCTION/TRAJECTORY/execute``) or the API key after a
# dot (``TOKEN.TRAJECTORY``). Each command is an action, so cores are held while one runs and no longer. What lives
# between them, the sessions' shells, lives in the sandbox; nothing of it is kept here, so the next gateway goes on with
# it.

logger = structlog.get_logger("gateway.facades")
#: Seconds after which the client's HTTP library gives up, whatever the action's own time-out is.
CLIENT_S = 300.0
#: Seconds that a command in a session is given less than its action has: the action itself must not be ended.
SESSION_MARGIN_S = 5.0
#: Seconds that a command is given beside its own, to be started; its bytes of output that are ours.
START_S, SHAPE_BYTES = 0.1, 1024
WORD_BYTES = 16
#: Requests of which the answer is kept, each of this size at most: the last one of each trajectory.
REMEMBERED, REMEMBERED_BYTES = 256, 2**20
MULTIPART, OCTETS = "multipart/form-data", "application/octet-stream"
#: Where a key's trajectory is kept in the scope.
NAMED = "swerex.trajectory"


@dataclass(frozen=True, slots=True)
class RuntimePlace:
    """Whose runtime a request is for."""

    function: FunctionSpec
    trajectory: str

    def session(self, name: str = "") -> str:
        """Return the name of a session's socket: those of one trajectory begin alike."""
        parts = [self.trajectory, *([f"{self.trajectory}\0{name}"] if name else [""])]
        digests = [hashlib.sha256(part.encode("utf-8", "surrogatepass")).hexdigest()[:24] for part in parts]
        return f"{digests[0]}-{digests[1] if name else ''}"


class Swerex(Facade):
    """The facade of SWE-ReX's clients."""

    name: ClassVar[str] = "swerex"
    # Its client raises what a 511 holds, and drops the words of every other status; a wrong key is a 403 to it.
    statuses: ClassVar[Mapping[FaultKind, int]] = (
        STATUSES
        | dict.fromkeys((kind for kind in FaultKind if STATUSES[kind] not in (403, 404, 405, 422)), RAISED)
        | {FaultKind.UNAUTHORIZED: 403}
    )
    prefix: ClassVar[str] = "swerex"
    media_types: ClassVar[frozenset[str]] = frozenset({"application/json", OCTETS, MULTIPART})

    def __init__(self, api: Api, calls: ForeignCalls, section: SwerexFacade) -> None:
        super().__init__(api, calls, section)
        self._settings = section
        self._remembered: OrderedDict[str, tuple[str, Response]] = OrderedDict()

    def routes(self) -> Sequence[ForeignRoute]:
        """Return every route: at the root, where the key names the trajectory, and below a trajectory."""
        verbs: Mapping[str, Callable[[Request, RuntimePlace], Awaitable[Response]]] = {
            "create_session": self.create_session,
            "run_in_session": self.run_in_session,
            "close_session": self.close_session,
            "execute": self.execute,
            "read_file": self.read_file,
            "write_file": self.write_file,
            "upload": self.upload,
            "close": self.close,
        }
        below = "/{function}/{trajectory}"
        return (
            *(
                ForeignRoute(method="POST", path=f"{root}/{verb}", endpoint=partial(self._serve, endpoint))
                for root in ("", below)
                for verb, endpoint in verbs.items()
            ),
            *(ForeignRoute(method="GET", path=f"{root}/is_alive", endpoint=self.is_alive) for root in ("", below)),
            *(ForeignRoute(method="GET", path=root, endpoint=self.root) for root in ("/", below, f"{below}/")),
        )

    def body(self, fault: Fault, status: int) -> object:
        """Return a fault as its server says it: an exception to raise, or FastAPI's words for what never reached it."""
        if status != RAISED:
            return {"detail": fault.message}
        return transfer(f"{ERRORS}SwerexException", f"{fault.code}: {fault.message}", {"code": fault.code})

    def admitted(self, scope: Scope, segments: Sequence[str]) -> Scope:
        """Return the scope with the trajectory of an API key ``TOKEN.TRAJECTORY`` apart from its token."""
        headers = dict(reversed(scope["headers"]))
        token, dot, trajectory = headers.get(b"x-api-key", b"").rpartition(b".")
        if len(segments) > 1 or not dot:
            return scope
        others = [(name, value) for name, value in scope["headers"] if name != b"x-api-key"]
        return {**scope, "headers": [*others, (b"x-api-key", token)], NAMED: trajectory.decode("latin-1")}

    # --- what is asked

    async def root(self, request: Request) -> Response:
        return answer({"message": "hello world"})

    async def is_alive(self, request: Request) -> Response:
        """Answer at once, as its client waits 0.15 s: the sandbox is made by the first command."""
        self._place(request)
        return answer({"is_alive": True, "message": ""})

    async def create_session(self, request: Request, place: RuntimePlace) -> Response:
        """Begin a bash on a terminal of its own, which stays in the sandbox."""
        body = read_shape(await self.read_object(request), CreateSession)
        fields = {"startup_source": body.startup_source, "startup_timeout": min(body.startup_timeout, CLIENT_S)}
        opening = {"verb": "open", "server": server_text(), **fields}
        record, output, result = await self._session(request, place, body.session, opening)
        match result["end"]:
            case "exists":
                raise RaisedAtClient(
                    f"{ERRORS}SessionExistsError", f"session {body.session} already exists", record=record
                )
            case "not_started":
                text = f"the session did not start ({result.get('why', 'no bash in the sandbox?')}): {output[-2000:]!r}"
                raise RaisedAtClient("pexpect.exceptions.TIMEOUT", text, record=record)
        return answer({"output": output, "session_type": "bash"}, record)

    async def run_in_session(self, request: Request, place: RuntimePlace) -> Response:
        """Type a command, or an interrupt, to a session."""
        value = await self.read_object(request)
        if value.get("action_type") == "bash_interrupt":
            return await self._interrupt(request, place, read_shape(value, BashInterrupt))
        body = read_shape(value, BashAction)
        if body.is_interactive_command and body.is_interactive_quit:
            message = "$.is_interactive_quit: a command is is_interactive_command or is_interactive_quit, not both"
            raise InvalidInput(message, component=self.name, detail={"path": "$.is_interactive_quit"})
        longest_s = max(place.function.timeout_s - SESSION_MARGIN_S, place.function.timeout_s / 2)
        bound_s = min(longest_s, self._client_s - SESSION_MARGIN_S)
        timeout_s = bound_s if body.timeout is None else min(body.timeout, bound_s)
        typed = {**msgspec.to_builtins(body), "verb": "run", "timeout": timeout_s}
        record, output, ended = await self._session(request, place, body.session, typed)
        self._check_end(body, record, output, ended, timeout_s)
        code = ended["exit_code"]
        if body.check == "raise" and code != 0 and not body.is_interactive_command and not body.is_interactive_quit:
            message = f"Command {body.command!r} failed with exit code {code}. Here is the output:\n{output!r}"
            raise RaisedAtClient(f"{ERRORS}NonZeroExitCodeError", prefixed(body.error_msg, message), record=record)
        return self._observed(output, ended, record)

    async def close_session(self, request: Request, place: RuntimePlace) -> Response:
        """End a session."""
        body = read_shape(await self.read_object(request), CloseSession)
        record, _, result = await self._session(request, place, body.session, {"verb": "close"})
        if result["end"] == "missing":
            raise self._no_session(body.session, record)
        return answer({"session_type": "bash"}, record)

    async def execute(self, request: Request, place: RuntimePlace) -> Response:
        """Run a command, as subprocess.run does."""
        body = read_shape(await self.read_object(request), ExecuteCommand)
        words = [body.command] if isinstance(body.command, str) else body.command
        argv = ["/bin/sh", "-c", *words] if body.shell else words
        if not argv:
            raise InvalidInput("$.command: there is none", component=self.name, detail={"path": "$.command"})
        word = secrets.token_hex(WORD_BYTES)
        input = script_input(BOOT, {"argv": argv, "env": body.env, "cwd": body.cwd, "word": word})
        if body.merge_output_streams:
            input["merge"] = True
        timeout_s = None if body.timeout is None else max(body.timeout, 0.0) + START_S
        record = await self._act(request, place, input, timeout_s)
        result = result_object(record)
        if record.reason is Reason.TIMEOUT:
            raise self._timed_out(record, body.timeout, "Timeout ({}s) exceeded while running command")
        self._check(record)
        stdout, stderr = text_of(result, "stdout"), text_of(result, "stderr")
        output = stdout if body.merge_output_streams else stderr
        if result.get("exit_code") == REFUSED and output.startswith(f"{word} "):
            kind, message = orjson.loads(output.removeprefix(f"{word} "))
            raise RaisedAtClient(f"builtins.{kind}", message, record=record)
        self._check_python(record, result)
        code, number = result.get("exit_code"), result.get("signal")
        code = -number if isinstance(number, int) else code
        if body.check and code != 0:
            problem = f"Command {body.command!r} failed with exit code {code}. Stdout:\n{stdout!r}\nStderr:\n{stderr!r}"
            raise RaisedAtClient(f"{ERRORS}NonZeroExitCodeError", prefixed(body.error_msg, problem), record=record)
        return answer({"stdout": stdout, "stderr": stderr, "exit_code": code}, record)

    async def read_file(self, request: Request, place: RuntimePlace) -> Response:
        """Read a text as Path.read_text does."""
        body = read_shape(await self.read_object(request), ReadFile)
        files = await self._files(request, place)
        try:
            path, limit_bytes = placed_path(body.path, files.workdir), self.api.server.file_limit_bytes
            async with files.open(path, limit_bytes=limit_bytes) as file:
                data = b"".join([chunk async for chunk in file.chunks()])
            return answer({"content": decoded(data, body)})
        except (InvalidInput, NotFound) as error:
            raise as_python(error, body.path) from None

    async def write_file(self, request: Request, place: RuntimePlace) -> Response:
        """Write a text as Path.write_text does, its directories too."""
        body = read_shape(await self.read_object(request), WriteFile)
        files = await self._files(request, place)
        try:
            data = body.content.encode("utf-8")
            await files.write(placed_path(body.path, files.workdir), data)
        except UnicodeEncodeError as error:
            raise RaisedAtClient("builtins.UnicodeEncodeError", str(error)) from None
        except (InvalidInput, NotFound) as error:
            raise as_python(error, body.path) from None
        return answer({})

    async def upload(self, request: Request, place: RuntimePlace) -> Response:
        """Take a file, or a tree in a zip; what is in it is looked at nowhere but in the sandbox."""
        kind, _, boundary = request.headers.get("content-type", "").partition("boundary=")
        boundary = boundary.partition(";")[0].strip().strip('"')
        if not kind.startswith(MULTIPART) or not boundary:
            raise InvalidInput(f"the body must be {MULTIPART} with file, target_path and unzip", component=self.name)
        files = await self._files(request, place)
        name = f".swerex-{secrets.token_hex(12)}"
        limit_bytes = self.api.server.file_limit_bytes
        chunks = body_chunks(request, self.api, limit_bytes)
        await files.write(placed_path(name, files.workdir), chunks, mode=0o600)
        try:
            record = await self._act(
                request, place, script_input(UNPACK, {"body": name, "mark": f"--{boundary}"}), None
            )
            self._check(record)
            result = self._end_of(record)
        except Exception:  # refused, withdrawn, ended, or its client went away: nothing has taken it apart
            await self._remove(request, place, (name, f"{name}.part"))
            raise
        if result["end"] == "shape":
            named = orjson.dumps({name: result[name] for name in result if name != "end"}).decode()
            raise InvalidInput(f"the body's parts do not fit; {named}"[:500], component=self.name)
        if result["end"] == "raised":
            raise RaisedAtClient(str(result["class"]), str(result["message"]), record=record)
        return answer({}, record)

    async def close(self, request: Request, place: RuntimePlace) -> Response:
        """End the trajectory with all that is in it, or its sessions only where trajectories are kept."""
        if not self._settings.keep:
            await self.api.engine.end_trajectory(place.trajectory)
        elif self.api.engine.trajectory(place.trajectory) is not None:
            input = script_input(SESSION, {"verb": "close all", "name": place.session()})
            self._check(await self._act(request, place, input, None))
        return answer({})

    # --- what it is made of

    @property
    def _client_s(self) -> float:
        return self.section.client_timeout_s or CLIENT_S

    async def _serve(
        self, endpoint: Callable[[Request, RuntimePlace], Awaitable[Response]], request: Request
    ) -> Response:
        """Answer a request, or again what was answered to the same one; what its client is to raise is an answer."""
        place = self._place(request)
        id = request.headers.get("x-request-id", "")
        key = f"{place.function.name}\n{place.trajectory}"
        known, response = self._remembered.get(key, ("", None))
        if id and id == known and response is not None:
            return response
        try:
            response = await endpoint(request, place)
        except RaisedAtClient as error:
            response = answer(transfer(error.path, str(error), error.extra), error.record, status=RAISED)
        if id and len(response.body) <= REMEMBERED_BYTES:
            self._remembered[key] = (id, response)
            self._remembered.move_to_end(key)
            while len(self._remembered) > REMEMBERED:
                self._remembered.popitem(last=False)
        return response

    def _place(self, request: Request) -> RuntimePlace:
        """Return whose runtime it is; raises InvalidInput where nothing names it, NotFound, Forbidden."""
        headers, bounds = request.headers, self.api
        if (
            headers.get("content-type", "").startswith(MULTIPART)
            and bounds.guard.tokenless
            and "x-api-key" not in headers
        ):
            message = (
                "without tokens a form must come with an X-API-Key, which no web page sends unasked: set any auth_token"
            )
            raise Forbidden(message, component=self.name)
        parts = request.path_params
        trajectory = parts.get("trajectory") or request.scope.get(NAMED)
        if trajectory is None:
            message = (
                "nothing names the trajectory of this runtime: give the API key TOKEN.TRAJECTORY, or "
                "host: http://GATEWAY/swerex/FUNCTION/TRAJECTORY without a port"
            )
            raise InvalidInput(message, component=self.name)
        function = self.function(parts.get("function") or self._settings.function)
        if function.runtime != "exec":
            raise InvalidInput(f"{function.name!r} is no exec function", component=self.name)
        return RuntimePlace(function, serialization.name(trajectory, "trajectory"))

    async def _act(
        self, request: Request, place: RuntimePlace, input: Mapping[str, object], timeout_s: float | None
    ) -> Record:
        """Return an action of the trajectory, ended."""
        if timeout_s is not None:
            timeout_s = min(timeout_s, place.function.timeout_s)
        call = self.call(request, place.function.name, input, timeout_s=timeout_s)
        call = replace(call, trajectory=place.trajectory, key=None)
        return (await self.calls.run(request, [call], self.until_s(CLIENT_S)))[0].record

    async def _remove(self, request: Request, place: RuntimePlace, names: Sequence[str]) -> None:
        """Have files removed by an action of the trajectory, if it still lives; nobody waits for its end."""
        call = self.call(request, place.function.name, {"argv": ["rm", "-f", "--", *names]})
        call = replace(call, trajectory=place.trajectory, key=None, living=True, detached=True)
        try:
            await self.calls.accept(call, self.until_s(CLIENT_S))
        except CodedError as error:
            logger.warning("what an upload left stays", trajectory=place.trajectory, files=names, why=error.message)

    async def _session(
        self, request: Request, place: RuntimePlace, session: str, body: Mapping[str, object]
    ) -> tuple[Record, str, dict[str, object]]:
        """Return the end of a request to a session: its action, what was said, and how it ended."""
        limit = max(place.function.output_limit_bytes - SHAPE_BYTES, SHAPE_BYTES)
        body = {**body, "name": place.session(session or "\0"), "limit": limit}
        if body["verb"] != "open":  # what its server is told goes through untouched, and is read there
            body = {"verb": body["verb"], "name": body["name"], "request": serialization.dumps(body)}
        input = script_input(SESSION, body)
        record = await self._act(request, place, input, None)
        if record.reason is Reason.TIMEOUT:
            raise self._timed_out(record, None, "timeout after {} seconds while running command")
        self._check(record)
        return record, text_of(result_object(record), "stdout"), self._end_of(record)

    def _end_of(self, record: Record) -> dict[str, object]:
        """Return how a script ended, in its own words."""
        stderr = str(result_object(record).get("stderr", ""))
        try:
            result = orjson.loads(stderr)
        except orjson.JSONDecodeError:
            result = None
        if not isinstance(result, dict) or "end" not in result:
            text = f"{record.function}: its sandbox needs python3 (3.8 or newer) and bash for SWE-ReX: {stderr[-2000:]}"
            raise RaisedAtClient(f"{ERRORS}SwerexException", text, record=record)
        return result

    def _check_end(
        self, request: BashAction, record: Record, output: str, ended: Mapping[str, object], timeout_s: float
    ) -> None:
        """Raise what a command's end is to its client, unless it is an observation."""
        match ended["end"]:
            case "done":
                return
            case "missing":
                raise self._no_session(request.session, record)
            case "timeout":
                message = f"timeout after {timeout_s} seconds while running command {request.command!r}"
                if request.timeout is None or request.timeout > timeout_s:
                    message += f" (no command may take longer here: timeout of {record.function}, client_timeout)"
                raise RaisedAtClient(f"{ERRORS}CommandTimeoutError", message, record=record)
            case "no_exit_code":
                raise RaisedAtClient(f"{ERRORS}NoExitCodeError", "timeout while getting exit code", record=record)
            case "syntax":
                fields = {"bash_stdout": ended["stdout"], "bash_stderr": ended["stderr"]}
                message = (
                    f"Error (exit code {ended['exit_code']}) while checking bash command \n{request.command!r}\n"
                    f"---- Stderr ----\n{ended['stderr']}\n---- Stdout ----\n{ended['stdout']}"
                )
                raise RaisedAtClient(f"{ERRORS}BashIncorrectSyntaxError", message, fields, record)
            case "pattern":
                raise RaisedAtClient("re.error", str(ended.get("message")), record=record)
        raise RaisedAtClient(
            f"{ERRORS}SwerexException", f"the session {ended['end']}: {ended.get('message', '')}", record=record
        )

    async def _interrupt(self, request: Request, place: RuntimePlace, body: BashInterrupt) -> Response:
        typed = {**msgspec.to_builtins(body), "verb": "interrupt", "timeout": min(body.timeout, SESSION_MARGIN_S)}
        record, output, ended = await self._session(request, place, body.session, typed)
        if ended["end"] == "uninterrupted":
            raise RaisedAtClient("pexpect.exceptions.TIMEOUT", "Failed to interrupt session", record=record)
        self._check_end(BashAction(command="", session=body.session), record, output, ended, body.timeout)
        return self._observed(output, ended, record)

    def _observed(self, output: str, ended: Mapping[str, object], record: Record) -> Response:
        fields = {name: ended.get(name) for name in ("exit_code", "expect_string")}
        return answer({"output": output, "failure_reason": "", "session_type": "bash", **fields}, record)

    async def _files(self, request: Request, place: RuntimePlace) -> SandboxFiles:
        """Return the files of the trajectory's sandbox, which an action makes that waits its turn."""
        result = self.api.files(place.trajectory)
        if result is None:
            unread = Request(
                request.scope, _silent
            )  # whoever watches a connection takes the body for its caller's signs
            self._check(await self._act(unread, place, {"command": ":"}, None))
            result = self.api.files(place.trajectory)
        if result is None:
            raise NotFound(f"trajectory {place.trajectory!r} has no sandbox any more", component=self.name)
        return result

    def _check(self, record: Record) -> None:
        """Raise for an end that says something of us, and nothing of the command: never a fake exit code."""
        fault = fault_of_end(record)
        if fault is None or (record.reason is Reason.OUT_OF_MEMORY and result_object(record)):
            return
        raise RaisedAtClient(f"{ERRORS}SwerexException", f"{fault.code}: {fault.message}", {"code": fault.code}, record)

    def _check_python(self, record: Record, result: Mapping[str, object]) -> None:
        stderr = text_of(result, "stderr")
        absent = '"python3": executable file not found' in stderr or stderr.startswith("python3: ")
        if result.get("exit_code") in (126, 127) and absent:
            self._end_of(record)

    def _timed_out(self, record: Record, asked_s: float | None, text: str) -> RaisedAtClient:
        function_s = self.api.functions.get(record.function).timeout_s
        bound_s = function_s if asked_s is None else min(asked_s, function_s)
        result = text.format(bound_s)
        if asked_s is None or asked_s > function_s:
            result += f" (the timeout of {record.function})"
        return RaisedAtClient(f"{ERRORS}CommandTimeoutError", result, record=record)

    def _no_session(self, session: str, record: Record) -> RaisedAtClient:
        return RaisedAtClient(f"{ERRORS}SessionDoesNotExistError", f"session {session!r} does not exist", record=record)


async def _silent() -> Message:
    """Wait for ever: of a body that is still to be read nothing may be taken."""
    silence: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await silence
