"""HTTP operations on RL tasks: their shares and use, and the steps that their trainers tell of."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway import wire
from gateway.http.messages import read_body, respond
from gateway.http.operation import Operation, PathParameter, json_answer, links
from gateway.operations.lists import list_tasks
from gateway.services import Services
from tangram.types import Name, StepExpectation, StepInfo, StepList, StepNumber, StepPath, TaskList

TASK = PathParameter(name="task", about="An RL task", shape=Name)


class TaskOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def tasks(self, request: Request) -> Response:
        """Every task, with its steps that have not ended; one that was only told of has an empty account."""
        return respond(list_tasks(self._services))

    async def steps(self, request: Request) -> Response:
        task = wire.name(request.path_params["task"], "task")
        return respond(StepList(steps=tuple(self._services.steps.of(task))))

    async def tell_step(self, request: Request) -> Response:
        """Open a step, or change what is expected of it; it is durable."""
        meant = wire.read(request.path_params, StepPath)
        self._services.functions.task(meant.task)
        asked = wire.read(wire.loads_object(await read_body(request, self._services)), StepExpectation, "$")
        return respond(await self._services.steps.tell(meant.task, meant.step, asked.expected))

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        number = PathParameter(name="step", about="A step, as the trainer numbers it", shape=StepNumber)
        return [
            Operation(
                id="getTasks",
                method="GET",
                path="/v1/tasks",
                endpoint=self.tasks,
                summary="RL tasks: weights, bounds and use, and the steps that have not ended",
                tag="scheduler",
                answers={200: json_answer("The present state", TaskList)},
            ),
            Operation(
                id="listSteps",
                method="GET",
                path="/v1/tasks/{task}/steps",
                endpoint=self.steps,
                summary="The steps of a task that are kept, that opened last first",
                tag="scheduler",
                parts=(TASK,),
                answers={200: json_answer("All of them; none if none was told of", StepList)},
                problems=(422,),
            ),
            Operation(
                id="putStep",
                method="PUT",
                path="/v1/tasks/{task}/steps/{step}",
                endpoint=self.tell_step,
                summary="Tell of a step of a task: how many rollouts it is to have",
                tag="scheduler",
                parts=(TASK, number),
                body={"application/json": StepExpectation},
                body_required=True,
                answers={200: json_answer("The step as it stands", StepInfo, links("/task", "task", "listSteps"))},
                problems=(413, 422),
            ),
        ]
