"""Environments: which sandbox a trajectory gets, and pools of warm ones."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace

import msgspec
import structlog

from manager.clock import Clock, MonotonicClock
from manager.errors import CodedError, Conflict, InvalidConfig, NotFound, Unsupported
from manager.function import Isolation, Network, SandboxSpec, Warm
from runtimes.chores import end_chores
from runtimes.sandbox.command import ResumableCommand
from runtimes.sandbox.runner.client import lost
from runtimes.sandbox.sandbox import Provider, Sandbox
from runtimes.sandbox.session import SessionSettings, SessionTable
from runtimes.sandbox.snapshots import SnapshotRecord
from runtimes.sandbox.spec import TASK, Declarations, OtherSandbox, chosen_env, contradiction, difference, outlives
from runtimes.secrets import Secrets

logger = structlog.get_logger("sandbox.environments")

#: Seconds of past claims that say how many will be claimed in the next while.
DEMAND_S = 30.0
BACKOFF_S, BACKOFF_MAX_S = 1.0, 60.0


class WarmPool:
    """Idle sandboxes of one spec: at least ``warm.min``, after recent claims up to ``warm.max``."""

    def __init__(self, spec: SandboxSpec, make: Callable[[], Awaitable[Sandbox]], clock: Clock) -> None:
        self.spec = spec
        self._make = make
        self._clock = clock
        self._idle: deque[Sandbox] = deque()
        self._claims_s: deque[float] = deque()
        self._changed = asyncio.Event()
        self._filled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> int:
        return len(self._idle)

    def living(self) -> list[Sandbox]:
        """Return the sandboxes that lie ready; those that died are dropped, and replaced in the background."""
        living = [sandbox for sandbox in self._idle if sandbox.alive]
        if len(living) < len(self._idle):
            self._idle = deque(living)
            self._changed.set()
        return living

    @property
    def target(self) -> int:
        """How many should lie ready now."""
        while self._claims_s and self._claims_s[0] < self._clock.now() - DEMAND_S:
            self._claims_s.popleft()
        return max(self.spec.warm.min, min(self.spec.warm.max, len(self._claims_s)))

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._replenish())
            self._changed.set()

    def claim(self) -> Sandbox | None:
        """Return one that lies ready, or None; it is replaced in the background."""
        self._claims_s.append(self._clock.now())
        if len(self._claims_s) > max(1, self.spec.warm.max):
            self._claims_s.popleft()
        self._changed.set()
        while self._idle:
            sandbox = self._idle.popleft()
            if sandbox.alive:
                return sandbox
        return None

    async def filled(self) -> None:
        """Wait until as many as wanted lie ready."""
        while self.idle < self.target:
            self._filled.clear()
            await self._filled.wait()

    async def close(self) -> list[Sandbox]:
        """Stop making; returns what lies ready, for its owner to end or to keep."""
        await end_chores(self._task)
        idle, self._idle = list(self._idle), deque()
        return idle

    async def _replenish(self) -> None:
        backoff_s = BACKOFF_S
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self.idle < self.target:
                try:
                    self._idle.append(await self._make())
                    backoff_s = BACKOFF_S
                except CodedError as error:
                    pause_s = error.retry_after_s or backoff_s
                    backoff_s = min(BACKOFF_MAX_S, backoff_s * 2)
                    logger.warning("no warm sandbox", image=self.spec.image, why=error.message, pause_s=pause_s)
                    await asyncio.sleep(pause_s)
            self._filled.set()


class WarmPools:
    """Pools by what their sandboxes are. Of those that trajectories chose the last claimed are kept, within a bound."""

    def __init__(self, create: Callable[[SandboxSpec], Awaitable[Sandbox]], clock: Clock) -> None:
        self._create = create
        self._clock = clock
        self._own: dict[bytes, WarmPool] = {}
        #: The last claimed comes last.
        self._chosen: dict[bytes, WarmPool] = {}

    def of(self, spec: SandboxSpec) -> WarmPool:
        """Return the pool of sandboxes equal to ``spec``, which keeps none ready until it is started."""
        return self._own.setdefault(_key(spec), self._pool(spec, spec.warm))

    def claim(self, spec: SandboxSpec) -> Sandbox | None:
        """Return a sandbox that lies ready; None if there is none. What is claimed is soon kept ready."""
        key = _key(spec)
        pool = self._own.get(key) or self._chosen_pool(key, spec)
        return None if pool is None else pool.claim()

    def living(self) -> list[Sandbox]:
        """Return all that lie ready."""
        return [sandbox for pool in (*self._own.values(), *self._chosen.values()) for sandbox in pool.living()]

    def take_superfluous(self) -> list[WarmPool]:
        """Take out the pools of chosen sandboxes that nobody has claimed for a while, and the oldest beyond the bound.

        Their sandboxes are the caller's to end.
        """
        most = max((pool.spec.trajectory.warm for pool in self._chosen.values()), default=0)
        beyond = list(self._chosen)[: max(0, len(self._chosen) - most)]
        over = [key for key, pool in self._chosen.items() if key in beyond or not pool.target]
        return [self._chosen.pop(key) for key in over]

    async def close(self) -> list[Sandbox]:
        """Stop making; returns what lies ready, for its owner to end or to keep."""
        pools = [*self._own.values(), *self._chosen.values()]
        return [sandbox for pool in pools for sandbox in await pool.close()]

    def _chosen_pool(self, key: bytes, spec: SandboxSpec) -> WarmPool | None:
        """Return the pool of a chosen sandbox, begun with its first claim; None if none is kept ready."""
        if not (spec.chosen and spec.warm.max and spec.trajectory.warm) or spec.network is Network.INTERNAL:
            return None
        pool = self._chosen.pop(key, None)
        if pool is None:
            pool = self._pool(spec, replace(spec.warm, min=0))
            pool.start()
        self._chosen[key] = pool
        return pool

    def _pool(self, spec: SandboxSpec, warm: Warm) -> WarmPool:
        return WarmPool(replace(spec, warm=warm), lambda: self._create(spec), self._clock)


def _key(spec: SandboxSpec) -> bytes:
    return msgspec.json.encode(replace(spec, chosen=False), order="deterministic")


COMPONENT = "sandbox"
TRAJECTORY = "tangram.trajectory"
PURPOSE = "tangram.purpose"
#: Seconds for which the sandbox of a single action waits at most for the action's end to be on record.
ACK_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """How environments are kept."""

    #: For functions and trajectories that name no sandbox.
    default: SandboxSpec = field(default_factory=SandboxSpec)
    #: What ``${secret:NAME}`` in a sandbox's environment stands for.
    secrets: Secrets = field(default_factory=Secrets)
    #: Whether sandboxes live on when the gateway ends in good order, for the next one to adopt.
    keep_on_close: bool = False
    #: Seconds between two searches for orphans, and until the next if something may have been left behind.
    reap_every_s: float = 60.0
    reap_soon_s: float = 5.0
    #: Sandboxes that are removed at the same time.
    max_closing: int = 4
    sessions: SessionSettings = field(default_factory=SessionSettings)


@dataclass(slots=True)
class Environment:
    """A trajectory's sandbox, and the lock under which it is made and ended."""

    trajectory: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    sandbox: Sandbox | None = None
    made_s: float = 0.0
    #: It was made by an earlier gateway, under a configuration that is not known.
    adopted: bool = False
    #: What a trajectory has chosen: if its sandbox is lost, the next one is made so too.
    spec: SandboxSpec | None = None
    #: It was told that no function is declared so any more.
    outlived: bool = False


class Environments:
    """The sandboxes of the trajectories, and those that lie ready. The core decides when a trajectory ends."""

    def __init__(
        self, provider: Provider, settings: EnvironmentSettings | None = None, clock: Clock | None = None
    ) -> None:
        self.provider = provider
        self.settings = settings or EnvironmentSettings()
        self._clock = clock or MonotonicClock()
        #: The commands that somebody types to.
        self.sessions = SessionTable(self.settings.sessions)
        self._environments: dict[str, Environment] = {}
        self._ephemeral: dict[str, Sandbox] = {}
        #: Sandboxes of single actions that an earlier gateway started, until they are claimed or removed.
        self._orphaned: list[Sandbox] = []
        #: Sandboxes of single actions whose end is not on record yet, by what their claims begin with.
        self._awaiting_ack: dict[str, Sandbox] = {}
        #: Ids of sandboxes that are made, or claimed, and have no owner yet.
        self._unowned: set[str] = set()
        #: Ids of sandboxes that were left to the next gateway.
        self._left: set[str] = set()
        self._declared = Declarations()
        #: Ids of sandboxes that belong to others.
        self._excluded: list[Callable[[], Collection[str]]] = []
        self._pools = WarmPools(lambda spec: self._create(spec, {PURPOSE: "warm"}), self._clock)
        self._removals: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Semaphore(self.settings.max_closing)
        self._reaper: asyncio.Task[None] | None = None
        #: Set if a creation or a removal failed: what it left behind is looked for soon.
        self._suspicion = asyncio.Event()
        self._closed = False
        provider.snapshots.users = self._snapshots_in_use

    async def start(self, trajectories: Collection[str] | None = None) -> list[str]:
        """Adopt what an earlier gateway left (of these trajectories; None: of all), remove the rest, watch for orphans.

        Return the trajectories that live on, with their files. What runs in them runs on until `end_unclaimed`.
        """
        for sandbox, labels in await self.provider.adopt():
            trajectory = labels.get(TRAJECTORY)
            if trajectory is not None and (trajectories is None or trajectory in trajectories):
                await self._adopt(trajectory, sandbox)
            elif sandbox.resumable:
                self._orphaned.append(sandbox)
            else:
                self._remove(sandbox)
        await self._reap()
        self._reaper = asyncio.create_task(self._reap_forever())
        return list(self._environments)

    async def _adopt(self, trajectory: str, sandbox: Sandbox) -> None:
        """Own it. If no action runs in it, its processes go on as between two, before any action comes."""
        if not _busy(sandbox) and not await self._quiesced(sandbox):
            return
        self._environments[trajectory] = Environment(trajectory, sandbox=sandbox, made_s=time.time(), adopted=True)
        logger.info("sandbox adopted", trajectory=trajectory, sandbox=sandbox.id)

    async def _quiesced(self, sandbox: Sandbox) -> bool:
        try:
            await sandbox.quiesce(sandbox.spec.background)
            return True
        except CodedError as failure:
            logger.warning("not adopted", sandbox=sandbox.id, why=failure.message)
            self._remove(sandbox)
            return False

    # --- commands that outlast a gateway

    def resumable(self) -> dict[str, ResumableCommand]:
        """Return the commands of an earlier gateway that can be claimed, by claim."""
        return dict(item for sandbox in [*self._owned(), *self._orphaned] for item in sandbox.resumable.items())

    def never_started(self, trajectory: str, claims: str) -> bool:
        """Return whether the trajectory's sandbox is certain that no command with such a claim was started."""
        sandbox = self.get(trajectory)
        return sandbox is not None and sandbox.never_started(claims)

    async def end_unclaimed(self, taken: Collection[str]) -> None:
        """End every resumable command whose claim begins with none of ``taken``: nobody comes for it any more."""
        for sandbox in self._owned():
            busy = _busy(sandbox)
            for claim in list(sandbox.resumable):
                if not claim.startswith(tuple(taken)):
                    sandbox.keep(claim, detached=False)
            if busy and not sandbox.resumable:
                await self._quiesced(sandbox)
        for sandbox in [one for one in self._orphaned if not _claimed(one, taken)]:
            self._orphaned.remove(sandbox)
            self._remove(sandbox)

    async def leave(self, claims: str) -> bool:
        """Leave a running action to the next gateway, as it runs; return False if that cannot be."""
        if not self.settings.keep_on_close:
            return False
        for sandbox in [*self._owned(), *self._ephemeral.values(), *self._awaiting_ack.values()]:
            if sandbox.has_detached(claims):
                self._awaiting_ack.pop(claims, None)
                self._left.add(sandbox.id)
                await sandbox.release()
                return True
        return False

    def detach(self, claims: str) -> None:
        """Let the action whose claims begin so outlive this gateway."""
        for sandbox in [*self._owned(), *self._ephemeral.values()]:
            sandbox.keep(claims, detached=True)

    def acknowledge(self, trajectory: str | None, claims: str) -> None:
        """Forget the action whose claims begin so: its end is on record."""
        sandbox = None if trajectory is None else self.get(trajectory)
        if sandbox is not None:
            sandbox.keep(claims, detached=False)
        ended = self._awaiting_ack.pop(claims, None)
        if ended is None and trajectory is None:
            ended = self._reclaim(claims)  # of one whose end was known without it
        if ended is not None:
            self._remove(ended)

    def keep(self) -> None:
        """Let the trajectories' sandboxes live on at `close`, for the next gateway to adopt."""
        self.settings = replace(self.settings, keep_on_close=True)

    def exclude(self, living: Callable[[], Collection[str]]) -> None:
        """Exclude sandboxes (ids) that another room owns from the search for orphans."""
        self._excluded.append(living)

    def declare(self, function: str, spec: SandboxSpec) -> None:
        """Know how a function's sandbox is declared from now on; raises InvalidConfig if it has no such secret."""
        self.settings.secrets.filled(spec)
        self._declared.declare(function, self._known(spec), time.time())

    # --- trajectories

    async def ensure(self, trajectory: str, spec: SandboxSpec | None = None, *, task: str = "") -> Sandbox:
        """Return the trajectory's sandbox, made at the first call for its task; an existing one wins over ``spec``.

        Raises OtherSandbox if the existing one contradicts what ``spec`` says, Unsupported or InvalidConfig if such a
        sandbox cannot be made, and ActionFailed(environment_lost) once if it died unseen: what was in it is lost, and
        that is never passed over in silence.
        """
        spec = self._known(spec)
        environment = self._environments.setdefault(trajectory, Environment(trajectory))
        sandbox = environment.sandbox
        if sandbox is None or not sandbox.alive:
            async with environment.lock:
                sandbox = await self._ensure_locked(environment, spec, task)
        self._require_agreement(environment, spec, sandbox.spec)
        return sandbox

    def choose(self, trajectory: str, spec: SandboxSpec) -> None:
        """Make the trajectory's sandbox so whenever it is made anew: it has chosen that under an earlier gateway."""
        self._environments.setdefault(trajectory, Environment(trajectory)).spec = spec

    def get(self, trajectory: str) -> Sandbox | None:
        environment = self._environments.get(trajectory)
        return None if environment is None else environment.sandbox

    async def end(self, trajectory: str) -> None:
        """Remove the trajectory's sandbox; idempotent."""
        environment = self._environments.get(trajectory)
        if environment is None:
            return
        async with environment.lock:
            if self._environments.get(trajectory) is environment:
                del self._environments[trajectory]
            sandbox, environment.sandbox = environment.sandbox, None
            if sandbox is not None:
                await self._guarded(sandbox.close())

    def list(self) -> list[dict[str, object]]:
        """Return every environment as plain JSON values."""
        return [
            {
                "trajectory": environment.trajectory,
                "sandbox": environment.sandbox.id,
                "image": environment.sandbox.spec.image,
                "memory_bytes": environment.sandbox.spec.memory_bytes,
                "alive": environment.sandbox.alive,
                "made_s": environment.made_s,
            }
            for environment in self._environments.values()
            if environment.sandbox is not None
        ]

    # --- snapshots

    async def snapshot(self, trajectory: str, *, id: str = "", spared: Collection[str] = ()) -> SnapshotRecord:
        """Keep the files of the trajectory's sandbox as they are now, for others to begin with.

        ``id`` and ``spared`` as for `SnapshotStore.take`. Raises NotFound if it has none, and as `SnapshotStore.take`
        and `Sandbox.snapshot`. No command of it may run.
        """
        environment = self._environments.get(trajectory)
        if environment is None or environment.sandbox is None:
            raise NotFound(f"trajectory {trajectory!r} has no sandbox", component=COMPONENT)
        sandbox = environment.sandbox
        # What the function itself has in its environment may be secrets, and is given to a fork anew.
        env = {} if environment.spec is None else chosen_env(environment.spec)
        spec, task = replace(sandbox.spec, env=env), sandbox.labels.get(TASK, "")
        taking = self.provider.snapshots.take(trajectory, task, spec, sandbox.snapshot, id=id, spared=spared)
        return await taking

    def _snapshots_in_use(self) -> dict[str, str]:
        """Return the snapshots with which trajectories began, which they need again if their sandbox dies."""
        used = {sandbox.spec.snapshot: sandbox.labels.get(PURPOSE, "") for sandbox in self._ephemeral.values()}
        for trajectory, environment in self._environments.items():
            if environment.spec is not None:
                used[environment.spec.snapshot] = trajectory
            if environment.sandbox is not None:
                used[environment.sandbox.spec.snapshot] = trajectory
        return used

    # --- actions without a trajectory, and warm sandboxes

    @asynccontextmanager
    async def ephemeral(
        self, spec: SandboxSpec | None = None, claims: str = "", *, task: str = ""
    ) -> AsyncIterator[Sandbox]:
        """Yield a sandbox for one action; it is removed in the background.

        It is the one that an earlier gateway made if that has a resumable command whose claim begins with ``claims``.
        """
        labels = {PURPOSE: "ephemeral", **_of_task(task)}
        sandbox = self._reclaim(claims) or await self._obtain(self._known(spec), labels)
        self._ephemeral[sandbox.id] = sandbox
        try:
            yield sandbox
        finally:
            del self._ephemeral[sandbox.id]
            if claims and sandbox.has_detached(claims):
                self._awaiting_ack[claims] = sandbox
                asyncio.get_running_loop().call_later(ACK_WAIT_S, self.acknowledge, None, claims)
            else:
                self._remove(sandbox)

    def _reclaim(self, claims: str) -> Sandbox | None:
        sandbox = next((one for one in self._orphaned if claims and _claimed(one, (claims,))), None)
        if sandbox is not None:
            self._orphaned.remove(sandbox)
        return sandbox

    async def warm(self, spec: SandboxSpec | None) -> None:
        """Check that such sandboxes can be made, and keep as many ready as they ask for."""
        spec = self._known(spec)
        await self.provider.check(spec)
        if spec.warm.max or spec.warm.min:
            if spec.network is Network.INTERNAL:
                raise InvalidConfig(
                    "sandbox.warm: a sandbox that lies ready belongs to no task, whose network internal is",
                    component=COMPONENT,
                )
            self.pool(spec).start()

    def pool(self, spec: SandboxSpec) -> WarmPool:
        """Return the pool of sandboxes equal to ``spec``, which keeps none ready until it is started."""
        return self._pools.of(spec)

    # --- the end

    async def close(self) -> None:
        """Remove (or with ``keep_on_close`` release) everything; idempotent."""
        if self._closed:
            return
        self._closed = True
        await end_chores(self._reaper)
        for sandbox in await self._pools.close():
            self._remove(sandbox)
        for claims, ended in list(self._awaiting_ack.items()):
            if self.settings.keep_on_close:  # its end is on no record yet: the next one asks for it
                self._spawn(ended.release())
            else:
                self.acknowledge(None, claims)
        for environment in self._environments.values():
            if environment.sandbox is None:
                continue
            if self.settings.keep_on_close:
                self._spawn(environment.sandbox.release())
            else:
                self._remove(environment.sandbox)
        self._environments.clear()
        while self._removals:
            await asyncio.gather(*self._removals, return_exceptions=True)

    # --- inside

    def _known(self, spec: SandboxSpec | None) -> SandboxSpec:
        """Return the spec to use; the isolation that a function requires is checked even if a sandbox exists."""
        if spec is None:
            return self.settings.default
        if spec.isolation is Isolation.CONTAINER and self.provider.info.kind != "container":
            raise Unsupported(
                f"isolation: container is required, this gateway has {self.provider.info.kind} sandboxes",
                component=COMPONENT,
            )
        return spec if spec.image else replace(spec, image=self.settings.default.image)

    async def _ensure_locked(self, environment: Environment, spec: SandboxSpec, task: str) -> Sandbox:
        sandbox = environment.sandbox
        if sandbox is not None and sandbox.alive:
            return sandbox
        if sandbox is not None:
            environment.sandbox = None
            self._remove(sandbox)
            if not sandbox.loss_reported:
                raise lost(f"the sandbox of trajectory {environment.trajectory!r} died; what was in it is lost")
        if environment.spec is not None:
            self._require_agreement(environment, spec, environment.spec)
            spec = environment.spec
        try:
            created = await self._obtain(spec, {TRAJECTORY: environment.trajectory, **_of_task(task)})
        except BaseException:
            if environment.spec is None and self._environments.get(environment.trajectory) is environment:
                del self._environments[environment.trajectory]
            raise
        environment.spec = spec if spec.chosen else None
        environment.sandbox, environment.made_s, environment.adopted = created, time.time(), False
        self._environments[environment.trajectory] = environment
        return created

    def _require_agreement(self, environment: Environment, spec: SandboxSpec, living: SandboxSpec) -> None:
        """Raise OtherSandbox unless a function, or an opening, of this spec is served in such a sandbox."""
        if spec is living or spec == living:
            return
        earlier = None if environment.adopted else self._declared.since(environment.made_s, spec)
        if spec.env != living.env:
            spec, living = self.settings.secrets.filled(spec), self.settings.secrets.filled(living)
        if spec.chosen:
            why = difference(spec, living)
        else:
            images = self.provider.info.kind == "container"
            why = contradiction(spec, living, images=images)
            if why and outlives(living, spec, earlier, self.settings.secrets.filled, images=images):
                if not environment.outlived:
                    message = "a trajectory keeps the sandbox of an earlier configuration"
                    logger.warning(message, trajectory=environment.trajectory, why=why)
                environment.outlived = True
                return
        if why:
            raise OtherSandbox(f"trajectory {environment.trajectory!r} lives in another sandbox: {why}")

    async def _obtain(self, spec: SandboxSpec, labels: dict[str, str]) -> Sandbox:
        sandbox = self._pools.claim(spec)
        if sandbox is None:
            return await self._create(spec, labels)
        with self._spared(sandbox.id):
            try:
                await sandbox.relabel(labels)
            except BaseException:
                self._remove(sandbox)
                raise
        return sandbox

    @contextmanager
    def _spared(self, id: str) -> Iterator[None]:
        """Keep the reaper from a sandbox until its owner has it: nothing may be awaited between this and that."""
        self._unowned.add(id)
        try:
            yield
        finally:
            self._unowned.discard(id)

    async def _create(self, spec: SandboxSpec, labels: dict[str, str]) -> Sandbox:
        if self._closed:
            raise Conflict("the gateway is closing", component=COMPONENT)
        name = secrets.token_hex(8)
        try:
            spec = self.settings.secrets.filled(spec)
            with self._spared(name):
                return await self.provider.create(spec, name=name, labels=labels, mounts={})
        except CodedError:
            self._suspicion.set()
            raise

    def _remove(self, sandbox: Sandbox) -> None:
        async def remove() -> None:
            async with self._closing:
                await sandbox.close()

        self._spawn(remove())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(self._guarded(work))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def _guarded(self, removal: Coroutine[None, None, None]) -> None:
        try:
            await removal
        except (CodedError, OSError) as error:
            logger.warning("a sandbox was not removed; the reaper will try again", why=str(error))
            self._suspicion.set()

    async def _reap_forever(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._suspicion.wait(), self.settings.reap_every_s)
                await asyncio.sleep(self.settings.reap_soon_s)
            self._suspicion.clear()
            try:
                await self._reap()
            except (CodedError, OSError) as error:
                logger.warning("the search for orphans failed", why=str(error))
                self._suspicion.set()

    def _owned(self) -> tuple[Sandbox, ...]:
        """Return the sandboxes of the trajectories."""
        return tuple([each.sandbox for each in self._environments.values() if each.sandbox is not None])

    async def _reap(self) -> None:
        for pool in self._pools.take_superfluous():
            for sandbox in await pool.close():
                self._remove(sandbox)
        ours = [
            *self._owned(),
            *self._pools.living(),
            *self._ephemeral.values(),
            *self._orphaned,
            *self._awaiting_ack.values(),
        ]
        living = {*self._unowned, *self._left, *(sandbox.id for sandbox in ours)}
        removed = await self.provider.reap(living.union(*(others() for others in self._excluded)))
        if removed:
            logger.warning("orphaned sandboxes removed", count=removed)


def _of_task(task: str) -> dict[str, str]:
    return {TASK: task} if task else {}


def _busy(sandbox: Sandbox) -> bool:
    """Return whether a command of an earlier gateway runs in it."""
    return any(command.running for command in sandbox.resumable.values())


def _claimed(sandbox: Sandbox, taken: Collection[str]) -> bool:
    """Return whether it has a resumable command whose claim begins with one of ``taken``."""
    return any(claim.startswith(tuple(taken)) for claim in sandbox.resumable)
