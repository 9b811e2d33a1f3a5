"""The E2B API: its control plane, and envd of each sandbox, under one address."""

from __future__ import annotations

import asyncio
import binascii
import hmac
import re
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from email import message_from_string
from functools import partial
from typing import Annotated, ClassVar, Literal, TypeVar
from urllib.parse import parse_qsl, unquote

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from gateway import serialization
from gateway.api import BYTES, JSON, Api, placed_path
from gateway.auth import Role
from gateway.config.schema import E2bFacade
from gateway.errors import FaultKind
from gateway.facades.commands import CommandSpec
from gateway.facades.e2b import rpc
from gateway.facades.e2b.files import SCRIPTS, entries_of, script_input
from gateway.facades.e2b.rpc import COMPONENT, Emit, EventStream, RpcFailed
from gateway.facades.e2b.sandboxes import (
    E2bRecord,
    E2bSandbox,
    SandboxCommand,
    SandboxManager,
    SandboxSource,
    new_id,
)
from gateway.facades.facade import (
    AUTHORIZATION,
    STATUSES,
    CallFailed,
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
from gateway.http.endpoints import ROLE
from gateway.http.messages import body_chunks, disconnected, read_body, read_headers, while_connected
from gateway.http.streaming import FileResponse
from gateway.invocations.invocations import InvocationRequest
from manager.errors import CodedError, Forbidden, InvalidInput, NotFound, Reason, TooLarge, Unsupported
from runtimes.sandbox.files import SandboxFiles
from tangram.types import LEASE_MAX_S, CallHeaders, FileReadQuery, SandboxChoice

T = TypeVar("T", bound=Struct)
Timeout = Annotated[int, Meta(ge=0, le=int(LEASE_MAX_S))]
Text = Annotated[str, Meta(max_length=32768)]
Texts = Annotated[dict[Annotated[str, Meta(max_length=1024)], Text], Meta(max_length=256)]

#: The envd whose protocol this is: what the SDK asks for depends on it.
ENVD_VERSION = "0.6.2"
#: The template that the SDK names where its user names none.
BASE = "base"
#: A template that a snapshot of ours is: the function, and the id.
SNAPSHOT = re.compile(r"([^:]+):([0-9a-f]{12})")
#: Seconds for which a sandbox lives unless its client says, and for which the SDK waits for an answer.
TIMEOUT_S, CLIENT_S = 300, 60.0
#: Seconds of silence after which a stream shows that it lives, unless its client says.
KEEPALIVE_S = 50
#: First segments of what envd answers, and where the scope has the sandbox and the user that such a request names.
ENVD = frozenset({"process.Process", "filesystem.Filesystem", "files", "health"})
SANDBOX, USER = "e2b.sandbox", "e2b.user"
SANDBOX_ID, ACCESS_TOKEN = b"e2b-sandbox-id", b"x-access-token"
#: The port of envd: no other is served.
ENVD_PORT = "49983"

#: Parts of the API that this facade has not: method and path, and what is told of it.
REFUSED: Mapping[str, str] = {
    "GET /sandboxes/{id}/metrics": "metrics: GET /v1/resources and /metrics of the gateway have them",
    "GET /sandboxes/{id}/logs": "logs: the gateway keeps those of each command, GET /v1/invocations/{id}/logs",
    "GET /v2/sandboxes/{id}/logs": "logs: the gateway keeps those of each command, GET /v1/invocations/{id}/logs",
    "PUT /sandboxes/{id}/network": "network: the function's sandbox.network says it",
    "GET /snapshots": "a list of snapshots: GET /v1/snapshots of the gateway has it",
    "POST /filesystem.Filesystem/WatchDir": "watch_dir",
    "POST /filesystem.Filesystem/CreateWatcher": "watch_dir",
    "POST /filesystem.Filesystem/GetWatcherEvents": "watch_dir",
    "POST /filesystem.Filesystem/RemoveWatcher": "watch_dir",
    "POST /templates": "building templates: use an image, or a function of the configuration",
    "POST /v2/templates": "building templates: use an image, or a function of the configuration",
    "POST /v3/templates": "building templates: use an image, or a function of the configuration",
    "GET /volumes": "volumes",
    "POST /volumes": "volumes",
    "GET /secrets": "secrets",
    "POST /secrets": "secrets",
}


class NewSandbox(Struct, rename="camel"):
    """Make a sandbox."""

    template_id: Annotated[str, Meta(max_length=1024)] = msgspec.field(name="templateID")
    timeout: Timeout = TIMEOUT_S
    metadata: Texts = {}
    env_vars: Texts = {}
    auto_pause: bool = False
    auto_pause_memory: bool = False
    auto_resume: dict[str, object] | None = None
    allow_internet_access: bool | None = msgspec.field(default=None, name="allow_internet_access")
    network: dict[str, object] | None = None
    iam: object = None
    mcp: object = None
    volume_mounts: list[object] = []


class SandboxLife(Struct):
    """How long a sandbox lives from now on, and whether its memory matters."""

    timeout: Timeout = TIMEOUT_S
    memory: bool | None = None


class SandboxForks(Struct):
    """How many sandboxes begin with the files of one."""

    timeout: Timeout = TIMEOUT_S
    count: Annotated[int, Meta(ge=1, le=64)] = 1


class SandboxCopy(Struct):
    """What a pause or a snapshot keeps."""

    memory: bool | None = None
    name: str | None = None


class ProcessConfig(Struct):
    """What is run."""

    cmd: str
    args: list[str] = []
    envs: dict[str, str] = {}
    cwd: str = ""


class PtySize(Struct):
    """How large a terminal is."""

    cols: Annotated[int, Meta(ge=0, le=1000)] = 80
    rows: Annotated[int, Meta(ge=0, le=1000)] = 24


class Pty(Struct):
    """A terminal."""

    size: PtySize = msgspec.field(default_factory=PtySize)


class StartRequest(Struct):
    """Run a program."""

    process: ProcessConfig
    pty: Pty | None = None
    tag: Text | None = None
    stdin: bool = False


class ProcessSelector(Struct):
    """Which program."""

    pid: int | None = None
    tag: str | None = None


class ProcessData(Struct):
    """What is typed to it."""

    stdin: bytes | None = None
    pty: bytes | None = None


class ProcessRequest(Struct):
    """Something asked of a program that runs."""

    process: ProcessSelector = msgspec.field(default_factory=ProcessSelector)
    input: ProcessData = msgspec.field(default_factory=ProcessData)
    signal: Literal["SIGNAL_UNSPECIFIED", "SIGNAL_SIGTERM", "SIGNAL_SIGKILL"] = "SIGNAL_UNSPECIFIED"
    pty: Pty | None = None


class StreamedInput(Struct):
    """One message of an input stream: whom it is for, or some of it."""

    start: ProcessRequest | None = None
    data: ProcessRequest | None = None


@dataclass(frozen=True, slots=True)
class EnvdCall:
    """A request to envd of one sandbox."""

    request: Request
    sandbox: E2bSandbox
    files: SandboxFiles
    #: Whom it is done as; empty for the sandbox's own user.
    user: str

    @property
    def timeout_s(self) -> float | None:
        """What the client waits for its end; None for ever."""
        return _number(self.request, "connect-timeout-ms", 0) / 1000 or None


class E2b(Facade):
    """See the module."""

    name: ClassVar[str] = "e2b"
    prefix: ClassVar[str] = "e2b"
    statuses: ClassVar[Mapping[FaultKind, int]] = {**STATUSES, FaultKind.INPUT: 400}
    #: A form comes with a header of envd's own, which no web page sends unasked.
    media_types: ClassVar[frozenset[str]] = frozenset({JSON, rpc.STREAM, BYTES, "multipart/form-data"})

    def __init__(self, api: Api, calls: ForeignCalls, section: E2bFacade) -> None:
        super().__init__(api, calls, section)
        self._settings = section
        self._sandboxes = SandboxManager(api, calls)

    async def stop(self) -> None:
        await self._sandboxes.close()

    def routes(self) -> Sequence[ForeignRoute]:
        one = "/sandboxes/{id}"
        listed = ("metadata", "state", "startedAfter", "template", "order", "limit", "nextToken")
        control = (
            ForeignRoute(method="POST", path="/v2/sandboxes", endpoint=self.create),
            ForeignRoute(method="POST", path="/sandboxes", endpoint=self.create),
            ForeignRoute(method="GET", path="/v2/sandboxes", endpoint=self.list, query=listed),
            ForeignRoute(method="GET", path=one, endpoint=self.show),
            ForeignRoute(method="DELETE", path=one, endpoint=self.kill),
            ForeignRoute(method="POST", path=f"{one}/timeout", endpoint=self.set_timeout),
            ForeignRoute(method="POST", path=f"{one}/pause", endpoint=self.pause),
            ForeignRoute(method="POST", path=f"{one}/connect", endpoint=self.connect),
            ForeignRoute(method="POST", path=f"/v2{one}/connect", endpoint=self.connect),
            ForeignRoute(method="POST", path=f"{one}/snapshots", endpoint=self.snapshot),
            ForeignRoute(method="POST", path=f"{one}/fork", endpoint=self.fork),
            ForeignRoute(method="DELETE", path="/templates/{id}", endpoint=self.remove_snapshot),
        )
        envd: dict[str, Callable[[EnvdCall], Awaitable[object]]] = {
            "process.Process/List": self.processes, "process.Process/Start": self.start,
            "process.Process/Connect": self.attach, "process.Process/SendInput": self.send_input,
            "process.Process/StreamInput": self.stream_input, "process.Process/CloseStdin": self.close_stdin,
            "process.Process/SendSignal": self.send_signal, "process.Process/Update": self.update,
            **{f"filesystem.Filesystem/{verb}": partial(self.on_files, verb) for verb in SCRIPTS},
        }  # fmt: skip
        calls = [ForeignRoute(method="POST", path=f"/{path}", endpoint=self._rpc(each)) for path, each in envd.items()]
        files = (
            ForeignRoute(method="GET", path="/health", endpoint=self._envd(self.health)),
            ForeignRoute(method="GET", path="/files", endpoint=self._envd(self.read), query=("path", "username")),
            ForeignRoute(method="POST", path="/files", endpoint=self._envd(self.write), query=("path", "username")),
        )
        refused = [
            ForeignRoute(method=route.split(" ")[0], path=route.split(" ")[1], endpoint=_refusing(words))
            for route, words in REFUSED.items()
        ]
        return (*control, *calls, *files, *refused)

    def body(self, fault: Fault, status: int) -> object:
        return {"code": status, "message": fault.message}

    def status(self, fault: Fault) -> int:
        return 429 if fault.code == "quota_exceeded" else super().status(fault)

    def admitted(self, scope: Scope, segments: Sequence[str]) -> Scope:
        """Let in who has the access token of the sandbox that is asked, and take its user out of the way."""
        if not segments or segments[0] not in ENVD:
            return scope
        headers = dict(reversed(scope["headers"]))
        kind, _, value = headers.get(AUTHORIZATION, b"").partition(b" ")
        id = headers.get(SANDBOX_ID, b"").decode("latin-1")
        found: dict[str, object] = {SANDBOX: id, USER: ""}
        if kind.lower() == b"basic":
            with suppress(binascii.Error):
                found[USER] = b64decode(value).decode("utf-8", "replace").partition(":")[0]
            scope = {**scope, "headers": [each for each in scope["headers"] if each[0] != AUTHORIZATION]}
        wanted = self._access_token(id)
        if wanted is not None and hmac.compare_digest(headers.get(ACCESS_TOKEN, b""), wanted.encode()):
            found[ROLE] = Role.INVOKE
        return {**scope, **found}

    # --- the control plane

    async def create(self, request: Request) -> Response:
        """Make a sandbox of a template: a function, an image that the facade's function allows, or a snapshot."""
        body = await self._shape(request, NewSandbox)
        for name, is_asked in {
            "mcp": body.mcp, "iam": body.iam, "volumeMounts": body.volume_mounts, "network": body.network,
            "autoPauseMemory": body.auto_pause_memory, "autoResume": (body.auto_resume or {}).get("enabled"),
        }.items():  # fmt: skip
            if is_asked:
                raise Unsupported(f"{name}: is not done by this facade; leave it out", component=COMPONENT)
        source, headers = self._source(body), read_headers(request, CallHeaders)
        record = self._record(body, source, serialization.name(headers.task or "default", "X-Task"), headers.key)
        work = self._sandboxes.create(record, source, self._within_s)
        sandbox = await while_connected(work, disconnected(request.receive), self._sandboxes.kill)
        return answer(self._shown(sandbox), status=201)

    async def list(self, request: Request) -> Response:
        """Show sandboxes, those that began last first."""
        query = request.query_params
        wanted = {unquote(name): unquote(value) for name, value in parse_qsl(query.get("metadata", ""))}
        states = {each for text in query.getlist("state") for each in text.split(",")}
        limit = query.get("limit", "100")
        if re.fullmatch(r"[0-9]{1,4}", limit) is None or not 1 <= int(limit) <= 1000:
            raise InvalidInput("limit: 1 to 1000", component=COMPONENT, detail={"path": "limit"})
        after_s = _instant(query["startedAfter"]) if "startedAfter" in query else 0.0
        found = [
            each
            for each in await self._sandboxes.all()
            if wanted.items() <= each.record.metadata.items()
            and (not states or _state(each) in states)
            and query.get("template", each.record.template) == each.record.template
            and each.record.started_s >= after_s
        ]
        if query.get("order", "desc") == "desc":
            found.reverse()
        ids = [each.record.id for each in found]
        begin = ids.index(query["nextToken"]) + 1 if query.get("nextToken") in ids else 0
        page = found[begin : begin + int(limit)]
        response = answer([self._detail(each) for each in page])
        if begin + len(page) < len(found):
            response.headers["X-Next-Token"] = page[-1].record.id
        return response

    async def show(self, request: Request) -> Response:
        """Show a sandbox."""
        return answer(self._detail(await self._named(request)))

    async def kill(self, request: Request) -> Response:
        """End a sandbox with all that is in it."""
        await self._sandboxes.kill(await self._named(request))
        return Response(status_code=204)

    async def set_timeout(self, request: Request) -> Response:
        """Let a sandbox live for so long from now on."""
        body = await self._shape(request, SandboxLife)
        await self._sandboxes.set_timeout(await self._named(request), body.timeout)
        return Response(status_code=204)

    async def pause(self, request: Request) -> Response:
        """Keep the files of a sandbox, and let go of the rest."""
        _require_no_memory(await self._shape(request, SandboxCopy))
        await self._sandboxes.pause(await self._named(request))
        return Response(status_code=204)

    async def connect(self, request: Request) -> Response:
        """Let a sandbox live on, again if it was paused."""
        body = await self._shape(request, SandboxLife)
        sandbox = await self._named(request)
        was_paused = _state(sandbox) == "paused"
        await self._sandboxes.resume(sandbox, body.timeout, self._within_s)
        return answer(self._shown(sandbox), status=201 if was_paused else 200)

    async def snapshot(self, request: Request) -> Response:
        """Keep the files of a sandbox as a template."""
        body = await self._shape(request, SandboxCopy)
        _require_no_memory(body)
        if body.name:
            raise Unsupported("name: snapshots have no names here; leave it out", component=COMPONENT)
        return answer(
            {"snapshotID": await self._sandboxes.snapshot(await self._named(request)), "names": []}, status=201
        )

    async def fork(self, request: Request) -> Response:
        """Make sandboxes that begin with the files of one."""
        body = await self._shape(request, SandboxForks)
        parent = await self._named(request)
        template = await self._sandboxes.snapshot(parent)
        made = await asyncio.gather(*(self._forked(parent.record, template, body) for _ in range(body.count)))
        return answer(made, status=201)

    async def remove_snapshot(self, request: Request) -> Response:
        """Remove a template that is a snapshot."""
        found = SNAPSHOT.fullmatch(request.path_params["id"])
        if found is None:
            raise NotFound("the template is no snapshot, and others are of the configuration", component=COMPONENT)
        await self.api.remove_snapshot(found[2])
        return Response(status_code=204)

    # --- envd: programs

    async def processes(self, call: EnvdCall) -> object:
        """Show the programs that run."""
        shown = []
        for command in call.sandbox.commands.values():
            cmd, *args = command.spec.argv
            config: dict[str, object] = {"cmd": cmd, "args": args, "envs": dict(command.spec.env)}
            config |= {"cwd": command.spec.cwd} if command.spec.cwd else {}
            shown.append({"config": config, "pid": command.pid} | ({"tag": command.tag} if command.tag else {}))
        return {"processes": shown}

    async def start(self, call: EnvdCall) -> Response:
        """Run a program; what it says, and how it ends, is the answer."""
        body = read_shape(await self._one_message(call.request), StartRequest)
        size = body.pty.size if body.pty is not None else PtySize()
        spec = CommandSpec(
            argv=(body.process.cmd, *body.process.args), cwd=body.process.cwd, user=call.user, rows=size.rows,
            env=tuple({**call.sandbox.record.envs, **body.process.envs}.items()), columns=size.cols,
            tty=body.pty is not None, stdin=body.stdin or body.pty is not None,
        )  # fmt: skip
        begun = self._sandboxes.begin(call.sandbox, spec, body.tag, call.timeout_s)
        return self._stream(call, begun, late=False)

    async def attach(self, call: EnvdCall) -> Response:
        """Hear what a program says from now on."""
        body = read_shape(await self._one_message(call.request), ProcessRequest)
        command = _selected(call.sandbox, body.process)

        async def found() -> SandboxCommand:
            return command

        return self._stream(call, found(), late=True)

    async def send_input(self, call: EnvdCall) -> object:
        """Type to a program."""
        body = read_shape(await self.read_object(call.request), ProcessRequest)
        typing = _type(_selected(call.sandbox, body.process), body.input)
        await while_connected(typing, disconnected(call.request.receive))
        return {}

    async def stream_input(self, call: EnvdCall) -> Response:
        """Type to a program as the input comes."""
        chunks, command = body_chunks(call.request, self.api, self.api.server.file_limit_bytes), None
        async for message in rpc.messages(chunks, self.api.server.body_limit_bytes):
            body = read_shape(serialization.loads_object(message), StreamedInput)
            if body.start is not None:
                command = _selected(call.sandbox, body.start.process)
            elif body.data is not None:
                if command is None:
                    raise InvalidInput("the first message must say which process is meant", component=COMPONENT)
                await _type(command, body.data.input)
        return Response(rpc.enveloped({}) + rpc.enveloped({}, rpc.END), media_type=rpc.STREAM)

    async def close_stdin(self, call: EnvdCall) -> object:
        """Let a program find the end of its input."""
        body = read_shape(await self.read_object(call.request), ProcessRequest)
        await _selected(call.sandbox, body.process).end_input()
        return {}

    async def send_signal(self, call: EnvdCall) -> object:
        """End a program, or ask it to end."""
        body = read_shape(await self.read_object(call.request), ProcessRequest)
        command = _selected(call.sandbox, body.process)
        if body.signal == "SIGNAL_SIGTERM":
            await command.signal("TERM")
        elif body.signal == "SIGNAL_SIGKILL":
            await command.cancel("it was killed")
        else:
            raise InvalidInput("signal: SIGNAL_SIGTERM or SIGNAL_SIGKILL", component=COMPONENT)
        return {}

    async def update(self, call: EnvdCall) -> object:
        """Tell a program's terminal how large it is."""
        body = read_shape(await self.read_object(call.request), ProcessRequest)
        if body.pty is not None:
            await _selected(call.sandbox, body.process).resize(body.pty.size.rows or 24, body.pty.size.cols or 80)
        return {}

    # --- envd: files

    async def on_files(self, verb: str, call: EnvdCall) -> object:
        """Show, make, move or remove files."""
        fields, workdir = await self.read_object(call.request), call.files.workdir
        input, word = script_input(verb, fields, workdir, call.user)
        record = call.sandbox.record
        wanted = InvocationRequest(
            function=record.function, input=input, body=serialization.dumps(input), task=record.task,
            trajectory=record.id, living=True, parent=await call.sandbox.neighbour(),
        )  # fmt: skip
        ended = (await self.calls.run(call.request, [wanted], self.until_s(call.timeout_s or CLIENT_S)))[0].record
        if (fault := fault_of_end(ended)) is not None:
            raise CallFailed(fault)
        result = result_of(ended)
        path = str(fields.get("path") or fields.get("source"))
        entries = entries_of(result if isinstance(result, dict) else {}, word, workdir, path)
        if verb == "ListDir":
            return {"entries": entries}
        return {"entry": entries[0]} if entries else {}

    async def read(self, call: EnvdCall) -> Response:
        """Send a file."""
        path = placed_path(_required(call.request, "path"), call.files.workdir)
        async with AsyncExitStack() as opening:
            file = await opening.enter_async_context(
                self.api.read_file(call.files, path, FileReadQuery(user=call.user or None))
            )
            return FileResponse(file.chunks(), opening.pop_all(), size_bytes=file.size_bytes)

    async def write(self, call: EnvdCall) -> Response:
        """Take a file as it is, or files in a form."""
        request, workdir = call.request, call.files.workdir
        headers = request.headers
        if headers.get("content-encoding", "identity") != "identity":
            raise Unsupported("gzip: send the file as it is", component=COMPONENT)
        if any(name.startswith("x-metadata-") for name in headers):
            raise Unsupported("metadata of files: leave it out", component=COMPONENT)
        kind, _, _ = headers.get("content-type", "").partition(";")
        if kind == BYTES:
            path = placed_path(_required(request, "path"), workdir)
            data = body_chunks(request, self.api, self.api.server.file_limit_bytes)
            await call.files.write(path, data, user=call.user)
            return answer([_written_shape(path)])
        parts = _parts(headers.get("content-type", ""), await read_body(request, self.api))
        named = request.query_params.get("path")
        if named is not None and len(parts) != 1:
            raise InvalidInput("path: names one file, and the form has not one", component=COMPONENT)
        paths = [placed_path(named or name, workdir) for name, _ in parts]
        for path, (_, part) in zip(paths, parts, strict=True):
            await call.files.write(path, part, user=call.user)
        return answer([_written_shape(path) for path in paths])

    async def health(self, call: EnvdCall) -> Response:
        """Say that the sandbox lives."""
        return Response(status_code=204)

    # --- what it is made of

    @property
    def _within_s(self) -> float:
        return (self.section.client_timeout_s or CLIENT_S) - 1.0

    def _access_token(self, id: str) -> str | None:
        """Return what proves that its bearer may use one sandbox; None where everybody may."""
        return self.api.guard.capability(f"e2b sandbox {id}")

    async def _shape(self, request: Request, kind: type[T]) -> T:
        if not request.headers.get("content-type", JSON).startswith(JSON):
            raise InvalidInput(f"the body must be {JSON}", component=COMPONENT)
        body = await read_body(request, self.api)
        return read_shape(serialization.loads_object(body) if body else {}, kind)

    async def _named(self, request: Request) -> E2bSandbox:
        return await self._sandboxes.find(request.path_params["id"])

    def _source(self, body: NewSandbox) -> SandboxSource:
        """Return what a template means; raises NotFound, InvalidInput."""
        template, own = body.template_id, self._settings.function
        network: Literal["none"] | None = "none" if body.allow_internet_access is False else None
        snapshot = SNAPSHOT.fullmatch(template)
        known = {each.name for each in self.api.functions.all()}
        if snapshot is not None and snapshot[1] in known:
            return SandboxSource(function=snapshot[1], snapshot=snapshot[2])
        name = own if template == BASE else template
        image = None if name in known else template
        function = self.function(own if image else name)
        if function.runtime != "exec":
            raise InvalidInput(f"template {template!r} is no exec function", component=COMPONENT)
        choice = SandboxChoice(image=image, network=network) if image or network else None
        return SandboxSource(function=function.name, choice=choice)

    def _record(self, body: NewSandbox, source: SandboxSource, task: str, key: str | None) -> E2bRecord:
        now_s = self.api.wall()
        return E2bRecord(
            id=new_id(key), function=source.function, task=task, template=body.template_id, metadata=body.metadata,
            envs=body.env_vars, started_s=now_s, end_s=now_s + body.timeout, auto_pause=body.auto_pause,
        )  # fmt: skip

    async def _forked(self, parent: E2bRecord, template: str, body: SandboxForks) -> object:
        """Return one fork as it is told, or why it could not be made."""
        wanted = NewSandbox(template, body.timeout, dict(parent.metadata), dict(parent.envs), parent.auto_pause)
        source = self._source(wanted)
        record = self._record(wanted, source, parent.task, None)
        record.snapshot = source.snapshot or ""  # which goes with the last of them
        try:
            made = await self._sandboxes.create(record, source, self._within_s)
        except CodedError as error:
            fault = fault_of(error)
            return {"error": self.body(fault, self.status(fault))}
        return {"sandbox": self._shown(made)}

    def _shown(self, sandbox: E2bSandbox) -> dict[str, object]:
        record, token = sandbox.record, self._access_token(sandbox.record.id)
        shown: dict[str, object] = {"sandboxID": record.id, "templateID": record.template, "clientID": "tangram"}
        return {**shown, "envdVersion": ENVD_VERSION} | ({} if token is None else {"envdAccessToken": token})

    def _detail(self, sandbox: E2bSandbox) -> dict[str, object]:
        record = sandbox.record
        living = self.api.engine.trajectory(record.id) or {}
        function = next((each for each in self.api.functions.all() if each.name == record.function), None)
        cores = None if function is None else function.cost.get("cpu")
        disk_bytes = 0 if function is None or function.sandbox is None else function.sandbox.disk_bytes
        return {
            **self._shown(sandbox),
            "alias": record.function,
            "startedAt": serialization.instant(record.started_s),
            "endAt": serialization.instant(record.end_s),
            "state": _state(sandbox),
            "cpuCount": 0 if cores is None else cores.minimum,
            "memoryMB": int(str(living.get("memory_bytes", 0))) // 2**20,
            "diskSizeMB": disk_bytes // 2**20,
            "metadata": record.metadata,
        }

    def _envd(self, endpoint: Callable[[EnvdCall], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of a request to envd; of a sandbox that is not there it is told as E2B's proxy does."""

        async def served(request: Request) -> Response:
            try:
                return await endpoint(await self._call(request))
            except RpcFailed as failed:
                return answer({"code": failed.status, "message": str(failed)}, status=failed.status)
            except TooLarge as error:
                if error.component != "sandbox":
                    raise
                return answer({"code": 507, "message": error.message}, status=507)
            except CodedError as error:
                if "file_error" not in error.detail or fault_of(error).kind is FaultKind.NOT_FOUND:
                    raise
                return answer({"code": 400, "message": error.message}, status=400)

        return served

    def _rpc(self, endpoint: Callable[[EnvdCall], Awaitable[object]]) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of a call of envd: its failures are Connect's."""

        async def served(request: Request) -> Response:
            try:
                result = await endpoint(await self._call(request))
            except rpc.FAILURES as error:
                return rpc.error_response(rpc.as_failed(error))
            return result if isinstance(result, Response) else answer(result)

        return served

    async def _call(self, request: Request) -> EnvdCall:
        """Return a request with its sandbox; raises RpcFailed for one that does not live, Forbidden, Unsupported."""
        id, port = str(request.scope[SANDBOX]), request.headers.get("e2b-sandbox-port", ENVD_PORT)
        if not id:
            raise Forbidden("a request to a sandbox must name it, by the header E2b-Sandbox-Id", component=COMPONENT)
        if port != ENVD_PORT:
            raise Unsupported(f"port {port[:16]}: open it by POST /v1/trajectories/{{id}}/ports", component=COMPONENT)
        gone = RpcFailed("unavailable", f"The sandbox {id[:64]} was not found", 502)
        try:
            sandbox = await self._sandboxes.find(id)
        except NotFound:
            raise gone from None
        if sandbox.record.paused:
            raise gone
        files, here = self.api.files(id), self.api.environments.get(id)
        if files is None or (here is not None and not here.alive):
            if not sandbox.lock.locked():  # it was lost, and what comes next would be empty
                await self._sandboxes.kill(sandbox)
            raise gone
        user = request.query_params.get("username") or str(request.scope.get(USER, ""))
        return EnvdCall(request, sandbox, files, user)

    async def _one_message(self, request: Request) -> dict[str, object]:
        """Return the only message of a call whose answer is a stream; raises InvalidInput, TooLarge."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != rpc.STREAM:
            raise InvalidInput(f"the body must be {rpc.STREAM}", component=COMPONENT)
        limit_bytes = self.api.server.body_limit_bytes
        chunks = body_chunks(request, self.api, limit_bytes, "server.body_limit")
        found = [each async for each in rpc.messages(chunks, limit_bytes)]
        if len(found) != 1:
            raise InvalidInput(f"the stream has {len(found)} messages, and needs one", component=COMPONENT)
        return serialization.loads_object(found[0])

    def _stream(self, call: EnvdCall, begun: Awaitable[SandboxCommand], *, late: bool) -> Response:
        keepalive_s = max(1, _number(call.request, "keepalive-ping-interval", KEEPALIVE_S))
        produce = partial(_watched, begun, late=late)
        return EventStream(produce, self.api.server.stall_s, keepalive_s, {"event": {"keepalive": {}}})


async def _watched(begun: Awaitable[SandboxCommand], emit: Emit, *, late: bool) -> None:
    """Tell what a command says, and how it ends; raises what it is to its client if it does not end by itself."""
    command = await begun
    await command.opened.wait()
    if not command.ended.is_set() or (command.error is None and command.reason is not Reason.INVALID_INPUT):
        await emit({"event": {"start": {"pid": command.pid}}})

        async def tell(stream: str, data: bytes) -> None:
            name = "pty" if command.spec.tty else stream
            await emit({"event": {"data": {name: b64encode(data).decode()}}})

        await command.follow(tell, late=late)
    await command.ended.wait()
    if command.expired_s is not None:
        raise RpcFailed("deadline_exceeded", f"the command ran longer than {command.expired_s:g} s")
    if command.error is not None:
        raise command.error
    if command.reason is Reason.INVALID_INPUT:
        raise InvalidInput(command.end_message.strip(), component=COMPONENT)
    if command.reason is Reason.TIMEOUT:
        raise RpcFailed("deadline_exceeded", command.end_message.strip())
    code = 0 if command.exit_code is None else command.exit_code
    end: dict[str, object] = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
    await emit({"event": {"end": end | ({"error": f"exit status {code}"} if code else {})}})


def _selected(sandbox: E2bSandbox, selector: ProcessSelector) -> SandboxCommand:
    """Return the command that is meant; raises NotFound."""
    for command in sandbox.commands.values():
        if command.pid == selector.pid or (selector.tag is not None and command.tag == selector.tag):
            return command
    raise NotFound(f"process {selector.pid or selector.tag} not found", component=COMPONENT)


async def _type(command: SandboxCommand, data: ProcessData) -> None:
    """Type to a command; raises InvalidInput for one that reads nothing."""
    typed = data.pty if data.pty is not None else data.stdin or b""
    if not command.spec.stdin:
        raise InvalidInput("the command has no standard input: start it with stdin", component=COMPONENT)
    await command.type(typed)


def _number(request: Request, header: str, otherwise: int) -> int:
    """Return the whole number of a header, bounded to what a clock takes."""
    text = request.headers.get(header, "")
    return int(text) if re.fullmatch(r"[0-9]{1,10}", text) else otherwise


def _state(sandbox: E2bSandbox) -> str:
    return "paused" if sandbox.record.paused else "running"


def _instant(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise InvalidInput(f"startedAfter: {text[:64]!r} is no instant", component=COMPONENT) from None


def _required(request: Request, name: str) -> str:
    value = request.query_params.get(name)
    if not value:
        raise InvalidInput(f"{name}: is missing", component=COMPONENT)
    return value


def _require_no_memory(body: SandboxCopy) -> None:
    if body.memory:
        raise Unsupported("memory: files are kept, and no processes; mode='filesystem' says so", component=COMPONENT)


def _refusing(words: str) -> Callable[[Request], Awaitable[Response]]:
    async def refused(request: Request) -> Response:
        raise Unsupported(f"{words}: not done by this facade", component=COMPONENT)

    return refused


def _parts(content_type: str, body: bytes) -> list[tuple[str, bytes]]:
    """Return the files of a form, each with its name; raises InvalidInput."""
    boundary = message_from_string(f"Content-Type: {content_type}").get_boundary()
    pieces = (b"\r\n" + body).split(b"\r\n--" + (boundary or "").encode("latin-1"))
    if boundary is None or len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        raise InvalidInput("the body must be a file, or a whole form of files", component=COMPONENT)
    parts = []
    for piece in pieces[1:-1]:
        head, found, data = piece.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        name = message_from_string(head.decode("latin-1")).get_filename()
        if not found or not name:
            raise InvalidInput("a part of the form is no file", component=COMPONENT)
        parts.append((name.encode("latin-1", "replace").decode("utf-8", "replace"), data))
    return parts


def _written_shape(path: str) -> dict[str, object]:
    return {"name": path.rpartition("/")[2], "path": path, "type": "file"}
