"""The API: every operation of the gateway, declared once by its signature, and what HTTP and gRPC both do."""

from __future__ import annotations

import asyncio
import inspect
import posixpath
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, TypeVar, cast, get_type_hints

from msgspec import UNSET, Meta, Struct, convert
from msgspec.structs import replace as replaced

from gateway import serialization
from gateway.auth import KEY_LIFE_S, Guard, PageSessions
from gateway.cluster.cluster import Cluster
from gateway.cluster.store import NodeSnapshot
from gateway.config.schema import ServerConfig, nearest
from gateway.dashboard.stream import Watch
from gateway.errors import TooSlow
from gateway.invocations.callbacks import CallbackSender
from gateway.invocations.invocations import (
    Admission,
    DeadLetters,
    HeldInputs,
    InvocationRequest,
    Invocations,
    LiveInvocation,
)
from gateway.invocations.logs import Logs
from gateway.invocations.record import Record, cursor_of, seq_of
from gateway.limits import MachineLimits
from gateway.metrics import Metrics
from gateway.ports import PortGrant, TrajectoryPorts
from gateway.registry import Registry, function_info
from gateway.runtime_factory import Runtimes
from gateway.stats import Stats
from gateway.steps import TaskSteps
from gateway.store.maintenance import StateDirectory
from gateway.store.store import Filter, Store
from gateway.trajectory_records import NOBODY, ConnectionPeer, Leases, SnapshotCatalogue, UnreadAnswers
from manager.action import State
from manager.core.outside import OutsideWait
from manager.core.state import Cause
from manager.engine import Engine
from manager.errors import ActionFailed, CodedError, Conflict, InvalidInput, NotFound, Reason, TooLarge, Unsupported
from manager.function import FunctionSpec
from manager.learning import History
from runtimes.sandbox.command import FileStream
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.exec import terminal_of
from runtimes.sandbox.files import LocalFiles, SandboxFiles
from runtimes.sandbox.sandbox import Provider
from runtimes.sandbox.session import InteractiveSession, SessionTable, TerminalSize
from runtimes.sandbox.spec import ImageKeeper, ImageState, chosen, forked, require_image_name
from tangram import types

# Declarations. An operation is a method that says by its signature what HTTP reads and answers:
#
# - ``id``, ``name``, ... of a path parameter's name: that part of the path, of its type
# - ``query`` and ``headers``: Structs; their fields are the parameters
# - ``body``: a Struct (JSON; optional where it has a default), ``bytes`` (as they are) or `Chunks` (as they arrive)
# - ``request``: the request itself, for what only HTTP does
# - the returned type: the JSON that is answered; None answers 204; anything else is declared by ``answers``
#
# The first paragraph of its docstring is its summary, its name in camel case the operationId. Routes, rights, reading,
# answers and the OpenAPI document are made from that.

F = TypeVar("F", bound=Callable[..., Any])
#: What a schema is made of: a wire type or any other type that JSON can hold. Any: the checker has no name for it.
Shape = Any
#: A body as it arrives, within the bounds of a file.
Chunks = AsyncIterator[bytes]

JSON, BYTES = "application/json", "application/octet-stream"
BINARY = Annotated[str, Meta(extra_json_schema={"format": "binary"})]

FunctionName = Annotated[types.Name, Meta(title="function", description="A registered function")]
InvocationId = Annotated[types.Name, Meta(title="id", description="Id of an invocation")]
TrajectoryId = Annotated[types.Name, Meta(title="trajectory", description="Name of a trajectory, chosen by its caller")]
DeadId = Annotated[types.Name, Meta(title="id", description="Id of a dead invocation")]
NewFunctionName = Annotated[types.Name, Meta(title="function", description="The function")]
NodeName = Annotated[types.Name, Meta(title="node", description="A machine that has joined")]
SnapshotName = Annotated[
    types.SnapshotId, Meta(title="snapshot", description="Id of a snapshot, given when it was taken")
]
TaskName = Annotated[types.Name, Meta(title="task", description="An RL task")]
Step = Annotated[types.StepNumber, Meta(title="step", description="A step, as the trainer numbers it")]
PortId = Annotated[types.Name, Meta(title="port", description="Id of an open port, given when it was opened")]
FilePath = Annotated[types.SandboxPath, Meta(title="path", description="Path in the sandbox, from its root")]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationLink:
    """What can be asked next: an operation, and which of its parameters are in the answer (RFC 6901 pointers)."""

    operation: str
    parameters: Mapping[str, str]
    #: Its body, where the answer knows it.
    body: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSpec:
    """What comes back with one status: a shape by media type, empty for no body."""

    about: str
    content: Mapping[str, Shape] = field(default_factory=dict)
    links: tuple[OperationLink, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method on one path, as its declaration says."""

    #: The operationId.
    id: str
    method: str
    path: str
    summary: str
    tag: str
    #: The method that does it; bound by `operations_of`.
    call: Callable[..., Any]
    parts: Mapping[str, Shape]
    query: type[Struct] | None
    headers: type[Struct] | None
    #: What the method takes as its body, None for nothing, and whether it does without.
    reads: Shape
    body_required: bool
    #: The body by media type, as the document shows it.
    body: Mapping[str, Shape]
    takes_request: bool
    status: int
    answers: Mapping[int, ResponseSpec]
    #: Statuses of problem bodies that it can answer with, besides 401, 403, 500 and 503.
    problems: tuple[int, ...]
    #: Whether it is served without a token.
    open: bool
    #: Whether it changes the gateway for everybody, and the invoke token does not do.
    admin: bool

    @property
    def shapes(self) -> list[Shape]:
        """Every type that it names."""
        answers = [shape for answer in self.answers.values() for shape in answer.content.values()]
        parameters = [shape for shape in (self.query, self.headers) if shape is not None]
        return [*answers, *self.body.values(), *parameters, *self.parts.values()]


def links(pointer: str, parameter: str, *operations: str) -> tuple[OperationLink, ...]:
    """One value of the answer is one parameter of each of these operations."""
    return tuple(OperationLink(operation=operation, parameters={parameter: pointer}) for operation in operations)


def json_answer(about: str, shape: Shape, next_ones: tuple[OperationLink, ...] = ()) -> ResponseSpec:
    return ResponseSpec(about=about, content={JSON: shape}, links=next_ones)


def operation(
    route: str,
    tag: str,
    answers: str | Mapping[int, ResponseSpec],
    *,
    status: int = 200,
    problems: tuple[int, ...] = (),
    next_ones: tuple[OperationLink, ...] = (),
    body: Mapping[str, Shape] | None = None,
    required: bool = False,
    admin: bool = False,
    open: bool = False,
) -> Callable[[F], F]:
    """Declare a method as the operation of a route (``POST /v1/leases``).

    ``answers`` describes the answer of the returned type, whose ``status`` is 204 for None, or names all answers.
    ``problems`` are statuses of problems besides those that follow from the signature: 422 of anything that is read,
    408 and 413 of a body. ``body`` shows another body in the document than the one that the signature says.
    """
    method, _, path = route.partition(" ")

    def declared(function: F) -> F:
        hints = get_type_hints(function, include_extras=True)
        defaults = inspect.signature(function).parameters
        parts = {name: hints[name] for name in hints if f"{{{name}}}" in path or f"{{{name}:path}}" in path}
        reads, returned = hints.get("body"), hints["return"]
        done = 204 if returned is type(None) else status
        specs = answers
        if isinstance(specs, str):
            content = {} if returned is type(None) else {JSON: returned}
            specs = {done: ResponseSpec(about=specs, content=content, links=next_ones)}
        structured = isinstance(reads, type) and issubclass(reads, Struct)
        shown = body or _shown(reads)
        inputs = parts or shown or {"query", "headers"} & hints.keys()
        implied = (*((422,) if inputs else ()), *((408, 413) if shown else ()))
        first, *others = function.__name__.split("_")
        function.__dict__["operation"] = Operation(
            id=first + "".join(word.capitalize() for word in others),
            method=method,
            path=path,
            summary=" ".join((function.__doc__ or "").partition("\n\n")[0].split()).removesuffix("."),
            tag=tag,
            call=function,
            parts=parts,
            query=hints.get("query"),
            headers=hints.get("headers"),
            reads=reads,
            body_required=required or bool(structured and defaults["body"].default is inspect.Parameter.empty),
            body=shown,
            takes_request="request" in defaults,
            status=done,
            answers=specs,
            problems=tuple(sorted({*problems, *implied})),
            open=open,
            admin=admin,
        )
        return function

    return declared


def _shown(reads: Shape) -> Mapping[str, Shape]:
    if reads is None:
        return {}
    return {BYTES: BINARY} if reads in (bytes, Chunks) else {JSON: reads}


def operations_of(holder: object) -> list[Operation]:
    """Return the operations of an object, in the order of their declaration."""
    rows = [each.operation for each in vars(type(holder)).values() if hasattr(each, "operation")]
    return [replace(each, call=getattr(holder, each.call.__name__)) for each in rows]


#: A call, or why it cannot be read; what became of it.
ReadCall = InvocationRequest | CodedError
Verdict = LiveInvocation | CodedError
#: The status of a gateway that takes work.
READY = "ready"
PATH_BYTES_MAX = 4095
#: Sandboxes that one fork has made at a time, beside the provider's own bound.
OPENED_AT_ONCE = 16
#: Why a machine is to leave, where nobody says it.
NO_REASON = types.DrainWanted()
#: Problems of what is done with files.
FILE_PROBLEMS = (404, 409, 410, 502)
SESSION_PROBLEMS = (404, 409)


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """What every server of the gateway speaks to: its parts, and the operations that no protocol has to itself."""

    #: Bounds of the servers: ``server`` of the configuration.
    server: ServerConfig
    guard: Guard
    #: The browser that came with the key of the page's address.
    pages: PageSessions
    state_dir: StateDirectory
    limits: MachineLimits
    held: HeldInputs
    admission: Admission
    invocations: Invocations
    dead_letters: DeadLetters
    logs: Logs
    callbacks: CallbackSender
    store: Store
    engine: Engine
    functions: Registry
    history: History
    runtimes: Runtimes
    machines: Cluster
    leases: Leases
    ports: TrajectoryPorts
    answers: UnreadAnswers
    snapshots: SnapshotCatalogue
    steps: TaskSteps
    metrics: Metrics
    stats: Stats
    #: What the page is sent, as it changes.
    watch: Watch
    #: The time of day in seconds.
    wall: Callable[[], float]

    def unready(self) -> str | None:
        """Return why no work is taken now; None when it is."""
        if self.engine.fault is not None:
            return self.engine.fault
        if self.admission.draining:
            return "draining"
        here = self.state_dir
        return here.lost or here.locked or here.damage or self.store.failure or self.limits.shortage()

    @property
    def environments(self) -> Environments:
        """Return the sandboxes of the trajectories on this machine."""
        return self.runtimes.environments

    @property
    def sessions(self) -> SessionTable:
        """Return the commands that somebody types to."""
        return self.runtimes.environments.sessions

    @property
    def provider(self) -> Provider:
        """Return what makes the sandboxes, and their images if they have any."""
        return self.runtimes.provider

    def require_here(self, trajectory: str) -> None:
        """Raise Unsupported if a trajectory lives on another machine than this one."""
        node = self.machines.elsewhere(trajectory)
        if node:
            message = f"trajectory {trajectory!r} lives on node {node}: this works on the gateway's own machine only"
            raise Unsupported(message, component="cluster")

    def files(self, trajectory: str) -> SandboxFiles | None:
        """Return the files of a trajectory's sandbox, wherever it is; None if it has none.

        Raises CapacityExceeded while its node is not reached.
        """
        sandbox = self.environments.get(trajectory)
        return self.machines.files(trajectory) if sandbox is None else LocalFiles(sandbox)

    def wait_s(self, text: str) -> float:
        """Return the seconds of ``?wait=30s``, bounded."""
        return min(serialization.duration_s(text, "wait"), self.server.wait_max_s)

    # --- invocations

    def check_batch(self, count: int) -> None:
        """Raise TooLarge for more calls than a batch may hold."""
        if count > self.server.batch_max:
            raise TooLarge(f"{count} calls are more than a batch may have, {self.server.batch_max}", component="batch")

    async def invoke_batch(self, calls: Sequence[ReadCall], wait: str, timeout_s: float) -> list[Verdict]:
        """Accept those that can be read, and wait for the ends of none, any or all; verdicts in the calls' order."""
        readable = [call for call in calls if isinstance(call, InvocationRequest)]
        accepted = iter(await self.invocations.invoke_all(readable))
        verdicts = [next(accepted) if isinstance(call, InvocationRequest) else call for call in calls]
        if wait != "none":
            await _wait(verdicts, asyncio.FIRST_COMPLETED if wait == "any" else asyncio.ALL_COMPLETED, timeout_s)
        return verdicts

    @operation(
        "GET /v1/invocations",
        "invocations",
        "A page",
        problems=(404,),
        next_ones=(
            *links("/invocations/0/id", "id", "getInvocation", "redriveDeadLetter", "purgeDeadLetter"),
            *links("/next_cursor", "cursor", "listInvocations"),
        ),
    )
    async def list_invocations(self, query: types.InvocationQuery) -> types.InvocationPage:
        """Records, newest first unless asked otherwise."""
        now_s = self.wall()
        wanted = Filter(
            function=query.function,
            task=query.task,
            trajectory=query.trajectory,
            parent=query.parent,
            state=None if query.state is None else State(query.state),
            reason=None if query.reason is None else Reason(query.reason),
            since_s=None if query.since is None else serialization.moment_s(query.since, "since", now_s),
            until_s=None if query.until is None else serialization.moment_s(query.until, "until", now_s),
            oldest=query.order == "oldest",
            dead=query.dead,
            before=None if query.cursor is None else seq_of(query.cursor),
            limit=query.limit,
        )
        page = await self.store.find(wanted)
        records = tuple([self.invocations.shown(record).as_wire(payload=False) for record in page.records])
        return types.InvocationPage(invocations=records, next_cursor=cursor_of(page.before))

    @operation(
        "DELETE /v1/dead-letters/{id}", "dead letters", "How many left the list", problems=(404, 409), admin=True
    )
    async def purge_dead_letter(self, id: DeadId) -> types.Purged:
        """Take a dead letter off the list; its record stays."""
        await self.dead_letters.purge(id)
        return types.Purged(purged=1)

    @operation("DELETE /v1/dead-letters", "dead letters", "How many left the list", admin=True)
    async def purge_dead_letters(self, query: types.PurgeQuery) -> types.Purged:
        """Take all dead letters off the list; they are listed by GET /v1/invocations?dead=true."""
        return types.Purged(purged=await self.dead_letters.purge_all(query.function))

    # --- trajectories

    def expect(
        self, holder: str | None, name: str, peer: ConnectionPeer | None, undo: Callable[[], Awaitable[object]]
    ) -> None:
        """Undo what was made if its connection closes before the client that names itself knows of it."""
        if holder is not None and peer is not None:
            self.answers.expect(peer, holder, name, undo)

    async def open_trajectory(
        self, id: str, body: types.TrajectoryOpening, peer: ConnectionPeer | None = None
    ) -> types.TrajectoryInfo:
        """Make the trajectory's sandbox as it was chosen, or find that it lives so already; return the trajectory.

        A caller that goes meanwhile is to cancel this. Of one that names itself as the ``holder`` it is found out
        whether the answer came: what it never learned of ends when the connection to its ``peer`` closes.

        Raises NotFound for the function or the snapshot, SnapshotLost if that is lost with its node, InvalidInput with
        the field that the function does not allow, Conflict if the trajectory lives in another sandbox, or lives and
        was to be ``new``, and what the engine raises.
        """
        # Which says more than the types do: a newline at the end is none of a name's characters.
        id, task = serialization.name(id, "trajectory"), serialization.name(body.task, "task")
        function = self.functions.get(body.function)
        images = self.provider.images
        if body.snapshot is not None:
            function = self._begun_with(function, body)
        elif body.sandbox is not None:
            self._require_images(body.sandbox)
            function = with_choice(function, body.sandbox)
        if body.sandbox is not None and body.sandbox.image is not None and images is not None:
            with self.waiting("opening", body.sandbox.image, task, id):  # before it holds memory or a core
                await images.require(body.sandbox.image)
        self.functions.task(task)
        await self.engine.until_ended(id)
        lived = self.engine.trajectory(id) is not None
        joined = lived and self.leases.joins(id, body.opening)
        if joined and body.new:
            raise Conflict(f"trajectory {id!r} lives already: choose another name, or end it", component="http")
        if not lived:
            self.leases.begin(id, body.opening)
        begin = partial(self.engine.open_trajectory, id, task, function)
        with self.steps.opening(task, body.step):
            await (begin() if body.snapshot is None else self.snapshots.begin(body.snapshot, begin))
        if body.lease_s is not None or not joined:
            holder = body.holder or NOBODY
            if not self.leases.holds(id, holder) or self.answers.awaits(holder, id):
                self.expect(body.holder, id, peer, partial(self.leases.release, [id], holder))
            self.leases.hold(id, holder, body.lease_s)
        if body.step is not None:
            await self.steps.opened(id, task, body.step)
        return replaced(await self.get_trajectory(id), joined=joined)

    @contextmanager
    def waiting(self, what: str, image: str, task: str, trajectory: str | None = None) -> Iterator[None]:
        """Show while this lasts that an opening, or a pull, waits for an image."""
        outside = self.engine.outside
        wait = OutsideWait(
            id=f"{what}-{trajectory or image}",
            function=f"({what})",
            task=task,
            trajectory=trajectory,
            since_s=outside.now(),
            what=("image", image),
            why=lambda: Cause(kind="image", text=f"image {image}"),
        )
        with outside.waiting(wait):
            yield

    def _begun_with(self, function: FunctionSpec, opening: types.TrajectoryOpening) -> FunctionSpec:
        """Return the function with a sandbox that begins with a snapshot, on the machine that has it.

        Raises as `SnapshotCatalogue.get`, InvalidInput or Conflict.
        """
        if opening.sandbox is not None:
            message = (
                "$.sandbox: what begins with a snapshot has the choices of the trajectory it was taken of; leave it out"
            )
            raise InvalidInput(message, component="http", detail={"path": "$.sandbox"})
        if function.sandbox is None:
            raise _no_choice(function, "snapshot")
        snapshot = self.snapshots.get(opening.snapshot or "")
        sandbox = forked(function.sandbox, snapshot.record, images=snapshot.record.provider == "container")
        return replace(function, sandbox=sandbox, on_node=snapshot.node)

    def _require_images(self, choice: types.SandboxChoice) -> None:
        """Raise Unsupported if an image is named where sandboxes have none."""
        kind = self.provider.info.kind
        if choice.image is not None and kind != "container":
            message = (
                f"$.sandbox.image: this gateway's sandboxes are of kind {kind} and have no images; serve it with Docker"
            )
            raise Unsupported(message, component="sandbox", detail={"path": "$.sandbox.image"})

    @operation(
        "GET /v1/trajectories",
        "trajectories",
        "A page",
        next_ones=links("/trajectories/0/trajectory", "id", "getTrajectory"),
    )
    async def list_trajectories(self, query: types.TrajectoryQuery) -> types.TrajectoryPage:
        """Living trajectories, by name."""
        page = convert(self.engine.trajectories(query.limit, query.cursor), types.TrajectoryPage)
        return replaced(page, trajectories=tuple([self._leased(each) for each in page.trajectories]))

    @operation("GET /v1/trajectories/{id}", "trajectories", "The trajectory", problems=(404,))
    async def get_trajectory(self, id: TrajectoryId) -> types.TrajectoryInfo:
        """One trajectory."""
        trajectory = self.engine.trajectory(id)
        if trajectory is None:
            raise self._no_trajectory(id)
        sandbox, living = self.environments.get(id), self.machines.living(id)
        if sandbox is not None:
            living = convert(sandbox.spec, types.LivingSandbox, from_attributes=True)
        return self._leased(replaced(convert(trajectory, types.TrajectoryInfo), sandbox=living))

    def _no_trajectory(self, id: str) -> NotFound:
        """Return what is told of a name that does not live, with the nearest that does."""
        living = convert(self.engine.trajectories(), types.TrajectoryPage).trajectories
        hint = nearest(id, [each.trajectory for each in living])
        return NotFound(f"no trajectory {id!r}{hint}", component="trajectories")

    def _leased(self, trajectory: types.TrajectoryInfo) -> types.TrajectoryInfo:
        """Return it with the time for which its client holds it."""
        return replaced(trajectory, lease_left_s=self.leases.left_s(trajectory.trajectory))

    @operation("DELETE /v1/trajectories/{id}", "trajectories", "It has ended", problems=(404,))
    async def end_trajectory(self, id: TrajectoryId) -> None:
        """End a trajectory, with everything in it."""
        if not await self.engine.end_trajectory(id):
            raise self._no_trajectory(id)

    @operation("POST /v1/leases", "trajectories", "They are held for so long")
    async def renew_leases(self, body: types.LeaseRequest) -> types.LeaseAnswer:
        """Say that the client of these trajectories lives, or that it lets some go."""
        holder = body.holder or NOBODY
        self.answers.known(holder, (*body.trajectories, *body.known))
        await self.leases.release(body.released, holder)
        return types.LeaseAnswer(gone=tuple(self.leases.renew(body.trajectories, body.lease_s, holder)))

    # --- snapshots

    async def take_snapshot(self, id: str) -> types.SnapshotInfo:
        """Keep the files of a trajectory's sandbox.

        As they are when all that was asked of it before has ended; they stay where the trajectory lives.

        Raises NotFound without such a trajectory or its sandbox, Conflict if it ends meanwhile or its files are lost or
        on their way, CapacityExceeded while its node is not reached or its turn does not come, and as
        `SnapshotCatalogue.take`.
        """
        living, bound_s = self.engine.trajectory(id), self.server.wait_max_s
        if living is None or living["state"] == "ending":
            raise self._no_trajectory(id)

        taken: list[NodeSnapshot] = []

        async def take() -> None:
            try:
                taken.append(await asyncio.wait_for(self.snapshots.take(id), bound_s))
            except TimeoutError:
                raise Conflict(
                    f"no snapshot of trajectory {id!r} within {bound_s:g} s", component="snapshots"
                ) from None
            except ActionFailed as error:
                if error.reason not in (Reason.ENVIRONMENT_LOST, Reason.NODE_LOST):
                    raise
                raise Conflict(error.message, component=error.component, detail=error.detail) from None

        function = FunctionSpec(name="snapshot", runtime="snapshot", queue_timeout_s=bound_s)
        try:
            await self.engine.take(id, "snapshot", take, str(living["task"]), function)
        except BaseException:
            for each in taken:  # at the moment at which its caller went
                await self.remove_snapshot(each.record.id)
            raise
        return self._snapshot_info(taken[0])

    async def fork_trajectory(
        self, id: str, body: types.ForkRequest, peer: ConnectionPeer | None = None
    ) -> types.ForkAnswer:
        """Open trajectories that begin with the files of another as they are now: all of them, or none and no snapshot.

        Raises as `take_snapshot` and `open_trajectory`, and Conflict for a name that lives or comes twice.
        """
        for place, new in enumerate(body.to):
            if new == id or new in body.to[:place]:
                message = f"$.to[{place}]: {new!r} is named twice, or is the trajectory itself"
                raise Conflict(message, component="snapshots", detail={"path": f"$.to[{place}]"})
            if self.engine.trajectory(new) is not None:
                raise Conflict(
                    f"trajectory {new!r} lives already: choose another name, or end it", component="snapshots"
                )
        parent = self.engine.trajectory(id)
        if parent is None:
            raise self._no_trajectory(id)
        self.functions.get(body.function)
        taken = (await self.take_snapshot(id)).snapshot
        opening = types.TrajectoryOpening(
            function=body.function,
            task=body.task or str(parent["task"]),
            step=body.step,
            snapshot=taken,
            lease_s=body.lease_s,
            holder=body.holder,
            new=True,
        )
        try:
            # Which may wait long for memory, and be the least used.
            opened = await self.snapshots.begin(taken, lambda: self._open_all(body.to, opening, peer))
        except BaseException:
            with suppress(CodedError):  # nobody was told of it
                await self.snapshots.remove(taken)
            raise
        return types.ForkAnswer(snapshot=self._snapshot_info(self.snapshots.get(taken)), trajectories=opened)

    async def _open_all(
        self, names: tuple[str, ...], opening: types.TrajectoryOpening, peer: ConnectionPeer | None
    ) -> tuple[types.TrajectoryInfo, ...]:
        """Open them, or end those that could be opened and raise why another could not.

        They come under their step when all of them live: those of a fork that is refused were no rollouts.
        """
        alone = replaced(opening, step=None)
        gate, opened = asyncio.Semaphore(OPENED_AT_ONCE), dict[str, types.TrajectoryInfo]()

        async def open_one(name: str) -> None:
            async with gate:
                opened[name] = await self.open_trajectory(name, alone, peer)

        try:
            failures = await asyncio.gather(*map(open_one, names), return_exceptions=True)
            if opening.step is not None and not any(failures):
                joining = (self.steps.opened(name, opening.task, opening.step) for name in names)
                failures = await asyncio.gather(*joining, return_exceptions=True)
            for failure in filter(None, failures):
                raise failure
        except BaseException:
            await asyncio.gather(*map(self.engine.end_trajectory, opened))
            raise
        return tuple([opened[name] for name in names])

    @operation("GET /v1/snapshots", "trajectories", "All of them")
    async def list_snapshots(self) -> types.SnapshotList:
        """Snapshots of trajectories, the oldest first."""
        settings, used = self.snapshots.settings, self.snapshots.in_use()
        return types.SnapshotList(
            snapshots=tuple([self._snapshot_info(each, used) for each in self.snapshots.all()]),
            count_max=settings.count_max,
            total_max_bytes=settings.total_max_bytes,
        )

    @operation("DELETE /v1/snapshots/{id}", "trajectories", "It is gone", problems=(404, 409))
    async def remove_snapshot(self, id: SnapshotName) -> None:
        """Remove a snapshot."""
        await self.snapshots.remove(id)

    def _snapshot_info(self, snapshot: NodeSnapshot, used: Collection[str] | None = None) -> types.SnapshotInfo:
        record, used = snapshot.record, self.snapshots.in_use() if used is None else used
        return types.SnapshotInfo(
            snapshot=record.id,
            trajectory=record.trajectory,
            task=record.task or "default",
            provider=record.provider,
            image=record.spec.image,
            size_bytes=record.size_bytes,
            made_at=serialization.instant(record.made_s),
            used_at=serialization.instant(record.used_s),
            in_use=record.id in used,
            node=snapshot.node,
            lost=snapshot.lost or None,
        )

    # --- files

    def files_of(self, trajectory: str, headers: types.FileHeaders) -> SandboxFiles:
        """Return the files of a trajectory, wherever it lives.

        Raises NotFound, TrajectoryHasEnded if it is to live, CapacityExceeded while its node is not reached.
        """
        if headers.expect == "living":
            self.engine.check_trajectory(trajectory, "", living=True)
        files = self.files(trajectory)
        if files is None:
            message = f"trajectory {trajectory!r} has no sandbox: it starts with its first action, or when it is opened"
            raise NotFound(message)
        return files

    @operation(
        "PUT /v1/trajectories/{id}/files/{path:path}",
        "trajectories",
        "It is written",
        status=201,
        problems=FILE_PROBLEMS,
    )
    async def put_file(
        self, id: TrajectoryId, path: FilePath, query: types.FileWriteQuery, headers: types.FileHeaders, body: Chunks
    ) -> types.FileWritten:
        """Write a file into the sandbox."""
        return await _write(self.files_of(id, headers), rooted(path), query, body)

    @operation("PUT /v1/trajectories/{id}/files", "trajectories", "It is written", status=201, problems=FILE_PROBLEMS)
    async def put_file_at(
        self, id: TrajectoryId, query: types.FileWriteAtQuery, headers: types.FileHeaders, body: Chunks
    ) -> types.FileWritten:
        """Write a file into the sandbox."""
        files = self.files_of(id, headers)
        return await _write(files, placed_path(query.path, files.workdir), query, body)

    @asynccontextmanager
    async def read_file(self, files: SandboxFiles, path: str, query: types.FileReadQuery) -> AsyncIterator[FileStream]:
        """Open a file that is read piece by piece."""
        opened = files.open(path, limit_bytes=self.server.file_limit_bytes, user=query.user or "")
        async with AsyncExitStack() as opening:
            with file_conflicts():
                try:
                    file = await opening.enter_async_context(opened)
                except TooLarge as error:
                    message = f"{error.message} (server.file_limit)"
                    raise TooLarge(message, component=error.component, detail=error.detail) from None
            yield file

    @operation(
        "PUT /v1/trajectories/{id}/archive",
        "trajectories",
        "It is unpacked",
        status=201,
        problems=FILE_PROBLEMS,
        required=True,
    )
    async def put_archive(
        self, id: TrajectoryId, query: types.ArchiveWriteQuery, headers: types.FileHeaders, body: Chunks
    ) -> types.FileWritten:
        """Unpack a tar below a directory of the sandbox."""
        files = self.files_of(id, headers)
        path, source = placed_path(query.path, files.workdir), _SentData(body)
        limit_bytes = self.server.file_limit_bytes
        with source.failing(), file_conflicts():
            size_bytes = await files.unpack(path, source.chunks(), user=query.user or "", limit_bytes=limit_bytes)
        return types.FileWritten(path=path, size_bytes=size_bytes)

    @asynccontextmanager
    async def read_archive(
        self, files: SandboxFiles, query: types.ArchiveReadQuery
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Pack a file or a directory into a tar, as it is read."""
        path, limit_bytes = placed_path(query.path, files.workdir), self.server.file_limit_bytes
        packing = files.pack(path, user=query.user or "", limit_bytes=limit_bytes, base=query.base)
        async with AsyncExitStack() as opening:
            with file_conflicts():
                chunks = await opening.enter_async_context(packing)
            yield chunks

    # --- sessions

    def session_input(self, opening: types.SessionOpening) -> bytes:
        """Return the input of the exec function whose invocation the session is.

        Raises NotFound for the function, InvalidInput with the field that does not fit, CapacityExceeded if there may
        be no more sessions.
        """
        if self.functions.get(opening.function).runtime != "exec":
            message = f"$.function: {opening.function!r} is no exec function, and others have no sessions"
            raise InvalidInput(message, component="session", detail={"path": "$.function"})
        self.sessions.check()
        fields: dict[str, object] = {
            "argv": list(opening.argv),
            "cwd": opening.cwd,
            "env": None if opening.env is None else dict(opening.env),
            "user": opening.user,
        }
        terminal = opening.terminal
        size = {} if terminal is None else {"terminal": True, "rows": terminal.rows, "columns": terminal.columns}
        chosen_fields = {**{name: value for name, value in fields.items() if value is not None}, "session": size}
        terminal_of(chosen_fields)
        return serialization.dumps(chosen_fields)

    async def begin_session(self, call: InvocationRequest) -> LiveInvocation:
        """Accept the invocation of a session, which goes on without its caller; raises as any call does.

        ``call`` is detached, and its input that of `session_input`.
        """
        invocation = await self.invocations.invoke(call)
        self.invocations.leave(invocation)
        return invocation

    def session_of(self, invocation: LiveInvocation) -> InteractiveSession | None:
        """Return the session of an invocation, None if it has ended and is forgotten; raises Conflict if it is none."""
        record = invocation.record
        fields = serialization.loads_object(record.input or b"{}")
        if "session" not in fields or record.trajectory is None:
            message = "it is no session: begin one by POST /v1/trajectories/{id}/sessions"
            raise Conflict(message, component="session", invocation_id=record.id)
        if record.terminal:
            return self.sessions.get(record.id)
        return self.sessions.living(record.id, terminal_of(fields))

    @operation("POST /v1/invocations/{id}/session/input", "sessions", "How far it came", problems=SESSION_PROBLEMS)
    async def write_session(self, id: InvocationId, query: types.SessionWriteQuery, body: bytes) -> types.SessionFed:
        """Pass input to a session."""
        session = await self._living_session(id)
        position = await session.write(body, query.offset, end=query.end)
        return types.SessionFed(input_offset=position, reads=session.reads)

    @operation("POST /v1/invocations/{id}/session/control", "sessions", "It was told", problems=SESSION_PROBLEMS)
    async def steer_session(self, id: InvocationId, body: types.SessionSteering) -> None:
        """Resize a session's terminal, or signal what runs in it."""
        session = await self._living_session(id)
        session.require_reached()
        if body.terminal is not None:
            await session.resize(TerminalSize(body.terminal.rows, body.terminal.columns))
        if body.signal is not None:
            await session.signal(body.signal)

    async def _living_session(self, id: str) -> InteractiveSession:
        invocation = await self.invocations.get(id)
        session = self.session_of(invocation)
        if session is None or session.ended:
            raise Conflict("the session has ended", component="http", invocation_id=id)
        return session

    # --- ports

    @operation(
        "POST /v1/trajectories/{id}/ports",
        "ports",
        "It can be reached",
        status=201,
        problems=(404, 409, 410),
        next_ones=links("/id", "port", "withdrawPort"),
    )
    async def open_port(self, id: TrajectoryId, body: types.PortOpening) -> types.PortInfo:
        """Let whoever has its URL reach a server in the sandbox."""
        capability, grant = self.ports.open(id, body.port, body.function, body.ttl_s)
        return replaced(_port_info(grant), url=self.ports.url(capability))

    @operation("GET /v1/trajectories/{id}/ports", "ports", "All of them")
    async def list_ports(self, id: TrajectoryId) -> types.PortList:
        """Ports of a trajectory that can be reached; their URLs are not told again."""
        return types.PortList(ports=tuple([_port_info(grant) for grant in self.ports.grants.of(id)]))

    @operation("DELETE /v1/trajectories/{id}/ports/{port}", "ports", "It is withdrawn", problems=(404,))
    async def withdraw_port(self, id: TrajectoryId, port: PortId) -> None:
        """Withdraw a port: its URL leads nowhere from now on, and open connections end."""
        self.ports.withdraw(id, port)

    # --- functions, images, tasks and machines

    @operation(
        "GET /v1/functions",
        "functions",
        "All of them",
        next_ones=(
            *links("/functions/0/name", "name", "getFunction", "invoke"),
            OperationLink(
                operation="openTrajectory", parameters={}, body={"function": "$response.body#/functions/0/name"}
            ),
        ),
    )
    async def list_functions(self) -> types.FunctionList:
        """Registered functions.

        By name, without what was learned of them.
        """
        known = self.functions
        infos = [
            function_info(each, readiness=known.preparation.of(each.name), source=known.source(each.name))
            for each in known.all()
        ]
        return types.FunctionList(functions=tuple(infos))

    @operation("GET /v1/functions/{name}", "functions", "The function", problems=(404,))
    async def get_function(self, name: FunctionName) -> types.FunctionInfo:
        """One function.

        With what was learned of it, and its changes.
        """
        known = self.functions
        spec = known.get(name)
        learned, ready = self.history.describe(name), known.preparation.of(name)
        return function_info(spec, learned, ready, known.source(name), known.revisions.of(name))

    @operation("PUT /v1/functions/{name}", "functions", "The differences", problems=(409,), admin=True)
    async def put_function(
        self, name: NewFunctionName, query: types.FunctionQuery, body: types.FunctionUpload
    ) -> types.ConfigDiff:
        """Add or change one function, with a handler's files; 409 for one of the server's own files.

        Nothing in flight is dropped.
        """
        return await self.functions.put(name, body, query.dry_run)

    @operation("DELETE /v1/functions/{name}", "functions", "The differences", problems=(404, 409), admin=True)
    async def remove_function(self, name: FunctionName, query: types.FunctionQuery) -> types.ConfigDiff:
        """Remove a function that was applied; 409 for one of the server's own files.

        There are no new invocations of it; nothing in flight is dropped.
        """
        return await self.functions.remove(name, query.dry_run)

    @operation(
        "PUT /v1/config",
        "functions",
        "The differences",
        body={"application/yaml": types.JsonObject, JSON: types.ConfigFiles},
        admin=True,
    )
    async def put_config(self, query: types.ConfigQuery, body: bytes) -> types.ConfigDiff:
        """Apply a configuration without dropping anything in flight.

        Functions and tasks are added and changed: new invocations see the new ones.
        """
        return await self.functions.configure(body, query.dry_run, query.prune)

    @operation("GET /v1/images", "images", "All of them", problems=(422,))
    async def list_images(self) -> types.ImageList:
        """Container images, and how far pulls are.

        Every image of the engine that has a name, and those that are pulled or could not be.
        """
        keeper = self.image_keeper()
        return _image_list(await keeper.states(), keeper)

    @operation("PUT /v1/images", "images", "Those that were asked for", admin=True)
    async def pull_images(self, query: types.WaitQuery, body: types.ImagesWanted) -> types.ImageList:
        """Pull container images ahead of a run.

        Pulls begin, and are waited for if that is asked; what became of each stands in the answer.
        """
        wait_s = None if query.wait is None else self.wait_s(query.wait)
        keeper, wanted = self.image_keeper(), body.images
        for image in wanted:
            require_image_name(image)
        present = {state.image for state in await keeper.states() if state.state == "present"}
        for image in wanted:
            if not {image, f"{image}:latest"} & present:
                keeper.begin(image)
        with ExitStack() as waits:
            for image in filter(keeper.pulls, wanted if wait_s else ()):
                waits.enter_context(self.waiting("pull", image, ""))
            await keeper.settled(wanted, wait_s or 0.0)
        names = {name for image in wanted for name in (image, f"{image}:latest")}
        return _image_list([state for state in await keeper.states() if state.image in names], keeper)

    def image_keeper(self) -> ImageKeeper:
        """Return who keeps the images of sandboxes; raises Unsupported where they have none."""
        if self.provider.images is None:
            kind = self.provider.info.kind
            raise Unsupported(f"this gateway's sandboxes are of kind {kind} and have no images; serve it with Docker")
        return self.provider.images

    @operation("GET /v1/tasks", "scheduler", "The present state")
    async def get_tasks(self) -> types.TaskList:
        """RL tasks: weights, bounds and use, and the steps that have not ended.

        One that has a step and no action yet has an empty account.
        """
        tasks = self.engine.tasks(self.steps.tasks())
        return convert(
            {"tasks": [{**each, "steps": self.steps.unfinished(str(each["task"]))} for each in tasks]}, types.TaskList
        )

    @operation("GET /v1/tasks/{task}/steps", "scheduler", "All of them; none if none was told of")
    async def list_steps(self, task: TaskName) -> types.StepList:
        """The steps of a task that are kept, that opened last first."""
        return types.StepList(steps=tuple(self.steps.of(task)))

    @operation(
        "PUT /v1/tasks/{task}/steps/{step}",
        "scheduler",
        "The step as it stands",
        next_ones=links("/task", "task", "listSteps"),
    )
    async def put_step(self, task: TaskName, step: Step, body: types.StepExpectation) -> types.StepInfo:
        """Tell of a step of a task: how many rollouts it is to have.

        It is durable.
        """
        self.functions.task(task)
        return await self.steps.tell(task, step, body.expected)

    @operation("GET /v1/nodes", "operation", "All of them", next_ones=links("/nodes/0/node", "name", "drainNode"))
    async def list_nodes(self) -> types.NodeStatusList:
        """The machines that actions run on, and how they are."""
        return self.machines.info()

    @operation("POST /v1/nodes/{name}/drain", "operation", "How it is now", problems=(404,), admin=True)
    async def drain_node(self, name: NodeName, body: types.DrainWanted = NO_REASON) -> types.NodeStatus:
        """Have a machine take no new work, and leave when it is empty.

        Or when its grace is over.
        """
        return self.machines.drain(name, body.why)

    @operation("POST /v1/node-tickets", "operation", "The ticket", status=201, problems=(409,), admin=True)
    async def issue_ticket(self, body: types.TicketWanted) -> types.NodeTicket:
        """What admits one machine once, soon."""
        return self.machines.ticket(body.name)

    # --- the state

    @operation("POST /v1/page-keys", "operation", "The key", status=201, admin=True)
    async def issue_page_key(self) -> types.PageKey:
        """What opens the page in one browser, once: `/?key=KEY`."""
        return types.PageKey(key=self.pages.issue(), expires_in_s=KEY_LIFE_S)

    @operation("GET /v1/resources", "scheduler", "The present state")
    async def get_resources(self) -> types.ResourcesInfo:
        """Pools, what is held of them, and the sandboxes."""
        sandboxes = convert(self.provider.info, types.SandboxesInfo, from_attributes=True)
        state = {**self.engine.resources(), "sandboxes": sandboxes, "models": self.runtimes.model.resources()}
        return convert(state, types.ResourcesInfo)

    @operation("GET /v1/activity", "scheduler", "The present state")
    async def get_activity(self) -> types.ActivityInfo:
        """Rates and times of the last minute, failures of the last 15."""
        return self.stats.whole_info()

    @operation("GET /v1/queue", "scheduler", "A page", next_ones=links("/next_cursor", "cursor", "getQueue"))
    async def get_queue(self, query: types.QueueQuery) -> types.QueuePage:
        """How many wait, and a page of them in order of service, with what each waits for.

        A cursor stays good when the action that it names has left.
        """
        return convert(self.engine.queue(query.limit, query.cursor), types.QueuePage)

    @operation("GET /healthz", "operation", "It lives", open=True)
    async def get_health(self) -> types.Health:
        """Whether the process lives."""
        return types.Health(status="ok")

    def readiness(self) -> types.Health:
        """Return whether work is taken now (`READY`), and if not, why."""
        states = {name: status for name, (status, _) in self.functions.health().items()}
        return types.Health(
            status=self.unready() or READY,
            warnings=(*self.engine.policy_faults.values(), *self.machines.warnings(), *self.provider.info.weakenings),
            record=self.state_dir.checked or UNSET,
            preparing=tuple([name for name, status in states.items() if status == "preparing"]),
            unavailable=tuple([name for name, status in states.items() if status == "unavailable"]),
        )


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


def with_choice(function: FunctionSpec, choice: types.SandboxChoice) -> FunctionSpec:
    """Return the function with the sandbox that a trajectory has chosen; raises InvalidInput."""
    if function.sandbox is None:
        raise _no_choice(function, "sandbox")
    return replace(function, sandbox=chosen(function.sandbox, choice))


def _no_choice(function: FunctionSpec, field: str) -> InvalidInput:
    message = f"$.{field}: function {function.name!r} has no sandbox of which anything could be chosen"
    return InvalidInput(message, component="http", detail={"path": f"$.{field}"})


def rooted(path: str) -> str:
    """Return a path that begins at the sandbox's root; raises InvalidInput."""
    return "/" + _fitting(path).lstrip("/")


def placed_path(path: str, workdir: str) -> str:
    """Return a path, absolute: a relative one begins at the sandbox's working directory; raises InvalidInput."""
    return posixpath.normpath(posixpath.join(workdir, _fitting(path)))


def _fitting(path: str) -> str:
    """Return a path that a system can take; raises InvalidInput. It is the sandbox that keeps it inside."""
    if "\0" in path or len(path.encode("utf-8", "replace")) > PATH_BYTES_MAX:
        message = f"the path holds a NUL byte or is longer than {PATH_BYTES_MAX} bytes"
        raise InvalidInput(message, component="files", detail={"path": "path"})
    return path


@contextmanager
def file_conflicts() -> Iterator[None]:
    """Raise Conflict for what the sandbox refuses, of a path that is one, and for files that are lost with it."""
    try:
        yield
    except InvalidInput as error:
        raise Conflict(error.message, component=error.component, detail=error.detail) from None
    except ActionFailed as error:
        if error.reason is not Reason.ENVIRONMENT_LOST:
            raise
        message = f"{error.message}; actions that expect them end environment_lost, then it begins anew, empty"
        raise Conflict(message, component=error.component, detail=error.detail) from None


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


async def _write(files: SandboxFiles, path: str, query: types.FileWriteQuery, data: Chunks) -> types.FileWritten:
    """Write a file as it comes; ``data`` keeps its bound."""
    mode, source = None if query.mode is None else int(query.mode, 8), _SentData(data)
    with source.failing(), file_conflicts():
        size_bytes = await files.write(path, source.chunks(), mode=mode, user=query.user or "")
    return types.FileWritten(path=path, size_bytes=size_bytes)


async def list_files(files: SandboxFiles, path: str, query: types.FileReadQuery) -> types.FileList:
    """Return the entries of a directory, by name."""
    with file_conflicts():
        stats = await files.list(path, user=query.user or "")
    entries = [
        types.FileEntry(path=stat.path, size_bytes=stat.size_bytes, directory=stat.directory, mode=f"{stat.mode:o}")
        for stat in stats
    ]
    return types.FileList(files=tuple(entries))


def _image_list(states: Sequence[ImageState], keeper: ImageKeeper) -> types.ImageList:
    images = tuple(
        types.ImageInfo(
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
    return types.ImageList(images=images, bound_bytes=keeper.bound_bytes)


def _port_info(grant: PortGrant) -> types.PortInfo:
    until_s = grant.until_s
    return types.PortInfo(
        id=grant.id,
        trajectory=grant.trajectory,
        port=grant.port,
        function=grant.function,
        expires_at=None if until_s is None else serialization.instant(until_s),
    )


def session_end(record: Record, offset: int) -> types.SessionEnd:
    """Return how an ended invocation that was a session ended."""
    result = {} if record.result is None else serialization.loads_object(record.result)
    exit_code, signal = result.get("exit_code"), result.get("signal")
    return types.SessionEnd(
        stream="eof",
        offset=offset,
        state=cast(types.State, record.state),
        reason=cast("types.Reason | None", record.reason),
        message=record.message,
        exit_code=exit_code if isinstance(exit_code, int) else None,
        signal=signal if isinstance(signal, int) else None,
    )


async def bounded_chunks(
    chunks: AsyncIterator[bytes], limit_bytes: int, setting: str, timeout_s: float, component: str
) -> AsyncIterator[bytes]:
    """Yield the chunks, in time and within a bound; raises TooLarge and TooSlow.

    ``setting`` is the key of the bound, for who has to raise it.
    """
    deadline_s, size_bytes = asyncio.get_running_loop().time() + timeout_s, 0
    while True:
        try:
            async with asyncio.timeout_at(deadline_s):
                chunk = await anext(chunks, None)
        except TimeoutError:
            message = f"the body took longer than {timeout_s:g} s to arrive"
            raise TooSlow(message, component=component) from None
        if chunk is None:
            return
        size_bytes += len(chunk)
        if size_bytes > limit_bytes:
            raise TooLarge(f"the body is larger than {limit_bytes} bytes ({setting})", component=component)
        if chunk:
            yield chunk
