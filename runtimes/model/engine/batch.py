"""The batch: actions of one service on one chunk that the manager started together, gathered into one job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from manager.action import Chunk
from runtimes.model.engine.contract import ModelBackend, ModelJob, ModelRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberAnswer:
    """One action's JSON value, and the measured use of the job it was part of."""

    value: Mapping[str, object]
    usage: Mapping[str, float]


@dataclass(eq=False, slots=True, kw_only=True)
class BatchMember:
    """One action of a batch; ``begin`` is called when its weights are in place."""

    request: ModelRequest
    begin: Callable[[], None]
    #: What the manager evicts for it: the leader of a batch carries that, and members come in any order.
    evict: tuple[str, ...] = ()
    answer: asyncio.Future[MemberAnswer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class BatchJob:
    """Waits shortly for the members that the lease names, then runs those that came as one job.

    Whoever makes or finds it promises to `join` or to `leave_out` its action; the wait begins with the first to join.
    """

    def __init__(
        self,
        *,
        backend: ModelBackend,
        service: str,
        members: tuple[str, ...],
        chunk: Chunk,
        cores: tuple[int, ...],
        gather_s: float,
        on_end: Callable[[], None],
    ) -> None:
        self._backend, self._service, self._chunk = backend, service, chunk
        self._cores, self._gather_s = cores, gather_s
        self._on_end = on_end
        self._expected = set(members)
        self._present: list[BatchMember] = []
        self._first = asyncio.Event()
        self._complete = asyncio.Event()
        #: Whether the job is on its way: later comers make a batch of their own.
        self.closed = False
        #: Whether it computes something that nobody waits for any more.
        self._abandoned = False
        self._task = asyncio.create_task(self._run(), name=f"batch {members[0]}")

    def join(self, action_id: str, member: BatchMember) -> None:
        self._present.append(member)
        self._first.set()
        self.leave_out(action_id)

    def leave_out(self, action_id: str) -> None:
        """Wait no longer for this action."""
        self._expected.discard(action_id)
        if not self._expected:
            self._first.set()
            self._complete.set()

    async def answer(self, member: BatchMember) -> MemberAnswer:
        """The member's answer. When the last member is cancelled the job is stopped before this returns."""
        try:
            return await member.answer
        except asyncio.CancelledError:
            self._abandoned = True
            raise
        finally:
            self._present.remove(member)
            if not self._present and self._abandoned:
                await self.cancel()

    async def cancel(self) -> None:
        """Stop the job and wait until it has stopped."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            await self._first.wait()
            if self._expected:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._gather_s):
                        await self._complete.wait()
            self.closed = True
            members = list(self._present)
            if members:
                await self._execute(members)
        finally:
            self.closed = True
            self._on_end()

    async def _execute(self, members: list[BatchMember]) -> None:
        job = ModelJob(
            service=self._service,
            chunk=self._chunk,
            requests=tuple(member.request for member in members),
            evict=tuple({name: None for member in members for name in member.evict}),
            cores=self._cores,
        )

        def answered(index: int, value: Mapping[str, object], usage: Mapping[str, float]) -> None:
            if not members[index].answer.done():
                members[index].answer.set_result(MemberAnswer(value=value, usage=usage))

        try:
            answers = await self._backend.execute(job, lambda: _begin(members), answered)
        except BaseException as error:
            for member in members:
                if not member.answer.done():
                    _settle_error(member.answer, error)
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        for member, value in zip(members, answers.values, strict=True):
            if not member.answer.done():
                member.answer.set_result(MemberAnswer(value=value, usage=answers.usage))


def _begin(members: list[BatchMember]) -> None:
    for member in members:
        member.begin()


def _settle_error(answer: asyncio.Future[MemberAnswer], error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError):
        answer.cancel()
    else:
        answer.set_exception(error)
