"""The wire between gateway and runner, seen from the gateway: frames, requests and answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from manager.errors import (
    ActionFailed,
    CodedError,
    InvalidConfig,
    InvalidInput,
    NotFound,
    Reason,
    TooLarge,
    Unsupported,
)
from runtimes.sandbox.runner.runner import FRAME_MAX_BYTES, HEADER
from runtimes.sandbox.sandbox import Command, CommandResult, FileStat, ResumableCommand

COMPONENT = "sandbox"
_ENCODER = json.JSONEncoder(separators=(",", ":"))


class ProtocolError(Exception):
    """The other side does not speak the protocol: the sandbox is not to be believed any more."""


class Decoder:
    """Bytes in, frames out: (kind, number, payload)."""

    def __init__(self) -> None:
        self._incoming = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[int, int, bytes]]:
        """The frames completed by ``data``; raises ProtocolError when a frame exceeds the bound."""
        incoming = self._incoming
        incoming += data
        start = 0
        try:
            while len(incoming) - start >= HEADER.size:
                length, kind, number = HEADER.unpack_from(incoming, start)
                if length > FRAME_MAX_BYTES:
                    raise ProtocolError(f"a frame of {length} bytes")
                end = start + HEADER.size + length
                if len(incoming) < end:
                    return
                payload = bytes(incoming[start + HEADER.size : end])
                start = end
                yield kind, number, payload
        finally:
            del incoming[:start]


def encode(kind: int, number: int, payload: bytes = b"") -> bytes:
    return HEADER.pack(len(payload), kind, number) + payload


def encode_json(kind: int, number: int, value: Mapping[str, object]) -> bytes:
    return encode(kind, number, _ENCODER.encode(value).encode())


def decode_json(payload: bytes) -> dict[str, object]:
    """Raises ProtocolError when it is no JSON object."""
    try:
        value = json.loads(payload)
    except ValueError as error:
        raise ProtocolError(str(error)) from None
    if not isinstance(value, dict):
        raise ProtocolError("an answer that is no object")
    return value


def run_request(command: Command, *, marker: str, interactive: bool) -> dict[str, object]:
    """A command as the runner wants it; raises InvalidInput when it can be no command at all."""
    if bool(command.argv) == bool(command.shell):
        raise InvalidInput("give exactly one of argv and shell", component=COMPONENT)
    return {
        "marker": marker,
        "argv": list(command.argv),
        "shell": command.shell,
        "cwd": command.cwd,
        "env": dict(command.env),
        "user": command.user,
        "stdin": interactive or bool(command.stdin),
        "timeout_s": command.timeout_s if math.isfinite(command.timeout_s) else None,
        "grace_s": command.kill_grace_s,
        "limit": None if interactive else command.output_limit_bytes,
        **({"claim": command.claim, "lasting": command.detached} if command.claim else {}),
    }


def result_of(answer: Mapping[str, object], stdout: bytes, stderr: bytes) -> CommandResult:
    """The runner's EXIT as a result; raises ProtocolError when it does not fit."""
    try:
        code, signal = answer.get("code"), answer.get("signal")
        truncated = answer.get("truncated", (False, False))
        if not isinstance(truncated, list | tuple):
            raise TypeError("truncated")
        return CommandResult(
            exit_code=None if code is None else _whole(code),
            signal=None if signal is None else _whole(signal),
            stdout=stdout,
            stderr=stderr,
            stdout_truncated=bool(truncated[0]),
            stderr_truncated=bool(truncated[1]),
            timed_out=answer.get("timed_out") is True,
            out_of_memory=answer.get("out_of_memory") is True,
            duration_s=_number(answer.get("duration_s", 0.0)),
            cpu_s=_number(answer.get("cpu_s", 0.0)),
            peak_memory_bytes=_whole(answer.get("peak_bytes", 0)),
        )
    except (TypeError, ValueError, IndexError) as error:
        raise ProtocolError(f"an end that does not fit: {error}") from None


def resumable_of(answer: Mapping[str, object]) -> dict[str, ResumableCommand]:
    """The commands that a READY says can be claimed; raises ProtocolError when it does not fit."""
    held = answer.get("held", {})
    try:
        if not isinstance(held, dict):
            raise TypeError("held")
        return {
            str(claim): ResumableCommand(_number(ran_s), running is True) for claim, (ran_s, running) in held.items()
        }
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"a greeting that does not fit: {error}") from None


def started_of(answer: Mapping[str, object]) -> frozenset[str] | None:
    """The detached commands that a READY says were begun; None where it cannot tell; ProtocolError when misfit."""
    begun = answer.get("begun")
    if begun is not None and not isinstance(begun, list):
        raise ProtocolError("a greeting that does not fit: begun")
    return None if begun is None else frozenset(map(str, begun))


def files_of(answer: Mapping[str, object], directory: str) -> list[FileStat]:
    """The runner's listing; raises ProtocolError when it does not fit."""
    entries = answer.get("entries")
    try:
        if not isinstance(entries, list):
            raise TypeError("entries")
        return [
            FileStat(
                path=f"{directory.rstrip('/')}/{entry['name']}" if directory else str(entry["name"]),
                size_bytes=_whole(entry["size"]),
                directory=entry["directory"] is True,
                mode=_whole(entry["mode"]),
            )
            for entry in entries
        ]
    except (TypeError, KeyError, ValueError) as error:
        raise ProtocolError(f"a listing that does not fit: {error}") from None


def error_of(answer: Mapping[str, object]) -> CodedError:
    """The runner's refusal as a typed error."""
    message = str(answer.get("message", "refused"))[:1000]
    kinds: dict[object, type[CodedError]] = {"not_found": NotFound, "too_large": TooLarge}
    return kinds.get(answer.get("code"), InvalidInput)(message, component=COMPONENT)


def unmade(error: CodedError) -> ActionFailed:
    """An environment that could not be had: the function's fault, or the engine's, which may have recovered soon."""
    if isinstance(error, ActionFailed):
        return error
    theirs = isinstance(error, InvalidConfig | InvalidInput | Unsupported)
    return ActionFailed(
        Reason.INVALID_INPUT if theirs else Reason.ENVIRONMENT_LOST,
        f"no sandbox could be made: {error.message}",
        component=error.component,
        retry_after_s=error.retry_after_s,
    )


def lost(message: str, *, result: object = None) -> ActionFailed:
    """The end of every action whose sandbox died under it."""
    return ActionFailed(Reason.ENVIRONMENT_LOST, message, component=COMPONENT, result=result)


def cut_off(message: str, *, result: object = None) -> ActionFailed:
    """The end of an action whose sandbox is out of reach, and perhaps lives on."""
    message = f"{message}; the sandbox may live on"
    return ActionFailed(Reason.NODE_LOST, message, component=COMPONENT, result=result)


def out_of_memory(result: CommandResult, peak_memory_bytes: int) -> CommandResult:
    """The same end, with what the kernel knows of it."""
    return replace(result, out_of_memory=True, peak_memory_bytes=max(peak_memory_bytes, result.peak_memory_bytes))


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no integer")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value)
