"""Which kind of sandbox this machine gets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import structlog

from manager.errors import Unsupported
from manager.setting import Setting
from runtimes.sandbox.creation_gate import CreationGate
from runtimes.sandbox.sandbox import Provider

logger = structlog.get_logger("sandbox")


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerSettings:
    """The Docker engine that makes container sandboxes, on this machine or on another."""

    host: Annotated[
        str,
        Setting(
            "unix:///path, tcp://host:port or ssh://user@host; by default DOCKER_HOST or the usual socket",
            pattern=r"^((unix|tcp|ssh)://.+)?$",
        ),
    ] = ""
    transport: Annotated[
        Literal["auto", "socket", "attach"],
        Setting(
            "how sandboxes are spoken to: over a socket in a directory that the engine mounts, or attached "
            "through the engine; auto takes the socket where the engine is seen to share the state directory"
        ),
    ] = "auto"
    copy_limit_bytes: Annotated[
        int,
        Setting("most bytes of a handler's directory, which is copied to an engine that cannot mount it"),
    ] = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSettings:
    """What the providers are made from."""

    kind: Annotated[
        Literal["auto", "container", "process"],
        Setting("auto takes containers where Docker answers, else local processes", key="provider"),
    ] = "auto"
    #: Where sockets, records and the process sandboxes' files live; one gateway at a time.
    state_dir: Path = Path("sandboxes")
    #: Stable for the state directory: the label of its sandboxes.
    gateway_id: str = "tangram"
    max_starting: Annotated[int, Setting("sandboxes that are started at once", ge=1)] = 4
    #: Cores on which background processes run between actions; empty means all.
    shared_cores: tuple[int, ...] = ()
    #: Seconds that the engine may take for one request.
    engine_timeout_s: float = 120.0
    engine_silence_s: Annotated[
        float, Setting("a Docker engine that answers nothing for so long is given up until it answers again", gt=0)
    ] = 10.0
    docker: Annotated[DockerSettings, Setting("the engine")] = DockerSettings()


def make_provider(settings: ProviderSettings) -> Provider:
    """Return the provider that the settings ask for; raises InvalidConfig, or Unsupported with the remedy."""
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    provider = _make(settings)
    logger.info("sandboxes", kind=provider.info.kind, engine=provider.info.engine, isolation=provider.info.isolation)
    return provider


def _make(settings: ProviderSettings) -> Provider:
    shared_cores = settings.shared_cores or tuple(sorted(os.sched_getaffinity(0)))
    gate = CreationGate(settings.max_starting)
    if settings.kind != "process":
        try:
            from runtimes.sandbox.docker.engine import DockerEngine
            from runtimes.sandbox.docker.provider import ContainerProvider

            chosen = settings.docker
            engine = DockerEngine.connect(
                chosen.host,
                state_dir=settings.state_dir,
                timeout_s=settings.engine_timeout_s,
                workers=settings.max_starting + 4,
                silence_s=settings.engine_silence_s,
            )
            transport = chosen.transport
            if transport == "auto":
                transport = "socket" if engine.shares(settings.state_dir) else "attach"
            return ContainerProvider(
                engine,
                state_dir=settings.state_dir,
                gateway_id=settings.gateway_id,
                gate=gate,
                shared_cores=shared_cores,
                transport=transport,
                copy_limit_bytes=chosen.copy_limit_bytes,
            )
        except (Unsupported, ImportError) as error:
            if settings.kind == "container":
                raise
            logger.warning("no containers here", why=str(error))
    from runtimes.sandbox.process.provider import ProcessProvider

    return ProcessProvider(state_dir=settings.state_dir, gate=gate, shared_cores=shared_cores)
