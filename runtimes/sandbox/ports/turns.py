"""Turns: while one lasts, the servers of a sandbox run on the cores of an action, and speak to the gateway.

A turn is an action with a session, whose input and output are the frames of the sandbox's relay
(`runtimes.sandbox.ports.relay`). The end of its input ends it, and the sandbox rests. The relay stays, and with it the
connections, until the sandbox ends or a gateway comes that does not know them.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

from manager.errors import ActionFailed
from runtimes.chores import end_chores
from runtimes.sandbox.command import Command
from runtimes.sandbox.ports import relay
from runtimes.sandbox.runner.client import SandboxProcess, lost
from runtimes.sandbox.sandbox import Sandbox
from runtimes.sandbox.session import InteractiveSession

SOURCE = Path(relay.__file__).read_text(encoding="utf-8")


@dataclass(slots=True, eq=False)
class SandboxRelay:
    """The relay of one sandbox."""

    process: SandboxProcess
    #: The gateway that knows its connections, by a name that it gave itself.
    gateway: str
    #: Tells it from the sandbox's other relays.
    id: str = field(default_factory=lambda: secrets.token_hex(8))


class RelayGrip:
    """A `runtimes.sandbox.session.SessionGrip` on the relay, for one turn."""

    def __init__(self, process: SandboxProcess, session: InteractiveSession) -> None:
        self._process = process
        self._session = session
        #: Set once nobody wants it to go on.
        self.over = asyncio.Event()
        #: Set while the gateway takes what the relay says.
        self.taken = asyncio.Event()
        self.taken.set()

    def require_reached(self) -> None:
        """It is here."""

    def attend(self, *, attended: bool) -> None:
        """Who reads is known here already: the session holds it back itself."""

    async def settle(self) -> None:
        """What was passed on is told at once."""

    async def input_room(self) -> int:
        return await self._process.input_room()

    async def feed(self, data: bytes) -> None:
        self._session.passed(self._session.input_offset + len(data))  # it is on its way before the first wait
        await self._process.send_input(data)

    async def end_input(self) -> None:
        self.over.set()

    def steer(self, request: Mapping[str, object]) -> None:
        if "held" in request:
            (self.taken.clear if request["held"] else self.taken.set)()
        if "end" in request:
            self.over.set()


class PortTurns:
    """The relays of this process's sandboxes, and the turns in which they are spoken to."""

    def __init__(self) -> None:
        self._relays: WeakKeyDictionary[Sandbox, SandboxRelay] = WeakKeyDictionary()

    async def serve(self, sandbox: Sandbox, session: InteractiveSession, gateway: str) -> None:
        """Pass frames on until the session's input ends, or nobody is attached any more.

        What it says first, as ``stderr``, is the relay's id: under another than before, no connection is left. Raises
        Unsupported for a sandbox without python3, ActionFailed(environment_lost) if the relay ends.
        """
        async with self._relay(sandbox, gateway) as used:
            grip = RelayGrip(used.process, session)
            session.open(grip)
            session.add_output("stderr", used.id.encode())
            passing = asyncio.ensure_future(_pass_on(used.process, grip, session))
            over = asyncio.ensure_future(grip.over.wait())
            try:
                await asyncio.wait({passing, over}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end_chores(passing, over)
            if not grip.over.is_set():
                raise lost("the process that connects to the sandbox's ports has ended")

    def has_unread(self, sandbox: Sandbox) -> bool:
        """Return whether the relay has said something since the last turn."""
        used = self._relays.get(sandbox)
        return used is not None and used.process.has_unread

    @asynccontextmanager
    async def _relay(self, sandbox: Sandbox, gateway: str) -> AsyncIterator[SandboxRelay]:
        """Yield the sandbox's relay of this gateway; one that fails in the block is not used again."""
        known = self._relays.pop(sandbox, None)
        if known is not None and known.gateway != gateway:
            await _end(known.process)
            known = None
        if known is None:
            command = Command(argv=("-c", SOURCE), python=True, timeout_s=math.inf, still_s=0.0)
            known = SandboxRelay(await sandbox.spawn(command), gateway)
        try:
            yield known
        except BaseException:
            await _end(known.process)
            raise
        self._relays[sandbox] = known


async def _end(process: SandboxProcess) -> None:
    """Let a relay end itself."""
    with suppress(ActionFailed):
        await process.end_input()


async def _pass_on(process: SandboxProcess, grip: RelayGrip, session: InteractiveSession) -> None:
    """Pass on what the relay says, as fast as it is taken; return at its end."""
    async for stream, data in process.chunks():
        if stream == "stdout":
            session.add_output("stdout", data)
        await grip.taken.wait()
