"""What HTTP and gRPC both do."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from msgspec import UNSET, convert
from msgspec.structs import replace as replaced

from gateway import serialization
from gateway.invocations.invocations import InvocationRequest, LiveInvocation
from gateway.invocations.record import Record, seq_of
from gateway.registry import function_info
from gateway.services import Services
from gateway.store.store import Filter, Page
from gateway.trajectories import leased
from manager.action import State
from manager.errors import ActionFailed, CodedError, Conflict, InvalidInput, NotFound, Reason, TooLarge, Unsupported
from runtimes.sandbox.command import FileStat, FileStream
from runtimes.sandbox.exec import terminal_of
from runtimes.sandbox.files import SandboxFiles
from runtimes.sandbox.session import InteractiveSession
from runtimes.sandbox.spec import ImageKeeper, ImageState, require_image_name
from tangram.types import (
    ArchiveReadQuery,
    ArchiveWriteQuery,
    FileEntry,
    FileReadQuery,
    FileWriteQuery,
    FileWritten,
    FunctionInfo,
    Health,
    ImageInfo,
    ImageList,
    InvocationQuery,
    QueuePage,
    QueueQuery,
    ResourcesInfo,
    SandboxesInfo,
    SessionEnd,
    SessionOpening,
    TaskList,
    TrajectoryPage,
    TrajectoryQuery,
)

#: A call, or why it cannot be read; what became of it.
ReadCall = InvocationRequest | CodedError
Verdict = LiveInvocation | CodedError


def check_batch(services: Services, count: int) -> None:
    """Raise TooLarge for more calls than a batch may hold."""
    if count > services.bounds.batch_max:
        raise TooLarge(f"{count} calls are more than server.batch_max, {services.bounds.batch_max}", component="batch")


async def invoke_batch(services: Services, calls: Sequence[ReadCall], wait: str, timeout_s: float) -> list[Verdict]:
    """Accept those that can be read, and wait for the ends of none, any or all; verdicts in the order of the calls."""
    readable = [call for call in calls if isinstance(call, InvocationRequest)]
    accepted = iter(await services.invocations.invoke_all(readable))
    verdicts = [next(accepted) if isinstance(call, InvocationRequest) else call for call in calls]
    if wait != "none":
        await _wait(verdicts, asyncio.FIRST_COMPLETED if wait == "any" else asyncio.ALL_COMPLETED, timeout_s)
    return verdicts


async def _wait(verdicts: Sequence[Verdict], until: str, timeout_s: float) -> None:
    waits = {
        asyncio.ensure_future(verdict.ended.wait())
        for verdict in verdicts
        if isinstance(verdict, LiveInvocation) and not verdict.ended.is_set()
    }
    already = any(isinstance(verdict, LiveInvocation) and verdict.ended.is_set() for verdict in verdicts)
    try:
        if waits and not (already and until == asyncio.FIRST_COMPLETED):
            await asyncio.wait(waits, timeout=timeout_s, return_when=until)
    finally:
        for wait in waits:
            wait.cancel()


PATH_BYTES_MAX = 4095


def files_of(services: Services, trajectory: str, *, living: bool) -> SandboxFiles:
    """Return the files of a trajectory, wherever it lives.

    Raises NotFound, TrajectoryHasEnded if it is to live (``living``), CapacityExceeded while its node is not reached.
    """
    name = serialization.name(trajectory, "trajectory")
    if living:
        services.engine.check_trajectory(name, living=True)
    found = services.files(name)
    if found is None:
        raise NotFound(f"trajectory {name!r} has no sandbox: it starts with its first action, or when it is opened")
    return found


def placed_path(path: str, workdir: str) -> str:
    """Return a path, absolute: a relative one begins at the sandbox's working directory."""
    return posixpath.normpath(posixpath.join(workdir, fitting_path(path)))


def fitting_path(path: str) -> str:
    """Return a path that a system can take; raises InvalidInput. It is the sandbox that keeps it inside."""
    if "\0" in path or len(path.encode("utf-8", "replace")) > PATH_BYTES_MAX:
        told = f"the path holds a NUL byte or is longer than {PATH_BYTES_MAX} bytes"
        raise InvalidInput(told, component="files", detail={"path": "path"})
    return path


@contextmanager
def as_files_are() -> Iterator[None]:
    """Raise Conflict for what the sandbox refuses, of a path that is one, and for files that are lost with it."""
    try:
        yield
    except InvalidInput as error:
        raise Conflict(error.message, component=error.component, detail=error.detail) from None
    except ActionFailed as error:
        if error.reason is not Reason.ENVIRONMENT_LOST:
            raise
        told = f"{error.message}; actions that expect them end environment_lost, then it begins anew, empty"
        raise Conflict(told, component=error.component, detail=error.detail) from None


class _SentData:
    """What a caller sends: its own fault is told as it is, and not as one of the file."""

    def __init__(self, data: AsyncIterator[bytes]) -> None:
        self._data = data
        self._failure: CodedError | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._data:
                yield chunk
        except CodedError as error:
            self._failure = error
            raise

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Raise what was wrong with the data, whatever became of it on its way."""
        try:
            yield
        except CodedError:
            if self._failure is None:
                raise
            raise self._failure from None


async def write_file(files: SandboxFiles, path: str, data: AsyncIterator[bytes], asked: FileWriteQuery) -> FileWritten:
    """Write a file as it comes; ``data`` keeps its bound."""
    mode, sent = None if asked.mode is None else int(asked.mode, 8), _SentData(data)
    with sent.failing(), as_files_are():
        size_bytes = await files.write(path, sent.chunks(), mode=mode, user=asked.user or "")
    return FileWritten(path=path, size_bytes=size_bytes)


async def list_files(files: SandboxFiles, path: str, asked: FileReadQuery) -> tuple[FileEntry, ...]:
    """Return the entries of a directory, by name."""
    with as_files_are():
        listed = await files.list(path, user=asked.user or "")
    return tuple([_entry(stat) for stat in listed])


@asynccontextmanager
async def read_file(
    services: Services, files: SandboxFiles, path: str, asked: FileReadQuery
) -> AsyncIterator[FileStream]:
    """Open a file that is read piece by piece."""
    opened = files.open(path, limit_bytes=services.bounds.file_limit_bytes, user=asked.user or "")
    async with AsyncExitStack() as opening:
        with as_files_are():
            try:
                file = await opening.enter_async_context(opened)
            except TooLarge as error:
                told = f"{error.message} (server.file_limit)"
                raise TooLarge(told, component=error.component, detail=error.detail) from None
        yield file


async def write_archive(
    services: Services, files: SandboxFiles, data: AsyncIterator[bytes], asked: ArchiveWriteQuery
) -> FileWritten:
    """Unpack a tar below a directory, as it comes."""
    path, limit_bytes = placed_path(asked.path, files.workdir), services.bounds.file_limit_bytes
    sent = _SentData(data)
    with sent.failing(), as_files_are():
        size_bytes = await files.unpack(path, sent.chunks(), user=asked.user or "", limit_bytes=limit_bytes)
    return FileWritten(path=path, size_bytes=size_bytes)


@asynccontextmanager
async def read_archive(
    services: Services, files: SandboxFiles, asked: ArchiveReadQuery
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Pack a file or a directory into a tar, as it is read."""
    path, limit_bytes = placed_path(asked.path, files.workdir), services.bounds.file_limit_bytes
    packing = files.pack(path, user=asked.user or "", limit_bytes=limit_bytes, base=asked.base)
    async with AsyncExitStack() as opening:
        with as_files_are():
            chunks = await opening.enter_async_context(packing)
        yield chunks


def _entry(stat: FileStat) -> FileEntry:
    return FileEntry(path=stat.path, size_bytes=stat.size_bytes, directory=stat.directory, mode=f"{stat.mode:o}")


async def list_images(services: Services) -> ImageList:
    """Return every image of the engine that has a name, and those that are pulled or could not be."""
    keeper = _keeper(services)
    return _listed(await keeper.states(), keeper)


async def pull_images(services: Services, wanted: Sequence[str], wait_s: float) -> ImageList:
    """Begin to pull images, and wait for them so long; what became of each stands in the answer."""
    keeper = _keeper(services)
    for image in wanted:
        require_image_name(image)
    present = {state.image for state in await keeper.states() if state.state == "present"}
    for image in wanted:
        if not {image, f"{image}:latest"} & present:
            keeper.begin(image)
    if wait_s:
        await keeper.settled(wanted, wait_s)
    names = {name for image in wanted for name in (image, f"{image}:latest")}
    return _listed([state for state in await keeper.states() if state.image in names], keeper)


def _keeper(services: Services) -> ImageKeeper:
    if services.images is None:
        kind = services.sandboxes().kind
        raise Unsupported(f"this gateway's sandboxes are of kind {kind} and have no images; serve it with Docker")
    return services.images


def _listed(states: Sequence[ImageState], keeper: ImageKeeper) -> ImageList:
    found = tuple(
        ImageInfo(
            image=each.image,
            state=each.state,
            size_bytes=each.size_bytes,
            done_bytes=each.done_bytes,
            total_bytes=each.total_bytes,
            pulled=each.pulled,
            kept=each.kept,
            used_at=serialization.instant(each.used_s) if each.used_s else None,
            problem=each.problem,
        )
        for each in states
    )
    return ImageList(images=found, bound_bytes=keeper.bound_bytes)


async def list_invocations(services: Services, asked: InvocationQuery) -> Page:
    """Return records by filter, newest first unless asked otherwise."""
    now_s = services.wall()
    chosen = Filter(
        function=asked.function,
        task=asked.task,
        trajectory=asked.trajectory,
        parent=asked.parent,
        state=None if asked.state is None else State(asked.state),
        reason=None if asked.reason is None else Reason(asked.reason),
        since_s=None if asked.since is None else serialization.moment_s(asked.since, "since", now_s),
        until_s=None if asked.until is None else serialization.moment_s(asked.until, "until", now_s),
        oldest=asked.order == "oldest",
        dead=asked.dead,
        before=None if asked.cursor is None else seq_of(asked.cursor),
        limit=asked.limit,
    )
    return await services.invocations.find(chosen)


def list_trajectories(services: Services, asked: TrajectoryQuery) -> TrajectoryPage:
    """Return living trajectories, by name."""
    page = convert(services.engine.trajectories(asked.limit, asked.cursor), TrajectoryPage)
    return replaced(page, trajectories=tuple([leased(services, each) for each in page.trajectories]))


def list_queue(services: Services, asked: QueueQuery) -> QueuePage:
    """Return what waits, in order of service; a cursor stays good when the action that it names has left."""
    return convert(services.engine.queue(asked.limit, asked.cursor), QueuePage)


def list_functions(services: Services) -> tuple[FunctionInfo, ...]:
    """Return every function, by name, without what was learned of it."""
    known = services.functions
    return tuple(
        [
            function_info(spec, readiness=known.readiness(spec.name), source=known.source(spec.name))
            for spec in known.all()
        ]
    )


def list_tasks(services: Services) -> TaskList:
    """Return every task, with its steps that have not ended; one that was only told of has an empty account."""
    steps = services.steps
    tasks = services.engine.tasks(steps.tasks())
    return convert({"tasks": [{**each, "steps": steps.unfinished(str(each["task"]))} for each in tasks]}, TaskList)


#: The status of a gateway that takes work.
READY = "ready"


def get_function(services: Services, name: str) -> FunctionInfo:
    """Return a function with what was learned of it, and its changes; raises NotFound."""
    known, learned = services.functions, services.learned
    spec = known.get(serialization.name(name, "function"))
    return function_info(
        spec, learned(spec.name), known.readiness(spec.name), known.source(spec.name), known.changes(spec.name)
    )


def get_resources(services: Services) -> ResourcesInfo:
    """Return pools and who holds what, in plain words what the sandboxes are, and the model processes."""
    sandboxes = convert(services.sandboxes(), SandboxesInfo, from_attributes=True)
    return convert({**services.engine.resources(), "sandboxes": sandboxes, "models": services.models()}, ResourcesInfo)


def get_readiness(services: Services) -> Health:
    """Return whether work is taken now (`READY`), and if not, why."""
    known = services.functions
    states = {spec.name: known.readiness(spec.name) for spec in known.all()}
    return Health(
        status=services.unready() or READY,
        warnings=(*services.warnings(), *services.sandboxes().weakenings),
        record=services.record() or UNSET,
        preparing=tuple(name for name, each in states.items() if each.status == "preparing"),
        unavailable=tuple(name for name, each in states.items() if each.status == "unavailable"),
    )


COMPONENT = "session"


def session_input(services: Services, asked: SessionOpening) -> bytes:
    """Return the input of the exec function whose invocation the session is.

    Raises NotFound for the function, InvalidInput with the field that does not fit, CapacityExceeded if there may be
    no more sessions.
    """
    if services.functions.get(asked.function).runtime != "exec":
        told = f"$.function: {asked.function!r} is no exec function, and others have no sessions"
        raise InvalidInput(told, component=COMPONENT, detail={"path": "$.function"})
    services.sessions.check()
    given: dict[str, object] = {
        "argv": list(asked.argv),
        "cwd": asked.cwd,
        "env": None if asked.env is None else dict(asked.env),
        "user": asked.user,
    }
    terminal = asked.terminal
    size = {} if terminal is None else {"terminal": True, "rows": terminal.rows, "columns": terminal.columns}
    chosen = {**{name: value for name, value in given.items() if value is not None}, "session": size}
    terminal_of(chosen)
    return serialization.dumps(chosen)


async def open_session(services: Services, call: InvocationRequest) -> LiveInvocation:
    """Accept the invocation of a session, which goes on without its caller; raises as any call does.

    ``call`` is detached, and its input that of `session_input`.
    """
    invocation = await services.invocations.invoke(call)
    services.invocations.leave(invocation)
    return invocation


def session_of(services: Services, invocation: LiveInvocation) -> InteractiveSession | None:
    """Return the session of an invocation, None if it has ended and is forgotten; raises Conflict if it is none."""
    record = invocation.record
    given = serialization.loads_object(record.input or b"{}")
    if "session" not in given or record.trajectory is None:
        told = "it is no session: begin one by POST /v1/trajectories/{id}/sessions, or on gRPC by Session"
        raise Conflict(told, component=COMPONENT, invocation_id=record.id)
    if record.terminal:
        return services.sessions.get(record.id)
    return services.sessions.living(record.id, terminal_of(given))


def session_end(record: Record, offset: int) -> SessionEnd:
    """Return how an ended invocation that was a session ended."""
    result = {} if record.result is None else serialization.loads_object(record.result)
    exit_code, signal = result.get("exit_code"), result.get("signal")
    return SessionEnd(
        stream="eof",
        offset=offset,
        state=serialization.state(record.state),
        reason=serialization.reason(record.reason),
        message=record.message,
        exit_code=exit_code if isinstance(exit_code, int) else None,
        signal=signal if isinstance(signal, int) else None,
    )
