"""What the YAML writes otherwise than the field that it sets: names and policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from gateway.config.derive import Section, refuse_boolean, section_of
from gateway.config.sections import SchedulerConfig
from manager.config import ResourceName
from manager.errors import InvalidConfig
from manager.scheduler.policy import PolicySpec
from manager.scheduler.registry import PolicyName, make_policy

Name = Annotated[str, Field(pattern=ResourceName.__metadata__[0].pattern)]


class PolicySection(Section):
    """A policy with its constants."""

    name: PolicyName = Field(description="policy")
    options: dict[str, Annotated[float, Field(ge=0), BeforeValidator(refuse_boolean)]] = Field(
        default={}, description="constants by name, for example dop: 8 for fixed"
    )

    @model_validator(mode="after")
    def _known(self) -> Self:
        """Refuse options that the policy has not, or not in this range."""
        try:
            make_policy(PolicySpec(name=self.name, options=self.options))
        except InvalidConfig as error:
            raise ValueError(str(error)) from error
        return self


def _policy_form(value: object) -> str | None:
    if isinstance(value, str):
        return "name"
    if isinstance(value, PolicySection) or (isinstance(value, dict) and "name" in value):
        return "options"
    return "kinds" if isinstance(value, dict) else None


def _policies(chosen: str | PolicySection | Mapping[str, str | PolicySection]) -> Mapping[str, PolicySpec]:
    by_kind = chosen if isinstance(chosen, Mapping) else {"default": chosen}
    specs = {
        kind: PolicySpec(name=each) if isinstance(each, str) else PolicySpec(name=each.name, options=each.options)
        for kind, each in by_kind.items()
    }
    return {"default": PolicySpec(name="price")} | specs


Policy = Annotated[
    Annotated[PolicyName, Tag("name")] | Annotated[PolicySection, Tag("options")],
    Discriminator(
        _policy_form,
        custom_error_type="policy",
        custom_error_message="write a policy's name, or {name: ..., options: {...}}",
    ),
]
PolicyChoice = Annotated[
    Annotated[PolicyName, Tag("name")]
    | Annotated[PolicySection, Tag("options")]
    | Annotated[dict[Name, Policy], Tag("kinds")],
    Discriminator(
        _policy_form,
        custom_error_type="policy",
        custom_error_message="write a policy's name, {name: ..., options: {...}}, or one for each resource",
    ),
    AfterValidator(_policies),
]
Scheduler = section_of(SchedulerConfig, policies=PolicyChoice)
