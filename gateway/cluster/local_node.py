"""This machine as a node whose daemon is a process of its own (``cluster.local: process``).

The daemon is started and watched by the gateway and outlives it, as any node does: what runs in its sandboxes costs the
gateway's loop nothing, and a gateway that was killed finds it again. One that ends properly has it end too.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import structlog

from gateway.cluster.store import TICKET_VARIABLE
from manager.clock import Clock
from manager.errors import InvalidConfig
from runtimes.node.daemon import LOCK, PID
from tangram.types import NodeTicket

#: Its state directory, in the gateway's, and its log there.
DIRECTORY, LOG = "node", "daemon.log"
#: Seconds between two looks at it.
LOOK_S = 0.5
#: Seconds until one that lives must have joined this gateway for the first time: it may know it by another address.
JOIN_S = 15.0
#: Seconds that one which is told to leave has for it.
LEAVE_S = 15.0
#: Bytes of its log beyond which the next one begins another, and the one before is kept.
LOG_BYTES = 8 * 2**20
#: Seconds until one that died is started again, doubled each time.
AGAIN_S, AGAIN_MAX_S = 0.5, 60.0
#: One that has served for so long was well: its next death is waited for as its first.
WELL_S = 60.0
#: Seconds for it to end with its gateway: with the gateway's own drain it is less than a supervisor waits. Where it has
#: sandboxes to remove first, a person has ended the gateway, and waits longer: one that is killed leaves them.
END_S, TIDY_S = 8.0, 60.0
#: Ends a daemon and what is idle on its machine; what runs goes on.
TIDY = signal.SIGUSR1


class LocalNode:
    """Sees to it that this machine's daemon lives. Use from one event loop."""

    def __init__(
        self,
        name: str,
        state_dir: Path,
        paths: Sequence[Path],
        *,
        ticket: Callable[[], NodeTicket],
        joined: Callable[[str], bool],
        clock: Clock,
        lost_after_s: float,
    ) -> None:
        """``state_dir`` is the gateway's, ``paths`` the configuration that it serves; raises InvalidConfig without.

        ``ticket`` makes what admits it, ``joined`` tells whether a node of a name is heard.

        One that had joined and is silent is replaced after ``lost_after_s``, when it counts as lost anyway.
        """
        if not paths:
            raise InvalidConfig("cluster.local: process needs a configuration in files", component="cluster")
        self.name = name
        self._directory = state_dir.absolute() / DIRECTORY
        self._paths = tuple(path.absolute() for path in paths)
        self._ticket, self._is_connected = ticket, joined
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths = 0
        #: Since when it is awaited, or has joined, and when the next one may be started.
        self._since_s = self._again_s = clock.now()
        self._joined = self._left = False
        #: How long it may live without having joined, and when it was told to leave for that.
        self._patience_s, self._lost_after_s = JOIN_S, lost_after_s
        self._leave_s: float | None = None
        self._task: asyncio.Future[None] | None = None
        self._log = structlog.get_logger("gateway.cluster")

    def open(self) -> None:
        """Start it, unless that of the gateway before lives, and watch it until `close`."""
        self._task = asyncio.ensure_future(self._watch_for_ever())

    def left(self, node: str) -> None:
        """A node was drained and is gone; if it is this one, it stays away until the gateway's next start."""
        self._left = self._left or node == self.name

    def warnings(self) -> list[str]:
        """Return what should be looked at."""
        if self._joined or not self._deaths:
            return []
        return [f"this machine's daemon ended {self._deaths} times before it joined: {self._directory / LOG} says why"]

    async def close(self, *, keep: bool) -> None:
        """End it; what runs in its sandboxes goes on for the next one. ``keep``: idle trajectories live on as well."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        pid = self._living()
        if pid:
            self._signal(pid, signal.SIGHUP if keep else TIDY)
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S if keep else TIDY_S):
                    while self._living():  # noqa: ASYNC110  # it may be no child of this process: only its lock tells
                        await asyncio.sleep(LOOK_S / 10)
            if self._living() == pid:
                self._signal(pid, signal.SIGKILL)  # as good for what runs in sandboxes
        self._reap()

    async def _watch_for_ever(self) -> None:
        while not self._left:
            try:
                self.look()
            except Exception:  # noqa: BLE001  # a look that fails costs that look, not all that would follow
                self._log.exception("this machine's daemon could not be looked after")
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Start it if it does not live and may be started; replace one that lives and does not join."""
        now_s = self._clock.now()
        if self._is_connected(self.name):
            if not self._joined:
                self._joined, self._since_s, self._patience_s = True, now_s, self._lost_after_s
            elif now_s - self._since_s > WELL_S:
                self._deaths = 0
            return
        if self._joined:
            self._joined, self._since_s = False, now_s
        pid = self._living()
        if not pid:
            self._leave_s = None
            if now_s >= self._again_s:
                self._start(now_s)
        elif self._leave_s is not None and now_s - self._leave_s > LEAVE_S:
            self._log.error("this machine's daemon does not leave: it is killed, and what it ran goes on", daemon=pid)
            self._signal(pid, signal.SIGKILL)
        elif self._leave_s is None and now_s - self._since_s > self._patience_s:
            self._log.warning("this machine's daemon does not join: another takes its place", daemon=pid)
            self._signal(pid, signal.SIGHUP)
            self._leave_s = now_s

    def _start(self, now_s: float) -> None:
        if self._reap():
            self._deaths += 1
        self._since_s = now_s
        self._again_s = now_s + min(AGAIN_MAX_S, AGAIN_S * 2.0 ** min(self._deaths, 16))
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            with self._opened_log() as log:
                ticket = self._ticket()
                self._process = subprocess.Popen(
                    self._command(ticket),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=os.environ | {TICKET_VARIABLE: ticket.ticket},
                )
        except OSError as error:
            self._deaths += 1
            self._log.error("this machine's daemon cannot be started", why=str(error))
            return
        self._log.info("this machine's daemon is started", daemon=self._process.pid, deaths=self._deaths)

    def _opened_log(self) -> BinaryIO:
        place = self._directory / LOG
        if place.exists() and place.stat().st_size > LOG_BYTES:
            place.replace(place.with_suffix(".log.1"))
        return place.open("ab")

    def _command(self, ticket: NodeTicket) -> list[str]:
        options = {
            "--gateway": ticket.gateway,
            "--fingerprint": ticket.fingerprint,
            "--name": self.name,
            "--state-dir": str(self._directory),
        }
        words = [word for pair in options.items() for word in pair]
        configured = [word for path in self._paths for word in ("--config", str(path))]
        return [sys.executable, "-m", "gateway", "node", "join", *words, *configured]

    def _reap(self) -> bool:
        """Return whether one that this gateway had started has ended since the last time."""
        if self._process is None or self._process.poll() is None:
            return False
        self._process = None
        return True

    def _living(self) -> int:
        """Return the pid of the daemon, this gateway's own or that of the one before; 0 if none lives here.

        A lock says that one lives, perhaps in another container; a number in a file is believed if that is its process.
        """
        if self._process is not None and self._process.poll() is None:
            return self._process.pid
        with suppress(OSError, ValueError):
            descriptor = os.open(self._directory / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = int((self._directory / PID).read_text(encoding="ascii"))
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                return pid if os.fsencode(self._directory) in words else 0
            finally:
                os.close(descriptor)
        return 0

    def _signal(self, pid: int, number: signal.Signals) -> None:
        with suppress(OSError):
            os.kill(pid, number)
