"""The kind pytest: a test suite in the trajectory's sandbox, what it takes and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypedDict

from msgspec import Meta

from manager.function import FunctionSpec, PytestSpec, Setting
from runtimes.kind import Kind, Schema, schema_of
from runtimes.sandbox.pytest.plan import PytestInput
from runtimes.sandbox.pytest.runtime import Check, PytestRuntime

Verdict = Literal["passed", "failed", "error", "skipped", "xfailed", "xpassed", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PytestKeys:
    """The keys of a pytest function."""

    pytest: Annotated[PytestSpec, Setting("how the suite is run")] = field(default_factory=PytestSpec)


class ListedTests(TypedDict):
    """The tests of one list, by whether they passed; ignored ones are in neither."""

    passed: list[str]
    failed: list[str]


class PytestResult(TypedDict):
    """The verdicts of a suite, and the reward that they are worth."""

    reward: Annotated[
        float | None,
        Meta(
            description="1 or 0 by the listed tests; without lists the share of tests that passed. Only passed is a "
            "pass, and what pytest.ignore names does not count; null if it is not valid"
        ),
    ]
    valid: Annotated[
        bool,
        Meta(description="Whether the run says something about the code; not if it found none of the tests asked for"),
    ]
    reason: Annotated[str, Meta(description="Why it is not valid; empty if it is")]
    graded: Annotated[
        Literal["fresh", "same_sandbox"], Meta(description="In a sandbox of its own, or where the agent worked")
    ]
    checked: Annotated[list[Check], Meta(description="What held of this run (docs/SANDBOXES.md, Rewards)")]
    resolved: Annotated[bool | None, Meta(description="Whether all that count passed; null likewise")]
    tests: Annotated[
        dict[str, Verdict],
        Meta(description="Verdict by test id; passed ones that no list names are left out if the result is too large"),
    ]
    fail_to_pass: Annotated[ListedTests, Meta(description="The input's list, parted")]
    pass_to_pass: Annotated[ListedTests, Meta(description="The input's list, parted")]
    counts: Annotated[dict[str, int], Meta(description="Tests by verdict")]
    collection_errors: Annotated[dict[str, str], Meta(description="Why a file could not be collected, by its path")]
    workers: Annotated[int, Meta(description="Workers that ran")]
    duration_s: Annotated[float, Meta(description="Seconds that the suite ran")]
    exit_code: Annotated[
        int | None, Meta(description="pytest's exit status; null if the suite did not come to its end")
    ]
    note: Annotated[str, Meta(description="What a reader of the reward should know; empty for nothing")]


_INPUT = schema_of(PytestInput, additionalProperties=False)
_RESULT = schema_of(PytestResult)


def _input_schema(function: FunctionSpec) -> Schema:
    """The fields that the learning looks at may be any value, unless they are pytest's own."""
    properties = _INPUT["properties"]
    assert isinstance(properties, dict)
    return {**_INPUT, "properties": {**dict.fromkeys(function.duration.fields, True), **properties}}


PYTEST = Kind(
    name="pytest",
    meaning="a test suite in the trajectory's sandbox, with a worker for each core; its verdicts are the reward",
    make=lambda materials: PytestRuntime(materials.environments),
    works_in_sandbox=True,
    section=PytestKeys,
    sandbox="its environment",
    spec=lambda section, place: {"pytest": section.pytest},
    input_schema=_input_schema,
    result_schema=lambda function: _RESULT,
    shown={"": (_INPUT, _RESULT)},
)
