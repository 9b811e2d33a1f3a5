"""The gateway's side of the driver: a child process that is watched, and started again when it dies or is silent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import structlog

from manager.clock import Clock, MonotonicClock
from manager.function import Setting

DRIVER = Path(__file__).with_name("driver.py")
BACKOFF_S, BACKOFF_MAX_S = 1.0, 30.0
#: Longest line of a driver; a longer one ends it.
LINE_MAX_BYTES = 2**20
#: Of what Ray says on standard error, kept for the next message.
COMPLAINT_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """A Ray cluster whose machines become nodes."""

    address: Annotated[str, Setting("of the cluster's head, such as head:6379; auto for one on this machine")] = "auto"
    labels: Annotated[
        Mapping[str, str], Setting("labels of the machines that are taken, * for any value; empty: all")
    ] = field(default_factory=dict)
    head: Annotated[bool, Setting("the head's machine is taken too")] = False
    reserve_cpus: Annotated[float | None, Setting("CPUs of each machine reserved with Ray; null: all", ge=0)] = None
    reserve_gpus: Annotated[float | None, Setting("GPUs, likewise", ge=0)] = 0.0
    python: Annotated[str, Setting("interpreter with the cluster's own Ray; empty: the gateway's")] = ""
    #: Most machines that are taken, as many as there may be nodes.
    machines_max: int = 1024
    command: Annotated[tuple[str, ...], Setting("how a machine runs our command")] = ("tangram",)
    join: Annotated[tuple[str, ...], Setting("further words of `tangram node join`, such as --cores 0-15")] = ()
    name: Annotated[str, Setting("of a machine's node: {address} and {id} stand for what Ray calls it")] = (
        "ray-{address}"
    )
    state_dir: Annotated[str, Setting("where a machine's daemon keeps its state; {name} stands for the node's")] = (
        "/var/lib/tangram-node"
    )
    at_end: Annotated[
        Literal["keep", "release"],
        Setting(
            "daemons and what is reserved at the end of the gateway: kept for the next one, or ended and given back"
        ),
    ] = "keep"
    #: Seconds after which a reservation that waits is told of.
    waiting_s: float = 30.0
    #: Seconds between two looks whether the driver lives.
    ping_s: float = 2.0
    #: Seconds of silence after which a driver is started again.
    silent_s: float = 10.0


class RayMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the driver; its ``kind`` says which fields count.

    ``connected`` to the cluster, or it is ``unreachable``; a ``pong``. Of a machine that is wanted: it is ``alive`` or
    ``dead`` (by itself this ends nothing: its daemon's own link says more), ``draining``, or ``waiting`` for what is to
    be reserved there, which others hold. Its ``actor`` holds that, or has ``actor_failed`` and is made again. A command
    that was done, ``started`` or ``released``, or ``refused``.
    """

    kind: Literal[
        "connected", "unreachable", "pong", "alive", "dead", "draining", "waiting", "actor", "actor_failed",
        "started", "released", "refused",
    ]  # fmt: skip
    #: Ray's id of a machine.
    node: str = ""
    why: str = ""
    #: Of the driver or the actor.
    pid: int = 0
    version: str = ""
    #: Seconds since the driver saw the cluster.
    looked_ago_s: float = 0.0
    address: str = ""
    labels: Mapping[str, str] = {}
    #: What is to be reserved, for how long it waits, and what nobody holds there; empty if Ray does not say.
    cpus: float = 0.0
    gpus: float = 0.0
    waited_s: float = 0.0
    free: Mapping[str, float] = {}
    gpu_ids: tuple[str, ...] = ()
    #: Pid of the daemon that was to be started; 0 if it did not come up.
    daemon: int = 0
    #: Whether the daemon of a machine that was given back has gone.
    gone: bool = False

    def reservation(self) -> str:
        """Describe what a machine waits for, for logs and warnings."""
        parts = []
        for name, wanted in {"CPU": self.cpus, "GPU": self.gpus}.items():
            if wanted:
                free = f", {self.free[name]:g} free" if name in self.free else ", none free" if self.free else ""
                parts.append(f"{wanted:g} {name}s asked{free}")
        wanted_here = "; ".join(parts) or "nothing asked, and Ray makes no actor there"
        return f"Ray node {self.node[:12]} waits for its reservation since {self.waited_s:g} s: {wanted_here}"


class RayDriverProcess:
    """Runs a driver for ever; what it says is handed over, and what it is told is dropped while there is none."""

    def __init__(
        self,
        settings: RaySettings,
        on_message: Callable[[RayMessage], None],
        *,
        clock: Clock | None = None,
        driver: Path = DRIVER,
    ) -> None:
        self._settings = settings
        self._on_message = on_message
        self._clock = clock or MonotonicClock()
        self._driver = driver
        self._process: asyncio.subprocess.Process | None = None
        self._received_s = 0.0
        self._away_since_s: float | None = self._clock.now()
        self._why = "not connected yet"
        self._complaint = b""
        self._log = structlog.get_logger("node.ray")
        #: How often one was started.
        self.starts = 0

    def warning(self) -> str | None:
        """Return for how long the cluster has not been seen, and why; None if it is."""
        if self._away_since_s is None:
            return None
        return f"ray: unreachable for {self._clock.now() - self._away_since_s:.0f} s: {self._why}"

    def start_daemon(self, node: str, command: list[str], environment: Mapping[str, str], state_dir: str) -> None:
        """Have a machine's actor start its daemon; what comes of it is a message."""
        start = {"kind": "start", "node": node, "command": command}
        self._send({**start, "environment": environment, "state_dir": state_dir})

    def release(self, node: str, *, kill: bool = False) -> None:
        """Have a machine's daemon end, and what is reserved there given back."""
        self._send({"kind": "release", "node": node, "kill": kill})

    async def run(self) -> None:
        """Keep a driver running until cancelled; actors and daemons stay."""
        failures = 0
        while True:
            began_s = self._clock.now()
            try:
                await self._once()
            except OSError as error:
                self._why = f"the driver cannot be started: {error}"
            finally:
                await self._end()
            if self._away_since_s is None:
                self._away_since_s = self._clock.now()
            failures = 0 if self._clock.now() - began_s > BACKOFF_MAX_S else failures + 1
            self._log.warning("the driver has ended", why=self._why, said=self._complaint.decode(errors="replace"))
            await asyncio.sleep(min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** max(0, failures - 1)))

    async def _once(self) -> None:
        settings = self._settings
        self.starts += 1
        self._complaint, self._received_s = b"", self._clock.now()
        self._process = await asyncio.create_subprocess_exec(
            settings.python or sys.executable,
            str(self._driver),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_MAX_BYTES,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if not name.startswith(("TANGRAM_", "PYTHONPATH"))},
        )
        self._send(
            {
                "address": settings.address,
                "labels": settings.labels,
                "head": settings.head,
                "most": settings.machines_max,
                "cpus": settings.reserve_cpus,
                "gpus": settings.reserve_gpus,
                "waiting_s": settings.waiting_s,
            }
        )
        async with asyncio.TaskGroup() as group:
            complaints = group.create_task(self._read_complaints())
            pings = group.create_task(self._ping())
            await self._read()
            pings.cancel()
            complaints.cancel()

    async def _read(self) -> None:
        """Hand over what it says until it says no more."""
        assert self._process is not None and self._process.stdout is not None
        decoder = msgspec.json.Decoder(RayMessage)
        try:
            while line := await self._process.stdout.readline():
                self._take(decoder.decode(line))
        except (msgspec.MsgspecError, ValueError) as error:
            self._why = f"the driver says what nobody understands: {error}"

    def _take(self, message: RayMessage) -> None:
        self._received_s = self._clock.now()
        match message.kind:
            case "connected":
                self._away_since_s = None
            case "pong":
                self._looked(message.looked_ago_s, message.why)
            case "unreachable":
                self._why = message.why
        if message.kind != "pong":
            self._on_message(message)

    def _looked(self, ago_s: float, why: str) -> None:
        """The driver last saw the cluster so long ago; a look is due every second."""
        if not why and ago_s <= self._settings.silent_s:
            self._away_since_s = None
        elif self._away_since_s is None:
            self._away_since_s, self._why = self._received_s - ago_s, why or "its head does not answer"

    async def _ping(self) -> None:
        """Ask whether it lives; kill one that is silent, which ends `_read`."""
        assert self._process is not None
        while True:
            await asyncio.sleep(self._settings.ping_s)
            if self._clock.now() - self._received_s > self._settings.silent_s:
                self._why = f"the driver was silent for {self._settings.silent_s:g} s"
                self._kill()
                return
            self._send({"kind": "ping"})

    async def _read_complaints(self) -> None:
        """Keep the last of what Ray prints."""
        assert self._process is not None and self._process.stderr is not None
        while output := await self._process.stderr.read(COMPLAINT_MAX_BYTES):
            self._complaint = (self._complaint + output)[-COMPLAINT_MAX_BYTES:]

    def _send(self, message: Mapping[str, object]) -> None:
        """Write a line; without a driver it is dropped: the next one is told anew by what it says."""
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None or process.stdin.is_closing():
            return
        if process.stdin.transport.get_write_buffer_size() > LINE_MAX_BYTES:
            self._why = "the driver does not read"
            self._kill()
            return
        process.stdin.write(msgspec.json.encode(message) + b"\n")

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _end(self) -> None:
        """The driver is gone for certain, with whatever it has forked."""
        self._kill()
        process, self._process = self._process, None
        if process is not None:
            await process.wait()
