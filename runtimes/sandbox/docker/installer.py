"""How the runner gets into a container and is spoken to: in a directory that the engine shares with us, or attached."""

from __future__ import annotations

import base64
import os
import secrets
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Protocol

from runtimes.sandbox.docker.attach import AttachByteStream
from runtimes.sandbox.docker.attach_client import AttachClient
from runtimes.sandbox.docker.engine import Blueprint, DockerEngine, Found
from runtimes.sandbox.docker.network import NO_NETWORK
from runtimes.sandbox.parts import RunnerClient
from runtimes.sandbox.record import HOSTS, SandboxRecord
from runtimes.sandbox.runner.byte_stream import SocketStream
from runtimes.sandbox.runner.packing import packed_beside
from runtimes.sandbox.runner.protocol import INSIDE, ISOLATED, RUNNER
from runtimes.sandbox.runner.stream_client import StreamClient

START_S = 30.0
PYTHON = ("python3", *ISOLATED)
#: Signs of life that a gateway gives in the time after which a runner takes it for gone.
LIFE_SIGNS = 3
#: Seconds that commands go on at least when no gateway is heard of: its engine may be starting again.
UNSEEN_S = 60.0


class RunnerInstaller(Protocol):
    """One way; the container's record names it, so that the next gateway takes the same."""

    @property
    def name(self) -> str: ...

    def equip(self, blueprint: Blueprint, directory: Path, mounts: Mapping[str, str]) -> Blueprint:
        """Return the container with its runner; ``mounts`` (path here -> path inside) can be read in it."""
        ...

    async def furnish(self, container: str, mounts: Mapping[str, str]) -> None:
        """Put in, before its start, what it cannot see from outside."""
        ...

    async def connect(self, found: Found, record: SandboxRecord, directory: Path) -> RunnerClient:
        """Speak to the runner of a started container; raises ActionFailed(environment_lost)."""
        ...


class SharedDirectoryInstaller:
    """Mounts of our directories, and a Unix socket in one of them: the engine sees them, and so does the container."""

    name = "socket"

    def __init__(self, state_dir: Path) -> None:
        """Blocks for a moment: ``state_dir``, which the engine sees, gets the file that starts in each container."""
        self._runner = packed_beside(state_dir.absolute())

    def equip(self, blueprint: Blueprint, directory: Path, mounts: Mapping[str, str]) -> Blueprint:
        offline = blueprint.network == NO_NETWORK
        return replace(
            blueprint,
            offline=offline,
            argv=(*PYTHON, f"{INSIDE}/runner.py", f"{INSIDE}/run"),
            # The socket's directory is the gateway's: without privileges of its own it is no root.
            capabilities=(*blueprint.capabilities, *(() if os.geteuid() == 0 else ("DAC_OVERRIDE",))),
            binds={
                str(self._runner): (f"{INSIDE}/runner.py", "ro"),
                str(directory / "run"): (f"{INSIDE}/run", "rw"),
                **({str(directory / HOSTS): ("/etc/hosts", "rw")} if offline else {}),
                **{source: (target, "ro") for source, target in mounts.items()},
            },
        )

    async def furnish(self, container: str, mounts: Mapping[str, str]) -> None:
        """Do nothing: they are mounted."""

    async def connect(self, found: Found, record: SandboxRecord, directory: Path) -> StreamClient:
        stream = SocketStream(directory / "run", peer_pid=found.pid)
        return await StreamClient.open(stream, record.greeting(own_cgroup=True), within_s=START_S)


@dataclass(frozen=True, slots=True)
class AttachInstaller:
    """Needs nothing but a connection to the engine, whatever files and kernel the container sees.

    The runner travels in the container's own command line, and speaks over its standard streams.
    """

    engine: DockerEngine
    #: Most bytes of the files that are copied in place of a mount.
    copy_limit_bytes: int
    name: str = "attach"

    def equip(self, blueprint: Blueprint, directory: Path, mounts: Mapping[str, str]) -> Blueprint:
        return replace(blueprint, argv=(*PYTHON, "-c", _packed_runner(), "--attached"), attached=True)

    async def furnish(self, container: str, mounts: Mapping[str, str]) -> None:
        for source, target in mounts.items():
            await self.engine.put_tree(container, Path(source), target, limit_bytes=self.copy_limit_bytes)

    async def connect(self, found: Found, record: SandboxRecord, directory: Path) -> AttachClient:
        unattended_s = max(record.spec.unattended_s, UNSEEN_S)
        life_s = min(record.spec.idle_ttl_s, unattended_s) / LIFE_SIGNS
        stream = AttachByteStream(self.engine, found.id, token=record.token, life_s=life_s)
        sequence = 1 + secrets.randbits(31)
        hello = record.greeting(own_cgroup=True, unattended_s=unattended_s, sequence=sequence)

        async def attach(first: int) -> StreamClient:
            return await StreamClient.open(stream, hello, within_s=START_S, first=first)

        async def running() -> bool:
            return await self.engine.running(found.id)

        return await AttachClient(attach, running, detachable=record.spec.unattended_s > 0).attach()


@cache
def _packed_runner() -> str:
    """Return the runner for Python's ``-c``: small, as the engine repeats it in every list of containers."""
    packed = base64.b64encode(zlib.compress(RUNNER.read_bytes(), 9)).decode("ascii")
    return f"import base64,zlib;exec(compile(zlib.decompress(base64.b64decode('{packed}')),'runner.py','exec'))"
