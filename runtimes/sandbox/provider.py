"""Which kind of sandbox this machine gets."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from manager.errors import InvalidConfig, Unsupported
from runtimes.sandbox.creation_gate import CreationGate
from runtimes.sandbox.process.provider import ProcessProvider
from runtimes.sandbox.sandbox import Provider

logger = structlog.get_logger("sandbox")

#: Most bytes that are copied into a container in place of a mount.
COPY_LIMIT_BYTES = 256 * 2**20
KINDS = ("auto", "container", "process")


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerSettings:
    """Which Docker engine is used, and how its containers are spoken to."""

    #: As in DOCKER_HOST; empty takes that, or the usual socket.
    host: str = ""
    #: ``auto`` takes ``socket`` where the engine is seen to share the state directory, else ``attach``.
    transport: str = "auto"
    #: Most bytes of a handler's directory that are copied to an engine that cannot mount it.
    copy_limit_bytes: int = COPY_LIMIT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSettings:
    """What the providers are made from."""

    #: ``auto`` takes containers where a Docker engine answers, else local processes.
    kind: str = "auto"
    #: Where sockets, records and the process sandboxes' files live; one gateway at a time.
    state_dir: Path
    #: Stable for the state directory: the label of its sandboxes.
    gateway_id: str = "tangram"
    #: Sandboxes that are created at the same time.
    max_starting: int = 4
    #: Cores on which background processes run between actions; empty means all.
    shared_cores: tuple[int, ...] = ()
    #: Seconds that the engine may take for one request.
    engine_timeout_s: float = 120.0
    #: Seconds after which an engine that answers not even a ping is given up.
    engine_silence_s: float = 10.0
    docker: DockerSettings = field(default_factory=DockerSettings)


def make_provider(settings: ProviderSettings) -> Provider:
    """Return the provider that the settings ask for; raises InvalidConfig, or Unsupported with the remedy."""
    if settings.kind not in KINDS:
        raise InvalidConfig(f"sandbox kind {settings.kind!r} is none of {', '.join(KINDS)}", component="sandbox")
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
    return ProcessProvider(state_dir=settings.state_dir, gate=gate, shared_cores=shared_cores)
