"""The kind model: a model service on the devices, what each of its actions takes and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from manager.function import FunctionSpec, ModelAction, ModelSpec, Setting
from runtimes.kind import DeclarationSite, Kind, Schema, schema_of
from runtimes.materials import Materials
from runtimes.model.checkpoint.checkpoint import fingerprint
from runtimes.model.checkpoint.directory import checkpoint_problem
from runtimes.runtime import Runtime

TokenId = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSection:
    """An external, OpenAI-compatible engine instead of the in-house one.

    It needs devices of its own: a gateway whose node has GPUs serves either external engines or its own models.
    Where the engine computes was decided when it was started; the chunk of its action says when it may be awake.
    """

    url: Annotated[
        str, Setting("base URL", pattern=r"^https?://", words="an address that begins with http:// or https://")
    ]
    sleep: Annotated[str, Setting("path posted to evict the model")] = ""
    wake: Annotated[str, Setting("path posted to restore the model")] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """A checkpoint and what is asked of it."""

    spec: Annotated[ModelSpec, Setting(inline=True)]
    engine: Annotated[EngineSection | None, Setting("an external engine")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKeys:
    """The keys of a model function."""

    model: Annotated[ModelSection, Setting("the checkpoint")]


class ModelInputFields(TypedDict, total=False):
    """Sequences: exactly one of ``texts``, ``token_ids`` and ``messages``."""

    texts: Annotated[list[Text], Meta(min_length=1, description="Texts, one sequence each")]
    token_ids: Annotated[
        list[Annotated[list[TokenId], Meta(min_length=1)]],
        Meta(min_length=1, description="Token ids, one list for each sequence"),
    ]
    messages: Annotated[
        list[dict[str, Any] | list[Any]],
        Meta(min_length=1, description="One conversation (messages with role and content), or a list of them"),
    ]


class GenerateInputFields(ModelInputFields, total=False):
    """Sequences to continue, and how to sample: exactly one of ``texts``, ``token_ids`` and ``messages``."""

    max_new_tokens: Annotated[int, Meta(ge=1, description="At most the function's max_new_tokens, its default")]
    temperature: Annotated[float, Meta(ge=0, le=100, description="0, the default, takes the likeliest token")]
    top_p: Annotated[float, Meta(gt=0, le=1, description="Mass of the likeliest tokens to draw from; 1 by default")]
    seed: Annotated[int, Meta(ge=0, description="Seed of the draws; a random one by default, told in the result")]


class LogprobsInputFields(ModelInputFields, total=False):
    """Sequences to judge token by token: exactly one of ``texts``, ``token_ids`` and ``messages``."""

    top_logprobs: Annotated[
        int,
        Meta(
            ge=0, le=128, description="Also tell ids, ranks and so many of the likeliest tokens; in-house models only"
        ),
    ]


class ModelResult(TypedDict):
    """What every action tells of its sequences; an external engine does not."""

    tokens: NotRequired[Annotated[list[int], Meta(description="Tokens of each sequence as it was read")]]
    truncated: NotRequired[Annotated[list[int], Meta(description="Indices of the sequences that were cut")]]


class ScoreResult(ModelResult):
    """The value of the head for each sequence."""

    scores: Annotated[
        list[float | list[float]], Meta(description="A number for each sequence; a list if the head has several labels")
    ]


class LogprobsResult(ModelResult):
    """The log-probability of each token under the ones before it."""

    logprobs: Annotated[list[list[float]], Meta(description="For each sequence every token's but the first")]
    sums: Annotated[list[float], Meta(description="Their sum for each sequence")]
    token_ids: NotRequired[Annotated[list[list[int]], Meta(description="The sequences' ids, if top_logprobs is given")]]
    ranks: NotRequired[
        Annotated[list[list[int]], Meta(description="Rank of each token in the vocabulary, 1 the likeliest, likewise")]
    ]
    top_logprobs: NotRequired[
        Annotated[
            list[list[list[list[int | float]]]],
            Meta(description="The likeliest tokens in its place, id and log-probability, likewise"),
        ]
    ]


class EmbedResult(ModelResult):
    """A unit vector for each sequence."""

    embeddings: list[list[float]]


class GenerateResult(ModelResult):
    """A continuation of each sequence."""

    texts: NotRequired[
        Annotated[list[str], Meta(description="Continuations; left out if the checkpoint has no tokenizer")]
    ]
    token_ids: NotRequired[Annotated[list[list[int]], Meta(description="Their ids; an external engine tells none")]]
    finish_reasons: Annotated[list[str], Meta(description="stop or length, for each sequence")]
    seed: Annotated[int, Meta(description="The seed that was used")]


_ONE_OF = [{"required": [kind]} for kind in ModelInputFields.__annotations__]
_SEQUENCES = schema_of(ModelInputFields, oneOf=_ONE_OF, additionalProperties=False)
_LOGPROBS = schema_of(LogprobsInputFields, oneOf=_ONE_OF, additionalProperties=False)
_GENERATE = schema_of(GenerateInputFields, oneOf=_ONE_OF, additionalProperties=False)
_SHOWN: Mapping[str, tuple[Schema, Schema]] = {
    ModelAction.SCORE: (_SEQUENCES, schema_of(ScoreResult)),
    ModelAction.LOGPROBS: (_LOGPROBS, schema_of(LogprobsResult)),
    ModelAction.EMBED: (_SEQUENCES, schema_of(EmbedResult)),
    ModelAction.GENERATE: (_GENERATE, schema_of(GenerateResult)),
}


def _schemas(function: FunctionSpec) -> tuple[Schema, Schema]:
    assert function.model is not None, f"{function.name} has no model section"
    return _SHOWN[function.model.action]


def _spec(section: ModelKeys, place: DeclarationSite) -> Mapping[str, object]:
    spec, engine = section.model.spec, section.model.engine
    if engine is not None:
        url, sleep, wake = engine.url, engine.sleep, engine.wake
        return {"model": replace(spec, engine_url=url, sleep_path=sleep, wake_path=wake)}
    path = ((place.models_dir or place.directory) / spec.path.expanduser()).resolve()
    if not place.may_look_at(path):
        place.refuse(
            ("model", "path"),
            f"{path} is outside of the directories that this gateway serves; "
            "put it below models.dir or beside the server's own files, or name it in these and apply them with "
            "tangram apply --own",
        )
    elif place.look and not place.models_elsewhere and (problem := checkpoint_problem(path)) is not None:
        place.refuse(("model", "path"), problem)
    return {"model": replace(spec, path=path)}


def _make(materials: Materials) -> Runtime:
    from runtimes.model.runtime import ModelRuntime

    return ModelRuntime(materials.models)


def _source(function: FunctionSpec) -> str:
    """What names the weights that a revision was declared with; an engine of its own has its own."""
    return "" if function.model is None or function.model.engine_url else fingerprint(function.model.path)


MODEL = Kind(
    name="model",
    meaning="a model that is restored when it is needed and evicted when not",
    make=_make,
    section=ModelKeys,
    cost="gpu",
    spec=_spec,
    input_schema=lambda function: _schemas(function)[0],
    result_schema=lambda function: _schemas(function)[1],
    shown=_SHOWN,
    source=_source,
)
