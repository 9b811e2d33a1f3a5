"""A function's section made into its `FunctionSpec`: defaults filled in, files looked at, revision computed."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import orjson

from gateway.config import files
from gateway.config.declared import Resource
from gateway.config.document import suggestion
from gateway.config.functions import (
    ApiFunction,
    ExecFunction,
    Function,
    HandlerFunction,
    ModelFunction,
    ModelSection,
    PytestFunction,
    RequestSection,
    unit_set,
)
from gateway.config.resources import with_needs
from gateway.config.sections import SandboxConfig
from gateway.config.yaml import KeyPath
from manager.action import UnitSet
from manager.errors import InvalidConfig
from manager.function import (
    FunctionSpec,
    HandlerSpec,
    Isolation,
    ModelSpec,
    RequestSpec,
    RuntimeKind,
)
from runtimes.api.template import RequestTemplate

#: Problems are (key path in the function, message).
Problems = list[tuple[KeyPath, str]]


def function_spec(
    name: str,
    section: Function,
    *,
    directory: Path,
    kinds: Collection[str],
    resources: Mapping[str, Resource],
    sandbox: SandboxConfig,
    models_dir: Path | None,
    look: bool,
    problems: Problems,
) -> FunctionSpec:
    """The function that the section describes; what is wrong with it is added to ``problems``."""
    cost = _cost(section, kinds, problems)
    spec = FunctionSpec(
        name=name,
        runtime=RuntimeKind(section.runtime),
        description=section.description,
        cost=with_needs(cost, resources),
        key=_key(section, cost, problems),
        elasticity=None if section.elasticity is None else section.elasticity.elasticity(),
        duration=section.duration.spec(),
        input_schema=section.input,
        result_schema=section.result,
        timeout_s=section.timeout_s,
        queue_timeout_s=section.queue_timeout_s,
        idempotent=section.idempotent,
        max_queued=section.max_queued,
        output_limit_bytes=section.output_limit_bytes,
        log_limit_bytes=section.log_limit_bytes,
        retry=section.retry.spec(),
    )
    if spec.retry.on_status and not isinstance(section, ApiFunction):
        problems.append((("retry", "on"), "HTTP statuses are tried again by api functions only: name a reason"))
    match section:
        case ExecFunction():
            spec = replace(spec, sandbox=section.sandbox.spec(sandbox))
        case PytestFunction():
            spec = replace(spec, sandbox=section.sandbox.spec(sandbox), pytest=section.pytest.spec())
        case HandlerFunction():
            handler = _handler(section, directory, look, problems)
            spec = replace(spec, sandbox=section.sandbox.spec(sandbox), handler=handler)
        case ModelFunction():
            spec = replace(spec, model=_model(section.model, models_dir or directory, look, problems))
        case ApiFunction():
            spec = replace(spec, request=_request(section.request, problems))
    _check_sandbox(spec, sandbox, problems)
    return replace(spec, revision=_revision(spec, look, problems))


def _cost(section: Function, kinds: Collection[str], problems: Problems) -> dict[str, UnitSet]:
    if section.cost is None:
        default = {ModelFunction: "gpu", ApiFunction: None}.get(type(section), "cpu")
        return {} if default is None else {default: UnitSet.fixed(1)}
    for kind in section.cost:
        if kind == "memory":
            problems.append((("cost", kind), "memory is no cost: write sandbox.memory, which a trajectory holds"))
        elif kind not in kinds:
            problems.append((("cost", kind), f"{kind!r} is no resource{suggestion(kind, kinds)}"))
    return {kind: unit_set(amount) for kind, amount in section.cost.items()}


def _key(section: Function, cost: Mapping[str, UnitSet], problems: Problems) -> str | None:
    """The key elasticity resource: the declared one, else the only elastic one (its elasticity is then learned)."""
    if section.elasticity is not None:
        key = section.elasticity.key
        if key not in cost:
            problems.append((("elasticity", "key"), f"{key!r} is not in the cost{suggestion(key, cost)}"))
            return None
        return key
    elastic = [kind for kind, units in cost.items() if units.elastic]
    if len(elastic) > 1:
        problems.append((("cost",), f"{' and '.join(elastic)} are elastic: say which is the key (elasticity.key)"))
    return elastic[0] if elastic else None


def _handler(section: HandlerFunction, directory: Path, look: bool, problems: Problems) -> HandlerSpec:
    module, _, callable_name = section.handler.partition(":")
    problem = files.handler_problem(directory, module, callable_name) if look else None
    if problem is not None:
        problems.append((("handler",), problem))
    return HandlerSpec(
        module=module,
        callable=callable_name,
        directory=directory,
        per_instance=section.concurrency.per_instance,
        instances_min=section.scale.min,
        instances_max=section.scale.max,
        idle_s=section.scale.idle_s,
    )


def _model(section: ModelSection, base: Path, look: bool, problems: Problems) -> ModelSpec:
    engine = section.engine
    path = Path(section.path) if engine is not None else (base / Path(section.path).expanduser()).resolve()
    if look and engine is None and (problem := files.checkpoint_problem(path)) is not None:
        problems.append((("model", "path"), problem))
    return ModelSpec(
        path=path,
        action=section.action,
        dtype=section.dtype,
        max_tokens=section.max_tokens,
        overlong=section.overlong,
        batch_tokens=section.batch_tokens,
        max_new_tokens=section.max_new_tokens,
        engine_url="" if engine is None else engine.url,
        sleep_path="" if engine is None else engine.sleep,
        wake_path="" if engine is None else engine.wake,
    )


def _request(section: RequestSection, problems: Problems) -> RequestSpec:
    spec = RequestSpec(
        method=section.method,
        url=section.url,
        headers=section.headers,
        json=section.json_body,
        accept=section.accept,
        response_limit_bytes=section.response_limit_bytes,
    )
    try:
        RequestTemplate(spec)
    except InvalidConfig as error:
        problems.append((("request",), error.message.removeprefix("request: ")))
    return spec


def _check_sandbox(spec: FunctionSpec, server: SandboxConfig, problems: Problems) -> None:
    if spec.sandbox is None:
        return
    if spec.sandbox.warm.min > spec.sandbox.warm.max:
        problems.append((("sandbox", "warm"), f"min {spec.sandbox.warm.min} is more than max {spec.sandbox.warm.max}"))
    if spec.sandbox.isolation is Isolation.CONTAINER:
        if server.provider == "process":
            problems.append((("sandbox", "isolation"), "a container is required, but sandbox.provider is process"))
        if not spec.sandbox.image:
            problems.append(
                (("sandbox", "image"), "a container is required: name its image here or in the sandbox section")
            )


def _revision(spec: FunctionSpec, look: bool, problems: Problems) -> str:
    """Twelve hex digits of the definition, and of the handler's sources."""
    digest = hashlib.sha256(orjson.dumps(spec, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS))
    if spec.handler is not None and look and not problems:
        try:
            digest.update(files.sources_digest(spec.handler.directory).encode())
        except (OSError, ValueError) as error:
            problems.append((("handler",), str(error)))
    return digest.hexdigest()[:12]
