"""The kind handler: a Python function of the user's, imported once per warm instance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from manager.function import FunctionSpec, HandlerSpec, Setting
from runtimes.kind import DeclarationSite, Kind
from runtimes.materials import Materials
from runtimes.runtime import Runtime
from runtimes.sandbox.handler.instance import HandlerSettings
from runtimes.sandbox.handler.requirements import requirement_lines
from runtimes.sandbox.handler.runtime import HandlerRuntime
from runtimes.sandbox.handler.sources import handler_problem, sources_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceConcurrency:
    """What one warm instance takes at a time."""

    per_instance: Annotated[int, Setting("actions that one instance executes at once", ge=1)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How many warm instances there are."""

    min: Annotated[int, Setting("always kept, on every machine that can run it", ge=0)] = 0
    max: Annotated[int, Setting("most at once on one machine", ge=1)] = 8
    idle_s: Annotated[float, Setting("an instance above min ends after this time")] = 300.0

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerKeys:
    """The keys of a handler function."""

    handler: Annotated[
        str,
        Setting(
            "module:callable beside the YAML file, called as callable(event, context)",
            pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$",
            words="module:callable, for example reward:score",
        ),
    ]
    requirements: Annotated[
        tuple[str, ...],
        Setting(
            "packages that it imports, each as pip takes it (name==1.2, with --hash=sha256:... if wanted), or -r FILE "
            "for a file beside the YAML; installed once, from where sandbox.requirements says"
        ),
    ] = ()
    concurrency: Annotated[InstanceConcurrency, Setting("actions of one instance")] = InstanceConcurrency()
    scale: Annotated[Scale, Setting("warm instances")] = Scale()


def _spec(section: HandlerKeys, place: DeclarationSite) -> Mapping[str, object]:
    module, _, name = section.handler.partition(":")
    if place.look and (problem := handler_problem(place.directory, module, name)) is not None:
        place.refuse(("handler",), problem)
    try:
        requirements = requirement_lines(section.requirements, place.directory, place.look)
    except ValueError as error:
        place.refuse(("requirements",), str(error))
        requirements = ()
    return {
        "handler": HandlerSpec(
            module=module,
            callable=name,
            directory=place.directory,
            per_instance=section.concurrency.per_instance,
            instances_min=section.scale.min,
            instances_max=section.scale.max,
            idle_s=section.scale.idle_s,
            requirements=requirements,
        )
    }


def _source(function: FunctionSpec) -> str:
    assert function.handler is not None, f"{function.name} has no handler"
    return sources_digest(function.handler.directory)


def _make(materials: Materials) -> Runtime:
    settings = HandlerSettings(
        sandbox=materials.sandbox,
        secrets=materials.secrets,
        requirements=materials.requirements,
        layers_dir=materials.layers_dir,
        copies=materials.copies,
    )
    runtime = HandlerRuntime(materials.provider, settings)
    materials.environments.exclude(lambda: runtime.sandboxes)
    return runtime


HANDLER = Kind(
    name="handler",
    meaning="a Python function, imported once per warm instance",
    make=_make,
    section=HandlerKeys,
    sandbox="the environment of an instance",
    spec=_spec,
    source=_source,
    input_schema=lambda function: None,
    result_schema=lambda function: None,
    shown={"": (None, None)},
)
