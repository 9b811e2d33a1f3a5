"""Ports of trajectories: who may speak to them, and the turns in which they are spoken to."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import struct
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import structlog

from gateway import serialization
from gateway.config.schema import PortsSection
from gateway.errors import PortFailed
from gateway.invocations.invocations import InvocationRequest, Invocations
from gateway.registry import Registry
from gateway.store.store import Store
from manager.engine import Engine
from manager.errors import (
    CapacityExceeded,
    CodedError,
    Conflict,
    InvalidInput,
    NotFound,
    QuotaExceeded,
    Reason,
    TrajectoryHasEnded,
)
from runtimes.chores import end_chores
from runtimes.sandbox.ports import relay as wire
from runtimes.sandbox.runner.runner import FrameDecoder, ProtocolError
from runtimes.sandbox.session import InteractiveSession, SessionTable

logger = structlog.get_logger("gateway.ports")

COMPONENT = "ports"
#: The document of what was granted.
GRANTS = "ports"
#: Bytes of a capability's secret, and of the name by which a grant is listed and withdrawn.
SECRET_BYTES, ID_BYTES = 20, 6


class PortGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The right to speak to one port of one trajectory, for whoever has its capability."""

    id: str
    #: SHA-256 of the capability, in hexadecimal digits.
    digest: str
    trajectory: str
    port: int
    #: The exec function whose cores the servers have.
    function: str
    #: When it ends, by the time of day; None with its trajectory.
    until_s: float | None = None


class PortGrants:
    """What was granted. It outlives a restart as its trajectories do; the capabilities themselves are not kept."""

    def __init__(self, store: Store, wall: Callable[[], float], count_max: int) -> None:
        self._store = store
        self._wall = wall
        self._count_max = count_max
        self._grants: dict[str, PortGrant] = {}

    async def load(self, lives: Callable[[str], bool]) -> None:
        """Take up what an earlier gateway has granted, of trajectories that live."""
        saved = await self._store.document(GRANTS)
        try:
            known = msgspec.json.decode(saved, type=list[PortGrant]) if saved else []
        except msgspec.ValidationError as error:
            logger.warning("grants of ports are forgotten", why=str(error))
            return
        self._grants = {grant.digest: grant for grant in known if lives(grant.trajectory)}

    def issue(self, trajectory: str, port: int, function: str, ttl_s: float | None) -> tuple[str, PortGrant]:
        """Return a new capability and its grant; raises CapacityExceeded."""
        self._forget(grant for grant in self._grants.values() if self._is_over(grant))
        if len(self._grants) >= self._count_max:
            message = f"{self._count_max} ports are open (server.ports.grants_max)"
            raise CapacityExceeded(message, component=COMPONENT, retry_after_s=1.0)
        capability, digest = (secret := secrets.token_hex(SECRET_BYTES)), _digest(secret)
        until_s = None if ttl_s is None else self._wall() + ttl_s
        id = secrets.token_hex(ID_BYTES)
        grant = PortGrant(id=id, digest=digest, trajectory=trajectory, port=port, function=function, until_s=until_s)
        self._grants[digest] = grant
        self._save()
        return capability, grant

    def find(self, capability: str) -> PortGrant:
        """Return what a capability grants; raises NotFound."""
        grant = self._grants.get(_digest(capability))
        if grant is None or self._is_over(grant):
            raise NotFound("no such port: it was withdrawn, or its trajectory has ended", component=COMPONENT)
        return grant

    def of(self, trajectory: str) -> list[PortGrant]:
        """Return what is granted of a trajectory."""
        return [each for each in self._grants.values() if each.trajectory == trajectory and not self._is_over(each)]

    def withdraw(self, trajectory: str, id: str) -> None:
        """End one; raises NotFound."""
        found = [grant for grant in self.of(trajectory) if grant.id == id]
        if not found:
            raise NotFound(f"trajectory {trajectory!r} has no open port {id!r}", component=COMPONENT)
        self._forget(found)

    def end(self, trajectory: str) -> None:
        """End those of a trajectory; idempotent."""
        self._forget(grant for grant in self._grants.values() if grant.trajectory == trajectory)

    def left_s(self, until_s: float) -> float:
        """Return the seconds until a time of the day."""
        return until_s - self._wall()

    def _is_over(self, grant: PortGrant) -> bool:
        return grant.until_s is not None and self.left_s(grant.until_s) <= 0

    def _forget(self, grants: Iterable[PortGrant]) -> None:
        over = list(grants)
        for grant in over:
            del self._grants[grant.digest]
        if over:
            self._save()

    def _save(self) -> None:
        self._store.save_document(GRANTS, msgspec.json.encode(list(self._grants.values())).decode())


def _digest(capability: str) -> str:
    return hashlib.sha256(capability.encode("utf-8", "surrogateescape")).hexdigest()


class PortConnection:
    """A stream of bytes to and from a server in a sandbox; whoever holds it must `close` it.

    Its methods raise PortFailed if it is broken or could not be made, and what ended the turns of its trajectory.
    """

    def __init__(self, link: PortLink, number: int, grant: PortGrant) -> None:
        self.number = number
        self.grant = grant
        #: Whether it was asked for in the sandbox.
        self.asked = False
        #: Until when the server owes an answer, on the loop's clock.
        self.owed_until_s = 0.0
        self._link = link
        self._unread: deque[bytes] = deque()
        self._unread_bytes = self._credit_bytes = 0
        self._room = wire.WINDOW_BYTES
        self._opened = self._ended = False
        self._error: CodedError | None = None
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_owed(self) -> bool:
        """Whether the server is to run for it: not if it is its reader who is slow."""
        return self._unread_bytes < wire.WINDOW_BYTES and asyncio.get_running_loop().time() < self.owed_until_s

    def owe(self, for_s: float) -> None:
        """The server is to run until `paid`, for so long at most."""
        self.owed_until_s = asyncio.get_running_loop().time() + for_s
        self._link.want()

    def paid(self) -> None:
        """It has answered."""
        self.owed_until_s = 0.0

    async def opened(self) -> None:
        """Return once the server, or its backlog, has taken it."""
        while not self._opened:
            self._check()
            await self._wait()

    async def read(self) -> bytes:
        """Return what comes next; nothing at the end."""
        while not self._unread:
            if self._ended:
                return b""
            self._check()
            await self._wait()
        data = self._unread.popleft()
        self._unread_bytes -= len(data)
        self._credit_bytes += len(data)
        if self._credit_bytes >= wire.WINDOW_BYTES // 4 and not self._ended:
            self._link.send(wire.CREDIT, self, wire.NUMBER.pack(self._credit_bytes))
            self._credit_bytes = 0
        return data

    async def write(self, data: bytes) -> None:
        """Send, as there is room; what others write meanwhile follows."""
        view = memoryview(data)
        async with self._writing:
            while view:
                self._check()
                if self._room <= 0:
                    await self._wait()
                    continue
                piece = view[: min(self._room, wire.CHUNK_BYTES)]
                view = view[len(piece) :]
                self._room -= len(piece)
                self._link.send(wire.DATA, self, bytes(piece))

    def end(self) -> None:
        """Nothing more is sent."""
        if self._error is None:
            self._link.send(wire.END, self)

    def end_in(self, left_s: float) -> None:
        """Withdraw it when its grant is over."""
        error = NotFound("the time of the port is over", component=COMPONENT)
        self._timer = asyncio.get_running_loop().call_later(left_s, self.withdraw, error)

    def close(self) -> None:
        """Give it up; idempotent. The server hears of it when it runs again."""
        self.withdraw(PortFailed("the connection is closed", component=COMPONENT))

    def withdraw(self, error: CodedError) -> None:
        """Give it up because of an error; idempotent."""
        if self._error is None:
            self.fail(error)
            self._link.forget(self)

    # --- the link's side

    def take(self, kind: int, payload: bytes) -> None:
        """Take a frame of it; raises ProtocolError, struct.error."""
        if kind == wire.OPEN:
            self._opened = True
        elif kind == wire.DATA:
            self._unread.append(payload)
            self._unread_bytes += len(payload)
            if self._unread_bytes + self._credit_bytes > wire.WINDOW_BYTES:
                raise ProtocolError("more than there is room for")
        elif kind == wire.END:
            self._ended = True
        elif kind == wire.CREDIT:
            self._room += wire.NUMBER.unpack(payload)[0]
        elif kind == wire.CLOSE:
            why = payload[:200].decode("utf-8", "replace").lower() or "it hung up"
            words = "broke the connection" if self._opened else "cannot be reached"
            self.fail(PortFailed(f"the server on port {self.grant.port} {words}: {why}", component=COMPONENT))
        self._changed.set()

    def fail(self, error: CodedError) -> None:
        """It is over: what came is still read."""
        self._error = self._error or error
        if self._timer is not None:
            self._timer.cancel()
        self.paid()
        self._changed.set()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class PortLink:
    """The connections to the servers of one trajectory, which run in turns: actions that last as long as they answer.

    A turn begins when there is something for a server, and lasts while one owes an answer and ``linger_s`` longer, so
    that many messages share it. One that has lasted ``turn_s`` makes place for the trajectory's other actions. Another
    follows one that ended with something unread: pings of the servers are never left without an answer.
    """

    def __init__(self, ports: TrajectoryPorts, trajectory: str, task: str, function: str) -> None:
        self.connections: dict[int, PortConnection] = {}
        self._ports = ports
        self._trajectory = trajectory
        self._task = task
        self._function = function
        self._last_number = secrets.randbits(31)
        #: Who knows these connections: under another name the sandbox forgets them.
        self._name = secrets.token_hex(8)
        self._relay = ""
        self._decoder = FrameDecoder(wire.HEADER, limit=wire.FRAME_MAX_BYTES)
        #: What is to be sent, each by the connection that it opens, if it opens one.
        self._outgoing: deque[tuple[PortConnection | None, bytes]] = deque()
        #: Whether some of it does not wait for the next turn.
        self._urgent = False
        self._changed = asyncio.Event()
        self._quiet_since_s = 0.0
        #: Whether the servers were frozen with something unread.
        self._unread = False
        #: The processor time of the sandbox, as it was told last, and whether it was since it was asked for.
        self._work_ticks = 0
        self._worked = asyncio.Event()
        self._turning: asyncio.Task[None] | None = None

    def connect(self, grant: PortGrant) -> PortConnection:
        """Return a new connection, under way."""
        self._last_number = (self._last_number + 1) % 2**32
        connection = self.connections[self._last_number] = PortConnection(self, self._last_number, grant)
        self.send(wire.OPEN, connection, wire.NUMBER.pack(grant.port))
        return connection

    def send(self, kind: int, connection: PortConnection, payload: bytes = b"", *, urgent: bool = True) -> None:
        """Send a frame of a connection, in a turn that begins for it if it is ``urgent``."""
        frame = wire.HEADER.pack(len(payload), kind, connection.number) + payload
        self._outgoing.append((connection if kind == wire.OPEN else None, frame))
        self._urgent |= urgent
        self.want()

    def forget(self, connection: PortConnection) -> None:
        """Give a connection up."""
        if self.connections.pop(connection.number, None) is not None and connection.asked:
            self.send(wire.CLOSE, connection, urgent=False)

    def want(self) -> None:
        """Let a turn begin if there is a reason for one."""
        self._changed.set()
        if self._turning is None and self._is_wanted():
            self._turning = asyncio.get_running_loop().create_task(self._take_turns())

    def fail(self, error: CodedError) -> None:
        """Break all connections."""
        connections, self.connections = self.connections, {}
        for connection in connections.values():
            connection.fail(error)
        self._outgoing.clear()
        self._urgent, self._relay, self._name = False, "", secrets.token_hex(8)
        self._changed.set()

    async def close(self, error: CodedError) -> None:
        """Break all connections, and end the turn."""
        self.fail(error)
        await end_chores(self._turning)

    def _is_wanted(self) -> bool:
        return any(self._urgent or connection.is_owed for connection in self.connections.values())

    async def _take_turns(self) -> None:
        looked = False
        try:
            while self._is_wanted() or (self._unread and self.connections and not looked):
                looked = not self._is_wanted()  # once: a server may leave unread what it likes
                await self._turn()
        except CodedError as error:
            self.fail(error)
        except Exception as error:
            self.fail(CodedError("a fault of the gateway: its log tells more", component=COMPONENT))
            logger.exception("a turn of ports failed", error=str(error))
        finally:
            self._turning = None

    async def _turn(self) -> None:
        """Let the servers run while there is a reason; raises CodedError if they cannot, or did not end well."""
        value: dict[str, object] = {"argv": [COMPONENT], "session": {"ports": self._name}}
        call = InvocationRequest(
            function=self._function, input=value, body=serialization.dumps(value), task=self._task,
            trajectory=self._trajectory, living=True,
        )  # fmt: skip
        try:
            self._ports.sessions.check()
            invocation = await self._ports.invocations.invoke(call)
        except (CapacityExceeded, QuotaExceeded) as error:  # nothing was sent: to wait is no failure
            await asyncio.sleep(error.retry_after_s or AGAIN_S)
            return
        reading: asyncio.Task[None] | None = None
        try:
            session = self._ports.sessions.living(invocation.record.id, None)
            session.wait_for_somebody(UNATTENDED_S)
            known = asyncio.Event()
            reading = asyncio.get_running_loop().create_task(self._read(session, known))
            await self._talk(session, reading, known)
            await session.write(b"", end=True)
            await reading
            await invocation.has_ended(None)
        except ProtocolError as error:
            raise PortFailed(f"the sandbox's relay does not keep the protocol: {error}", component=COMPONENT) from None
        finally:
            if reading is not None:
                reading.cancel()
            self._ports.invocations.leave(invocation)
        if invocation.refusal is not None:
            raise invocation.refusal
        record = invocation.record
        if record.reason is not None and record.reason is not Reason.QUEUE_TIMEOUT:
            message = f"{record.reason}: {record.message}"
            raise PortFailed(message, component=COMPONENT, invocation_id=record.id)
        self._unread = bool(serialization.loads_object(record.result or b"{}").get("unread"))

    async def _talk(self, session: InteractiveSession, reading: asyncio.Task[None], known: asyncio.Event) -> None:
        """Pass on what there is for the servers until none owes anything; return earlier if the turn ends."""
        settings, now = self._ports.settings, asyncio.get_running_loop().time
        beginning = asyncio.ensure_future(known.wait())
        await asyncio.wait({reading, beginning}, return_when=asyncio.FIRST_COMPLETED)
        beginning.cancel()
        began_s = heard_s = self._quiet_since_s = now()
        bound_s = min(settings.turn_s, self._ports.functions.get(self._function).timeout_s / 2)
        reading.add_done_callback(lambda _: self._changed.set())
        while not reading.done():
            self._changed.clear()
            if self._outgoing:
                await self._flush(session)
                heard_s = self._quiet_since_s = now()
            if now() >= began_s + bound_s:
                return
            if self._outgoing:
                continue
            owed = max((each.owed_until_s for each in self.connections.values() if each.is_owed), default=0.0)
            linger_s = min(settings.linger_s, WORK_STEP_S) if self._ports.is_crowded() else settings.linger_s
            until_s = max(owed, self._quiet_since_s + linger_s)
            if now() >= until_s:
                if now() >= heard_s + settings.answer_s or not await self._is_at_work(session, reading):
                    return
                self._quiet_since_s = max(self._quiet_since_s, now() - linger_s + WORK_STEP_S)
                continue
            try:
                async with asyncio.timeout(min(until_s, began_s + bound_s) - now()):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _is_at_work(self, session: InteractiveSession, reading: asyncio.Task[None]) -> bool:
        """Return whether a process of the sandbox has used a core since this was asked before."""
        before = self._work_ticks
        self._worked.clear()
        await session.write(wire.HEADER.pack(0, wire.WORK, 0))
        told = asyncio.ensure_future(self._worked.wait())
        await asyncio.wait({reading, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        return self._work_ticks != before

    async def _flush(self, session: InteractiveSession) -> None:
        """Send what is to be sent; raises PortFailed if the relay takes no more."""
        frames, size_bytes = [], 0
        while self._outgoing and size_bytes < wire.WINDOW_BYTES:
            opened, frame = self._outgoing.popleft()
            if opened is not None:
                opened.asked = True
            frames.append(frame)
            size_bytes += len(frame)
        self._urgent = bool(self._outgoing)
        data, offset = b"".join(frames), session.input_offset
        while session.reads and session.input_offset < offset + size_bytes:
            await session.write(data[session.input_offset - offset :])
        if session.input_offset < offset + size_bytes:
            raise PortFailed("the sandbox's relay reads no more", component=COMPONENT)

    async def _read(self, session: InteractiveSession, known: asyncio.Event) -> None:
        """Take what the relay says until the turn ends; raises ProtocolError."""
        offset = 0
        async for page in session.read(0, HEARTBEAT_S):
            for piece in page:
                if piece.offset != offset:
                    raise ProtocolError("some of what it said is missing")
                offset += len(piece.data)
                if piece.stream == "stderr":
                    self._begin(piece.data.decode("ascii", "replace"))
                    known.set()
                    continue
                for (_, kind, number), payload in self._decoder.feed(piece.data):
                    self._take(kind, number, payload)
                self._changed.set()

    def _begin(self, relay: str) -> None:
        """The turn is spoken to by this relay; a new one knows no connection of before."""
        if relay != self._relay:
            self._relay, self._decoder = relay, FrameDecoder(wire.HEADER, limit=wire.FRAME_MAX_BYTES)
            for connection in [each for each in self.connections.values() if each.asked]:
                del self.connections[connection.number]
                connection.fail(PortFailed("the sandbox was lost, and the connection with it", component=COMPONENT))

    def _take(self, kind: int, number: int, payload: bytes) -> None:
        try:
            if kind == wire.WORK:
                self._work_ticks = wire.NUMBER.unpack(payload)[0]
                self._worked.set()
                return
            connection = self.connections.get(number)
            if connection is None:
                return
            self._quiet_since_s = asyncio.get_running_loop().time()
            connection.take(kind, payload)
        except struct.error as error:
            raise ProtocolError(str(error)) from None
        if kind == wire.CLOSE:
            del self.connections[number]


#: Seconds for which a turn of a gateway that is gone goes on, and after which a reader looks whether it is wanted.
UNATTENDED_S, HEARTBEAT_S = 10.0, 30.0
#: Seconds between two looks whether servers that say nothing work.
WORK_STEP_S = 0.02
#: Seconds after which a turn that was refused for want of room is asked for again.
AGAIN_S = 1.0


@dataclass(slots=True, kw_only=True)
class TrajectoryPorts:
    """The ports of all trajectories."""

    settings: PortsSection
    grants: PortGrants
    invocations: Invocations
    engine: Engine
    functions: Registry
    sessions: SessionTable
    #: Whether others wait, who could have the cores that linger.
    is_crowded: Callable[[], bool]
    #: The listener's address as it is told to callers, ``http://HOST:PORT``; empty if there is no listener.
    address: str = ""
    _links: dict[tuple[str, str], PortLink] = field(default_factory=dict)

    def open(self, trajectory: str, port: int, function: str, ttl_s: float | None) -> tuple[str, PortGrant]:
        """Grant a port of a living trajectory; return its capability and the grant.

        Raises Conflict if there is no listener, InvalidInput for a function that is no exec function, NotFound,
        TrajectoryHasEnded, CapacityExceeded.
        """
        if not self.address:
            raise Conflict("this gateway has no listener for ports (server.ports.port)", component=COMPONENT)
        if self.functions.get(function).runtime != "exec":
            message = f"$.function: {function!r} is no exec function, and others have no ports"
            raise InvalidInput(message, component=COMPONENT, detail={"path": "$.function"})
        self.engine.check_trajectory(trajectory, "", living=True)
        return self.grants.issue(trajectory, port, function, ttl_s)

    def url(self, capability: str) -> str:
        return f"{self.address}/p/{capability}"

    def connect(self, grant: PortGrant) -> PortConnection:
        """Return a connection to a port, under way; raises CapacityExceeded, TrajectoryHasEnded."""
        living = self.engine.trajectory(grant.trajectory)
        if living is None:
            raise TrajectoryHasEnded(f"trajectory {grant.trajectory!r} has ended", component=COMPONENT)
        key = grant.trajectory, grant.function
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = PortLink(self, grant.trajectory, str(living["task"]), grant.function)
        if len(link.connections) >= self.settings.connections_max:
            message = f"{len(link.connections)} connections to this trajectory (server.ports.connections_max)"
            raise CapacityExceeded(message, component=COMPONENT, retry_after_s=1.0)
        connection = link.connect(grant)
        if grant.until_s is not None:
            connection.end_in(self.grants.left_s(grant.until_s))
        return connection

    def withdraw(self, trajectory: str, id: str) -> None:
        """End a grant, and its connections; raises NotFound."""
        self.grants.withdraw(trajectory, id)
        error = NotFound("the port was withdrawn", component=COMPONENT)
        for (name, _), link in self._links.items():
            for connection in [each for each in link.connections.values() if name == trajectory]:
                if connection.grant.id == id:
                    connection.withdraw(error)

    def ended(self, trajectory: str) -> None:
        """A trajectory has ended, and with it its grants and connections."""
        self.grants.end(trajectory)
        error = TrajectoryHasEnded(f"trajectory {trajectory!r} has ended", component=COMPONENT)
        for key in [key for key in self._links if key[0] == trajectory]:
            self._links.pop(key).fail(error)

    async def close(self) -> None:
        """Break all connections, and end the turns."""
        error = PortFailed("the gateway ends", component=COMPONENT)
        links, self._links = self._links, {}
        await asyncio.gather(*(link.close(error) for link in links.values()))
