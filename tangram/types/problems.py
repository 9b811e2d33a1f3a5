"""The problem body (RFC 9457): why a request was refused, or why an invocation ended badly."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from tangram.types.invocations import Invocation
from tangram.types.values.scalars import JsonObject, Name


class Problem(Struct, frozen=True, kw_only=True):
    """Why a request was refused, or how an invocation that was waited for ended; ``code`` is stable."""

    type: Annotated[str, Meta(description="urn:tangram:error:CODE, or urn:tangram:reason:REASON")]
    title: Annotated[str, Meta(description="What kind of problem it is, in a few words")]
    status: Annotated[int, Meta(ge=100, le=599, description="The HTTP status")]
    code: Annotated[str, Meta(description="Stable name of the error, or the reason of the invocation")]
    detail: Annotated[str, Meta(description="What is wrong here, for people")]
    component: Annotated[str, Meta(description="The part of the gateway that says so")]
    invocation_id: Annotated[Name | UnsetType, Meta(description="The invocation that it is about")] = UNSET
    retry_after_s: Annotated[
        float | UnsetType | None, Meta(description="Seconds after which the same request may be granted")
    ] = UNSET
    errors: Annotated[
        JsonObject | UnsetType, Meta(description="Particulars; path is the JSON path of an odd value")
    ] = UNSET
    invocation: Annotated[Invocation | UnsetType, Meta(description="The invocation that ended badly")] = UNSET
