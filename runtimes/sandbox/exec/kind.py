"""The kind exec: a shell command in the trajectory's sandbox, what it takes and what it returns."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from msgspec import Meta

from runtimes.kind import Kind, schema_of
from runtimes.sandbox.exec.runtime import ExecInput, ExecRuntime


class ExecResult(TypedDict):
    """How a command ended. An exit status that is not zero is data, not a failure."""

    exit_code: Annotated[int | None, Meta(description="Exit status; null if a signal ended it")]
    signal: Annotated[int | None, Meta(description="The signal that ended it, else null")]
    stdout: Annotated[str, Meta(description="Standard output; beyond output_limit its two ends")]
    stderr: Annotated[str, Meta(description="Standard error, likewise")]
    stdout_base64: NotRequired[Annotated[str, Meta(description="The bytes of stdout, if they are not UTF-8")]]
    stderr_base64: NotRequired[Annotated[str, Meta(description="The bytes of stderr, if they are not UTF-8")]]
    stdout_truncated: Annotated[bool, Meta(description="Whether stdout lacks bytes; a line in it counts them")]
    stderr_truncated: Annotated[bool, Meta(description="Whether stderr lacks bytes; a line in it counts them")]
    duration_s: Annotated[float, Meta(description="Seconds that the command ran")]


INPUT = schema_of(ExecInput, oneOf=[{"required": ["command"]}, {"required": ["argv"]}], additionalProperties=False)
RESULT = schema_of(ExecResult)

EXEC = Kind(
    name="exec",
    meaning="a shell command in the trajectory's sandbox",
    make=lambda materials: ExecRuntime(materials.environments),
    works_in_sandbox=True,
    sandbox="its environment",
    input_schema=lambda function: INPUT,
    added_fields=frozenset({"session"}),
    result_schema=lambda function: RESULT,
    shown={"": (INPUT, RESULT)},
)
