"""Answers as SWE-ReX's client reads them: exceptions that it raises, texts as Python decodes them."""

from __future__ import annotations

import codecs
import io
from collections.abc import Mapping

import msgspec

from gateway.facades.facade import result_of
from gateway.facades.faults import fault_of
from gateway.facades.swerex.shapes import ReadFile
from gateway.invocations.record import Record
from manager.errors import CodedError

#: The module of its exceptions.
ERRORS = "swerex.exceptions."
#: Codecs whose time is the square of the text's length; the gateway serves nobody else meanwhile.
SLOW_CODECS = frozenset({"idna", "punycode"})
#: Machine-readable file errors -> what Python raises for them: number, text and class.
FILE_ERRORS = {
    "not_found": (2, "No such file or directory", "FileNotFoundError"),
    "is_a_directory": (21, "Is a directory", "IsADirectoryError"),
    "not_a_directory": (20, "Not a directory", "NotADirectoryError"),
    "permission_denied": (13, "Permission denied", "PermissionError"),
    "outside": (13, "Permission denied", "PermissionError"),
    "read_only": (30, "Read-only file system", "OSError"),
}


class RaisedAtClient(Exception):
    """An exception that the client is to raise: class path, text, what else it carries, and whose end it is."""

    def __init__(
        self, path: str, message: str, extra: Mapping[str, object] | None = None, record: Record | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.extra = extra or {}
        self.record = record


def transfer(path: str, message: str, extra: Mapping[str, object]) -> object:
    """Return an exception as it travels; a traceback would be logged as critical by its client."""
    return {"swerexception": {"message": message, "class_path": path, "traceback": "", "extra_info": dict(extra)}}


def result_object(record: Record) -> dict[str, object]:
    result = result_of(record)
    return result if isinstance(result, dict) else {}


def text_of(result: Mapping[str, object], name: str) -> str:
    """Return what was said as SWE-ReX decodes it: bytes that are no UTF-8 as escapes."""
    encoded = result.get(f"{name}_base64")
    if isinstance(encoded, str):
        return msgspec.convert(encoded, bytes).decode("utf-8", "backslashreplace")
    return str(result.get(name) or "")


def decoded(data: bytes, asked: ReadFile) -> str:
    """Return a file's text as Path.read_text does; raises what the client is to raise."""
    encoding = asked.encoding or "utf-8"
    try:
        if encoding != "locale" and codecs.lookup(encoding).name in SLOW_CODECS:
            raise LookupError(f"{encoding} is for names of hosts, and takes hours for a file")
        return io.TextIOWrapper(io.BytesIO(data), encoding=encoding, errors=asked.errors).read()
    except (UnicodeError, LookupError, ValueError, TypeError) as error:  # TypeError: a handler that only encodes
        raise RaisedAtClient(f"builtins.{type(error).__name__}", str(error)) from None


def as_python(error: CodedError, path: str) -> RaisedAtClient:
    """Return a refused file access as Python raises it."""
    number, text, kind = FILE_ERRORS.get(str(error.detail.get("file_error", "")), (0, "", ""))
    if not kind:
        fault = fault_of(error)
        return RaisedAtClient(f"{ERRORS}SwerexException", f"{fault.code}: {fault.message}", {"code": fault.code})
    return RaisedAtClient(f"builtins.{kind}", f"[Errno {number}] {text}: {path!r}")


def prefixed(error_msg: str, told: str) -> str:
    return f"{error_msg}: {told}" if error_msg else told
