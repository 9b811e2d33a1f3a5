"""Lists, page by page: records, trajectories, what waits, functions and tasks."""

from __future__ import annotations

from msgspec import convert
from msgspec.structs import replace as replaced

from gateway import wire
from gateway.functions import function_info
from gateway.invocations.record import seq_of
from gateway.services import Services
from gateway.store.listing import Filter, Page
from gateway.trajectories import leased
from manager.action import State
from manager.errors import Reason
from tangram.types import (
    FunctionInfo,
    InvocationQuery,
    QueuePage,
    QueueQuery,
    TaskList,
    TrajectoryPage,
    TrajectoryQuery,
)


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
        since_s=None if asked.since is None else wire.moment_s(asked.since, "since", now_s),
        until_s=None if asked.until is None else wire.moment_s(asked.until, "until", now_s),
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
