"""What a client may ask of RL tasks, and tell of their steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from tangram.client import step_requests
from tangram.client.requests import ApiRequest
from tangram.types import StepInfo, TaskInfo

_T = TypeVar("_T")


class AsyncTaskCalls(ABC):
    """The part of a client that speaks of tasks."""

    @abstractmethod
    async def _send(self, request: ApiRequest[_T]) -> _T:
        """Send, and send again where that is safe."""

    async def tasks(self) -> Sequence[TaskInfo]:
        """Return the RL tasks: weights, bounds and use, and their steps that have not ended."""
        return (await self._send(step_requests.list_tasks())).tasks

    async def steps(self, task: str) -> Sequence[StepInfo]:
        """Return the steps of a task that the gateway keeps, that opened last first."""
        return (await self._send(step_requests.list_steps(task))).steps

    async def tell_step(self, task: str, step: int, *, expected: int) -> StepInfo:
        """Tell how many rollouts a step is to have: trajectories opened under it, and calls of none that name it."""
        return await self._send(step_requests.tell_step(task, step, expected))
