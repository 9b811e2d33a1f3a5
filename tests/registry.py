"""A real registry of images on loopback (Debian's docker-registry), and images made for it."""

from __future__ import annotations

import io
import os
import secrets
import shutil
import socket
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from pathlib import Path

START_S = 20.0
USER, PASSWORD = "tangram", "open sesame"
#: bcrypt of the password.
HTPASSWD = f"{USER}:$2y$05$abcdefghijklmnopqrstuupx2xBUC4954936wVIjyyPHmUBFu0wCW\n"
CONFIG = """
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdir: {root}}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""
AUTH = "auth: {{htpasswd: {{realm: tests, path: {path}}}}}\n"


class LoopbackRegistry:
    """Serves until `stop`; with ``login`` to nobody without the password."""

    def __init__(self, directory: Path, *, login: bool = False) -> None:
        """Raises RuntimeError where it cannot be had."""
        program = shutil.which("docker-registry")
        if program is None:
            raise RuntimeError("docker-registry is not installed (Debian: apt-get install docker-registry)")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        self.host = f"127.0.0.1:{self.port}"
        config = CONFIG.format(root=directory / "data", port=self.port)
        if login:
            (directory / "htpasswd").write_text(HTPASSWD)
            config += AUTH.format(path=directory / "htpasswd")
        (directory / "config.yml").write_text(config)
        self._log = (directory / "log").open("wb")
        self._process = subprocess.Popen(
            [program, "serve", str(directory / "config.yml")],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "OTEL_TRACES_EXPORTER": "none"},
        )
        self._wait(directory)

    def _wait(self, directory: Path) -> None:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://{self.host}/v2/", timeout=1.0):  # loopback
                    return
            except urllib.error.HTTPError:
                return  # it asks who we are
            except OSError:
                continue
        self.stop()
        raise RuntimeError("docker-registry does not serve: " + (directory / "log").read_text(errors="replace")[-500:])

    def push(self, name: str, size_bytes: int = 2**20) -> str:
        """Make an image of one file of noise, push it, and forget it here; return its name."""
        image = f"{self.host}/{name}"
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            info = tarfile.TarInfo("noise")
            info.size = size_bytes
            tar.addfile(info, io.BytesIO(secrets.token_bytes(size_bytes)))
        docker("import", "--change", "LABEL made=here", "-", image, stdin=packed.getvalue())
        docker("push", "-q", image)
        docker("rmi", image)
        return image

    def push_local(self, local: str, name: str) -> str:
        """Push an image that the engine has, under a name of this registry that the engine then forgets."""
        image = f"{self.host}/{name}"
        docker("tag", local, image)
        docker("push", "-q", image)
        docker("rmi", image)
        return image

    def login(self) -> None:
        docker("login", "-u", USER, "--password-stdin", self.host, stdin=PASSWORD.encode())

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def docker(*words: str, stdin: bytes | None = None) -> str:
    """Run docker's own client; raises CalledProcessError."""
    done = subprocess.run(["docker", *words], input=stdin, capture_output=True, timeout=120, check=True)
    return done.stdout.decode()
