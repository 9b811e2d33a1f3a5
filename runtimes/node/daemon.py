"""The daemon of a node: dials the gateway for ever, and lets the agent do what it asks.

It is a process of its own, under systemd, Slurm or whatever starts it. What runs in its sandboxes outlives it: the next
daemon of the same state directory adopts that. Only one that hears no gateway for ``unattended_s`` ends all.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import secrets
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import structlog

from manager.clock import Clock, MonotonicClock
from manager.config import NodeSpec
from manager.errors import CodedError, Conflict, InvalidConfig, StorageUnavailable, Unauthorized
from manager.executor import Executor
from manager.function import FunctionSpec, Setting
from runtimes.node import wire
from runtimes.node.agent import Agent, AgentSettings
from runtimes.node.certificate import node_side, shows
from runtimes.node.fitness.served import Trouble
from runtimes.node.journal import BOOT_ID
from runtimes.node.link import LinkClosed, LinkSettings, LinkStream, NodeLink
from runtimes.node.message import Message
from runtimes.node.models.served import NodeModels
from runtimes.node.sandboxes import NodeSandboxes
from runtimes.node.snapshots.served import ServedSnapshots

logger = structlog.get_logger("node")

COMPONENT = "node.daemon"
#: Of the kernel: numbers of the process itself may be somebody's who wants them again, and are alike after a fork.
CHANCE = random.SystemRandom()
LOCK, PID, KEY = "lock", "pid", "key"
#: Seconds between two looks whether a draining node is empty.
LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """Where a daemon joins, as what, and how patient it is."""

    host: str
    port: int
    #: SHA-256 of the gateway's certificate, hexadecimal.
    fingerprint: str
    #: Admits it once; empty if the state directory holds a key.
    ticket: str
    state_dir: Path
    #: This machine, with its name and labels.
    spec: NodeSpec
    #: What its sandboxes are, and their kind (`runtimes.sandbox.promises.ProviderInfo`).
    isolation: str = ""
    sandboxes: str = ""
    greeting_s: Annotated[float, Setting("seconds for a connection and its greeting", gt=0)] = 10.0
    redial_s: Annotated[float, Setting("seconds until the next try, doubled each time, half of it by chance", gt=0)] = (
        0.5
    )
    redial_max_s: Annotated[float, Setting("longest wait between two tries", gt=0)] = 10.0
    unattended_s: Annotated[float, Setting("seconds without a gateway after which all is ended", gt=0)] = 600.0
    drain_grace_s: Annotated[float, Setting("seconds that a drain waits for what runs", ge=0)] = 600.0
    link: LinkSettings = field(default_factory=LinkSettings)
    agent: AgentSettings = field(default_factory=AgentSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """What a daemon works with, and how that is let go: a `runtimes.node.requests.NodeWork`."""

    executor: Executor
    sandboxes: NodeSandboxes
    check: Callable[[FunctionSpec], Awaitable[None]]
    close: Callable[[], Awaitable[None]]
    handlers: Callable[[], Collection[Path]] = lambda: ()
    models: NodeModels | None = None
    snapshots: ServedSnapshots | None = None
    trouble: Trouble | None = None

    async def prepare(self, function: FunctionSpec) -> None:
        await self.check(function)

    def handlers_in_use(self) -> Collection[Path]:
        return self.handlers()


class Daemon:
    """One daemon: `run` it to its end; `drain`, `leave` and `stop` may be called from anywhere on its loop."""

    def __init__(self, settings: DaemonSettings, work: HostWork, *, clock: Clock | None = None) -> None:
        self._settings = settings
        self._work = work
        self._clock = clock or MonotonicClock()
        self._instance = secrets.token_hex(8)
        self._agent: Agent | None = None
        self._link: NodeLink | None = None
        self._stopping = asyncio.Event()
        self._heard_s = self._clock.now()
        #: Why it drains; whether what runs is left to the next daemon, and nothing else. Empty and False before.
        self._draining = ""
        self._leaving = self._tidy = False
        self._drainer: asyncio.Future[None] | None = None
        self._ending: asyncio.Future[None] | None = None
        #: Set once it has joined a gateway.
        self.joined = asyncio.Event()

    # --- from outside

    def drain(self, why: str) -> None:
        """Take no new work, and end when nothing is left or the grace is over; a second time changes nothing.

        A machine's own shutdown, its orchestrator and an operator may each ask for it: `stop` ends at once.
        """
        if self._draining:
            logger.info("it drains already", why=why)
            return
        self._draining = why
        logger.info("draining", why=why)
        if self._agent is not None:
            self._agent.say(wire.NodeDraining(why))
        self._drainer = asyncio.ensure_future(self._drain())

    def leave(self, *, tidy: bool = False) -> None:
        """End now, and leave all that runs to the next daemon of this state directory; ``tidy``: and nothing else."""
        self._leaving, self._tidy = True, tidy
        self.stop()

    def stop(self) -> None:
        """End now, with all that runs."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        """Kill what is not left to the next daemon, and say so; then end."""
        try:
            if self._agent is not None and not self._leaving:
                await self._agent.end_all()
            elif self._agent is not None and self._tidy:
                await self._agent.end_idle()
            if self._link is not None:
                self._link.send(wire.NodeGoodbye(self._draining or "the daemon ends", not self._leaving))
                self._link.close("the daemon ends")
        finally:
            self._stopping.set()

    async def _drain(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_grace_s):
                while self._agent is not None and not self._agent.idle:  # noqa: ASYNC110  # it ends in many places
                    await asyncio.sleep(LOOK_S)
        self.stop()

    # --- life

    async def run(self) -> None:
        """Join, and join again, until it is told to end or is unattended for too long.

        Raises Conflict if another daemon has the state directory, Unauthorized if the gateway takes neither its ticket
        nor its key at the first try, InvalidConfig if it is not the gateway that it was told of.
        """
        settings = self._settings
        with _held(settings.state_dir):
            self._agent = Agent(settings.state_dir, self._work, settings.agent, clock=self._clock)
            self._agent.on_drain = self.drain
            try:
                await self._agent.start()
                await self._dial_for_ever(self._agent)
            finally:
                for ending in (self._drainer, self._ending):
                    if ending is not None:
                        ending.cancel()
                if not self._leaving:
                    await self._agent.end_all()
                await self._agent.close()
                await self._work.close()

    async def _dial_for_ever(self, agent: Agent) -> None:
        wait_s = self._settings.redial_s
        while not self._stopping.is_set():
            try:
                await self._join(agent)
                wait_s = self._settings.redial_s
            except (InvalidConfig, Unauthorized):
                if not self.joined.is_set():
                    self._leaving = True  # what an earlier daemon left waits for one that is let in
                    raise
                logger.exception("the gateway refuses this node")
            except (OSError, CodedError, TimeoutError) as error:
                logger.info("the gateway is not to be had", why=str(error) or type(error).__name__)
            if self._clock.now() - self._heard_s > self._settings.unattended_s:
                logger.error("no gateway came: all is ended", seconds=self._settings.unattended_s)
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s * CHANCE.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, self._settings.redial_max_s)

    async def _join(self, agent: Agent) -> None:
        """One connection, from its dialling to its end."""
        async with asyncio.timeout(self._settings.greeting_s):
            link = await self._dial()
        try:
            link.send(self._hello(agent))
            welcome = await self._welcomed(link)
            if welcome.key:
                _keep_key(self._settings.state_dir, welcome.key)
            if welcome.fence:
                logger.warning("the gateway had given this node up: all that it has is ended")
                await agent.end_all()
            link.settings = replace(link.settings, beat_s=welcome.beat_s, silent_s=welcome.silent_s)
            self._link = link
            self.joined.set()
            logger.info("joined", gateway=link.peer, generation=welcome.generation)
            if self._draining:
                link.send(wire.NodeDraining(self._draining))
            why = await agent.serve(link)
            logger.info("the link is gone", why=why)
        finally:
            if self._link is link:
                self._link, self._heard_s = None, self._clock.now()
            link.close("the daemon is done with it")

    async def _dial(self) -> NodeLink:
        settings = self._settings
        loop = asyncio.get_running_loop()
        transport, stream = await loop.create_connection(
            LinkStream, settings.host, settings.port, ssl=node_side(), server_hostname=""
        )
        peer = transport.get_extra_info("ssl_object")
        if not isinstance(peer, ssl.SSLObject | ssl.SSLSocket) or not shows(peer, settings.fingerprint):
            transport.abort()
            told = f"{settings.host}:{settings.port} shows another certificate than {settings.fingerprint}"
            raise InvalidConfig(f"{told}: it is not the gateway, or has a new state directory", component=COMPONENT)
        return NodeLink(stream, settings.link, clock=self._clock)

    def _hello(self, agent: Agent) -> wire.NodeHello:
        settings = self._settings
        return wire.NodeHello(
            protocol=wire.PROTOCOL,
            version=_version(),
            name=settings.spec.name,
            boot=BOOT_ID.read_text(encoding="ascii").strip(),
            epoch=agent.epoch,
            instance=self._instance,
            ticket=settings.ticket,
            key=_kept_key(settings.state_dir),
            spec=settings.spec,
            labels=dict(settings.spec.labels),
            isolation=settings.isolation,
            sandboxes=settings.sandboxes,
            draining=bool(self._draining),
            unfit=agent.fitness.why,
            newcomers=agent.fitness.newcomers,
        )

    async def _welcomed(self, link: NodeLink) -> wire.NodeWelcome:
        answer = await link.receive(Message, self._settings.greeting_s)
        match answer:
            case wire.NodeWelcome():
                return answer
            case wire.NodeRefused(code=Unauthorized.code):
                raise Unauthorized(f"the gateway refuses the node: {answer.message}", component=COMPONENT)
            case wire.NodeRefused():
                raise LinkClosed(f"the gateway refuses the node: {answer.message}", component=COMPONENT)
        raise wire.ChannelError(f"a {type(answer).__name__} where a welcome was expected")


@contextmanager
def _held(state_dir: Path) -> Iterator[None]:
    """Hold a state directory for one daemon, and write down whose process that is."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(state_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageUnavailable(f"{state_dir} cannot be used: {error}", component=COMPONENT) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            told = f"another daemon has the state directory {state_dir}; give each its own --state-dir"
            raise Conflict(told, component=COMPONENT) from None
        (state_dir / PID).write_text(f"{os.getpid()}\n", encoding="ascii")
        yield
    finally:
        os.close(descriptor)


def _keep_key(state_dir: Path, key: str) -> None:
    """Write down what admits this node from now on; only its owner can read it."""
    part = state_dir / f"{KEY}.part"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    part.replace(state_dir / KEY)


def _kept_key(state_dir: Path) -> str:
    try:
        return (state_dir / KEY).read_text(encoding="ascii")
    except OSError:
        return ""


def _version() -> str:
    try:
        return version("tangram-gateway")
    except PackageNotFoundError:
        return "unknown"
