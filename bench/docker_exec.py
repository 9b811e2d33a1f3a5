"""The yardstick: ``docker exec`` through the engine's HTTP interface, as bare as it can be had."""

from __future__ import annotations

import http.client
import json
import socket


class DockerExec:
    """One keep-alive connection to the engine; create and start, output read to its end."""

    def __init__(self, path: str = "/var/run/docker.sock") -> None:
        self._connection = _UnixConnection(path)

    def run(self, container: str, argv: list[str]) -> bytes:
        """Execute in a container, and return the raw multiplexed output."""
        request = {"AttachStdout": True, "AttachStderr": True, "Cmd": argv, "User": "1000"}
        made = json.loads(self._post(f"/containers/{container}/exec", request))
        return self._post(f"/exec/{made['Id']}/start", {"Detach": False, "Tty": False})

    def _post(self, path: str, body: dict[str, object]) -> bytes:
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        data = response.read()
        if response.status >= 300:
            raise RuntimeError(f"{path}: {response.status} {data[:200]!r}")
        return data

    def close(self) -> None:
        self._connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)
