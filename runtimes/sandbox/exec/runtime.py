"""The exec runtime: a command in the trajectory's sandbox, on exactly the cores of its lease (paper, AOE)."""

from __future__ import annotations

import asyncio
import base64
import codecs
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import structlog

from manager.action import Action
from manager.errors import ActionFailed, CodedError, Reason
from manager.executor import LogSink
from manager.function import Background, FunctionSpec
from manager.lease import Lease
from runtimes.runtime import Execution, Result
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.runner.protocol import unmade
from runtimes.sandbox.sandbox import Command, CommandResult, OnOutput, Sandbox, claims_of

logger = structlog.get_logger("sandbox")

COMPONENT = "sandbox"
#: Seconds between the end of a command's time and the caller's deadline for it.
DEADLINE_MARGIN_S = 0.005
FIELDS = frozenset({"command", "argv", "cwd", "env", "stdin", "user"})


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
                    sandbox = await stack.enter_async_context(self.environments.ephemeral(spec, claims))
                else:
                    sandbox = await self.environments.ensure(action.trajectory, spec)
            except CodedError as error:
                raise unmade(error) from error
            if action.trajectory is not None:
                stack.push_async_callback(_rest, sandbox, Background.FREEZE if spec is None else spec.background)
            await stack.enter_async_context(self._occupied(action, sandbox, execution.lease))
            yield sandbox

    async def resize(self, action: Action, lease: Lease) -> None:
        """Give a running action other cores; do nothing if it has ended."""
        sandbox = self._busy.get(action.id)
        if sandbox is not None and sandbox.alive and lease.cores:
            await sandbox.set_cores(lease.cores)

    @asynccontextmanager
    async def _occupied(self, action: Action, sandbox: Sandbox, lease: Lease) -> AsyncIterator[None]:
        self._busy[action.id] = sandbox
        try:
            if lease.cores:
                await sandbox.set_cores(lease.cores)
            await sandbox.thaw()
            yield
        finally:
            del self._busy[action.id]


async def _rest(sandbox: Sandbox, background: Background) -> None:
    """Let the sandbox rest. A failure here is not the end of the action before: what it has done is done."""
    try:
        await sandbox.quiesce(background)
    except CodedError as error:
        logger.warning("a sandbox does not rest", sandbox=sandbox.id, why=error.message)


class ExecRuntime:
    """Executes shell text or an argument list; a non-zero exit is data."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        self._stage = Stage(environments)

    async def prepare(self, function: FunctionSpec) -> None:
        await self._environments.warm(function.sandbox)

    async def execute(self, execution: Execution) -> Result:
        function = execution.call.function
        action = execution.action
        command = command_of(execution.call.input, function, timeout_s=action.timeout_s)
        claim = f"{claims_of(action.id, action.attempt)}1"
        command = replace(command, claim=claim)
        lines = LogLines(execution.call.log)
        async with self._stage.enter(execution) as sandbox:
            try:
                result = await carry_out(execution, sandbox, command, lines.write)
            finally:
                lines.close()
        return conclude(result, command)

    async def resize(self, action: Action, lease: Lease) -> None:
        await self._stage.resize(action, lease)

    async def end_trajectory(self, trajectory: str) -> None:
        await self._environments.end(trajectory)

    async def close(self) -> None:
        """Do nothing: whoever made the environments closes them."""


async def begin(execution: Execution, sandbox: Sandbox) -> bool:
    """Start the action's clock; return whether its commands are detached.

    What an earlier gateway started has run since then, and its time may be over already.
    """
    claims = claims_of(execution.action.id, execution.action.attempt)
    held = [held.ran_s for claim, held in sandbox.resumable.items() if claim.startswith(claims)]
    detached = bool(held)
    if not held and execution.call.announce is not None:
        detached = await execution.call.announce()
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
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}

    def write(self, stream: str, data: bytes) -> None:
        text = self._decoders[stream].decode(data)
        if text:
            self._sink.write(stream, text)

    def close(self) -> None:
        for stream, decoder in self._decoders.items():
            text = decoder.decode(b"", final=True)
            if text:
                self._sink.write(stream, text)


def command_of(value: Mapping[str, object], function: FunctionSpec, *, timeout_s: float) -> Command:
    """Return the caller's input as a command; raises ActionFailed(invalid_input) with the path at fault."""
    unknown = sorted(set(value) - FIELDS)
    if unknown:
        raise _invalid(f"$.{unknown[0]}", f"is unknown; an exec action takes {', '.join(sorted(FIELDS))}")
    shell, argv = value.get("command"), value.get("argv")
    if (shell is None) == (argv is None):
        raise _invalid("$", "needs exactly one of command and argv")
    if argv is not None and not (isinstance(argv, list) and argv and all(isinstance(word, str) for word in argv)):
        raise _invalid("$.argv", "must be a list of one string or more")
    env = value.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(word, str) for word in env.values()):
        raise _invalid("$.env", "must be an object of strings")
    return Command(
        argv=() if not isinstance(argv, list) else tuple(argv),
        shell="" if argv is not None else _text(value, "command"),
        cwd=_text(value, "cwd"),
        env=env,
        user=_text(value, "user"),
        stdin=_text(value, "stdin").encode("utf-8", "surrogatepass"),
        timeout_s=timeout_s,
        output_limit_bytes=function.output_limit_bytes,
    )


def conclude(result: CommandResult, command: Command) -> Result:
    """Return the end of a command as that of its action; raises ActionFailed for timeout and out_of_memory."""
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
    if result.timed_out:
        message = f"the command ran longer than {command.timeout_s:g} s and was ended"
        raise ActionFailed(Reason.TIMEOUT, message, component=COMPONENT, result=value, detail=peak)
    if result.out_of_memory:
        message = f"the sandbox ran out of memory (peak {result.peak_memory_bytes} bytes)"
        raise ActionFailed(Reason.OUT_OF_MEMORY, message, component=COMPONENT, result=value, detail=peak)
    return Result(value=value, usage={"cpu_s": result.cpu_s, **peak})


def _output(name: str, data: bytes) -> dict[str, object]:
    """Return it as text, and also as base64 if the text does not say everything."""
    try:
        return {name: data.decode("utf-8")}
    except UnicodeDecodeError:
        return {name: data.decode("utf-8", "replace"), f"{name}_base64": base64.b64encode(data).decode("ascii")}


def _text(value: Mapping[str, object], name: str) -> str:
    text = value.get(name, "")
    if not isinstance(text, str) or (name == "command" and not text):
        raise _invalid(f"$.{name}", "must be a string" + (" that is not empty" if name == "command" else ""))
    if name != "stdin" and "\0" in text:
        raise _invalid(f"$.{name}", "must not contain NUL")
    return text


def _invalid(path: str, message: str) -> ActionFailed:
    return ActionFailed(Reason.INVALID_INPUT, f"{path} {message}", component=COMPONENT, detail={"path": path})
