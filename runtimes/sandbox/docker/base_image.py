"""The base image of sandboxes, made with this package and an engine alone: by debootstrap, or from a Dockerfile."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker.errors
import docker.utils

from manager.errors import InvalidConfig, Unsupported
from manager.function import BASE_IMAGE
from runtimes.sandbox.docker.client import AWAY, EngineConnection
from runtimes.sandbox.images import require_image_name

COMPONENT = "image"
#: What is built upon where debootstrap cannot be used; the Dockerfile's own default.
SOURCE = "debian:bookworm-slim"
PLACE = Path(__file__).with_name("base")
#: Seconds that a build may take as a whole, and that the engine may be silent.
BUILD_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseImageBuilder:
    """Builds one image on one engine, and tells ``say`` how far it is. Its methods block."""

    api: docker.APIClient
    say: Callable[[str], None]
    #: Makes the tree of a Debian and prints where it lies (base/debootstrap.sh).
    script: Path = PLACE / "debootstrap.sh"

    def present(self, name: str) -> bool:
        """Return whether the engine has the image; raises InvalidConfig for what is no name, Unsupported."""
        require_image_name(name)
        try:
            self.api.inspect_image(name)  # type: ignore[no-untyped-call]
        except docker.errors.ImageNotFound:
            return False
        except AWAY as error:
            raise _refused(error) from None
        return True

    def debootstrap(self, name: str) -> None:
        """Make it from Debian's packages; raises Unsupported where that fails."""
        repository, tag = _parted(name)
        words = ["sh", str(self.script), "--tarball"]
        try:
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=BUILD_S, check=True)
        except (subprocess.SubprocessError, OSError) as error:
            told = f"debootstrap could not make it ({error}): set TANGRAM_DEBIAN_MIRROR, or build with --from IMAGE"
            raise Unsupported(told, component=COMPONENT) from None
        tarball, *changes = done.stdout.splitlines()
        self.say(f"{name}: importing {tarball}")
        try:
            answer = self.api.import_image_from_file(tarball, repository=repository, tag=tag, changes=changes)
        except AWAY as error:
            raise _refused(error) from None
        if "errorDetail" in str(answer) or not self.present(name):
            raise Unsupported(f"the engine did not import {tarball}: {str(answer)[-500:]}", component=COMPONENT)

    def dockerfile(self, name: str, source: str) -> None:
        """Make it from ``source``, an image that the engine has or can pull.

        Raises InvalidConfig with what the engine says where that fails, Unsupported where it does not answer.
        """
        require_image_name(source)
        _parted(name)
        text = io.BytesIO((PLACE / "Dockerfile").read_bytes())
        try:
            events = self.api.build(
                fileobj=text, tag=name, buildargs={"BASE": source}, rm=True, forcerm=True, decode=True, timeout=BUILD_S
            )
            self._follow(name, source, events)
        except AWAY as error:
            raise _refused(error) from None

    def _follow(self, name: str, source: str, events: Iterable[Mapping[str, Any]]) -> None:
        """Tell each step and each tenth of a pull, and raise what the engine ends with."""
        deadline_s, layers, tenth = time.monotonic() + BUILD_S, dict[str, tuple[int, int]](), 0
        failed = said = ""
        for event in events:
            if "error" in event:
                failed = str(event["error"]).strip()  # the last event; read to the end, the connection is given back
            if time.monotonic() > deadline_s:
                raise InvalidConfig(f"{name} takes longer than {BUILD_S:g} s to build", component=COMPONENT)
            line = str(event.get("stream", "")).strip()
            if line.startswith("Step "):
                self.say(f"{name}: {line.splitlines()[0][:100]}")
            elif line and not line.startswith("--->"):
                said = line[-500:]
            detail = event.get("progressDetail") or {}
            if event.get("status") == "Downloading" and "total" in detail:
                layers[str(event.get("id"))] = (int(detail.get("current", 0)), int(detail["total"]))
                done, total = (sum(each) for each in zip(*layers.values(), strict=True))
                if total and 10 * done // total > tenth:
                    tenth = 10 * done // total
                    self.say(f"{name}: {tenth * 10} % of {source}, {total} bytes")
        if failed:
            told = f"{name} could not be built from {source} ({failed})"
            raise InvalidConfig(f"{told}{': ' if said else ''}{said}", component=COMPONENT)


def build(name: str, *, source: str, host: str, again: bool, say: Callable[[str], None]) -> bool:
    """Build the image on the engine that ``host`` or the environment names; return whether it was not there yet.

    Without ``source`` by debootstrap where this machine is a Debian whose root we are, else from
    `SOURCE`. ``again`` builds what is there already. Raises InvalidConfig, Unsupported.
    """
    with closing(_opened(host)) as engine:
        builder = BaseImageBuilder(api=engine.api, say=say)
        if builder.present(name) and not again:
            return False
        if not source and _bootstraps():
            builder.debootstrap(name)
        else:
            builder.dockerfile(name, source or SOURCE)
        return True


def lacks(name: str, host: str) -> bool:
    """Return whether there is an engine, and it has not the image."""
    try:
        with closing(_opened(host)) as engine:
            return not BaseImageBuilder(api=engine.api, say=lambda told: None).present(name)
    except Unsupported:
        return False


def remedy(name: str) -> str:
    """Return the command that makes a base image of that name."""
    return "tangram image build" if name == BASE_IMAGE else f"tangram image build --tag {name}"


def _opened(host: str) -> EngineConnection:
    return EngineConnection.open(host, timeout_s=60.0, workers=1)


def _bootstraps() -> bool:
    return os.geteuid() == 0 and Path("/etc/debian_version").exists() and shutil.which("debootstrap") is not None


def _parted(name: str) -> tuple[str, str]:
    """Return repository and tag of an image that is to be made; raises InvalidConfig."""
    require_image_name(name)
    repository, tag = docker.utils.parse_repository_tag(name)
    if "@" in name or name.startswith("sha256:"):
        raise InvalidConfig(f"{name!r} is a digest, which no new image can be given: name[:tag]", component=COMPONENT)
    return repository, tag or "latest"


def _refused(error: Exception) -> Unsupported:
    return Unsupported(f"the engine did not build it: {error}", component=COMPONENT)
