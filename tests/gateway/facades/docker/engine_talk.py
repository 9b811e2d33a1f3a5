"""Who asks the same of two engines, and keeps each answer without what differs from one run to the next."""

from __future__ import annotations

import base64
import http.client
import io
import json
import re
import socket
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

TIMEOUT_S = 60.0
VERSION = "/v1.41"
STAT = "X-Docker-Container-Path-Stat"
#: Headers that say what an answer is.
HEADERS = ("Content-Type", "Api-Version", "Ostype", "Docker-Experimental", "Upgrade", STAT)
_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z")
_NEVER = "0001-01-01T00:00:00Z"
_AGE = re.compile(r"(?:Less than a second|About a minute|\d+ (?:second|minute)s?)")
#: Numbers of which only whether they are there is compared.
_NUMBERS = frozenset({"Pid", "Created", "mtime"})
#: Where an engine tells an id of a container or a command for the first time; any other is its own affair.
_TELLS = frozenset({"Id", "ID"})

Answer = dict[str, object]


@dataclass
class EngineTalk:
    """One engine behind its socket, and what it answered, call by call."""

    path: Path
    #: What the names of this run's containers begin with: the same for both engines.
    prefix: str
    answers: dict[str, Answer] = field(default_factory=dict)
    _ids: dict[str, str] = field(default_factory=dict)

    def name(self, word: str) -> str:
        """Return a container's name that no other run uses."""
        return f"{self.prefix}-{word}"

    def ask(self, label: str, method: str, target: str, body: object = None, *, version: str = VERSION) -> Any:
        """Ask once on a connection of its own, keep the answer under the label, and return its JSON or bytes."""
        conn = self._connection()
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            kind = "application/x-tar" if "/archive" in target else "application/json"
            conn.request(method, version + target, data, {"Content-Type": kind})
            answer = conn.getresponse()
            headers, said = dict(answer.getheaders()), answer.read()
        finally:
            conn.close()
        told: Any = _json(said) if said and headers.get("Content-Type", "").startswith("application/json") else said
        self._keep(label, answer.status, headers, told)
        return told

    def hear(self, label: str, target: str, body: object, typed: bytes = b"", *, half_close: bool = True) -> bytes:
        """Ask with an upgrade, type, end the input, and keep each stream that comes back to its end."""
        data = json.dumps(body).encode()
        head = (
            f"POST {VERSION}{target} HTTP/1.1\r\nHost: engine\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        with self._socket() as stream:
            stream.sendall(head.encode() + data)
            with stream.makefile("rb") as file:
                status = int(file.readline().split()[1])
                headers = {}
                while line := file.readline().strip():
                    name, _, value = line.decode().partition(": ")
                    headers[name.title()] = value
                if status >= 400:
                    length = int(headers.get("Content-Length", 0))
                    self._keep(label, status, headers, _json(file.read(length)))
                    return b""
                if typed:
                    stream.sendall(typed)
                if half_close:
                    stream.shutdown(socket.SHUT_WR)
                said: bytes = file.read()
        self._keep(label, status, headers, said)
        return said

    def put(self, label: str, **values: object) -> None:
        """Keep values that somebody else was told."""
        self._put(label, values)

    def gone(self, id: str) -> None:
        """Remove a container, whatever it does, and wait until it is gone."""
        conn = self._connection()
        try:
            conn.request("DELETE", f"{VERSION}/containers/{id}?force=1&v=1")
            conn.getresponse().read()
        finally:
            conn.close()

    def _connection(self) -> http.client.HTTPConnection:
        conn = http.client.HTTPConnection("engine", timeout=TIMEOUT_S)
        conn.sock = self._socket()
        return conn

    def _socket(self) -> socket.socket:
        stream = socket.socket(socket.AF_UNIX)
        stream.settimeout(TIMEOUT_S)
        stream.connect(str(self.path))
        return stream

    def _keep(self, label: str, status: int, headers: Mapping[str, str], told: object) -> None:
        named: dict[str, object] = {name: headers[name] for name in HEADERS if name in headers}
        if "Api-Version" in named:
            named["Api-Version"] = "VERSION"
        if STAT in named:
            named[STAT] = json.loads(base64.b64decode(headers[STAT]))
        if isinstance(told, bytes) and headers.get("Content-Type") == "application/x-tar":
            told = entries(told)
        elif isinstance(told, bytes) and framed(told):
            told = streams(told)
        if status >= 400 and isinstance(told, bytes):
            told = {"message": told.decode().strip()}
        self._put(label, {"status": status, "headers": named or None, "body": told})

    def _put(self, label: str, value: object) -> None:
        assert label not in self.answers, label
        self.answers[label] = dict(flat(self._plain(value)))

    def _plain(self, value: object, key: str = "") -> object:
        """Return a value without ids, times and numbers of processes."""
        match value:
            case dict():
                return {self._text(str(name)): self._plain(each, str(name)) for name, each in value.items()}
            case list() | tuple():
                return [self._plain(each, key) for each in value]
            case bytes():
                return self._text(value.decode("utf-8", "backslashreplace"))
            case str():
                if key in _TELLS and _ID.fullmatch(value):
                    self._ids.setdefault(value, f"ID{len(self._ids) + 1}")
                return self._text(value)
            case int() if key in _NUMBERS and value:
                return "NUMBER"
        return value

    def _text(self, text: str) -> str:
        text = _DIGEST.sub("DIGEST", text.replace(self.prefix, "PREFIX"))
        text = _ID.sub(lambda found: self._ids.get(found[0], "HEX"), text)
        for id, known in self._ids.items():
            text = text.replace(id[:12], f"{known}-SHORT")
        text = _TIME.sub(lambda found: "NEVER" if found[0] == _NEVER else "TIME", text)
        return _AGE.sub("AGE", text)


def flat(value: object, path: str = "") -> list[tuple[str, object]]:
    """Return each leaf of a value with its path; an empty object or list is a leaf, and a list of texts."""
    if isinstance(value, dict) and value:
        return [leaf for name in sorted(value) for leaf in flat(value[name], f"{path}.{name}" if path else name)]
    if isinstance(value, list) and value and not all(isinstance(each, str | int) for each in value):
        return [leaf for number, each in enumerate(value) for leaf in flat(each, f"{path}.{number}")]
    return [(path, value)]


def framed(data: bytes) -> bool:
    """Return whether bytes are whole frames, and not none at all."""
    if not data:
        return False
    while data:
        if len(data) < 8 or data[0] not in (0, 1, 2) or data[1:4] != b"\0\0\0":
            return False
        size = int.from_bytes(data[4:8], "big")
        if len(data) < 8 + size:
            return False
        data = data[8 + size :]
    return True


def streams(data: bytes) -> dict[str, bytes]:
    """Return what frames hold, stream by stream."""
    found: dict[str, bytes] = {}
    while data:
        size = int.from_bytes(data[4:8], "big")
        name = ("stdin", "stdout", "stderr")[data[0]]
        found[name] = found.get(name, b"") + data[8 : 8 + size]
        data = data[8 + size :]
    return found


def entries(data: bytes) -> dict[str, object]:
    """Return what a tar holds: of each name its kind, mode, link and content."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        found: dict[str, object] = {}
        for each in tar:
            file = tar.extractfile(each) if each.isfile() else None
            kind = {tarfile.DIRTYPE: "directory", tarfile.SYMTYPE: "link", tarfile.REGTYPE: "file"}.get(each.type, "?")
            content = b"" if file is None else file.read()
            found[each.name] = [
                kind,
                oct(each.mode & 0o7777),
                each.linkname,
                content.decode("utf-8", "backslashreplace"),
            ]
        return found


def tree() -> bytes:
    """Return a tar: a directory, a file in it that can be executed, a link to that, an empty file."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, kind, mode, data, link in (
            ("tree", tarfile.DIRTYPE, 0o755, b"", ""),
            ("tree/run", tarfile.REGTYPE, 0o750, b"#!/bin/sh\necho ran\n", ""),
            ("tree/link", tarfile.SYMTYPE, 0o777, b"", "run"),
            ("tree/empty", tarfile.REGTYPE, 0o644, b"", ""),
            ("tree/na me é", tarfile.REGTYPE, 0o600, b"x" * 700, ""),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.size, entry.linkname, entry.mtime = kind, mode, len(data), link, 1_700_000_000
            tar.addfile(entry, io.BytesIO(data))
    return made.getvalue()


def path_query(path: str) -> str:
    return quote(path, safe="")


def _json(said: bytes) -> object:
    """Return the JSON of a body, a list of it where there are several; the bytes of what is none."""
    try:
        found = [json.loads(line) for line in said.splitlines() if line.strip()]
    except ValueError:
        return said
    return found[0] if len(found) == 1 else found
