"""A scripted gateway for tests of callers."""

from __future__ import annotations

import inspect
import io
import posixpath
import re
import tarfile
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any
from urllib.parse import unquote

import httpx
import msgspec

from tangram import types

#: What answers one request; it may raise an `httpx.TransportError`.
Answer = Callable[[httpx.Request], httpx.Response]


def refusal(status: int, code: str, detail: str = "as scripted", *, retry_after_s: float | None = None) -> Answer:
    """Return what refuses a request with this HTTP status and error code, for example 429 and ``quota_exceeded``."""
    return lambda request: problem_answer(status, code, detail, retry_after_s=retry_after_s)


def broken(kind: type[httpx.TransportError] = httpx.ReadError, message: str = "broken") -> Answer:
    """Return what breaks the connection: httpx.ConnectError before the request was sent, httpx.ReadError after it."""

    def answer(request: httpx.Request) -> httpx.Response:
        raise kind(message, request=request)

    return answer


def json_answer(value: object, status: int = 200) -> httpx.Response:
    """Return a response with a JSON body."""
    headers = {"Content-Type": "application/json"}
    return httpx.Response(status, headers=headers, content=msgspec.json.encode(value))


def problem_answer(status: int, code: str, detail: str, *, retry_after_s: float | None = None) -> httpx.Response:
    """Return a refusal as the gateway writes it."""
    problem = types.Problem(
        type=f"urn:tangram:error:{code}",
        title=code.replace("_", " ").capitalize(),
        status=status,
        code=code,
        detail=detail,
        component="gateway",
        retry_after_s=types.UNSET if retry_after_s is None else retry_after_s,
    )
    return json_answer(problem, status)


#: The beginning of a scripted gateway's time; nothing in it takes any.
BEGINNING = datetime(2026, 1, 1, tzinfo=timezone.utc)
_STATES: Mapping[types.Reason, types.State] = {
    "timeout": "timed_out",
    "queue_timeout": "timed_out",
    "cancelled": "cancelled",
    "environment_lost": "lost",
    "node_lost": "lost",
    "gateway_restart": "lost",
}


class ScriptedFailure(Exception):
    """Raised by a script: the invocation ends with this reason, message and partial result."""

    def __init__(
        self, reason: types.Reason = "handler_error", message: str = "as scripted", result: object = None
    ) -> None:
        super().__init__(message)
        self.reason: types.Reason = reason
        self.message = message
        self.result = result


@dataclass(eq=False, slots=True, kw_only=True)
class ScriptedCall:
    """One invocation, as its function's script sees it."""

    function: str
    input: Mapping[str, Any]
    task: str = "default"
    trajectory: str | None = None
    key: str | None = None
    #: The headers of its request, or none of a call of a batch.
    headers: Mapping[str, str] = field(default_factory=dict)
    record: types.Invocation
    lines: list[types.LogLine] = field(default_factory=list)

    def log(self, text: str, stream: str = "stdout") -> None:
        """Write to the invocation's log."""
        self.lines.append(types.LogLine(offset=len(self.lines), time=BEGINNING, stream=stream, data=text))

    def end(self, result: object, failure: ScriptedFailure | None = None) -> None:
        """Take the end of the script."""
        reason = None if failure is None else failure.reason
        self.record = msgspec.structs.replace(
            self.record,
            state="succeeded" if reason is None else _STATES.get(reason, "failed"),
            reason=reason,
            message="" if failure is None else failure.message,
            component="" if failure is None else "script",
            started_at=BEGINNING,
            ended_at=BEGINNING,
            overhead_ms=0.0,
            execution_ms=0.0,
            act_ms=0.0,
            result=msgspec.to_builtins(result) if failure is None else failure.result,
        )


#: What a function does with a call: its result, or the ScriptedFailure that it raises. For an AsyncClient it may be
#: a coroutine function. A value that is not callable is the result of every call.
Script = Callable[[ScriptedCall], object | Awaitable[object]]


def queued(
    number: int, function: str, input: Mapping[str, Any], *, mode: str, task: str, trajectory: str | None
) -> types.Invocation:
    """Return the record of an invocation that was just accepted."""
    body: dict[str, object] = {
        "id": f"scripted-{number}",
        "function": function,
        "revision": "scripted",
        "task": task,
        "trajectory": trajectory,
        "parent": None,
        "mode": mode,
        "state": "queued",
        "reason": None,
        "message": "",
        "component": "",
        "detail": {},
        "retry_after_s": None,
        "accepted_at": BEGINNING,
        "started_at": None,
        "ended_at": None,
        "queue_ms": 0.0,
        "overhead_ms": None,
        "execution_ms": None,
        "act_ms": None,
        "node": "scripted",
        "units": {},
        "usage": {},
        "attempt": 1,
        "attempts": [],
        "dead": False,
        "callback": None,
        "input": dict(input),
        "result": None,
    }
    return msgspec.convert(body, types.Invocation)


def listed(record: types.Invocation) -> types.Invocation:
    """Return the record as listings have it: without input and result."""
    return msgspec.structs.replace(record, input=types.UNSET, result=types.UNSET)


def function_info(name: str) -> types.FunctionInfo:
    """Return the description of a scripted function."""
    return types.FunctionInfo(
        name=name,
        runtime="handler",
        revision="scripted",
        description="scripted",
        cost={"cpu": 1},
        duration=types.DurationInfo(profile="learned", key="", initial_s=None),
        timeout_s=300.0,
        queue_timeout_s=3600.0,
        idempotent=False,
        max_queued=1000,
        output_limit_bytes=0,
        log_limit_bytes=0,
        retry=types.RetryInfo(max_attempts=1, backoff_s=1.0, backoff_max_s=60.0, jitter="none", on=(), on_status=()),
    )


def trajectory_info(name: str, task: str) -> types.TrajectoryInfo:
    """Return the description of a living trajectory."""
    return types.TrajectoryInfo(
        trajectory=name,
        task=task,
        node="scripted",
        memory_bytes=0,
        ttl_s=1800.0,
        state="idle",
        queued=0,
        active=None,
        idle_s=0.0,
    )


def step_info(task: str, step: int, expected: int) -> types.StepInfo:
    """Return the description of a step that was told of; nothing is counted."""
    return types.StepInfo(
        task=task,
        step=step,
        expected=expected,
        living=0,
        ended=0,
        opened_at=BEGINNING,
        ended_at=None,
        ends_in_s=None,
    )


_Reply = httpx.Response | Coroutine[object, None, httpx.Response]
_Endpoint = Callable[..., _Reply]


class ScriptedRefusal(Exception):
    """A request that the scripted gateway refuses."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.answer = problem_answer(status, code, detail)


@dataclass(slots=True)
class ScriptedTrajectory:
    """A living trajectory of a scripted gateway, with the files that were uploaded to it: contents and mode by path."""

    name: str
    task: str
    files: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    #: What it chose for its sandbox when it was opened, and what the request was called.
    sandbox: types.SandboxChoice | None = None
    opening: str | None = None


LEASES = "/v1/leases"


class ScriptedGateway(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Give it to a client as its transport: ``Client(transport=ScriptedGateway({"reward": {"reward": 1.0}}))``.

    ``functions`` says what each function does (see `Script`). Synchronous calls run at once; submitted ones run when
    somebody waits for them or follows their log. Trajectories live from their first action, or from being opened,
    until they are ended, and keep what was uploaded. Nothing takes time, and nothing is ever run in a sandbox.
    """

    def __init__(self, functions: Mapping[str, Script | object] | None = None) -> None:
        self.functions: dict[str, Script | object] = dict(functions or {})
        #: Every invocation, in the order of acceptance.
        self.calls: list[ScriptedCall] = []
        #: Every request but heartbeats, whatever became of it.
        self.requests: list[httpx.Request] = []
        self.trajectories: dict[str, ScriptedTrajectory] = {}
        #: What was told of steps: rollouts that are expected, by task and step.
        self.steps: dict[tuple[str, int], int] = {}
        #: How many heartbeats held each trajectory that lived.
        self.heartbeats: Counter[str] = Counter()
        self._troubles: deque[Answer] = deque()

    def trouble(self, *answers: Answer) -> None:
        """Let the next requests, one for each, have these answers instead: `refusal`, `broken`, or one of your own."""
        self._troubles.extend(answers)

    def end_trajectory(self, name: str) -> None:
        """End a trajectory behind its handle's back, as another client or a long silence would."""
        del self.trajectories[name]

    # The transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        answer = self._answer(request)
        if isinstance(answer, httpx.Response):
            return answer
        try:
            answer.send(None)
        except StopIteration as done:  # a coroutine that did not have to wait
            assert isinstance(done.value, httpx.Response)
            return done.value
        answer.close()
        raise TypeError("a script that waits needs an AsyncClient")

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        answer = self._answer(request)
        return answer if isinstance(answer, httpx.Response) else await answer

    def _answer(self, request: httpx.Request) -> _Reply:
        if request.url.path == LEASES:
            return self._renew(request)
        self.requests.append(request)
        if self._troubles:
            return self._troubles.popleft()(request)
        # Of the path as it was sent: names may hold escaped slashes.
        path = request.url.raw_path.decode("ascii").partition("?")[0]
        for method, pattern, endpoint in self._routes():
            match = re.fullmatch(pattern, path)
            if match is not None and method == request.method:
                try:
                    return endpoint(request, *map(unquote, match.groups()))
                except ScriptedRefusal as refused:
                    return refused.answer
        return problem_answer(404, "not_found", f"no such path: {path}")

    def _routes(self) -> Iterator[tuple[str, str, _Endpoint]]:
        name, invocation = "([^/]+)", "/v1/invocations/([^/]+)"
        yield "POST", f"/v1/functions/{name}/invocations", self._invoke
        yield "POST", "/v1/invocations:batch", self._batch
        yield "GET", "/v1/invocations", self._list
        yield "GET", invocation, self._get
        yield "GET", f"{invocation}/logs", self._logs
        yield "POST", f"{invocation}/cancel", self._cancel
        yield "GET", "/v1/functions", self._functions
        yield "GET", f"/v1/functions/{name}", self._function
        yield "GET", f"/v1/tasks/{name}/steps", self._list_steps
        yield "PUT", f"/v1/tasks/{name}/steps/{name}", self._tell_step
        yield "GET", "/v1/trajectories", self._list_trajectories
        yield "PUT", f"/v1/trajectories/{name}", self._open
        yield "GET", f"/v1/trajectories/{name}", self._trajectory
        yield "DELETE", f"/v1/trajectories/{name}", self._end
        yield "PUT", f"/v1/trajectories/{name}/files", self._put_file
        yield "GET", f"/v1/trajectories/{name}/files", self._get_file
        yield "PUT", f"/v1/trajectories/{name}/archive", self._put_archive
        yield "GET", f"/v1/trajectories/{name}/archive", self._get_archive
        yield "GET", "/healthz", lambda request: json_answer(types.Health(status="ok"))
        yield "GET", "/readyz", lambda request: json_answer(types.Health(status="ready"))

    # Steps

    def _tell_step(self, request: httpx.Request, task: str, step: str) -> _Reply:
        expectation = msgspec.json.decode(request.content, type=types.StepExpectation)
        self.steps[task, int(step)] = expectation.expected
        return json_answer(step_info(task, int(step), expectation.expected))

    def _list_steps(self, request: httpx.Request, task: str) -> _Reply:
        infos = [step_info(each, step, expected) for (each, step), expected in self.steps.items() if each == task]
        return json_answer(types.StepList(steps=tuple(reversed(infos))))

    # Invocations

    def _invoke(self, request: httpx.Request, function: str) -> _Reply:
        headers, mode = request.headers, request.url.params.get("mode", "sync")
        item = types.BatchItem(
            function=function,
            input=msgspec.json.decode(request.content or b"{}", type=dict[str, Any]),
            task=headers.get("x-task"),
            trajectory=headers.get("x-trajectory-id"),
            key=headers.get("idempotency-key"),
        )
        call = self._accept(item, mode, headers)
        if mode == "async" or call.record.ended:
            return json_answer(call.record, 200 if call.record.ended else 202)
        return self._run(call)

    def _accept(self, item: types.BatchItem, mode: str, headers: Mapping[str, str]) -> ScriptedCall:
        if item.function not in self.functions:
            raise ScriptedRefusal(404, "not_found", f"no function {item.function!r}")
        for known in self.calls:
            if item.key is not None and (known.function, known.key) == (item.function, item.key):
                if known.input != item.input:
                    raise ScriptedRefusal(422, "idempotency_key_reused", f"the key {item.key} came with another input")
                return known
        task = item.task or "default"
        if item.trajectory is not None:
            self._living(item.trajectory, headers)
            self.trajectories.setdefault(item.trajectory, ScriptedTrajectory(item.trajectory, task))
        record = queued(len(self.calls), item.function, item.input, mode=mode, task=task, trajectory=item.trajectory)
        call = ScriptedCall(
            function=item.function,
            input=item.input,
            task=task,
            trajectory=item.trajectory,
            key=item.key,
            headers=headers,
            record=record,
        )
        self.calls.append(call)
        return call

    def _run(self, call: ScriptedCall) -> _Reply:
        """Run its script, and answer with its record."""
        script = self.functions[call.function]
        try:
            result = script(call) if callable(script) else script
        except ScriptedFailure as failure:
            call.end(None, failure)
        else:
            if inspect.isawaitable(result):
                return self._await(call, result)
            call.end(result)
        return json_answer(call.record)

    async def _await(self, call: ScriptedCall, result: Awaitable[object]) -> httpx.Response:
        try:
            call.end(await result)
        except ScriptedFailure as failure:
            call.end(None, failure)
        return json_answer(call.record)

    def _batch(self, request: httpx.Request) -> httpx.Response:
        verdicts = []
        for item in msgspec.json.decode(request.content, type=types.BatchRequest).calls:
            try:
                call = self._accept(item, "async", {})
            except ScriptedRefusal as refused:
                problem = msgspec.json.decode(refused.answer.content, type=types.Problem)
                verdicts.append(types.BatchVerdict(status=problem.status, problem=problem))
                continue
            if request.url.params.get("wait", "none") != "none" and not call.record.ended:
                self._run(call)
            verdicts.append(types.BatchVerdict(status=200 if call.record.ended else 202, invocation=call.record))
        return json_answer(types.BatchAnswer(results=tuple(verdicts)))

    def _list(self, request: httpx.Request) -> httpx.Response:
        query = request.url.params
        records = [
            listed(call.record)
            for call in reversed(self.calls)
            if query.get("dead") != "true"
            and all(
                query[name] == getattr(call.record, name)
                for name in ("function", "task", "trajectory", "state")
                if name in query
            )
        ]
        begin, limit = int(query.get("cursor", "0")), int(query.get("limit", "100"))
        rest = str(begin + limit) if begin + limit < len(records) else None
        return json_answer(types.InvocationPage(invocations=tuple(records[begin : begin + limit]), next_cursor=rest))

    def _get(self, request: httpx.Request, id: str) -> _Reply:
        call = self._known(id)
        waits = request.url.params.get("wait", "0.000s") != "0.000s"
        return self._run(call) if waits and not call.record.ended else json_answer(call.record)

    def _logs(self, request: httpx.Request, id: str) -> httpx.Response:
        call = self._known(id)
        if request.url.params.get("follow") == "true" and not call.record.ended:
            self._run(call)
        lines: list[object] = list(call.lines[int(request.url.params.get("offset", "0")) :])
        record = call.record
        lines.append(types.LogEnd(stream="eof", offset=len(call.lines), state=record.state, reason=record.reason))
        return httpx.Response(200, content=b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    def _cancel(self, request: httpx.Request, id: str) -> httpx.Response:
        call = self._known(id)
        if call.record.ended:
            raise ScriptedRefusal(409, "conflict", f"invocation {id} is {call.record.state} already")
        call.end(None, ScriptedFailure("cancelled", "cancelled by request"))
        return json_answer(call.record)

    def _known(self, id: str) -> ScriptedCall:
        for call in self.calls:
            if call.record.id == id:
                return call
        raise ScriptedRefusal(404, "not_found", f"no invocation {id!r}")

    # What there is

    def _functions(self, request: httpx.Request) -> httpx.Response:
        return json_answer(types.FunctionList(functions=tuple(function_info(name) for name in sorted(self.functions))))

    def _function(self, request: httpx.Request, name: str) -> httpx.Response:
        if name not in self.functions:
            raise ScriptedRefusal(404, "not_found", f"no function {name!r}")
        return json_answer(function_info(name))

    # Trajectories

    def _open(self, request: httpx.Request, name: str) -> httpx.Response:
        opening = msgspec.json.decode(request.content, type=types.TrajectoryOpening)
        if opening.function not in self.functions:
            raise ScriptedRefusal(404, "not_found", f"no function {opening.function!r}")
        found = self.trajectories.get(name)
        joined = found is not None and (opening.opening is None or found.opening != opening.opening)
        if joined and opening.new:
            raise ScriptedRefusal(409, "conflict", f"trajectory {name!r} lives already")
        opened = ScriptedTrajectory(name, opening.task, sandbox=opening.sandbox, opening=opening.opening)
        trajectory = self.trajectories.setdefault(name, opened)
        return json_answer(msgspec.structs.replace(trajectory_info(name, trajectory.task), joined=joined))

    def _renew(self, request: httpx.Request) -> httpx.Response:
        asked = msgspec.json.decode(request.content, type=types.LeaseRequest)
        names = asked.trajectories
        for released in asked.released:
            self.trajectories.pop(released, None)
        self.heartbeats.update(name for name in names if name in self.trajectories)
        return json_answer(types.LeaseAnswer(gone=tuple([name for name in names if name not in self.trajectories])))

    def _list_trajectories(self, request: httpx.Request) -> httpx.Response:
        living = tuple(trajectory_info(name, each.task) for name, each in sorted(self.trajectories.items()))
        return json_answer(types.TrajectoryPage(trajectories=living, next_cursor=None))

    def _trajectory(self, request: httpx.Request, name: str) -> httpx.Response:
        return json_answer(trajectory_info(name, self._found(name, request.headers).task))

    def _end(self, request: httpx.Request, name: str) -> httpx.Response:
        del self.trajectories[self._found(name, {}).name]
        return httpx.Response(204)

    def _put_file(self, request: httpx.Request, name: str) -> httpx.Response:
        trajectory, path = self._found(name, request.headers), _path(request)
        trajectory.files[path] = (request.content, request.url.params.get("mode", "644"))
        return json_answer(types.FileWritten(path=path, size_bytes=len(request.content)), 201)

    def _get_file(self, request: httpx.Request, name: str) -> httpx.Response:
        files, path = self._found(name, request.headers).files, _path(request)
        if request.url.params.get("list") == "true":
            prefix = path.rstrip("/") + "/"
            entries = [
                types.FileEntry(path=each, size_bytes=len(data), directory=False, mode=mode)
                for each, (data, mode) in sorted(files.items())
                if each.startswith(prefix) and "/" not in each.removeprefix(prefix)
            ]
            return json_answer(types.FileList(files=tuple(entries)))
        if path not in files:
            raise ScriptedRefusal(404, "not_found", f"no file {path}")
        return httpx.Response(200, content=files[path][0])

    def _put_archive(self, request: httpx.Request, name: str) -> httpx.Response:
        trajectory, path = self._found(name, request.headers), _path(request)
        with tarfile.open(fileobj=io.BytesIO(request.content)) as archive:
            for entry in archive:
                held = archive.extractfile(entry)
                if held is not None:
                    trajectory.files[posixpath.join(path, entry.name)] = (held.read(), f"{entry.mode:o}")
        return httpx.Response(204)

    def _get_archive(self, request: httpx.Request, name: str) -> httpx.Response:
        files, prefix = self._found(name, request.headers).files, _path(request).rstrip("/") + "/"
        inside = {path.removeprefix(prefix): held for path, held in files.items() if path.startswith(prefix)}
        if not inside:
            raise ScriptedRefusal(404, "not_found", f"no directory {prefix}")
        written = io.BytesIO()
        with tarfile.open(fileobj=written, mode="w") as archive:
            for path, (data, mode) in sorted(inside.items()):
                entry = tarfile.TarInfo(path)
                entry.size, entry.mode = len(data), int(mode, 8)
                archive.addfile(entry, io.BytesIO(data))
        return httpx.Response(200, content=written.getvalue())

    def _found(self, name: str, headers: Mapping[str, str]) -> ScriptedTrajectory:
        self._living(name, headers)
        if name not in self.trajectories:
            raise ScriptedRefusal(404, "not_found", f"no trajectory {name!r}")
        return self.trajectories[name]

    def _living(self, name: str, headers: Mapping[str, str]) -> None:
        if headers.get("x-trajectory-expect") == "living" and name not in self.trajectories:
            raise ScriptedRefusal(410, "trajectory_ended", f"trajectory {name!r} has ended")


def _path(request: httpx.Request) -> str:
    return posixpath.normpath(posixpath.join("/workspace", request.url.params["path"]))


__all__ = ["Answer", "Script", "ScriptedCall", "ScriptedFailure", "ScriptedGateway", "broken", "refusal"]
