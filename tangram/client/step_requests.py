"""The requests that speak of RL tasks and their steps."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from tangram.client.answers import reader
from tangram.client.requests import JSON_BODY, ApiRequest, get
from tangram.types import StepExpectation, StepInfo, StepList, TaskList


def list_tasks() -> ApiRequest[TaskList]:
    return get("/v1/tasks", TaskList)


def list_steps(task: str) -> ApiRequest[StepList]:
    return get(_steps_path(task), StepList)


def tell_step(task: str, step: int, expected: int) -> ApiRequest[StepInfo]:
    """Return the request that tells of a step; it may be sent again."""
    content = msgspec.json.encode(StepExpectation(expected=expected))
    path = f"{_steps_path(task)}/{step}"
    return ApiRequest(method="PUT", path=path, read=reader(StepInfo), headers=JSON_BODY, content=content)


def _steps_path(task: str) -> str:
    return f"/v1/tasks/{quote(task, safe='')}/steps"
