"""Secrets: values that a function's YAML names but never holds, read at the moment of use."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from manager.errors import InvalidConfig
from manager.function import SandboxSpec

#: What stands in the place of a secret in a log line, an error or a result.
REDACTED = "[secret]"

#: How a value is named that the YAML does not hold.
SECRET = re.compile(r"\$\{secret:(?P<name>[^}]+)\}")

#: Shorter values would turn every digit of an innocent text into `REDACTED`.
_REDACTED_FROM_CHARS = 4

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Secrets:
    """Secret values by name: the file ``directory/NAME`` where there is one, else ``TANGRAM_SECRET_NAME``.

    Nothing is kept: a rotated secret serves the next call.
    """

    def __init__(self, directory: Path | None = None, *, environ: Mapping[str, str] | None = None) -> None:
        self._directory = directory
        self._environ = os.environ if environ is None else environ

    def get(self, name: str) -> str:
        """The value of ``name``; InvalidConfig, with the remedy, where there is none."""
        variable = "TANGRAM_SECRET_" + re.sub(r"[^A-Za-z0-9]", "_", name).upper()
        value = self._from_file(name) or self._environ.get(variable, "")
        if value:
            return value
        place = f"start the gateway with {variable}, or name server.secrets_dir and write the file {name} there"
        if self._directory is not None:
            place = f"write {self._directory / name}, or start the gateway with {variable}"
        raise InvalidConfig(f"secret {name!r} is not defined: {place}", component="secrets", detail={"secret": name})

    def filled(self, spec: SandboxSpec) -> SandboxSpec:
        """The sandbox with the secrets that its environment names in their places; raises InvalidConfig."""
        if not any(SECRET.search(value) for value in spec.env.values()):
            return spec
        env = {name: SECRET.sub(lambda match: self.get(match["name"]), value) for name, value in spec.env.items()}
        return replace(spec, env=env)

    def _from_file(self, name: str) -> str:
        if self._directory is None or not _NAME.fullmatch(name):
            return ""
        try:
            return (self._directory / name).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfig(f"secret {name!r} cannot be read: {error}", component="secrets") from error


def redact_json(value: object, values: tuple[str, ...]) -> object:
    """A JSON value without the secret ``values``, which escapes such as ``\\/`` do not hide; raises RecursionError."""
    if isinstance(value, str):
        return redact(value, values)
    if isinstance(value, list):
        return [redact_json(each, values) for each in value]
    if isinstance(value, dict):
        return {redact(name, values): redact_json(each, values) for name, each in value.items()}
    return REDACTED if isinstance(value, int | float) and str(value) in values else value


def redact(text: str, values: tuple[str, ...]) -> str:
    """``text`` without the secret ``values``, plain, percent-encoded, or as JSON writes them."""
    for value in values:
        if len(value) >= _REDACTED_FROM_CHARS:
            escaped = json.dumps(value)[1:-1]
            for form in (value, quote(value, safe=""), escaped, escaped.replace("/", "\\/")):
                text = text.replace(form, REDACTED)
    return text
