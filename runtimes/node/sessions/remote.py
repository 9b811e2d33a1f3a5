"""The gateway's side: sessions whose commands run on a node, as if they ran here."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping

from manager.action import Action
from manager.errors import CapacityExceeded
from manager.executor import Call
from runtimes.node.errors import error_of
from runtimes.node.link import NodeLink
from runtimes.node.message import Message
from runtimes.node.sessions.messages import (
    AttachSession,
    SessionOpened,
    SessionRoom,
    SessionSaid,
    SessionSteered,
    SessionTold,
    SessionTyped,
    SteerSession,
    TypeToSession,
)
from runtimes.node.wire import COMPONENT
from runtimes.sandbox.exec.runtime import terminal_of
from runtimes.sandbox.session import InteractiveSession, SessionTable

#: Bytes of input in one frame, and of output that may be under way.
PIECE_BYTES = 64 * 2**10
WINDOW_BYTES = 256 * 2**10
#: What steers a session and was not answered yet; the oldest is dropped for more.
STEERS_MAX = 64
#: Seconds after which a caller whose node is not reached may try again.
RETRY_AFTER_S = 1.0


class RemoteSession:
    """A `runtimes.sandbox.session.SessionGrip` on a session of a node, over all of its links."""

    def __init__(self, node: str, claim: str, session: InteractiveSession) -> None:
        self._node = node
        self._claim = claim
        self._session = session
        self._link: NodeLink | None = None
        self._life = secrets.token_hex(8)
        self._number = 0
        self._window_bytes = min(WINDOW_BYTES, session.settings.output_bytes // 4)
        self._open = self._held = self._attended = self._refused = False
        #: Up to where the node was told that its output was taken.
        self._taken = 0
        #: What the node has not answered yet, by number: whoever waits for it, or gave up.
        self._typing: dict[int, tuple[TypeToSession, asyncio.Future[SessionTyped]]] = {}
        self._settled = asyncio.Event()
        self._settled.set()
        self._steers: dict[int, SteerSession] = {}

    # --- the link

    def attach(self, link: NodeLink) -> None:
        """Go on over this link: say what the node may not have heard."""
        session = self._session
        self._link, self._taken = link, session.end
        asked = AttachSession(
            claim=self._claim,
            life=self._life,
            offset=session.end,
            window_bytes=self._window_bytes,
            attended=self._attended,
            held=self._held,
            unattended_s=session.settings.unattended_s,
        )
        for message in (asked, *self._steers.values(), *[typing for typing, _ in self._typing.values()]):
            link.send(message)

    def detach(self) -> None:
        """There is no link: what is typed waits."""
        self._link = None

    def close(self) -> None:
        """It has ended: nobody waits any more."""
        self._link = None
        for message, typed in self._typing.values():
            if not typed.done():
                typed.set_result(
                    SessionTyped(
                        claim=self._claim, number=message.number, input_offset=message.offset, reads=False, error=None
                    )
                )
        self._typing.clear()
        self._settled.set()

    def opened(self, told: SessionOpened) -> None:
        """Its command runs, or runs still."""
        self._refused = not told.reads
        self._window_bytes = max(1, min(self._window_bytes, told.window_bytes))
        if not self._open:
            self._open, self._taken = True, told.start
            self._session.open(self, start=told.start, input_offset=told.input_offset)
        else:
            self._session.skip(told.start)
            self._session.passed(told.input_offset)

    def said(self, told: SessionSaid) -> None:
        """Keep what is new of a piece."""
        session = self._session
        session.skip(told.offset)
        fresh = told.data[session.end - told.offset :]
        if fresh:
            session.said(told.stream, fresh)
        self._tell_taken()

    def typed(self, told: SessionTyped) -> None:
        """The node has passed something on, whether somebody still waits for that or not."""
        message, typed = self._typing.pop(told.number, (None, None))
        if message is None or typed is None:
            return
        if told.error is None or message.withdrawn:
            self._refused = not told.reads
            self._session.passed(told.input_offset)
        if not typed.done():
            typed.set_result(told)
        if not self._typing:
            self._settled.set()

    def steered(self, number: int) -> None:
        """The node has done it."""
        self._steers.pop(number, None)

    # --- SessionGrip

    def require_reached(self) -> None:
        if self._link is None:
            told = f"node {self._node}, on which the session lives, is not reached now"
            raise CapacityExceeded(told, component=COMPONENT, retry_after_s=RETRY_AFTER_S)

    def attend(self, *, attended: bool) -> None:
        self._attended = attended
        self._taken = self._session.end
        self._send(SessionRoom(self._claim, self._taken, attended))

    async def settle(self) -> None:
        await self._settled.wait()

    async def input_room(self) -> int:
        return 0 if self._refused else PIECE_BYTES

    async def feed(self, data: bytes) -> None:
        await self._type(data, end=False)

    async def end_input(self) -> None:
        await self._type(b"", end=True)

    async def _type(self, data: bytes, *, end: bool) -> None:
        """Pass it on; return when the node has done so. Raises what the node says."""
        self._number += 1
        number, offset = self._number, self._session.input_offset
        message = TypeToSession(claim=self._claim, number=number, offset=offset, data=data, end=end)
        typed: asyncio.Future[SessionTyped] = asyncio.get_running_loop().create_future()
        self._typing[number] = (message, typed)
        self._settled.clear()
        self._send(message)
        try:
            told = await typed
        except asyncio.CancelledError:
            self._withdraw(number)
            raise
        if told.error is not None:
            raise error_of(told.error)

    def _withdraw(self, number: int) -> None:
        """Nobody waits for it any more: the node passes no more of it on, and says how far it came."""
        if number not in self._typing:
            return  # it was answered in the same turn
        message, typed = self._typing[number]
        gone = TypeToSession(
            claim=self._claim, number=number, offset=message.offset, data=b"", end=False, withdrawn=True
        )
        self._typing[number] = (gone, typed)
        self._send(gone)

    def steer(self, request: Mapping[str, object]) -> None:
        if "held" in request:
            self._held = bool(request["held"])
            if not self._held:
                self.attend(attended=self._attended)
            return
        self._number += 1
        steer = SteerSession(claim=self._claim, number=self._number)
        match request:
            case {"size": [int(rows), int(columns)]}:
                steer.size = (rows, columns)
            case {"signal": int(number)}:
                steer.signal = number
            case _:
                steer.end = True
        while len(self._steers) >= STEERS_MAX:
            del self._steers[next(iter(self._steers))]
        self._steers[steer.number] = steer
        self._send(steer)

    # --- inside

    def _tell_taken(self) -> None:
        """Tell of what was taken, a quarter of the window at once; nothing while its reader is slow."""
        if self._attended and not self._held and self._session.end - self._taken >= max(1, self._window_bytes // 4):
            self._taken = self._session.end
            self._send(SessionRoom(self._claim, self._taken, True))

    def _send(self, message: Message) -> None:
        if self._link is not None:
            self._link.send(message)


class RemoteSessions:
    """The sessions on one node, over the link of now. Use from one event loop."""

    def __init__(self, node: str, table: SessionTable) -> None:
        self._node = node
        self._table = table
        self._link: NodeLink | None = None
        #: By claim, with the id of its invocation.
        self._sessions: dict[str, tuple[str, RemoteSession]] = {}

    def begin(self, claim: str, action: Action, call: Call) -> bool:
        """An attempt is about to be executed, or taken over; return whether it is a session.

        Raises CapacityExceeded if there may be no more sessions, ActionFailed if its input is not as declared. A later
        try than the first is none: a session is not begun again.
        """
        if "session" not in call.input or action.attempt > 1:
            return False
        id = call.context.get("invocation_id", action.id)
        session = self._table.living(id, terminal_of(call.input))
        self._sessions[claim] = (id, RemoteSession(self._node, claim, session))
        self.follow(claim)
        return True

    def follow(self, claim: str) -> None:
        """Ask the node to tell of a session, behind its beginning."""
        known = self._sessions.get(claim)
        if known is not None and self._link is not None:
            known[1].attach(self._link)

    def end(self, claim: str) -> None:
        """The attempt has ended; idempotent."""
        id, remote = self._sessions.pop(claim, ("", None))
        if remote is not None:
            self._table.close(id)
            remote.close()

    def attach(self, link: NodeLink) -> None:
        """Go on over this link."""
        self._link = link
        for _, remote in self._sessions.values():
            remote.attach(link)

    def detach(self) -> None:
        """There is no link: output stands still, and input waits."""
        self._link = None
        for _, remote in self._sessions.values():
            remote.detach()

    def take(self, message: Message) -> bool:
        """Deal with a message of the node; return whether it is one of a session."""
        if not isinstance(message, SessionOpened | SessionSaid | SessionTyped | SessionSteered | SessionTold):
            return False
        _, remote = self._sessions.get(message.claim, ("", None))
        if remote is None:
            return True  # it has ended here
        match message:
            case SessionOpened():
                remote.opened(message)
            case SessionSaid():
                remote.said(message)
            case SessionTyped():
                remote.typed(message)
            case SessionSteered():
                remote.steered(message.number)
            case SessionTold():
                pass  # its end follows
        return True
