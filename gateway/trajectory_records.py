"""Leases and locks of trajectories, and the catalogue of snapshots."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple, TypeVar

import msgspec
import structlog

from gateway.cluster.cluster import Cluster
from gateway.cluster.store import NodeSnapshot
from manager.errors import CodedError, Conflict
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.snapshots import SnapshotRecord, SnapshotSettings

logger = structlog.get_logger("gateway.trajectory_records")

#: Seconds between two looks for leases that have run out.
LOOK_S = 1.0
#: Most clients that hold one trajectory; beyond it the one whose lease ends first holds it no more.
HOLDERS_MAX = 64
#: Who names himself not.
NOBODY = ""

#: For how many seconds nothing of a trajectory has waited or run (0 while something does); None if it does not live.
IdleTime = Callable[[str], float | None]
#: Keeps for the next gateway who holds a trajectory, as JSON; empty for nobody.
Keep = Callable[[str, str], None]


#: Seconds after the end of a connection in which a client that lives says that it has read what came over it: it does
#: so ten times as fast (`tangram.client.heartbeats.GATHER_S`).
UNREAD_S = 3.0
#: Takes back what was made.
Undo = Callable[[], Awaitable[object]]


class ConnectionPeer:
    """The other end of a connection: what it does next tells whether it has read the last answer."""

    def __init__(self) -> None:
        self.gone = False
        #: What to undo if it closes the connection now, by client and name of what was made.
        self.unread: dict[tuple[str, str], Undo] = {}
        self._undoing: set[asyncio.Task[None]] = set()

    def asks(self) -> None:
        """It sends another request, one after the other: it has read the answers to those before."""
        self.unread.clear()

    def close(self) -> None:
        """It has closed the connection, or is cut off; a client that lives says soon what it knows of."""
        self.gone = True
        if self.unread:
            asyncio.get_running_loop().call_later(UNREAD_S, self._undo)

    def _undo(self) -> None:
        for (_, name), undo in self.unread.items():
            logger.info("what was made is undone: its caller has gone before it knew", name=name)
            task = asyncio.get_running_loop().create_task(_undone(undo))
            self._undoing.add(task)
            task.add_done_callback(self._undoing.discard)
        self.unread.clear()


async def _undone(undo: Undo) -> None:
    with suppress(CodedError):
        await undo()


class UnreadAnswers:
    """What was made for clients that name themselves, until they have said that they know of it.

    What a client never learned of is undone when its connection closes. Use from one event loop.
    """

    def __init__(self) -> None:
        #: Over which connection each is answered, by client and name of what was made.
        self._peers: dict[tuple[str, str], ConnectionPeer] = {}
        self._leaving = False

    def expect(self, peer: ConnectionPeer, holder: str, name: str, undo: Undo) -> None:
        """It is about to be answered; asked for again over another connection, it hangs on that."""
        self.known(holder, [name])
        if not self._leaving:
            self._peers[holder, name] = peer
            peer.unread[holder, name] = undo
            if peer.gone:
                peer.close()

    def awaits(self, holder: str, name: str) -> bool:
        """Whether nothing tells yet that the client knows of it."""
        peer = self._peers.get((holder, name))
        return peer is not None and (holder, name) in peer.unread

    def known(self, holder: str, names: Iterable[str]) -> None:
        """The client knows of these."""
        for name in names:
            if (peer := self._peers.pop((holder, name), None)) is not None:
                peer.unread.pop((holder, name), None)

    def leave(self) -> None:
        """The gateway closes its connections itself from now on: what is there is the next one's."""
        self._leaving = True
        for holder, name in list(self._peers):
            self.known(holder, [name])


class ClientHold(NamedTuple):
    """One client's hold on a trajectory."""

    #: Seconds for which it lasts after each sign of life; None: for ever.
    lease_s: float | None
    #: Until when on the clock, in seconds.
    until_s: float


class Leases:
    """Which clients hold each trajectory, and until when. Use from one event loop.

    A trajectory ends when none holds it any more, be it that they let it go or that they fell silent. Nobody holds what
    begins with an action: ``idle_ttl`` alone bounds that.
    """

    def __init__(
        self,
        now: Callable[[], float],
        idle_s: IdleTime,
        end: Callable[[str], Awaitable[bool]],
        keep: Keep = lambda trajectory, held: None,
    ) -> None:
        self._now = now
        self._idle_s = idle_s
        self._end = end
        self._keep = keep
        #: By trajectory, then by the name of the client.
        self._holds: dict[str, dict[str, ClientHold]] = {}
        #: The requests that made trajectories, by trajectory: sent again they join nobody else's.
        self._makers: dict[str, str] = {}

    def take_up(self, held: Mapping[str, str]) -> None:
        """Go on with the holds of an earlier gateway; each lasts anew."""
        for trajectory, text in held.items():
            for holder, lease_s in msgspec.json.decode(text, type=dict[str, float | None]).items():
                self.hold(trajectory, holder, lease_s)

    def begin(self, trajectory: str, opening: str | None) -> None:
        """A request is about to make a trajectory."""
        self._makers[trajectory] = opening or ""

    def joins(self, trajectory: str, opening: str | None) -> bool:
        """Whether a request for one that lives is another than the one that made it."""
        return opening is None or self._makers.get(trajectory) != opening

    def holds(self, trajectory: str, holder: str) -> bool:
        """Whether the client holds it."""
        return holder in self._holds.get(trajectory, {})

    def hold(self, trajectory: str, holder: str, lease_s: float | None) -> None:
        """Let a client hold one that lives, for so long from now on."""
        holds = self._holds.setdefault(trajectory, {})
        before = holds.get(holder)
        holds[holder] = ClientHold(lease_s, math.inf if lease_s is None else self._now() + lease_s)
        if len(holds) > HOLDERS_MAX:
            del holds[min(holds, key=lambda name: holds[name].until_s)]
        if before is None or before.lease_s != lease_s:
            self._save(trajectory)

    def renew(self, trajectories: Iterable[str], lease_s: float, holder: str = NOBODY) -> list[str]:
        """A client says that it holds these: those that live, for so long. Returns the others."""
        gone = []
        for trajectory in trajectories:
            if self._idle_s(trajectory) is None:
                gone.append(trajectory)
            else:
                self.hold(trajectory, holder, lease_s)
        return gone

    async def release(self, trajectories: Iterable[str], holder: str) -> None:
        """A client lets these go; those that nobody else holds end."""
        last = []
        for trajectory in trajectories:
            holds = self._holds.get(trajectory, {})
            if holds.pop(holder, None) is not None:
                self._save(trajectory)
                last += [] if holds else [trajectory]
        await asyncio.gather(*map(self._end, last))

    def ended(self, trajectory: str) -> None:
        """It lives no more."""
        self._holds.pop(trajectory, None)
        self._makers.pop(trajectory, None)

    def left_s(self, trajectory: str) -> float | None:
        """Seconds for which it is held yet; None without a lease, or where one holds it for ever."""
        until_s = max((hold.until_s for hold in self._holds.get(trajectory, {}).values()), default=math.inf)
        return None if until_s == math.inf else max(0.0, until_s - self._now())

    async def end_lapsed_for_ever(self) -> None:
        """End what nobody holds any more, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.end_lapsed()

    async def end_lapsed(self) -> None:
        """End what its clients hold no more, if no action of anybody used it for as long either."""
        for trajectory in [name for name, holds in self._holds.items() if self._lapsed_s(holds) is not None]:
            lease_s = self._lapsed_s(self._holds.get(trajectory, {}))  # it may be renewed while another is ended
            idle_s = self._idle_s(trajectory)
            if lease_s is not None and idle_s is not None and idle_s >= lease_s:
                logger.warning("a trajectory ended: its client has fallen silent", trajectory=trajectory)
                await self._end(trajectory)

    def _lapsed_s(self, holds: Mapping[str, ClientHold]) -> float | None:
        """Return the longest of the leases if all have run out, else None."""
        if not holds or any(hold.until_s > self._now() for hold in holds.values()):
            return None
        return max(hold.lease_s or 0.0 for hold in holds.values())

    def _save(self, trajectory: str) -> None:
        holds = {name: hold.lease_s for name, hold in self._holds.get(trajectory, {}).items()}
        self._keep(trajectory, msgspec.json.encode(holds).decode() if holds else "")


T = TypeVar("T")


class SnapshotCatalogue:
    """The snapshots of this machine and of its nodes; each is where the trajectory lived that it was taken of."""

    def __init__(self, environments: Environments, machines: Cluster) -> None:
        self._environments = environments
        self._here = environments.provider.snapshots
        self._machines = machines

    @property
    def settings(self) -> SnapshotSettings:
        """The bounds of those on this machine."""
        return self._here.settings

    def all(self) -> list[NodeSnapshot]:
        """Return every snapshot, also those that are lost, the oldest first."""
        nodes = self._machines.snapshots
        result = [*map(self._on_here, self._here.all()), *nodes.all()]
        return sorted(result, key=lambda each: each.record.made_s)

    def in_use(self) -> set[str]:
        """Return the snapshots that a living trajectory began with, or something is about to begin with."""
        nodes = self._machines.snapshots
        here = {each.id for each in self._here.all() if self._here.user(each.id)}
        return here | set(nodes.used())

    def get(self, id: str) -> NodeSnapshot:
        """Return a snapshot that a trajectory may begin with.

        Raises NotFound, Unsupported for one of another kind of sandbox than this machine's, SnapshotLost if its node is
        gone, and Conflict if that takes no new work.
        """
        nodes = self._machines.snapshots
        if nodes.find(id) is None:
            return self._on_here(self._here.get(id))
        result = nodes.get(id)
        if why := self._machines.leaving(result.node):
            message = f"snapshot {id!r} is on node {result.node}, which takes no new work: {why}"
            raise Conflict(message, component="snapshots")
        return result

    async def begin(self, id: str, work: Callable[[], Awaitable[T]]) -> T:
        """Do what begins with a snapshot, which is not removed meanwhile.

        Raises as `get`, SnapshotLost if its node is lost meanwhile, and what the work raises.
        """
        nodes = self._machines.snapshots
        if nodes.find(id) is not None:
            return await nodes.begin(id, work)
        async with self._here.held(id):
            return await work()

    async def take(self, trajectory: str) -> NodeSnapshot:
        """Take a snapshot of a trajectory where it lives; raises as `Environments.snapshot` or `NodeSnapshots.take`."""
        nodes, remote = self._machines.snapshots, self._machines.remote_of(trajectory)
        if remote is None:
            return self._on_here(await self._environments.snapshot(trajectory))
        return NodeSnapshot(remote.name, await nodes.take(remote, trajectory))

    async def remove(self, id: str) -> None:
        """Remove a snapshot; raises NotFound, Conflict for one that something needs, or StorageUnavailable."""
        nodes = self._machines.snapshots
        if nodes.find(id) is not None:
            await nodes.remove(id)
        else:
            await self._here.remove(id)

    def _on_here(self, record: SnapshotRecord) -> NodeSnapshot:
        return NodeSnapshot(self._machines.here.name, record)
