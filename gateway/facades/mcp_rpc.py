"""JSON-RPC as MCP speaks it over streamable HTTP: one message a request, in two eras of the protocol.

Until 2025-11-25 a client shakes hands (``initialize``) and has a session. Since 2026-07-28 each request says its
version and capabilities itself, beside its arguments and in its headers, which must agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gateway import wire
from gateway.facades.facade import read_shape
from manager.errors import InvalidInput

#: Protocol versions with a handshake, the newest last, and those in which each request stands alone.
HANDSHAKE = ("2025-03-26", "2025-06-18", "2025-11-25")
SINGLE = ("2026-07-28",)
#: What the handshake's first version means where a request says none.
ASSUMED = HANDSHAKE[0]

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32700, -32600, -32601, -32602
HEADER_MISMATCH, UNSUPPORTED_VERSION, CANCELLED = -32020, -32022, -32800
#: HTTP status of an error since 2026-07-28; what is not here is 200. Before, an error of a request is always 200.
SINGLE_STATUS: Mapping[int, int] = {
    INVALID_REQUEST: 400,
    INVALID_PARAMS: 400,
    HEADER_MISMATCH: 400,
    UNSUPPORTED_VERSION: 400,
    METHOD_NOT_FOUND: 404,
}
#: Characters of a stranger's words that are told back.
SHOWN = 64
_META = "io.modelcontextprotocol/"
NO_PARAMS: Mapping[str, object] = {}
RequestId = str | int


class RpcMessage(Struct):
    """A request, or without an id a notification. Keys that are not known mean nothing."""

    jsonrpc: Literal["2.0"]
    method: str
    id: RequestId | UnsetType = UNSET
    params: dict[str, object] | None = None

    @property
    def given(self) -> Mapping[str, object]:
        return self.params or NO_PARAMS


class ToolCall(Struct):
    """The parameters of ``tools/call``."""

    name: str
    arguments: dict[str, object] | None = None


class RpcRefused(InvalidInput):
    """A message that is refused with a number of the protocol's own; ``status`` None leaves it to the era."""

    def __init__(
        self, rpc: int, message: str, *, status: int | None = None, data: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(message, component="mcp")
        self.rpc = rpc
        self.status = status
        self.data: Mapping[str, object] = data or {}


def read_message(body: bytes) -> RpcMessage:
    """Return the one message of a body; raises RpcRefused."""
    try:
        value = wire.loads(body)
    except InvalidInput as error:
        raise RpcRefused(PARSE_ERROR, error.message, status=400) from None
    if isinstance(value, list):
        raise RpcRefused(INVALID_REQUEST, "no batches: one message a request", status=400)
    try:
        return read_shape(wire.loads_object(body), RpcMessage)
    except InvalidInput as error:
        raise RpcRefused(INVALID_REQUEST, error.message, status=400) from None


def read_tool_call(message: RpcMessage) -> ToolCall:
    """Return the parameters of a call; raises InvalidInput."""
    return read_shape(message.given, ToolCall)


def check_single(message: RpcMessage, headers: Mapping[str, str]) -> None:
    """Check that a request of the newer era says what it must, and its headers the same; raises RpcRefused."""
    meta = message.given.get("_meta")
    if not isinstance(meta, dict):
        meta = {}
    for name in ("protocolVersion", "clientCapabilities"):
        if _META + name not in meta:
            raise RpcRefused(INVALID_PARAMS, f"params._meta lacks {_META + name!r}")
    mirrored = {"mcp-protocol-version": meta[_META + "protocolVersion"], "mcp-method": message.method}
    if message.method == "tools/call" and "name" in message.given:
        mirrored["mcp-name"] = message.given["name"]
    for name, said in mirrored.items():
        if headers.get(name) != said:
            raise RpcRefused(HEADER_MISMATCH, f"the header {name} does not say what the body says")
    check_version(headers["mcp-protocol-version"])


def check_version(asked: str) -> None:
    """Raise RpcRefused with the versions that are served if it is none of them."""
    if asked not in (*HANDSHAKE, *SINGLE):
        data = {"supported": [*HANDSHAKE, *SINGLE], "requested": asked[:SHOWN]}
        told = f"protocol version {asked[:SHOWN]!r} is not served; {', '.join(data['supported'])} are"
        raise RpcRefused(UNSUPPORTED_VERSION, told, status=400, data=data)


def single_result(result: Mapping[str, object], *, cacheable: bool) -> dict[str, object]:
    """Return a result with what the newer era asks of each."""
    meta = result.get("_meta")
    stamped = (meta if isinstance(meta, dict) else {}) | {_META + "serverInfo": server_info()}
    cache = {"ttlMs": 0, "cacheScope": "private"} if cacheable else {}
    return {**result, **cache, "resultType": "complete", "_meta": stamped}


def server_info() -> dict[str, str]:
    """Return who answers."""
    try:
        return {"name": "tangram", "version": version("tangram-gateway")}
    except PackageNotFoundError:
        return {"name": "tangram", "version": "0"}


def text_content(texts: Sequence[str]) -> list[dict[str, str]]:
    """Return texts as content of a result."""
    return [{"type": "text", "text": text} for text in texts]
