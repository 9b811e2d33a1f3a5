"""An engine behind ssh: its socket, brought to this machine by one ssh process for all of the gateway's connections."""

from __future__ import annotations

import os
import select
import subprocess
import threading
from pathlib import Path
from urllib.parse import urlsplit

import structlog

logger = structlog.get_logger("sandbox.engine")

#: Seconds in which ssh must be through.
THROUGH_S = 20.0
SOCKET = "engine.sock"
#: Its own connection (no master that outlives it), no questions, no life beyond the network's.
OPTIONS = (
    "BatchMode=yes", "ControlMaster=no", "ControlPath=none", "ExitOnForwardFailure=yes",
    "ServerAliveInterval=10", "ServerAliveCountMax=3", "StreamLocalBindUnlink=yes", f"ConnectTimeout={THROUGH_S:.0f}",
)  # fmt: skip


class SshForward:
    """The forward of ``ssh://[user@]host[:port][/path/of/the/socket]`` to a socket in ``directory``."""

    def __init__(self, url: str, directory: Path) -> None:
        parts = urlsplit(url)
        if parts.scheme != "ssh" or not parts.hostname:
            raise ValueError(f"{url!r} is not ssh://user@host")
        self._host = parts.hostname
        self._login = [word for flag, value in (("-l", parts.username), ("-p", parts.port)) if value
                       for word in (flag, str(value))]  # fmt: skip
        self._remote = parts.path.rstrip("/") or "/var/run/docker.sock"
        self._directory = directory
        # Of any length: a socket's path may have 107 bytes.
        self._fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        self._process: subprocess.Popen[bytes] | None = None
        self._opening = threading.Lock()

    @property
    def url(self) -> str:
        """The address that stands for the engine's."""
        return f"unix:///proc/self/fd/{self._fd}/{SOCKET}"

    def ensure(self) -> None:
        """Make the forward unless it stands; blocks, raises OSError with what ssh says."""
        with self._opening:
            if self._process is not None and self._process.poll() is None:
                return
            self._end()
            self._process = self._start()
            assert self._process.stdout is not None
            ready, _, _ = select.select([self._process.stdout], [], [], THROUGH_S)
            if ready and self._process.stdout.readline() == b"through\n":
                logger.info("the engine is reached over ssh", host=self._host)
                return
            self._process.kill()
            raise ConnectionError(f"ssh {self._host}: {self._end() or 'it does not get through'}")

    def close(self) -> None:
        """End it for good."""
        with self._opening:
            self._end()
            os.close(self._fd)
        (self._directory / SOCKET).unlink(missing_ok=True)

    def _start(self) -> subprocess.Popen[bytes]:
        options = [word for option in OPTIONS for word in ("-o", option)]
        forward = ["-L", f"./{SOCKET}:{self._remote}"]
        # It ends with its standard input: with us, however we end.
        return subprocess.Popen(
            ["ssh", "-T", *options, *self._login, *forward, self._host, "echo through && exec cat >/dev/null"],
            cwd=self._directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def _end(self) -> str:
        """End ssh; return what it complained of."""
        if self._process is None:
            return ""
        self._process.kill()
        _, complaint = self._process.communicate()
        self._process = None
        return complaint.decode("utf-8", "replace").strip()
