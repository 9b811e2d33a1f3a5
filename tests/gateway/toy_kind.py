"""A runtime kind that the house does not have, and a gateway that serves it: a program, for the kinds are read once."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict

import httpx

import runtimes.kinds
from manager.function import FunctionSpec, Setting
from runtimes.kind import Kind, schema_of
from runtimes.runtime import Execution, Result, Runtime
from tangram.client.requests import Bearer

ANSWER_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyKeys:
    """The keys of a toy function."""

    times: Annotated[int, Setting("how often it says its text", ge=1)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyFunction(FunctionSpec):
    """A function of the kind toy."""

    times: int


class ToyText(TypedDict):
    """A text."""

    text: str


class ToyRuntime(Runtime):
    """Says its text as often as the function says."""

    async def execute(self, execution: Execution) -> Result:
        function = execution.call.function
        assert isinstance(function, ToyFunction)
        execution.begin()
        return Result(value={"text": str(execution.call.input["text"]) * function.times})


TEXT = schema_of(ToyText)
TOY = Kind(
    name="toy",
    meaning="a text, over and over",
    make=lambda deps: ToyRuntime(),
    section=ToyKeys,
    function=ToyFunction,
    spec=lambda section, place: {"times": section.times},
    input_schema=lambda function: TEXT,
    result_schema=lambda function: TEXT,
    shown={"": (TEXT, TEXT)},
)


async def serve(directory: Path) -> Mapping[str, object]:
    """Return what a gateway with the kind answers: of the function, of calls, and of a change."""
    from gateway.app import gateway
    from gateway.config.load import load
    from scripts.reference import CHAPTERS

    async with gateway(load([directory], {})) as app:
        serving = asyncio.create_task(app.serve())
        base, bearer = f"http://127.0.0.1:{app.http_port}/v1", Bearer(None)
        async with httpx.AsyncClient(base_url=base, auth=bearer, timeout=ANSWER_S) as client:
            calls = "/functions/say/invocations"
            found = {
                "function": (await client.get("/functions/say")).json(),
                "good": (await client.post(calls, json={"text": "ab"})).json(),
                "bad": (await client.post(calls, json={"txt": "ab"})).status_code,
                "change": (await client.put("/config", content="functions: {say: {runtime: toy, times: 3}}")).json(),
                "changed": (await client.post(calls, json={"text": "ab"})).json(),
                "chapters": [place for _, place in CHAPTERS if "toy" in place],
            }
        app.stop()
        await serving
    return found


def main() -> None:
    """Serve the directory that the command line names, and write what was answered to ``answers.json`` there."""
    runtimes.kinds.KINDS = {**runtimes.kinds.KINDS, TOY.name: TOY}
    directory = Path(sys.argv[1])
    (directory / "answers.json").write_text(json.dumps(asyncio.run(serve(directory))))


if __name__ == "__main__":
    main()
