"""The request template: a function's fixed request with holes, filled from one input without escaping its place.

``{name}`` takes a field of the input, ``${secret:name}`` a secret, ``{{`` and ``}}`` stand for braces. A hole
in the path or query is percent-encoded, one in a header must be printable, and a JSON string that is nothing
but a hole takes the field's value with its type. Scheme, host, port and header names have no holes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from manager.errors import InvalidConfig, InvalidInput
from manager.function import RequestSpec
from runtimes import exact_json
from runtimes.api.secrets import Secrets

_TOKEN = re.compile(r"\$\{secret:(?P<secret>[^}]+)\}|\{(?P<field>[A-Za-z_][A-Za-z0-9_]*)\}|\{\{|\}\}|[{}]")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"})

#: Headers that would move or reframe the request.
_RESERVED_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A request ready to be sent, and the secrets in it, to be redacted from whatever is said about it."""

    method: str
    url: str
    headers: Mapping[str, str]
    #: JSON text, or None to send no body.
    body: bytes | None
    secrets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Hole:
    """A place to fill: a field of the input, or a secret."""

    name: str
    secret: bool


_Text = tuple[str | _Hole, ...]


class RequestTemplate:
    """A `RequestSpec` taken apart once; InvalidConfig when it can never be a request."""

    def __init__(self, spec: RequestSpec) -> None:
        self._method = spec.method.upper()
        if self._method not in _METHODS:
            raise _refused(f"method {spec.method!r} is none of {', '.join(sorted(_METHODS))}")
        self.origin, path, query = _split(spec.url)
        self._path = [_parse(segment) for segment in path.split("/")]
        self._query = _parse(query)
        self._headers = {name: _parse(value) for name, value in spec.headers.items()}
        for name in self._headers:
            if name.lower() in _RESERVED_HEADERS:
                raise _refused(f"header {name!r} belongs to the connection and cannot be set")
        self._body = _parse_json(spec.json)

    def render(self, values: Mapping[str, object], secrets: Secrets) -> Rendered:
        """The request for the input ``values``; InvalidInput names the field at fault, InvalidConfig the secret."""
        used = {name: secrets.get(name) for name in self.secret_names()}

        def fill(text: _Text, encode: Callable[[str], str]) -> str:
            return "".join(part if isinstance(part, str) else _fill(part, values, used, encode) for part in text)

        segments = [fill(segment, _quote) for segment in self._path]
        self._refuse_dots(segments)
        query = fill(self._query, _quote)
        body = _fill_json(self._body, values, lambda text: fill(text, str))
        return Rendered(
            method=self._method,
            url=self.origin + "/".join(segments) + ("?" + query if query else ""),
            headers={name: fill(text, _header_value) for name, text in self._headers.items()},
            body=None if self._body is None else _json_bytes(body),
            secrets=tuple(used.values()),
        )

    def secret_names(self) -> frozenset[str]:
        return frozenset(hole.name for hole in self._holes() if hole.secret)

    def field_names(self) -> frozenset[str]:
        return frozenset(hole.name for hole in self._holes() if not hole.secret)

    def _holes(self) -> Iterator[_Hole]:
        texts = [*self._path, self._query, *self._headers.values(), *_texts(self._body)]
        return (part for text in texts for part in text if isinstance(part, _Hole))

    def _refuse_dots(self, segments: list[str]) -> None:
        """A client folds ``..``: the input would leave the path that the YAML fixed."""
        for text, segment in zip(self._path, segments, strict=True):
            if segment in (".", "..") and text != (segment,):
                names = [part.name for part in text if isinstance(part, _Hole)]
                raise _invalid(names[0], f"{segment!r} is no path segment")


def _split(url: str) -> tuple[str, str, str]:
    """Origin, path and query of the URL's template; the origin has no holes and no user."""
    if "#" in url:
        raise _refused("a url fragment is never sent")
    head, _, query = url.partition("?")
    parts = urlsplit(head)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise _refused(f"url {url!r} must begin with http:// or https:// and a host")
    if any(mark in parts.netloc for mark in "{}$@") or not parts.hostname:
        raise _refused("the url's host is fixed: no placeholder, no secret and no user name in it")
    return f"{parts.scheme}://{parts.netloc}", parts.path or "/", query


def _parse(text: str) -> _Text:
    parts: list[str | _Hole] = []
    at = 0
    for token in _TOKEN.finditer(text):
        parts.append(text[at : token.start()])
        at = token.end()
        if token["secret"] is not None:
            parts.append(_Hole(token["secret"], secret=True))
        elif token["field"] is not None:
            parts.append(_Hole(token["field"], secret=False))
        elif token[0] in ("{{", "}}"):
            parts.append(token[0][0])
        else:
            raise _refused(f"stray {token[0]!r} in {text!r}: write {token[0] * 2} for a brace, {{name}} for a field")
    parts.append(text[at:])
    return tuple(part for part in parts if part != "")


def _parse_json(value: object) -> object:
    """The JSON template with its strings parsed; a `_Text` is the only tuple in it."""
    if isinstance(value, str):
        return _parse(value)
    if isinstance(value, Mapping):
        return {str(key): _parse_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_parse_json(item) for item in value]
    return value


def _texts(body: object) -> Iterator[_Text]:
    if isinstance(body, tuple):
        yield body
    elif isinstance(body, dict):
        for item in body.values():
            yield from _texts(item)
    elif isinstance(body, list):
        for item in body:
            yield from _texts(item)


def _fill_json(body: object, values: Mapping[str, object], fill: Callable[[_Text], str]) -> object:
    if isinstance(body, tuple):
        if len(body) == 1 and isinstance(body[0], _Hole) and not body[0].secret:
            return _field(values, body[0].name)
        return fill(body)
    if isinstance(body, dict):
        return {key: _fill_json(item, values, fill) for key, item in body.items()}
    if isinstance(body, list):
        return [_fill_json(item, values, fill) for item in body]
    return body


def _fill(hole: _Hole, values: Mapping[str, object], used: Mapping[str, str], encode: Callable[[str], str]) -> str:
    """The hole's value, encoded for its place; the refusal never repeats a secret."""
    try:
        return encode(used[hole.name] if hole.secret else _scalar(values, hole.name))
    except ValueError as error:
        if hole.secret:
            raise _refused(f"secret {hole.name!r} cannot stand in its place") from None
        raise _invalid(hole.name, str(error)) from None


def _field(values: Mapping[str, object], name: str) -> object:
    if name not in values:
        raise _invalid(name, f"the request needs the field {name!r}")
    return values[name]


def _scalar(values: Mapping[str, object], name: str) -> str:
    value = _field(values, name)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise _invalid(name, f"the request's text needs a string, a number or a boolean as {name!r}")


def _quote(value: str) -> str:
    return quote(value, safe="")


def _header_value(value: str) -> str:
    if not value.isascii() or not value.isprintable():
        raise ValueError("a header takes printable ASCII only")
    return value


def _json_bytes(body: object) -> bytes:
    try:
        return exact_json.dumps(body)
    except TypeError as error:
        raise InvalidInput(f"the request's body is no JSON: {error}", component="api") from None


def _invalid(name: str, message: str) -> InvalidInput:
    return InvalidInput(message, component="api", detail={"path": f"$.{name}"})


def _refused(message: str) -> InvalidConfig:
    return InvalidConfig(f"request: {message}", component="api")
