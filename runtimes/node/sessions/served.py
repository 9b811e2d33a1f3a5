"""A node's side: what its sessions say is told to the gateway, and what the gateway types is passed on to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import structlog

from manager.action import Action
from manager.errors import CapacityExceeded, CodedError
from runtimes.node.errors import facts_of
from runtimes.node.link import NodeLink
from runtimes.node.message import ErrorFacts, Message
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
from runtimes.sandbox.output_tail import SessionPiece
from runtimes.sandbox.session import InteractiveSession, SessionTable, TerminalSize

logger = structlog.get_logger("node.sessions")

#: Seconds for which a command waits for a gateway that was read from it when the link went.
LINK_PATIENCE_S = 20.0
#: Inputs of one session that are passed on at once; the gateway sends the next when it has the answer.
INPUTS_MAX = 4
#: Bytes of output in one frame.
PIECE_BYTES = 64 * 2**10
#: Nothing is said meanwhile, and a reader looks whether it is still wanted.
LOOK_S = 30.0


@dataclass(slots=True, eq=False)
class ServedInput:
    """Input that is being passed on, and where that is answered."""

    link: NodeLink
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class ServedSession:
    """One session of an attempt, and what of it the gateway has heard."""

    claim: str
    id: str
    session: InteractiveSession
    #: The gateway's present attachment; None on no link.
    link: NodeLink | None = None
    life: str = ""
    window_bytes: int = 0
    #: Up to where it was taken, and was sent.
    taken: int = 0
    sent: int = 0
    attended: bool = False
    #: Whether all of it was told on this link.
    told: bool = False
    steered: int = 0
    #: What is being passed on, by who sent it and its number.
    inputs: dict[tuple[str, int], ServedInput] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    telling: asyncio.Task[None] | None = None

    @property
    def owed(self) -> bool:
        """Whether the gateway listens, and has not heard all."""
        return self.link is not None and not self.told

    @property
    def room_bytes(self) -> int:
        """How much may be sent now; its end is told whether there is room or not."""
        if self.session.ended:
            return PIECE_BYTES
        return min(PIECE_BYTES, self.taken + self.window_bytes - self.sent) if self.attended else 0


class ServedSessions:
    """The sessions of one node. Use from one event loop."""

    def __init__(self, table: SessionTable, on_told: Callable[[str], None]) -> None:
        """``on_told`` is called with the claim of a session all of which was told."""
        self._table = table
        self._on_told = on_told
        self._sessions: dict[str, ServedSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --- attempts

    def begin(self, claim: str, action: Action, context: Mapping[str, str], given: Mapping[str, object]) -> None:
        """An attempt is about to run; its output is kept until `forget` if it is a session's first try."""
        if "session" not in given or action.attempt > 1 or claim in self._sessions:
            return
        id = context.get("invocation_id", action.id)
        try:
            session = self._table.living(id, terminal_of(given))
        except CodedError:
            return  # its runtime refuses it in the same way
        self._sessions[claim] = ServedSession(claim, id, session)

    def ended(self, claim: str) -> None:
        """The attempt has ended; the rest of its output is told whether somebody reads it or not."""
        served = self._sessions.get(claim)
        if served is not None:
            self._table.close(served.id)
            served.changed.set()

    def owes(self, claim: str) -> bool:
        """Return whether there is output that the gateway must hear before the end."""
        served = self._sessions.get(claim)
        return served is not None and served.owed

    def forget(self, claim: str) -> None:
        """The gateway has its end on record; idempotent."""
        served = self._sessions.pop(claim, None)
        if served is not None:
            self._table.close(served.id)
            self._stop(served)

    # --- the link

    def take(self, link: NodeLink, message: Message) -> bool:
        """Deal with a message of the gateway; return whether it is one of a session."""
        if not isinstance(message, AttachSession | SessionRoom | TypeToSession | SteerSession):
            return False
        served = self._sessions.get(message.claim)
        match message:
            case AttachSession():
                if served is None:
                    link.send(SessionTold(message.claim))
                else:
                    self._attach(served, link, message)
            case SessionRoom() if served is not None:
                served.taken, served.attended = message.taken, message.attended
                served.changed.set()
            case TypeToSession():
                self._type(served, link, message)
            case SteerSession() if served is not None:
                self._spawn(self._steer(served, link, message))
            case _:
                pass  # it is forgotten
        return True

    def detach(self, link: NodeLink) -> None:
        """The link is gone: sessions go on, and those that were read wait a moment for the next link."""
        for served in self._sessions.values():
            if served.link is link:
                if served.attended and not served.session.ended:
                    reader = served.session.attend(served.sent)
                    asyncio.get_running_loop().call_later(LINK_PATIENCE_S, served.session.leave, reader)
                self._stop(served)

    async def close(self) -> None:
        """End what tells of them; the sessions themselves go on."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- inside

    def _attach(self, served: ServedSession, link: NodeLink, asked: AttachSession) -> None:
        if served.life != asked.life:
            served.life, served.steered = asked.life, 0
        own_bytes = served.session.settings.output_bytes // 4
        served.window_bytes = max(1, min(asked.window_bytes, own_bytes))
        served.sent = asked.offset
        served.taken = asked.offset - (served.window_bytes if asked.held else 0)
        served.attended, served.told = asked.attended, False
        served.session.wait_for_somebody(asked.unattended_s)
        reader = served.session.attend(served.sent)  # before the one whose place it takes lets go
        if not asked.attended:
            served.session.leave(reader)
        self._stop(served)
        served.link = link
        served.telling = self._spawn(self._tell(served, link, self._withdraw_of_others(served)))

    def _stop(self, served: ServedSession) -> None:
        """Tell no more of it on its link."""
        if served.telling is not None:
            served.telling.cancel()
        served.link = served.telling = None

    def _withdraw_of_others(self, served: ServedSession) -> list[asyncio.Task[None]]:
        """Pass no more on of what another side than the present one has typed; return what still ends of that."""
        others = [given for (life, _), given in served.inputs.items() if life != served.life]
        tasks = [given.task for given in others if given.task is not None]
        for task in tasks:
            task.cancel()
        return tasks

    async def _tell(self, served: ServedSession, link: NodeLink, ending: Collection[asyncio.Task[None]]) -> None:
        """Say that it runs, then what it says while there is room, and at its end the rest and that this was all.

        Where its input stands is told once what is ``ending`` has ended.
        """
        session = served.session
        await session.opened(None)
        await asyncio.gather(*ending, return_exceptions=True)
        if session.end or not session.ended:  # else it has never begun
            told = SessionOpened(
                claim=served.claim,
                start=session.start,
                input_offset=session.input_offset,
                reads=session.reads,
                window_bytes=served.window_bytes,
            )
            link.send(told)
        while not (session.ended and served.sent >= session.end):
            if served.attended or session.ended:
                before = served.sent
                await self._tell_some(served, link)
                if session.ended and served.sent == before:
                    served.sent = session.end  # nothing of the rest is kept
            else:
                served.changed.clear()
                await served.changed.wait()
        served.told = True
        link.send(SessionTold(served.claim))
        self._on_told(served.claim)

    async def _tell_some(self, served: ServedSession, link: NodeLink) -> None:
        """Tell what it says until nobody reads it any more, or it has ended and all is told."""
        session = served.session
        async with aclosing(session.read(served.sent, LOOK_S)) as pages:
            async for page in pages:
                for piece in page:
                    await self._tell_piece(served, link, piece)
                if not served.attended and not session.ended:
                    return

    async def _tell_piece(self, served: ServedSession, link: NodeLink, piece: SessionPiece) -> None:
        """Send a piece as there is room, unless nobody reads it any more."""
        data = piece.data
        while data and (served.attended or served.session.ended):
            room_bytes = served.room_bytes
            if room_bytes <= 0 or link.closed.is_set():
                served.changed.clear()
                await served.changed.wait()
                continue
            part, data = data[:room_bytes], data[room_bytes:]
            offset = piece.offset + len(piece.data) - len(data) - len(part)
            served.sent = offset + len(part)
            link.send(SessionSaid(served.claim, offset, piece.stream, part))
            await link.drained()

    def _type(self, served: ServedSession | None, link: NodeLink, typed: TypeToSession) -> None:
        if served is None:
            link.send(
                SessionTyped(claim=typed.claim, number=typed.number, input_offset=typed.offset, reads=False, error=None)
            )
            return
        key = (served.life, typed.number)
        given = served.inputs.get(key)
        if given is not None:
            given.link = link  # one that was sent again after a cut is answered on the new link
            if typed.withdrawn and given.task is not None:
                given.task.cancel()
        else:
            given = served.inputs[key] = ServedInput(link)
            given.task = self._spawn(self._pass_on(served, key, typed))
            given.task.add_done_callback(lambda _: self._answer_typed(served, key, typed.number, None))

    async def _pass_on(self, served: ServedSession, key: tuple[str, int], typed: TypeToSession) -> None:
        """Pass input on once its turn has come, and answer how far it came."""
        failure = None
        try:
            if len(served.inputs) > INPUTS_MAX:
                told = f"{INPUTS_MAX} inputs of the session wait for its command to read"
                raise CapacityExceeded(told, component=COMPONENT, retry_after_s=1.0)
            if not typed.withdrawn:
                await served.session.write(typed.data, typed.offset, end=typed.end)
        except CodedError as error:
            failure = facts_of(error)
        self._answer_typed(served, key, typed.number, failure)

    def _answer_typed(
        self, served: ServedSession, key: tuple[str, int], number: int, failure: ErrorFacts | None
    ) -> None:
        """Say how far an input came, once: it is over, or was withdrawn before its first step."""
        given = served.inputs.pop(key, None)
        if given is not None:
            session = served.session
            given.link.send(
                SessionTyped(
                    claim=served.claim,
                    number=number,
                    input_offset=session.input_offset,
                    reads=session.reads,
                    error=failure,
                )
            )

    async def _steer(self, served: ServedSession, link: NodeLink, steer: SteerSession) -> None:
        """Do it as soon as it runs, unless it was done on an earlier link."""
        await served.session.opened(None)
        if steer.number > served.steered:
            served.steered = steer.number
            size = None if steer.size is None else TerminalSize(*steer.size)
            served.session.relay(size=size, signal=steer.signal, end=steer.end)
        link.send(SessionSteered(served.claim, steer.number))

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a session is not told of", error=repr(error))
