"""Early answers: a request of a batch is answered when its own sequences have ended, not when all have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from manager.errors import CodedError
from runtimes.model.device.messages import Ended, Usage
from runtimes.model.device.process import Gone
from runtimes.model.engine.contract import ModelJob, ModelRequest, OnAnswered


class EarlyAnswers:
    """Collects the sequences of a job as they end. Leaving it waits for the answers that are on their way."""

    def __init__(
        self,
        job: ModelJob,
        value_of: Callable[[ModelRequest, Sequence[object]], Awaitable[Mapping[str, object]]],
        answered: OnAnswered,
    ) -> None:
        self._job, self._value_of, self._answered = job, value_of, answered
        #: Of each sequence, by its position in the job: its request, and its position there.
        self._owners = [
            (index, place) for index, request in enumerate(job.requests) for place in range(len(request.input))
        ]
        self._parts: list[dict[int, object]] = []
        self._answers: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*self._answers)

    def begin(self) -> None:
        """Nothing has ended yet: another attempt begins."""
        self._parts = [{} for _ in self._job.requests]

    def ended(self, one: Ended) -> None:
        """Take a sequence; answer its request if that was the last of it, and others go on."""
        index, place = self._owners[one.position]
        part, request = self._parts[index], self._job.requests[index]
        part[place] = one.value
        others_go_on = any(
            len(each) < len(asked.input) for each, asked in zip(self._parts, self._job.requests, strict=True)
        )
        if len(part) == len(request.input) and others_go_on:
            answer = asyncio.ensure_future(self._answer(index, [part[place] for place in sorted(part)], one.usage))
            self._answers.add(answer)
            answer.add_done_callback(self._answers.discard)

    async def _answer(self, index: int, results: Sequence[object], usage: Usage) -> None:
        """Answer one; what cannot be said of it now is said with all the others."""
        try:
            value = await self._value_of(self._job.requests[index], results)
        except (CodedError, Gone):
            return
        used = job_usage([usage], len(self._job.requests))
        self._answered(index, value, {**used, "devices": float(self._job.chunk.size), "early": 1.0})


def job_usage(usages: Sequence[Usage], batch: int) -> Mapping[str, float]:
    """The chunk's use: the slowest rank's times, everybody's bytes."""
    return {
        "restored": float(any(usage.restored for usage in usages)),
        "restore_s": max(usage.restore_s for usage in usages),
        "restore_bytes": float(sum(usage.restore_bytes for usage in usages)),
        "compute_s": max(usage.compute_s for usage in usages),
        "evict_s": max(usage.evict_s for usage in usages),
        "evicted": float(max(len(usage.evicted) for usage in usages)),
        "tokens": float(usages[0].tokens),
        "devices": float(len(usages)),
        "batch": float(batch),
    }
