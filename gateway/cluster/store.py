"""What the cluster keeps: nodes, tickets and the places of snapshots."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import structlog

from gateway.store.store import Store
from manager.config import NodeSpec
from manager.errors import (
    CapacityExceeded,
    CodedError,
    Conflict,
    InvalidInput,
    NotFound,
    SnapshotLost,
    StorageUnavailable,
    Unauthorized,
)
from runtimes.chores import end_chores
from runtimes.node.protocol import NodeAnswer
from runtimes.node.remote import RemoteNode
from runtimes.sandbox.snapshots import NodeSnapshotSettings, SnapshotRecord

GENERATION = "cluster.generation"
#: Followed by a node's name: which life of its state directory is known.
EPOCH = "cluster.epoch."
#: Whether a node is waited for after a restart: one that was lost is not.
KnownState = Literal["ready", "draining", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedNode:
    """A node that has joined."""

    name: str
    spec: NodeSpec
    key_digest: str
    state: KnownState
    joined_s: float
    #: Which life of its state directory this gateway has compared its record with; empty if none yet.
    epoch: str = ""


class NodeRecords:
    """The nodes on record. Changes are noted at once and durable with the next commit."""

    def __init__(self, store: Store, wall: Callable[[], float] = time.time, *, nodes_max: int = 1024) -> None:
        """``nodes_max``: beyond so many, those that were lost go, the one that joined longest ago first."""
        self._store = store
        self._wall = wall
        self._nodes_max = nodes_max
        self._known: dict[str, RecordedNode] = {}
        self.generation = 0

    async def open(self) -> None:
        """Read what is on record, and count this start of the gateway; raises StorageUnavailable."""
        before = await self._store.document(GENERATION)
        self.generation = int(before or 0) + 1
        self._store.save_document(GENERATION, str(self.generation))
        for row in await self._store.read("nodes", ()):
            spec = msgspec.json.decode(row["spec"], type=NodeSpec)
            known = RecordedNode(
                name=row["name"],
                spec=spec,
                key_digest=row["key_digest"],
                state=row["state"],
                joined_s=row["joined_s"],
                epoch=await self._store.document(EPOCH + row["name"]) or "",
            )
            self._known[known.name] = known
        self._keep_bound()
        for row in await self._store.read("document_names", (EPOCH,)):
            if str(row["name"]).removeprefix(EPOCH) not in self._known:
                self._store.save_document(row["name"], None)
        await self._store.durable()

    def get(self, name: str) -> RecordedNode | None:
        return self._known.get(name)

    @property
    def all(self) -> Mapping[str, RecordedNode]:
        return self._known

    def joined(self, spec: NodeSpec, key_digest: str) -> None:
        """It has joined, or comes with another key."""
        state: KnownState = "ready"
        known = self._known.get(spec.name)
        self._save(
            RecordedNode(
                name=spec.name,
                spec=replace(spec, able=None),
                key_digest=key_digest,
                state=state,
                joined_s=self._wall(),
                epoch="" if known is None else known.epoch,
            )
        )
        self._keep_bound()

    def compared(self, name: str, epoch: str) -> None:
        """What is on record of this life of a node is decided on: what begins there from now on is of this one."""
        known = self._known.get(name)
        if known is not None and known.epoch != epoch:
            self._known[name] = replace(known, epoch=epoch)
            self._store.save_document(EPOCH + name, epoch)

    def moved(self, name: str, state: KnownState) -> None:
        """It drains, was lost, or serves again."""
        known = self._known.get(name)
        if known is not None and known.state != state:
            self._save(replace(known, state=state))

    def forget(self, name: str) -> None:
        """It may come again by a new ticket only."""
        if self._known.pop(name, None) is not None:
            self._store.note("delete_node", name)
            self._store.save_document(EPOCH + name, None)

    def _keep_bound(self) -> None:
        if len(self._known) <= self._nodes_max:
            return
        lost = sorted(
            (known for known in self._known.values() if known.state == "lost"), key=lambda each: each.joined_s
        )
        for known in lost[: max(0, len(self._known) - self._nodes_max)]:
            self.forget(known.name)

    async def durable(self) -> None:
        """Wait until what was noted is on disk."""
        await self._store.durable()

    def _save(self, known: RecordedNode) -> None:
        self._known[known.name] = known
        spec = msgspec.json.encode(known.spec).decode()
        self._store.note("save_node", known.name, spec, known.key_digest, known.state, known.joined_s)


COMPONENT = "cluster.tickets"
#: File of the key that signs tickets, in the state directory.
SIGNING_KEY = "cluster.signing-key"
#: Variable that holds a daemon's ticket: what a command says stands in the list of processes, for every user to read.
TICKET_VARIABLE = "TANGRAM_TICKET"
#: Most bytes of a ticket that are read from a file.
TICKET_BYTES_MAX = 4096
_KEY_BYTES = 32
#: Tickets that were used and have not expired, of which each is remembered.
USED_MAX = 65536
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")  # as `manager.config.ResourceName`


def signing_key(state_dir: Path) -> bytes:
    """Return the key of the state directory, made at the first call; raises StorageUnavailable."""
    path = state_dir / SIGNING_KEY
    try:
        with suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
        key = path.read_bytes()
    except OSError as error:
        raise StorageUnavailable(f"{path} cannot be used: {error}", component=COMPONENT) from None
    if len(key) != _KEY_BYTES:
        raise StorageUnavailable(f"{path} holds no key: remove it, and start again", component=COMPONENT)
    return key


def check_name(name: str) -> str:
    """Return the name of a node; raises InvalidInput for what is none."""
    if not _NAME.fullmatch(name):
        message = f"{name[:128]!r} is no name of a node: letters, digits or . _ -, at most 128"
        raise InvalidInput(message, component=COMPONENT, detail={"path": "$.name"})
    return name


def new_node_key() -> str:
    """Return what a node shows from its second time on."""
    return secrets.token_urlsafe(_KEY_BYTES)


def digest_of(key: str) -> str:
    """Return what the gateway keeps of a node's key."""
    return hashlib.sha256(key.encode()).hexdigest()


class JoinTickets:
    """Issues tickets and takes each once. One of an earlier start of the gateway is worth nothing."""

    def __init__(
        self,
        key: bytes,
        generation: int,
        ttl_s: float,
        *,
        wall: Callable[[], float] = time.time,
        used_max: int = USED_MAX,
    ) -> None:
        self._key = key
        self._generation = generation
        self._ttl_s = ttl_s
        self._wall = wall
        self._used_max = used_max
        #: When each used ticket expires, by what is random of it.
        self._used: dict[str, float] = {}

    def issue(self, name: str) -> str:
        """Return a ticket for a name; raises InvalidInput."""
        expires_s = self._wall() + self._ttl_s
        return self._written(check_name(name), int(expires_s * 1000), secrets.token_urlsafe(12))

    def take(self, ticket: str, name: str) -> None:
        """Admit a node by its ticket; raises Unauthorized for one that is not ours, not its own, used, or too old."""
        told_name, expires_ms, nonce = _read(ticket)
        expected = self._written(told_name, expires_ms, nonce)
        if not hmac.compare_digest(expected.encode(), ticket.encode()):
            raise Unauthorized("the ticket is of no gateway's, or of an earlier start of it", component=COMPONENT)
        if told_name != name:
            raise Unauthorized(f"the ticket admits {told_name}, not {name}", component=COMPONENT)
        now_s = self._wall()
        if expires_ms / 1000 <= now_s:
            raise Unauthorized("the ticket has expired: ask for another (tangram node ticket)", component=COMPONENT)
        if nonce in self._used:
            raise Unauthorized("the ticket was used already: each admits once", component=COMPONENT)
        self._forget_expired(now_s)
        self._used[nonce] = expires_ms / 1000

    def give_back(self, ticket: str) -> None:
        """Let a ticket that was taken admit after all: its node was refused for another reason."""
        self._used.pop(_read(ticket)[2], None)

    def _forget_expired(self, now_s: float) -> None:
        if len(self._used) >= self._used_max:
            self._used = {nonce: expires_s for nonce, expires_s in self._used.items() if expires_s > now_s}
        if len(self._used) >= self._used_max:
            raise CapacityExceeded("too many tickets are used at once", component=COMPONENT, retry_after_s=self._ttl_s)

    def _written(self, name: str, expires_ms: int, nonce: str) -> str:
        body = f"{base64.urlsafe_b64encode(name.encode()).decode().rstrip('=')}.{expires_ms}.{nonce}"
        signed = hmac.new(self._key, f"{self._generation}.{body}".encode(), hashlib.sha256).hexdigest()
        return f"{body}.{signed}"


def _read(ticket: str) -> tuple[str, int, str]:
    """Return the name, the expiry and the random part; raises Unauthorized for what has another form."""
    try:
        name, expires_ms, nonce, _ = ticket.split(".")
        if not (expires_ms.isascii() and expires_ms.isdecimal() and len(expires_ms) <= 16):
            raise ValueError(expires_ms)
        padded = name + "=" * (-len(name) % 4)
        return base64.b64decode(padded.encode("ascii"), altchars=b"-_", validate=True).decode(), int(expires_ms), nonce
    except (ValueError, UnicodeError, binascii.Error):
        raise Unauthorized("this is no ticket", component=COMPONENT) from None


# The snapshots that nodes keep: on record here, so that they are known while their node is away, or gone.
#
# The record says what is to be there. A node that joins says what it has: what is on no record it removes (it was
# deleted meanwhile, or taken for a gateway that ended before it knew), and what it does not have is lost.

logger = structlog.get_logger("gateway.cluster.store")

SNAPSHOTS_COMPONENT = "cluster.snapshots"
#: Followed by a node's name: the snapshots that it keeps.
DOCUMENT = "cluster.snapshots."
#: Seconds after which a snapshot is tried again, where those in use leave no room.
RETRY_S = 10.0
#: Seconds for which a deletion waits at most for its node: what is on no record is removed there at the latest when it
#: joins the next time.
REMOVAL_S = 10.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One snapshot on a node."""

    node: str
    record: SnapshotRecord
    #: Why it cannot be had; empty while it is there, as far as is known.
    lost: str = ""


class NodeSnapshots:
    """The snapshots on nodes. Use from one event loop."""

    def __init__(
        self, store: Store, settings: NodeSnapshotSettings, *, age_s: float, wall: Callable[[], float] = time.time
    ) -> None:
        """``age_s``: a lost one that was not used for so long is forgotten."""
        self.settings = settings
        self._store = store
        self._age_s = age_s
        self._wall = wall
        self._kept: dict[str, NodeSnapshot] = {}
        #: Being taken: on a node already, and on no record yet.
        self._under_way: set[str] = set()
        #: Nodes that have joined, and are about to say what they have.
        self._comparing: set[str] = set()
        #: What is about to begin with one: its id, and what tells that it is lost.
        self._beginning: list[tuple[str, asyncio.Future[None]]] = []
        #: Tells with which snapshots living trajectories began, and one trajectory of each.
        self.users: Callable[[], Mapping[str, str]] = dict[str, str]
        #: Finds a node that has joined.
        self.member: Callable[[str], RemoteNode | None] = lambda name: None

    async def open(self, nodes: Iterable[str]) -> None:
        """Read what is on record of these nodes; raises StorageUnavailable."""
        known = set(nodes)
        for name in [str(row["name"]) for row in await self._store.read("document_names", (DOCUMENT,))]:
            if name.removeprefix(DOCUMENT) not in known:
                self._store.save_document(name, None)  # of a node that may come again by a new ticket only
                continue
            body = await self._store.document(name)
            for each in msgspec.json.decode(body, type=list[NodeSnapshot]) if body else ():
                self._kept[each.record.id] = each

    # --- what there is

    def all(self) -> list[NodeSnapshot]:
        """Return every snapshot, lost ones too."""
        return list(self._kept.values())

    def find(self, id: str) -> NodeSnapshot | None:
        """Return a snapshot; None if no node is known to have it."""
        return self._kept.get(id)

    def get(self, id: str) -> NodeSnapshot:
        """Return a snapshot; raises NotFound, or SnapshotLost if its node is gone."""
        found = self._kept.get(id)
        if found is None:
            raise NotFound(f"no snapshot {id!r}", component=SNAPSHOTS_COMPONENT)
        if found.lost:
            raise SnapshotLost(f"snapshot {id!r} is lost: {found.lost}", component=SNAPSHOTS_COMPONENT)
        return found

    def used(self) -> Mapping[str, str]:
        """Return what needs a snapshot, by the snapshots that something needs."""
        making = {id: "a sandbox that is being made" for id, _ in self._beginning}
        return {id: f"trajectory {trajectory!r}" for id, trajectory in self.users().items()} | making

    async def begin(self, id: str, work: Callable[[], Awaitable[_T]]) -> _T:
        """Do what begins with a snapshot, which is not removed meanwhile; it is cancelled when the snapshot is lost.

        Raises as `get`, SnapshotLost if it is lost meanwhile, and what the work raises.
        """
        self.get(id)
        lost = asyncio.get_running_loop().create_future()
        held = (id, lost)
        self._beginning.append(held)
        task = asyncio.ensure_future(work())
        try:
            await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                self.get(id)
            return await task
        finally:
            self._beginning.remove(held)
            lost.cancel()
            await end_chores(task)

    # --- taking and removing

    async def take(self, remote: RemoteNode, trajectory: str) -> SnapshotRecord:
        """Take a snapshot of a trajectory on its node, and put it on record.

        Raises CapacityExceeded while the node is not reached, or if those in use leave no room, StorageUnavailable, and
        as `RemoteNode.take_snapshot`. One that nobody is told of is removed again.
        """
        if not remote.attached:
            message = f"node {remote.name}, on which trajectory {trajectory!r} lives, is not reached now"
            raise CapacityExceeded(message, component=SNAPSHOTS_COMPONENT, retry_after_s=RETRY_S)
        id = secrets.token_hex(6)
        self._under_way.add(id)
        try:
            self._make_room(0)
            used = self.used()
            spared = [each.record.id for each in self._on(remote.name) if each.record.id in used]
            record = await remote.take_snapshot(trajectory, id, spared)
            self._make_room(record.size_bytes)
            self.adopt(remote.name, record)
            await self._store.commit()
        except BaseException:
            if self._kept.pop(id, None) is not None:
                self._save(remote.name)
            self._drop(remote.name, id)
            raise
        finally:
            self._under_way.discard(id)
        logger.info("snapshot taken", snapshot=id, node=remote.name, trajectory=trajectory)
        return record

    def adopt(self, node: str, record: SnapshotRecord) -> None:
        """Note that a node has a snapshot."""
        self._kept[record.id] = NodeSnapshot(node, record)
        self._save(node)

    async def remove(self, id: str) -> None:
        """Remove a snapshot, from an absent node when that is back; raises NotFound, Conflict or StorageUnavailable."""
        found = self._kept.get(id)
        if found is None:
            raise NotFound(f"no snapshot {id!r}", component=SNAPSHOTS_COMPONENT)
        if user := self.used().get(id):
            raise Conflict(f"snapshot {id!r} is in use by {user}: end that first", component=SNAPSHOTS_COMPONENT)
        removal = self._remove(found)
        await self._store.commit()
        if removal is not None:
            await asyncio.wait([removal], timeout=REMOVAL_S)

    # --- what nodes say

    async def compare(self, remote: RemoteNode) -> None:
        """Have a node that has joined say which it has, and bring both sides to agree."""
        self.watch(remote)
        self._comparing.add(remote.name)
        try:
            await remote.compare_snapshots()
        except CodedError as error:
            logger.warning("a node does not say which snapshots it has", node=remote.name, why=error.message)
        finally:
            self._comparing.discard(remote.name)

    def watch(self, remote: RemoteNode) -> None:
        """Take what a node says of its snapshots."""
        remote.on_snapshots = partial(self._said, remote.name)

    def lose(self, node: str, why: str) -> None:
        """A node is gone, and what it had can be had no more until it is back."""
        self._note(node, [replace(each, lost=each.lost or f"node {node}: {why}") for each in self._on(node)])

    def _said(self, node: str, there: Mapping[str, SnapshotRecord]) -> None:
        """A node has said which it keeps: all that are on record, or it has made room, or its disk is another one."""
        kept: list[NodeSnapshot] = []
        for each in self._on(node):
            if (record := there.get(each.record.id)) is not None:
                kept.append(NodeSnapshot(node, record))
            elif node in self._comparing:
                kept.append(replace(each, lost=each.lost or f"node {node} came back without it"))
            elif each.lost or each.record.id in self._under_way:
                kept.append(each)
            else:
                logger.info("a node has removed a snapshot", node=node, snapshot=each.record.id)
        self._note(node, kept)
        for id in there.keys() - self._under_way:
            if (known := self._kept.get(id)) is None or known.node != node:
                logger.info("a snapshot that nobody knows is removed", node=node, snapshot=id)
                self._drop(node, id)

    def _note(self, node: str, kept: Iterable[NodeSnapshot]) -> None:
        """Put on record what a node has, and tell those that wait for what it has no more."""
        before = {each.record.id: each for each in self._on(node)}
        oldest_s = self._wall() - self._age_s
        now = {each.record.id: each for each in kept if not each.lost or each.record.used_s >= oldest_s}
        if now == before:
            return
        for id in before:
            del self._kept[id]
        self._kept |= now
        for id, lost in self._beginning:
            gone = id in before and (id not in now or now[id].lost)
            if gone and not lost.done():
                lost.set_result(None)
        self._save(node)

    # --- inside

    def _on(self, node: str) -> list[NodeSnapshot]:
        return [each for each in self._kept.values() if each.node == node]

    def _make_room(self, size_bytes: int) -> None:
        """Remove what is lost, or was used least recently, until those under way fit; raises CapacityExceeded."""
        used = self.used()
        for each in sorted(self._kept.values(), key=lambda each: (not each.lost, each.record.used_s)):
            if self._fits(size_bytes):
                return
            if each.record.id not in used and each.record.id not in self._under_way:
                logger.info("snapshot removed, as it was used least recently", snapshot=each.record.id, node=each.node)
                self._remove(each)
        if not self._fits(size_bytes):
            message = (
                f"{len(self._kept)} snapshots on nodes are in use and leave no room for another: end trajectories that "
                "began with them, or raise cluster.snapshots.count_max and total_max"
            )
            raise CapacityExceeded(message, component=SNAPSHOTS_COMPONENT, retry_after_s=RETRY_S)

    def _fits(self, size_bytes: int) -> bool:
        there = [each.record.size_bytes for each in self._kept.values() if not each.lost]
        count = len(self._kept.keys() | self._under_way)
        return count <= self.settings.count_max and sum(there) + size_bytes <= self.settings.total_max_bytes

    def _remove(self, found: NodeSnapshot) -> asyncio.Future[NodeAnswer] | None:
        del self._kept[found.record.id]
        self._save(found.node)
        return self._drop(found.node, found.record.id)

    def _drop(self, node: str, id: str) -> asyncio.Future[NodeAnswer] | None:
        """Have a node remove one; an absent one does when it is back, as it is on no record."""
        remote = self.member(node)
        if remote is None or not remote.attached:
            return None
        return remote.drop_snapshot(id)

    def _save(self, node: str) -> None:
        kept = self._on(node)
        self._store.save_document(DOCUMENT + node, msgspec.json.encode(kept).decode() if kept else None)
