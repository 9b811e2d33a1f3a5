"""Spans in OTLP's JSON, as collectors take them at ``/v1/traces``: ids in hexadecimal, nanoseconds as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import orjson

from gateway.traces.spans import Attribute, Span

SERVER, INTERNAL = 2, 1
FAILED = 2


def encode(spans: Iterable[Span], *, service: str, version: str) -> bytes:
    """Return one request's body: all spans of this one service."""
    resource: dict[str, Attribute] = {"service.name": service, "service.version": version}
    scope = {"name": "tangram.gateway", "version": version}
    listed = [_span(span) for span in spans]
    return orjson.dumps(
        {
            "resourceSpans": [
                {
                    "resource": {"attributes": _attributes(resource)},
                    "scopeSpans": [{"scope": scope, "spans": listed}],
                }
            ]
        }
    )


def rejected(body: bytes) -> int:
    """Return how many spans an answer says were not taken; 0 if it says nothing that can be read."""
    try:
        partial = orjson.loads(body).get("partialSuccess", {})
        return max(0, int(partial.get("rejectedSpans", 0)))
    except (orjson.JSONDecodeError, AttributeError, TypeError, ValueError):
        return 0


def _span(span: Span) -> dict[str, object]:
    whole = span.name.startswith("invoke ")
    told: dict[str, object] = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "name": span.name,
        "kind": SERVER if whole else INTERNAL,
        "startTimeUnixNano": str(int(span.began_s * 1e9)),
        "endTimeUnixNano": str(int(max(span.began_s, span.ended_s) * 1e9)),
        "attributes": _attributes(span.attributes),
    }
    if span.parent_id:
        told["parentSpanId"] = span.parent_id
    if span.error is not None:
        told["status"] = {"code": FAILED, "message": span.error[:1024]}
    return told


def _attributes(given: Mapping[str, Attribute]) -> list[dict[str, object]]:
    return [{"key": name, "value": _value(value)} for name, value in given.items()]


def _value(value: Attribute) -> dict[str, object]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case _:
            return {"stringValue": value}
