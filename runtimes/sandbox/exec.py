"""The `exec` runtime: commands in sandboxes."""

from __future__ import annotations

import asyncio
import base64
import codecs
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Annotated, NotRequired, TypedDict, TypeVar

import msgspec
import structlog
from msgspec import Meta

from manager.action import Action, Lease
from manager.errors import ActionFailed, CodedError, Reason, Unsupported
from manager.executor import Call, LogSink
from manager.function import AUTO, Background, FunctionSpec, SandboxSpec
from runtimes.kind import Kind, schema_of
from runtimes.runtime import Execution, Result, Runtime
from runtimes.sandbox.command import (
    ARGUMENT_MAX_BYTES,
    KILLED,
    STOPPED,
    Command,
    CommandResult,
    OnOutput,
    claims_of,
    memory_ended,
    processes_refused,
)
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.ports.turns import PortTurns
from runtimes.sandbox.runner.client import unmade
from runtimes.sandbox.sandbox import Sandbox
from runtimes.sandbox.session import InteractiveSession, TerminalSize
from tangram.types import explained

logger = structlog.get_logger("sandbox")

COMPONENT = "sandbox"
#: Seconds between the end of a command's time and the caller's deadline for it.
DEADLINE_MARGIN_S = 0.005
#: Bytes of a command's words together: the kernel bounds words and environment to 2 MiB.
COMMAND_MAX_BYTES = 3 * 2**19
#: What the kernel needs for a word beside its text.
WORD_BYTES = 9
T = TypeVar("T")

Env = Annotated[dict[str, str], Meta(description="Environment variables, added to the sandbox's own")]
Directory = Annotated[str, Meta(description="Working directory; the sandbox's workdir by default")]


class SessionInput(TypedDict, total=False):
    """What a command that somebody types to runs on."""

    terminal: Annotated[bool, Meta(description="A terminal of its own; else three pipes")]
    rows: Annotated[int, Meta(ge=1, le=1000, description="Rows of the terminal; 24 by default")]
    columns: Annotated[int, Meta(ge=1, le=1000, description="Columns of the terminal; 80 by default")]
    ports: Annotated[str, Meta(description="Connect the gateway of this name to the sandbox's ports; no command")]


class ExecInput(TypedDict, total=False):
    """A command: exactly one of ``command`` and ``argv``."""

    command: Annotated[str, Meta(description="Shell text")]
    argv: Annotated[list[str], Meta(min_length=1, description="Program and arguments, run without a shell")]
    cwd: Directory
    env: Env
    stdin: Annotated[str, Meta(description="What it reads on standard input; nothing by default")]
    stdin_base64: Annotated[str, Meta(description="The same as bytes, in base64; in place of stdin")]
    merge: Annotated[bool, Meta(description="Standard error goes to stdout, in the order in which both were written")]
    user: Annotated[str, Meta(description="User name or id inside; the sandbox's user by default")]
    session: Annotated[
        SessionInput, Meta(description="Somebody types to it and watches it: POST /v1/trajectories/{id}/sessions")
    ]


class Stage:
    """Puts an action's sandbox on its lease for as long as it lasts; shared by the exec and pytest runtimes."""

    def __init__(self, environments: Environments) -> None:
        self.environments = environments
        self._busy: dict[str, Sandbox] = {}

    @asynccontextmanager
    async def enter(self, execution: Execution) -> AsyncIterator[Sandbox]:
        """Yield the sandbox, thawed and on the lease's cores; then quiesce it and free the cores."""
        action, spec = execution.action, execution.call.function.sandbox
        async with AsyncExitStack() as stack:
            try:
                if action.trajectory is None:
                    claims = claims_of(action.id, action.attempt)
                    sandbox = await stack.enter_async_context(
                        self.environments.ephemeral(spec, claims, task=action.task)
                    )
                else:
                    sandbox = await self.environments.ensure(action.trajectory, spec, task=action.task)
            except CodedError as error:
                raise unmade(error) from error
            await stack.enter_async_context(self._occupied(execution, sandbox, rests=action.trajectory is not None))
            yield sandbox

    @asynccontextmanager
    async def enter_fresh(self, execution: Execution, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """Yield a sandbox that nobody has used, on the lease's cores; it is removed afterwards.

        It is that of the gateway before if a command of this action can be claimed there.
        """
        action = execution.action
        async with AsyncExitStack() as stack:
            claims = claims_of(action.id, action.attempt)
            try:
                # Of no task: with network internal nothing of the agent's reaches the grader.
                sandbox = await stack.enter_async_context(self.environments.ephemeral(spec, claims))
            except CodedError as error:
                raise unmade(error) from error
            await stack.enter_async_context(self._occupied(execution, sandbox, rests=False))
            yield sandbox

    @asynccontextmanager
    async def visit(self, sandbox: Sandbox, execution: Execution) -> AsyncIterator[None]:
        """Let a trajectory's sandbox run for a moment, beside the one in which its action is executed."""
        async with _occupied(execution, sandbox, rests=True):
            yield

    async def resize(self, action: Action, lease: Lease) -> None:
        """Give a running action other cores; do nothing if it has ended."""
        sandbox = self._busy.get(action.id)
        if sandbox is not None and sandbox.alive and lease.cores:
            await sandbox.occupy(action.id, lease.cores)

    @asynccontextmanager
    async def _occupied(self, execution: Execution, sandbox: Sandbox, *, rests: bool) -> AsyncIterator[None]:
        id = execution.action.id
        self._busy[id] = sandbox
        try:
            async with _occupied(execution, sandbox, rests=rests):
                yield
        finally:
            del self._busy[id]


@asynccontextmanager
async def _occupied(execution: Execution, sandbox: Sandbox, *, rests: bool) -> AsyncIterator[None]:
    """Let an action's sandbox run. Afterwards one that ``rests`` does so, unless another action runs in it yet."""
    spec, id = execution.call.function.sandbox, execution.action.id
    background = None if not rests else Background.FREEZE if spec is None else spec.background
    try:
        await sandbox.occupy(id, execution.lease.cores)
        yield
    finally:
        try:
            await sandbox.vacate(id, background)
        except CodedError as error:  # which is not the end of the action: what it has done is done
            logger.warning("a sandbox does not rest", sandbox=sandbox.id, why=error.message)


class ExecRuntime(Runtime):
    """Executes shell text or an argument list; a non-zero exit is data."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        self._stage = Stage(environments)
        self._ports = PortTurns()

    async def prepare(self, function: FunctionSpec) -> None:
        await self._environments.warm(function.sandbox)

    async def execute(self, execution: Execution) -> Result:
        action = execution.action
        call, claim = execution.call, f"{claims_of(action.id, action.attempt)}1"
        if (gateway := ports_of(call.input)) is not None:
            return await self._port_turn(execution, gateway)
        command = command_of(call, timeout_s=action.timeout_s, claim=claim)
        if "session" in call.input:
            return await self._attended(execution, command)
        lines = LogLines(call.log)
        async with self._stage.enter(execution) as sandbox:
            try:
                result = await carry_out(execution, sandbox, command, lines.write)
            finally:
                lines.close()
            if result.forks_refused:
                call.log.write("system", processes_refused(result.forks_refused, sandbox.spec.pids) + "\n")
        if any(result.unshown.values()):
            call.log.omit(sum(result.unshown.values()))
        return conclude(result, command)

    async def _attended(self, execution: Execution, command: Command) -> Result:
        """Run a command that somebody types to; it ends if nobody is there any more."""
        if execution.action.attempt > 1:
            message = "the session ended with its first try; a session is not begun again"
            raise ActionFailed(Reason.ENVIRONMENT_LOST, message, component=COMPONENT)
        with self._session(execution) as session:
            async with self._stage.enter(execution) as sandbox:
                result = await carry_out(execution, sandbox, replace(command, session=session))
        if session.abandoned:
            message = f"nobody was attached to the session for {session.settings.unattended_s:g} s, so it was ended"
            raise ActionFailed(Reason.CANCELLED, message, component=COMPONENT)
        return conclude(result, command)

    async def _port_turn(self, execution: Execution, gateway: str) -> Result:
        """Let the sandbox's servers run for as long as the gateway speaks to them."""
        with self._session(execution) as session:
            async with self._stage.enter(execution) as sandbox:
                await begin(execution, sandbox)
                try:
                    await self._ports.serve(sandbox, session, gateway)
                except Unsupported as error:
                    raise ActionFailed(Reason.INVALID_INPUT, error.message, component=COMPONENT) from None
                finally:
                    execution.end()
            # A ping that came just before it was frozen: the server's clock goes on until it has its answer.
            unread = sandbox.has_unread() or self._ports.has_unread(sandbox)
        return Result(value={"sent_bytes": session.input_offset, "received_bytes": session.end, "unread": unread})

    @contextmanager
    def _session(self, execution: Execution) -> Iterator[InteractiveSession]:
        id, table = execution.call.invocation_id or execution.action.id, self._environments.sessions
        session = table.living(id, terminal_of(execution.call.input))
        try:
            yield session
        finally:
            table.close(id)

    async def resize(self, action: Action, lease: Lease) -> None:
        await self._stage.resize(action, lease)

    async def end_trajectory(self, trajectory: str) -> None:
        await self._environments.end(trajectory)


async def begin(execution: Execution, sandbox: Sandbox) -> bool:
    """Start the action's clock; return whether its commands are detached.

    What an earlier gateway started has run since then, and its time may be over already.
    """
    held = []
    if sandbox.resumable:
        claims, now_s = claims_of(execution.action.id, execution.action.attempt), time.monotonic()
        held = [held.run_s(now_s) for claim, held in sandbox.resumable.items() if claim.startswith(claims)]
    detached = bool(held) or await execution.call.hooks.commit_begin()
    ran_s = sum(held)
    execution.begin(ran_s)
    if ran_s >= execution.action.timeout_s - DEADLINE_MARGIN_S:
        execution.end()
    return detached


async def carry_out(
    execution: Execution, sandbox: Sandbox, command: Command, on_output: OnOutput | None = None
) -> CommandResult:
    """Run a command under its execution's clock.

    The sandbox ends a command that exceeds its timeout, and what it has printed is kept; so the execution counts as
    over a moment before the caller's own deadline, which would cancel it and lose that.
    """
    command = replace(command, detached=await begin(execution, sandbox))
    left_s = command.timeout_s - DEADLINE_MARGIN_S - execution.execution_s
    over = asyncio.get_running_loop().call_later(max(0.0, left_s), execution.end)
    try:
        return await sandbox.run(command, on_output)
    finally:
        over.cancel()
        execution.end()


class LogLines:
    """A command's output on its way into the invocation's log: bytes to text, character by character whole."""

    def __init__(self, sink: LogSink) -> None:
        self._sink = sink
        #: Of the streams that said something.
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}

    def write(self, stream: str, data: bytes) -> None:
        decoder = self._decoders.get(stream)
        if decoder is None:
            decoder = self._decoders[stream] = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        if text:
            self._sink.write(stream, text)

    def close(self) -> None:
        for stream, decoder in self._decoders.items():
            text = decoder.decode(b"", final=True)
            if text:
                self._sink.write(stream, text)


def checked(
    value: Mapping[str, object], wanted: type[T], *, learned: Sequence[str] = (), component: str = COMPONENT
) -> T:
    """Return the caller's input as a kind declares it; raises ActionFailed(invalid_input) with the path at fault.

    The fields that the learning looks at (``learned``) are allowed beside the kind's own.
    """
    fields = sorted(wanted.__annotations__)
    unknown = sorted(set(value) - {*fields, *learned})
    if unknown:
        raise invalid(f"$.{unknown[0]}", f"is unknown; the input may have {', '.join(fields)}", component)
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        output, place = explained(error)
        raise invalid(f"${place}".partition("[")[0], f"is not as declared: {output}", component) from None


def invalid(path: str, message: str, component: str = COMPONENT) -> ActionFailed:
    return ActionFailed(Reason.INVALID_INPUT, f"{path} {message}", component=component, detail={"path": path})


def command_of(call: Call, *, timeout_s: float, claim: str = "") -> Command:
    """Return the caller's input as a command; raises ActionFailed(invalid_input) with the path at fault."""
    values, function = checked(call.input, ExecInput), call.function
    if ("command" in values) == ("argv" in values):
        raise invalid("$", "needs exactly one of command and argv")
    if values.get("command") == "":
        raise invalid("$.command", "must be a string that is not empty")
    texts = {"command": values.get("command", ""), "cwd": values.get("cwd", ""), "user": values.get("user", "")}
    for name, text in texts.items():
        if "\0" in text:
            raise invalid(f"$.{name}", "must not contain NUL")
    if texts["user"] and function.sandbox is not None and (refused := function.sandbox.refuses(texts["user"])):
        raise invalid("$.user", refused)
    if "session" in values and ("stdin" in values or "stdin_base64" in values or "merge" in values):
        raise invalid("$.session", "takes its input from whoever is attached: leave out stdin, stdin_base64 and merge")
    _check_sizes(values)
    return Command(
        argv=tuple(values.get("argv", ())),
        shell=texts["command"],
        cwd=texts["cwd"],
        env=traced(call, values.get("env", {})),
        user="" if texts["user"] == AUTO else texts["user"],
        stdin=_stdin(values),
        merge=values.get("merge", False),
        timeout_s=timeout_s,
        output_limit_bytes=function.output_limit_bytes,
        shown_limit_bytes=function.log_limit_bytes,
        claim=claim,
    )


def traced(call: Call, env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment with the trace context that the command is part of, unless the caller set its own."""
    if call.traceparent is None or "TRACEPARENT" in env:
        return env
    context = {"TRACEPARENT": call.traceparent, "TRACESTATE": call.tracestate}
    return {name: value for name, value in context.items() if value is not None} | dict(env)


def terminal_of(value: Mapping[str, object]) -> TerminalSize | None:
    """Return the terminal that a session's input asks for; None for pipes."""
    request = checked(value, ExecInput).get("session", {})
    return TerminalSize(request.get("rows", 24), request.get("columns", 80)) if request.get("terminal") else None


def ports_of(value: Mapping[str, object]) -> str | None:
    """Return the name of the gateway that speaks to ports, by the input of its turn; None for a command."""
    return checked(value, ExecInput).get("session", {}).get("ports") if "session" in value else None


def _stdin(inputs: ExecInput) -> bytes:
    encoded = inputs.get("stdin_base64")
    if encoded is None:
        return inputs.get("stdin", "").encode("utf-8", "surrogatepass")
    if "stdin" in inputs:
        raise invalid("$.stdin_base64", "stands in place of stdin: give one of the two")
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError as error:  # which text that is not ASCII raises too
        raise invalid("$.stdin_base64", f"is not base64: {error}") from None


def _check_sizes(inputs: ExecInput) -> None:
    """Raise ActionFailed(invalid_input) for what the kernel would not take; a long ``command`` it takes in pieces."""
    size_bytes = len(inputs.get("command", "").encode("utf-8", "surrogatepass"))
    for name, words in (("argv", inputs.get("argv", ())), ("env", inputs.get("env", {}))):
        if len(words) > COMMAND_MAX_BYTES // WORD_BYTES:
            raise invalid(f"$.{name}", f"has {len(words)} words, more than the kernel takes; upload a file instead")
    for index, text in enumerate(inputs.get("argv", ())):
        size_bytes += _checked_size(f"$.argv[{index}]", text)
    for name, text in inputs.get("env", {}).items():
        _checked_size(f"$.env.{name}", text)
    if size_bytes > COMMAND_MAX_BYTES:
        name = "argv" if inputs.get("argv") else "command"
        raise invalid(f"$.{name}", f"has {size_bytes} bytes, more than {COMMAND_MAX_BYTES}; upload a file and run that")


def _checked_size(path: str, text: str) -> int:
    """Return the bytes of an argument or variable; raises ActionFailed for more than the kernel takes."""
    size_bytes = len(text.encode("utf-8", "surrogatepass"))
    if size_bytes >= ARGUMENT_MAX_BYTES - 256:
        raise invalid(path, "is longer than the kernel lets one be, 128 KiB; give it as stdin, or upload a file")
    return size_bytes


def conclude(result: CommandResult, command: Command) -> Result:
    """Return the end of a command as that of its action; raises ActionFailed (timeout, out_of_memory, cancelled)."""
    value: dict[str, object] = {
        "exit_code": result.exit_code,
        "signal": result.signal,
        **_output("stdout", result.stdout),
        **_output("stderr", result.stderr),
        "stdout_truncated": result.stdout_truncated,
        "stderr_truncated": result.stderr_truncated,
        "duration_s": round(result.duration_s, 6),
    }
    peak = {"peak_memory_bytes": result.peak_memory_bytes}
    usage = {"cpu_s": result.cpu_s, **peak}
    if result.killed:
        raise ActionFailed(Reason.CANCELLED, KILLED, component=COMPONENT, result=value, detail=peak, usage=usage)
    if result.timed_out:
        message = f"the command ran longer than timeout, {command.timeout_s:g} s, and was ended"
        message = f"the command {STOPPED}" if result.stopped else message
        raise ActionFailed(Reason.TIMEOUT, message, component=COMPONENT, result=value, detail=peak, usage=usage)
    if result.out_of_memory:
        message = memory_ended("the sandbox", result.peak_memory_bytes)
        raise ActionFailed(Reason.OUT_OF_MEMORY, message, component=COMPONENT, result=value, detail=peak, usage=usage)
    return Result(value=value, usage=usage)


def _output(name: str, data: bytes) -> dict[str, object]:
    """Return it as text, and also as base64 if the text does not say everything."""
    try:
        return {name: data.decode("utf-8")}
    except UnicodeDecodeError:
        return {name: data.decode("utf-8", "replace"), f"{name}_base64": base64.b64encode(data).decode("ascii")}


class ExecResult(TypedDict):
    """How a command ended. An exit status that is not zero is data, not a failure."""

    exit_code: Annotated[int | None, Meta(description="Exit status; null if a signal ended it")]
    signal: Annotated[int | None, Meta(description="The signal that ended it, else null")]
    stdout: Annotated[str, Meta(description="Standard output; beyond output_limit its two ends")]
    stderr: Annotated[str, Meta(description="Standard error, likewise")]
    stdout_base64: NotRequired[Annotated[str, Meta(description="The bytes of stdout, if they are not UTF-8")]]
    stderr_base64: NotRequired[Annotated[str, Meta(description="The bytes of stderr, if they are not UTF-8")]]
    stdout_truncated: Annotated[bool, Meta(description="Whether stdout lacks bytes; a line in it counts them")]
    stderr_truncated: Annotated[bool, Meta(description="Whether stderr lacks bytes; a line in it counts them")]
    duration_s: Annotated[float, Meta(description="Seconds that the command ran")]


INPUT = schema_of(ExecInput, oneOf=[{"required": ["command"]}, {"required": ["argv"]}], additionalProperties=False)
RESULT = schema_of(ExecResult)

EXEC = Kind(
    name="exec",
    meaning="a shell command in the trajectory's sandbox",
    make=lambda deps: ExecRuntime(deps.environments),
    works_in_sandbox=True,
    sandbox="its environment",
    input_schema=lambda function: INPUT,
    added_fields=frozenset({"session"}),
    result_schema=lambda function: RESULT,
    shown={"": (INPUT, RESULT)},
)
