"""A function's section of the YAML: one model for each runtime, chosen by ``runtime``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator

from gateway.config.sections import Bytes, Count, Name, Positive, SandboxSection, Seconds, Section, refuse_boolean
from manager.action import Amdahl, EfficiencyTable, Elasticity, UnitSet
from manager.errors import Reason
from manager.function import DurationSpec, ModelAction, PytestSpec, RetrySpec

#: Most units of a resource that one action may ask for: the search for the best count grows with it.
UNITS_MAX = 65536

Units = Annotated[int, Field(ge=1, le=UNITS_MAX), BeforeValidator(refuse_boolean)]
Efficiency = Annotated[float, Field(gt=0, le=1), BeforeValidator(refuse_boolean)]


class UnitRange(Section):
    """Every count from ``min`` to ``max``."""

    min: Units = Field(description="fewest units")
    max: Units = Field(description="most units")

    @model_validator(mode="after")
    def _ordered(self) -> UnitRange:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        return self

    def unit_set(self) -> UnitSet:
        return UnitSet.span(self.min, self.max)


class UnitChoices(Section):
    """Some counts only, for example 1, 2, 4, 8."""

    choices: tuple[Units, ...] = Field(min_length=1, description="admissible counts")

    def unit_set(self) -> UnitSet:
        return UnitSet.of(self.choices)


def _amount_form(value: object) -> str | None:
    if isinstance(value, dict):
        return "choices" if "choices" in value else "range"
    return "units" if isinstance(value, int | float | str) else None


Amount = Annotated[
    Annotated[Units, Tag("units")] | Annotated[UnitRange, Tag("range")] | Annotated[UnitChoices, Tag("choices")],
    Discriminator(
        _amount_form,
        custom_error_type="amount",
        custom_error_message="write a count, {min: ..., max: ...} or {choices: [...]}",
    ),
]


def unit_set(amount: int | UnitRange | UnitChoices) -> UnitSet:
    return UnitSet.fixed(amount) if isinstance(amount, int) else amount.unit_set()


class ElasticitySection(Section):
    """How much faster more units of the key resource make it; learned unless it is given."""

    key: Name = Field(description="the resource whose amount changes the duration")
    serial_fraction: Annotated[float, Field(ge=0, le=1), BeforeValidator(refuse_boolean)] | None = Field(
        default=None, description="part of the work that cannot be shared (Amdahl)"
    )
    table: dict[Units, Efficiency] | None = Field(
        default=None, min_length=1, description="efficiency E by units: {1: 1.0, 2: 0.9}"
    )
    learned: bool = Field(default=False, description="fit it to the history (also when nothing is given)")

    @model_validator(mode="after")
    def _one_form(self) -> ElasticitySection:
        if [self.serial_fraction is not None, self.table is not None, self.learned].count(True) > 1:
            raise ValueError("give one of serial_fraction, table and learned")
        return self

    def elasticity(self) -> Elasticity | None:
        """The declared curve, or None to learn it."""
        if self.serial_fraction is not None:
            return Amdahl(self.serial_fraction)
        return None if self.table is None else EfficiencyTable(tuple(sorted(self.table.items())))


class DurationSection(Section):
    """What is known of the duration before anything is measured."""

    profile: Literal["learned", "declared"] = Field(
        default="learned", description="learned from history, or as declared"
    )
    key: str = Field(default="", description="input field whose value keys the learning, for example suite")
    initial_s: Seconds | None = Field(default=None, validation_alias="initial", description="with one unit")

    @model_validator(mode="after")
    def _declared_is_given(self) -> DurationSection:
        if self.profile == "declared" and self.initial_s is None:
            raise ValueError("a declared duration needs initial")
        return self

    def spec(self) -> DurationSpec:
        return DurationSpec(profile=self.profile, key=self.key, initial_s=self.initial_s)


def _reason_or_status(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and 400 <= value <= 599:
        return value
    if isinstance(value, str) and value in set(Reason):
        return Reason(value)
    raise ValueError(f"{value!r} is neither a reason ({', '.join(Reason)}) nor an HTTP status from 400 to 599")


class RetrySection(Section):
    """Tries after a failure."""

    max_attempts: Annotated[Positive, Field(le=100)] = Field(default=1, description="tries in all")
    backoff_s: Seconds = Field(default=1.0, validation_alias="backoff", description="first wait, doubled each time")
    backoff_max_s: Seconds = Field(default=60.0, validation_alias="backoff_max", description="longest wait")
    jitter: Literal["full", "none"] = Field(default="full", description="full waits a random part of the time")
    on: tuple[
        Annotated[
            Reason | int,
            BeforeValidator(_reason_or_status),
            WithJsonSchema({"enum": [*Reason, *range(400, 600)]}),
        ],
        ...,
    ] = Field(default=(), description="reasons, and HTTP statuses of an api function, that are tried again")

    @model_validator(mode="after")
    def _says_on_what(self) -> RetrySection:
        if self.max_attempts > 1 and not self.on:
            raise ValueError("say on what it is tried again, for example on: [environment_lost, 503]")
        return self

    def spec(self) -> RetrySpec:
        return RetrySpec(
            max_attempts=self.max_attempts,
            backoff_s=self.backoff_s,
            backoff_max_s=self.backoff_max_s,
            jitter=self.jitter,
            on=tuple(each for each in self.on if isinstance(each, Reason)),
            on_status=tuple(each for each in self.on if not isinstance(each, Reason)),
        )


class FunctionBase(Section):
    """What every runtime knows."""

    description: str = Field(default="", description="one line for people")
    cost: dict[Name, Amount] | None = Field(
        default=None, description="units of each resource; one cpu (gpu for a model, nothing for an api) by default"
    )
    elasticity: ElasticitySection | None = Field(default=None, description="how more units make it faster")
    duration: DurationSection = Field(default=DurationSection(), description="what is known of the duration")
    input: dict[str, object] | None = Field(default=None, description="JSON Schema of the input")
    result: dict[str, object] | None = Field(
        default=None, description="JSON Schema of the result, told to callers and not checked"
    )
    timeout_s: Annotated[Seconds, Field(gt=0)] = Field(
        default=60.0, validation_alias="timeout", description="execution only"
    )
    queue_timeout_s: Annotated[Seconds, Field(gt=0)] = Field(
        default=600.0, validation_alias="queue_timeout", description="waiting only"
    )
    idempotent: bool = Field(default=False, description="may be run again after a node or the gateway is lost")
    max_queued: Positive = Field(default=1024, description="most waiting invocations; beyond it 429")
    output_limit_bytes: Bytes = Field(default=1 * 2**20, validation_alias="output_limit", description="largest result")
    log_limit_bytes: Bytes = Field(
        default=4 * 2**20, validation_alias="log_limit", description="log kept of one invocation"
    )
    retry: RetrySection = Field(default=RetrySection(), description="tries after a failure")


class ExecFunction(FunctionBase):
    """A shell command in the trajectory's sandbox."""

    runtime: Literal["exec"] = Field(description="a shell command in the trajectory's sandbox")
    sandbox: SandboxSection = Field(default=SandboxSection(), description="its environment")


class PytestSection(Section):
    """How a test suite is run."""

    args: tuple[str, ...] = Field(default=(), description="options added to every run")
    dist: Literal["load", "loadscope", "loadfile", "loadgroup", "worksteal", "no"] = Field(
        default="worksteal", description="pytest-xdist's --dist"
    )
    max_workers: Positive = Field(default=64, description="most workers, whatever was granted")

    def spec(self) -> PytestSpec:
        return PytestSpec(args=self.args, dist=self.dist, max_workers=self.max_workers)


class PytestFunction(FunctionBase):
    """A test suite in the trajectory's sandbox, with as many workers as cores were granted."""

    runtime: Literal["pytest"] = Field(
        description="a test suite in the trajectory's sandbox; its verdicts are the reward"
    )
    sandbox: SandboxSection = Field(default=SandboxSection(), description="its environment")
    pytest: PytestSection = Field(default=PytestSection(), description="how the suite is run")


class InstanceConcurrency(Section):
    """What one warm instance takes at a time."""

    per_instance: Positive = Field(default=1, description="actions that one instance executes at once")


class Scale(Section):
    """How many warm instances there are."""

    min: Count = Field(default=0, description="always kept")
    max: Positive = Field(default=8, description="most at once")
    idle_s: Seconds = Field(
        default=300.0, validation_alias="idle", description="an instance above min ends after this time"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Scale:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        return self


class HandlerFunction(FunctionBase):
    """A Python function, imported once per warm instance."""

    runtime: Literal["handler"] = Field(description="a Python function, imported once per warm instance")
    handler: str = Field(
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$",
        description="module:callable beside the YAML file, called as callable(event, context)",
    )
    sandbox: SandboxSection = Field(default=SandboxSection(), description="the environment of an instance")
    concurrency: InstanceConcurrency = Field(default=InstanceConcurrency(), description="actions of one instance")
    scale: Scale = Field(default=Scale(), description="warm instances")


class EngineSection(Section):
    """An external, OpenAI-compatible engine instead of the in-house one.

    It needs devices of its own: a gateway whose node has GPUs serves either external engines or its own models.
    Where the engine computes was decided when it was started; the chunk of its action says when it may be awake.
    """

    url: str = Field(pattern=r"^https?://", description="base URL")
    sleep: str = Field(default="", description="path posted to evict the model")
    wake: str = Field(default="", description="path posted to restore the model")


class ModelSection(Section):
    """A checkpoint and what is asked of it."""

    path: str = Field(
        min_length=1, description="directory with config.json and *.safetensors; the model's name on an engine"
    )
    action: ModelAction = Field(description="score, logprobs, generate or embed")
    dtype: Literal["", "float32", "float16", "bfloat16"] = Field(
        default="", description="the checkpoint's own by default"
    )
    max_tokens: Positive = Field(default=8192, description="most tokens of one text")
    overlong: Literal["error", "truncate"] = Field(default="error", description="what happens to a longer text")
    batch_tokens: Positive = Field(default=16384, description="tokens of one packed batch")
    max_new_tokens: Positive = Field(default=512, description="most generated tokens")
    engine: EngineSection | None = Field(default=None, description="an external engine")


class ModelFunction(FunctionBase):
    """A model service on the GPUs (or on the CPU device)."""

    runtime: Literal["model"] = Field(description="a model that is restored when it is needed and evicted when not")
    model: ModelSection = Field(description="the checkpoint")


def _status(value: int) -> int:
    if not 100 <= value <= 599:
        raise ValueError(f"{value} is no HTTP status")
    return value


class RequestSection(Section):
    """A templated HTTP call; ``{name}`` comes from the input, ``${secret:NAME}`` from the server."""

    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] = Field(default="GET", description="HTTP method")
    url: str = Field(description="URL; scheme, host and port are fixed")
    headers: dict[str, str] = Field(default={}, description="headers")
    # ``json`` would hide a method of pydantic's.
    json_body: object = Field(default=None, validation_alias="json", description="JSON template of the body")
    accept: tuple[Annotated[int, AfterValidator(_status)], ...] = Field(default=(), description="answers besides 2xx")
    response_limit_bytes: Bytes = Field(
        default=4 * 2**20, validation_alias="response_limit", description="largest answer"
    )


class ApiFunction(FunctionBase):
    """A rate-limited call of an external service."""

    runtime: Literal["api"] = Field(description="a templated HTTP call under quotas")
    request: RequestSection = Field(description="the call")


Function = Annotated[
    ExecFunction | PytestFunction | HandlerFunction | ModelFunction | ApiFunction, Field(discriminator="runtime")
]
