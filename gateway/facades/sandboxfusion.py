"""SandboxFusion's ``/run_code``: one program, its verdict and its output; what verl's code reward asks.

A program runs in a sandbox that nobody has used. Where there are several steps (a compiler, files to bring back) they
are the actions of a trajectory of its own, which ends with the answer.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from gateway.config.schema import SandboxFusionFacade, suggestion
from gateway.errors import FaultKind
from gateway.facades.facade import (
    STATUSES,
    CallFailed,
    Facade,
    Fault,
    ForeignRoute,
    answer,
    fault_of_end,
    read_shape,
    result_of,
)
from gateway.facades.sandboxfusion_boot import BOOT, COMPILE_CPP, FETCH, REFUSED, WORD_BYTES
from gateway.http.messages import record_headers
from gateway.invocations.record import Record
from manager.errors import InvalidInput, Reason, Unsupported
from manager.function import FunctionSpec

#: Seconds that clients add to the two time-outs of a request before they give up (verl).
CLIENT_MARGIN_S = 10.0
#: Seconds that a program is given beside its own, to be laid out and started.
START_S = 0.1
FILES_MAX = 1000
#: Names of files that SandboxFusion leaves out.
IGNORED = "IGNORE_THIS_FILE"
PYTHON = ("python3", "-I", "-S", "-c")


class RunCodeRequest(Struct, rename={"memory_limit_mb": "memory_limit_MB"}):
    """A program; keys that are not known mean nothing, as ROLL sends its own."""

    code: str
    language: str
    stdin: str | None = None
    compile_timeout: float = 10.0
    run_timeout: float = 10.0
    memory_limit_mb: int | None = None
    files: dict[str, str | None] = {}
    fetch_files: list[str] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """How programs of a language run; ``{file}`` is the program's."""

    suffix: str
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    #: Resources that ``memory_limit_MB`` bounds.
    limits: tuple[str, ...] = ("RLIMIT_AS", "RLIMIT_DATA")


LANGUAGES: Mapping[str, Language] = {
    "python": Language(suffix=".py", run=("{python}", "{file}")),
    "pytest": Language(suffix=".py", run=("{python}", "-m", "pytest", "{file}")),
    "bash": Language(suffix=".sh", run=("bash", "{file}")),
    "nodejs": Language(suffix=".js", run=("node", "{file}"), limits=()),  # V8 reserves more than it ever uses
    "cpp": Language(
        suffix=".cpp",
        compile=("/bin/sh", "-c", COMPILE_CPP, "sh", "{file}"),
        run=("./test",),
        limits=("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_STACK"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A request as its steps need it."""

    request: RunCodeRequest
    language: Language
    function: FunctionSpec
    directory: str
    file: str
    #: Path -> base64, the program's own file among them.
    files: Mapping[str, str]
    until_s: float
    #: What a complaint of `BOOT` begins with; the program cannot know it.
    word: str

    def boot(self, argv: Sequence[str], *, laid_out: bool = False, stdin: str = "") -> dict[str, object]:
        """Return the input of an exec action that becomes ``argv``; ``laid_out``: the files are there."""
        bytes_max = (self.request.memory_limit_mb or 0) * 2**20
        result = json.dumps(
            {
                "directory": self.directory,
                "files": {} if laid_out else self.files,
                "limits": dict.fromkeys(self.language.limits, bytes_max) if bytes_max > 0 else {},
                "argv": [self.file if word == "{file}" else word for word in argv],
            }
        )
        return {"argv": [*PYTHON, BOOT, str(len(result))], "stdin": self.word + result + stdin}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How one step ended, in SandboxFusion's words."""

    status: str
    stdout: str
    stderr: str
    return_code: int | None
    execution_time: float

    @property
    def good(self) -> bool:
        return self.status == "Finished" and self.return_code == 0

    def as_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


class SandboxFusion(Facade):
    """The facade of SandboxFusion's clients."""

    name: ClassVar[str] = "sandboxfusion"
    # verl tries a 504 again, and takes every other error for a failed test.
    statuses: ClassVar[Mapping[FaultKind, int]] = STATUSES | dict.fromkeys(
        (FaultKind.BUSY, FaultKind.LOST, FaultKind.FAILED, FaultKind.INTERNAL), 504
    )
    prefix: ClassVar[str] = "sandboxfusion"

    def routes(self) -> Sequence[ForeignRoute]:
        """Return every route of the facade."""
        return (
            ForeignRoute(method="POST", path="/run_code", endpoint=self.run_code),
            ForeignRoute(method="POST", path="/run_jupyter", endpoint=self.run_jupyter),
            ForeignRoute(method="GET", path="/v1/ping", endpoint=self.ping),
            ForeignRoute(method="GET", path="/", endpoint=self.page),
        )

    def body(self, fault: Fault, status: int) -> object:
        """Return a fault as FastAPI says it: a list of places for a request that does not fit, else a text."""
        if fault.kind is FaultKind.INPUT:
            place = [part for part in fault.path.removeprefix("$").split(".") if part]
            return {"detail": [{"type": fault.code, "loc": ["body", *place], "msg": fault.message}]}
        return {"detail": fault.message}

    async def ping(self, request: Request) -> Response:
        """It is there."""
        return answer("pong")

    async def page(self, request: Request) -> Response:
        """What a browser is shown."""
        return HTMLResponse("<p>POST /run_code</p>")

    async def run_jupyter(self, request: Request) -> Response:
        """Not here: it needs a kernel that lives between cells."""
        raise Unsupported("/run_jupyter is not served here: send each program to /run_code", component=self.name)

    async def run_code(self, request: Request) -> Response:
        """Run a program and tell its verdict."""
        program = self._program(read_shape(await self.read_object(request), RunCodeRequest))
        if not program.language.compile and not program.request.fetch_files:
            record = await self._step(request, program, program.boot(program.language.run, stdin=_stdin(program)))
            return self._verdict(program, None, record, {})
        trajectory = f"sandboxfusion-{secrets.token_hex(12)}"
        try:
            return await self._steps(request, program, trajectory)
        finally:
            await self.api.engine.end_trajectory(trajectory)

    async def _steps(self, request: Request, program: Program, trajectory: str) -> Response:
        compiled, language = None, program.language
        if language.compile:
            bounds = replace(program, request=_without_memory_bound(program.request))
            compiled = await self._step(request, program, bounds.boot(language.compile), trajectory, compiling=True)
            if fault_of_end(compiled) is not None or not _ended(compiled, program.word).good:
                return self._verdict(program, compiled, None, {})
        run = program.boot(language.run, laid_out=compiled is not None, stdin=_stdin(program))
        ran = await self._step(request, program, run, trajectory)
        files: dict[str, object] = {}
        if program.request.fetch_files and _is_answer(ran):
            fetch = {"argv": [*PYTHON, FETCH, program.directory, *program.request.fetch_files]}
            fetched = await self._step(request, program, fetch, trajectory)
            result = _fetched(fetched, program.word)
            if result is None:
                return self._no_verdict(fetched, "the files could not be fetched: they are larger than output_limit")
            files = result
        return self._verdict(program, compiled, ran, files)

    async def _step(
        self,
        request: Request,
        program: Program,
        input: Mapping[str, object],
        trajectory: str | None = None,
        *,
        compiling: bool = False,
    ) -> Record:
        bound_s = program.request.compile_timeout if compiling else program.request.run_timeout
        call = self.call(request, program.function.name, input, timeout_s=bound_s + START_S)
        call = replace(call, trajectory=trajectory, key=None)
        return (await self.calls.run(request, [call], program.until_s))[0].record

    def _verdict(
        self, program: Program, compiled: Record | None, ran: Record | None, files: Mapping[str, object]
    ) -> Response:
        """Return the verdict; what is none is an error that the client tries again."""
        last = ran or compiled
        assert last is not None
        if not _is_answer(last):
            fault = fault_of_end(last)
            assert fault is not None
            raise CallFailed(fault)
        if (short := _short_of_memory(program)) and last.reason is Reason.OUT_OF_MEMORY:
            return self._no_verdict(last, short)
        steps = [None if record is None else _ended(record, program.word) for record in (compiled, ran)]
        errors = [step.stderr for step in steps if step is not None and step.status == "Error"]
        good = all(step.good for step in steps if step is not None)
        status = "SandboxError" if errors else "Success" if good else "Failed"
        body = {
            "status": status,
            "message": errors[0] if errors else "",
            "compile_result": None if steps[0] is None else steps[0].as_json(),
            "run_result": None if steps[1] is None else steps[1].as_json(),
            "executor_pod_name": None,
            "files": files,
        }
        return answer(body, last)

    def _no_verdict(self, record: Record, message: str) -> Response:
        body = {"status": "SandboxError", "message": message, "compile_result": None, "run_result": None}
        shown = answer({**body, "executor_pod_name": None, "files": {}})
        shown.headers.update(record_headers(record))
        return shown

    def _program(self, request: RunCodeRequest) -> Program:
        """Return a request as its steps need it; raises InvalidInput."""
        assert isinstance(self.section, SandboxFusionFacade)
        offered = {str(language): name for language, name in self.section.languages.items()}
        if request.language not in offered:
            wanted = request.language[:64]
            message = f"$.language: {wanted!r} is not offered here{suggestion(wanted, offered)}"
            raise InvalidInput(message, component=self.name, detail={"path": "$.language"})
        function = self.function(offered[request.language])
        language = LANGUAGES[request.language]
        for name in ("compile_timeout", "run_timeout"):
            bound_s = getattr(request, name)
            if not 0 < bound_s <= function.timeout_s:
                message = f"$.{name}: {bound_s:g} s is not between 0 and the timeout of {function.name}, "
                raise InvalidInput(
                    f"{message}{function.timeout_s:g} s", component=self.name, detail={"path": f"$.{name}"}
                )
        file = f"{secrets.token_hex(8)}{language.suffix}"
        return Program(
            request=request,
            language=language,
            function=function,
            directory=f"run-{secrets.token_hex(8)}",
            file=file,
            files={**_files(request), file: base64.b64encode(request.code.encode()).decode()},
            until_s=self.until_s(request.compile_timeout + request.run_timeout + CLIENT_MARGIN_S),
            word=secrets.token_hex(WORD_BYTES // 2),
        )


def _files(request: RunCodeRequest) -> dict[str, str]:
    """Return the files to lay out; raises InvalidInput."""
    if len(request.files) > FILES_MAX or len(request.fetch_files) > FILES_MAX:
        raise InvalidInput(f"$.files: more than {FILES_MAX} files", detail={"path": "$.files"})
    names = [*request.files, *request.fetch_files]
    if any(not name or "\0" in name for name in names):
        raise InvalidInput("$.files: a name is empty or holds NUL", detail={"path": "$.files"})
    fields = {name: data for name, data in request.files.items() if data is not None and IGNORED not in name}
    for name, data in fields.items():
        try:
            base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            message = f"$.files: {name[:64]!r} is not base64"
            raise InvalidInput(message, detail={"path": "$.files"}) from None
    return fields


def _stdin(program: Program) -> str:
    return program.request.stdin or ""


def _without_memory_bound(request: RunCodeRequest) -> RunCodeRequest:
    """The bound is the program's, not the compiler's."""
    return RunCodeRequest(code=request.code, language=request.language, compile_timeout=request.compile_timeout)


def _short_of_memory(program: Program) -> str:
    """Return that it had less memory than was asked for; empty if not: then its end for want of it is its own."""
    sandbox, asked_bytes = program.function.sandbox, (program.request.memory_limit_mb or 0) * 2**20
    if sandbox is None or asked_bytes <= sandbox.memory_bytes:
        return ""
    had = f"{program.function.name} has {sandbox.memory_bytes / 2**20:g} MiB"
    return (
        f"out of memory: {had} of the {program.request.memory_limit_mb} that were asked for; raise its sandbox.memory"
    )


def _is_answer(record: Record) -> bool:
    """Whether the end of a step says something of the program, and not of us."""
    return record.reason in (None, Reason.TIMEOUT, Reason.OUT_OF_MEMORY)


def _ended(record: Record, word: str) -> Step:
    """Return the end of a step in SandboxFusion's words; ``word`` begins what says that it could not be started."""
    result = result_of(record)
    fields: Mapping[str, object] = result if isinstance(result, dict) else {}
    stdout, stderr = str(fields.get("stdout") or ""), str(fields.get("stderr") or "")
    code, number = fields.get("exit_code"), fields.get("signal")
    status, return_code = "Finished", code if isinstance(code, int) else None
    if isinstance(number, int):
        return_code = -number
    if record.reason is Reason.TIMEOUT:
        status, return_code = "TimeLimitExceeded", None
    elif code == REFUSED and stderr.startswith(f"{word} "):
        status, stderr = "Error", stderr.removeprefix(f"{word} ")
    elif record.reason is None and (fields.get("stdout_truncated") or fields.get("stderr_truncated")):
        status = "Error"
        stderr = f"the program's output is larger than the output_limit of {record.function}"
    if record.reason is Reason.OUT_OF_MEMORY and return_code is None:
        return_code, stderr = -9, stderr + record.message
    seconds = fields.get("duration_s")
    return Step(
        status=status,
        stdout=stdout,
        stderr=stderr,
        return_code=return_code,
        execution_time=float(seconds) if isinstance(seconds, int | float) else 0.0,
    )


def _fetched(record: Record, word: str) -> dict[str, object] | None:
    """Return the files that were brought back; None if they could not be."""
    step = _ended(record, word)
    if fault_of_end(record) is not None or not step.good:
        return None
    result = json.loads(step.stdout)
    return result if isinstance(result, dict) else None
