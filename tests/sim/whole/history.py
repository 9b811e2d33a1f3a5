"""One seed's history: what is asked, what fails when, what callers are told; then all is mended and comes to rest."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, partial, reduce
from operator import or_
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from gateway.invocations.invocations import InvocationRequest, LiveInvocation
from gateway.invocations.record import Mode, Record
from manager.errors import CapacityExceeded, CodedError, Conflict, Draining, NotFound, QuotaExceeded, StorageUnavailable
from tests.sim.whole.system import HERE, PLACE, SimSetting, SimWorld, WorldApp, in_place

#: Seconds in which operations fall, and after which every accepted call must have ended and all be at rest.
SPAN_S, REST_S = 12.0, 240.0
ENDED = frozenset({"succeeded", "failed", "timed_out", "cancelled", "lost"})
#: What may stay in memory, within bounds: what is learned and shown of functions and pools, and what goes in bulk.
MAY_STAY = frozenset((
    "Account", "BatchFit", "Estimate", "Fit", "FunctionCounters", "NodeChoice", "Profile", "Rate", "RunningSet",
    "SizeLine", "Spread", "Bar", "PoolLoad", "_Clock", "_End", "_Flow", "_Second", "TrajectoryState", "Action",
    "InOrder", "QueueGroup", "Signature", "Waiting", "AttemptEnd", "ExecuteAttempt", "JournalEntry",
))  # fmt: skip
#: What a caller tries again: it may be accepted later.
LATER = (ConnectionError, Draining, StorageUnavailable, CapacityExceeded, QuotaExceeded)
DATABASE, JOURNAL = PLACE / HERE / "tangram.sqlite", "journal"


@dataclass(frozen=True, slots=True)
class SimOperation:
    """Something that is done at an instant, by name, with arguments."""

    at_s: float
    name: str
    about: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        about = " ".join(f"{key}={value}" for key, value in self.about.items())
        return f"{self.at_s:7.3f} {self.name} {about}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a history is made of."""

    setting: SimSetting
    operations: tuple[SimOperation, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """What a caller was told of his call."""

    at_s: float
    id: str
    state: str
    reason: str | None
    result: bytes | None
    message: str
    #: Whether the disk refused what was written then: no end is on record.
    refused: bool


@dataclass(slots=True)
class Asked:
    """A call, as its caller knows it."""

    number: int
    about: dict[str, Any]
    asked_s: float
    #: Ids under which it was accepted: one, if keys are worth anything.
    ids: dict[str, None] = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)
    #: Why it was refused for good; and whether an answer may have been lost.
    refused: str = ""
    unknown: bool = False
    cancelled: bool = False
    record: Record | None = None
    log: list[str] = field(default_factory=list)

    @property
    def durable(self) -> bool:
        """Whether it is sent again with its key until it is accepted."""
        return bool(self.about["key"])

    @property
    def kept(self) -> bool:
        """Whether it is on disk before it is told as accepted."""
        return self.durable or self.about["mode"] == "async"


# --- plans

#: Seconds that commands run.
DURATIONS_S = (0.0, 0.2, 1.0, 3.0, 6.0)


class Planner:
    """Draws one plan. Each has few kinds of calls and of faults, so that what meets does so often."""

    def __init__(self, seed: int) -> None:
        chance = self._chance = random.Random(seed)
        nodes = chance.choice(((), ("n1",), ("n1",), ("n1", "n2")))
        self._setting = SimSetting(
            nodes=nodes,
            local="inline" if not nodes else chance.choice(("inline", "inline", "none")),
            cores=chance.choice((1, 2, 2)),
            reap_every_s=chance.choice((60.0, 60.0, 0.3)),
            drain_grace_s=chance.choice((0.0, 0.5, 3.0)),
        )
        names = ["shell", "shell", "again", "flaky", "search"] + (["there"] * 5 if nodes else [])
        self._functions = chance.sample(names, chance.randint(1, 3))
        self._durations_s = chance.sample(DURATIONS_S, 2)
        self._trajectories = chance.choice((1, 1, 2))
        faults = ["kill", "kill", "kill", "stop", "disk", "row", "row", "short", "box", "runner", "write"]
        if nodes:
            faults += ["kill node", "leave", "cut", "cut", "both", "reset"]
        self._faults = chance.sample(faults, 2)

    def plan(self) -> Plan:
        chance = self._chance
        operations = [self._call(number) for number in range(chance.randint(2, 7))]
        faults = [self._fault() for _ in range(chance.choice((0, 1, 1, 2, 3)))]
        for _ in range(chance.choice((0, 0, 1, 2))):
            # A cancel often meets what has just failed.
            at_s = chance.choice(faults).at_s + chance.uniform(0, 2.0) if faults else self._at_s()
            faults.append(
                SimOperation(at_s, "cancel", {"call": chance.randrange(len(operations)), "gone": self._gone()})
            )
        operations += faults
        if chance.random() < 0.15:
            operations.append(
                SimOperation(self._at_s(), "end", {"trajectory": chance.choice(("t0", "n0")), "gone": self._gone()})
            )
        return Plan(self._setting, tuple(sorted(operations, key=lambda each: each.at_s)))

    def _at_s(self) -> float:
        return self._chance.uniform(0.5, SPAN_S)

    def _call(self, number: int) -> SimOperation:
        chance, setting = self._chance, self._setting
        name = chance.choice(self._functions)
        script: dict[str, Any] = {"s": chance.choice(self._durations_s), "say": chance.choice((0, 0, 2))}
        if name == "flaky":
            script = {"s": 0.3, "say": 1, "hangs": chance.choice(((), (1,), (1, 2)))}
        # One that lives here cannot go on there.
        trajectory = "n" if name == "there" and setting.local == "inline" else "t"
        in_one = name != "search" and chance.random() < 0.8
        about = {
            "number": number,
            "function": name,
            "trajectory": f"{trajectory}{chance.randrange(self._trajectories)}" if in_one else None,
            "key": f"k{number}" if chance.random() < 0.85 else None,
            "mode": chance.choice(("async", "async", "sync")),
            "script": script,
            "gone": self._gone(),
        }
        return SimOperation(chance.choice((0.5 + 0.3 * number, chance.uniform(0, SPAN_S / 2))), "call", about)

    def _fault(self) -> SimOperation:
        chance = self._chance
        name, node = chance.choice(self._faults), chance.choice(self._setting.nodes or ("",))
        where = chance.choice((HERE, node or HERE))
        about: dict[str, Any] = {}
        match name:
            case "kill":
                about = self._kill("")
            case "kill node":
                about = self._kill("node_") | {"node": node}
            case "both":
                about = self._kill("") | self._kill("node_") | {"node": node}
            case "stop" | "leave":
                about = {"node": node, "down_s": self._down_s()}
            case "cut":
                about = {"node": node, "for_s": chance.choice((0.0, 2.0, 8.0, 30.0)), "silent": chance.random() < 0.5}
            case "disk" | "short":
                about = {"for_s": chance.choice((0.3, 2.0, 5.0)), "where": where}
            case "box":
                about = {"where": where}
            case "runner" | "write":
                about = {"where": where, "fuse": self._fuse()}
            case "reset":
                about = {"node": node, "where": where, "fuse": self._fuse()}
        return SimOperation(self._at_s(), name, about)

    def _kill(self, whose: str) -> dict[str, Any]:
        return {f"{whose}fuse": self._fuse(), f"{whose}down_s": self._down_s()}

    def _gone(self) -> int | None:
        """Callbacks and writes after which a caller is gone, and asks again later."""
        return self._chance.choice((None, None, None, None, self._chance.randrange(12), self._chance.randrange(60)))

    def _fuse(self) -> int:
        """At once, or some callbacks and writes later."""
        return self._chance.choice((0, self._chance.randrange(60), self._chance.randrange(600)))

    def _down_s(self) -> float:
        return self._chance.choice((0.1, 0.5, 2.0, 5.0))


def plan_of(seed: int) -> Plan:
    """Return what a seed stands for."""
    return Planner(seed).plan()


# --- a history


class SimHistory:
    """One plan, followed to its end in a world of its own."""

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        self.seed, self.plan = seed, plan or plan_of(seed)
        self.world = SimWorld(self.plan.setting, random.Random(f"{seed} world"))
        self.calls: dict[int, Asked] = {}
        #: Until when the gateway, and each node, are not to be started again.
        self._down_until_s: dict[str, float] = {}
        #: Whether a log record cannot be written.
        self.holes = False
        self.lines: list[str] = []
        #: Which machines have lost sandboxes, or were out of reach for so long that they count as lost.
        self.losses: set[str] = set()
        #: What the gateway, and a node, hold at rest; unknown for the history that shows it.
        self._at_rest: dict[str, Counter[str]] = {}
        #: Trajectories whose end was asked for, and may have happened in part.
        self._ended_in_part: set[str] = set()
        #: What is held at the end.
        self.remains: list[str] = []

    def run(self) -> SimHistory:
        """Follow it; raises AssertionError where the world does not come to its end."""
        if self.plan.operations != AT_REST:
            self._at_rest = at_rest(self.plan.setting.nodes, self.plan.setting.local)
        with in_place(self.world):
            try:
                self.world.loop.run(self._live(), self.world.loop.now_s + SPAN_S + 2 * REST_S)
            finally:
                for process in (self.world.gateway, *self.world.nodes.values()):
                    if process is not None:
                        process.kill()
                self.world.disk.close()
        return self

    def digest(self) -> str:
        runs = [f"{each}" for each in self.world.ledger.runs]
        return hashlib.sha256("\n".join([*self.lines, *runs]).encode()).hexdigest()

    def note(self, text: str) -> None:
        self.lines.append(f"{self.world.loop.now_s - 1000.0:8.4f} {text}")

    async def _live(self) -> None:
        loop = self.world.loop
        keeping = asyncio.ensure_future(self._keep_up())
        begun_s, doing = loop.now_s, []
        for operation in self.plan.operations:
            await asyncio.sleep(max(0.0, begun_s + operation.at_s - loop.now_s))
            self.note(str(operation))
            doing.append(asyncio.ensure_future(self._do(operation)))
        await asyncio.sleep(max(0.0, begun_s + SPAN_S - loop.now_s))
        self._mend()
        await asyncio.wait_for(asyncio.gather(*doing), REST_S)
        await asyncio.wait_for(self._come_to_rest(), REST_S)
        keeping.cancel()

    async def _keep_up(self) -> None:
        """Start what does not run, unless it is to be down."""
        world, loop = self.world, self.world.loop
        while True:
            if loop.now_s >= self._down_until_s.get(HERE, 0.0):
                world.start_gateway()
            for name in world.setting.nodes:
                if loop.now_s >= self._down_until_s.get(name, 0.0):
                    world.start_node(name)
            await asyncio.sleep(0.5)

    def _mend(self) -> None:
        world = self.world
        self._down_until_s.clear()
        world.disk.full.clear()
        world.disk.failing.clear()
        world.cut.clear()
        for machine in world.machines.values():
            machine.short = False

    # --- operations

    async def _do(self, operation: SimOperation) -> None:
        about = operation.about
        match operation.name:
            case "call":
                await self._call(about)
            case "cancel":
                await self._cancel(about["call"], about.get("gone"))
            case "end":
                await self._end(about["trajectory"], about.get("gone"))
            case "kill" | "both":
                self._kill(HERE, about["fuse"], about["down_s"])
                if "node" in about:
                    self._kill(about["node"], about["node_fuse"], about["node_down_s"])
            case "kill node":
                self._kill(about["node"], about["node_fuse"], about["node_down_s"])
            case "stop":
                self._down_until_s[HERE] = self.world.loop.now_s + about["down_s"]
                if self.world.app is not None and self.world.gateway is not None:
                    stop = self.world.app.stop
                    self.world.loop.call_soon(stop, True, context=self.world.gateway.context.copy())
            case "leave":
                self._leave(about["node"], about["down_s"])
            case "cut":
                await self._cut(about["node"], about["for_s"], about["silent"])
            case "disk":
                await self._fill_disk(about["where"], about["for_s"])
            case "row":
                self.world.disk.unwritable.setdefault(str(DATABASE))
                self.holes = True
            case "short":
                await self._run_short(about["where"], about["for_s"])
            case "box":
                self._end_boxes(about["where"])
            case "runner":
                self._burn(about, partial(self._break_runners, about["where"]))
            case "write":
                self._burn(about, partial(self.world.disk.failing.add, self._file(about["where"])))
            case "reset":
                self._burn(about, partial(self._reset, about["node"]))

    def _kill(self, name: str, fuse: int, down_s: float) -> None:
        process = self.world.gateway if name == HERE else self.world.nodes.get(name)
        self._down_until_s[name] = self.world.loop.now_s + down_s
        if process is not None and process.alive:
            process.held[self, name] = lambda: self._gone(name)
            process.burn(fuse, process.kill)

    def _gone(self, name: str) -> None:
        self.note(f"{name} is killed")
        if name == HERE:
            self.world.app = None

    def _burn(self, about: dict[str, Any], then: Callable[[], object]) -> None:
        process = self.world.gateway if about["where"] == HERE else self.world.nodes.get(about["where"])
        if process is not None and process.alive:
            process.burn(about["fuse"], then)

    def _break_runners(self, where: str) -> None:
        self.losses.add(where)
        for box in list(self.world.machines[where].boxes.values()):
            if box.client is not None:
                box.client.reset()

    def _reset(self, node: str) -> None:
        if node in self.world.links:
            self.world.links[node].reset()

    def _leave(self, node: str, down_s: float) -> None:
        process, daemon = self.world.nodes.get(node), self.world.daemons.get(node)
        self._down_until_s[node] = self.world.loop.now_s + down_s
        if process is not None and process.alive and daemon is not None:
            self.world.loop.call_soon(daemon.leave, context=process.context.copy())

    async def _cut(self, node: str, for_s: float, silent: bool) -> None:
        link = self.world.links.get(node)
        if for_s > 5.0:
            self.losses.add(node)
        self.world.cut.add(node)
        if link is not None:
            if silent:
                link.cut()
            else:
                self.world.loop.call_soon(link.close, context=link.process.context.copy())
        await asyncio.sleep(for_s)
        self.world.cut.discard(node)

    async def _fill_disk(self, where: str, for_s: float) -> None:
        name = self._file(where)
        self.world.disk.full.add(name)
        await asyncio.sleep(for_s)
        self.world.disk.full.discard(name)

    def _file(self, where: str) -> str:
        return str(DATABASE if where == HERE else PLACE / where / JOURNAL)

    async def _run_short(self, where: str, for_s: float) -> None:
        self.world.machines[where].short = True
        await asyncio.sleep(for_s)
        self.world.machines[where].short = False

    def _end_boxes(self, where: str) -> None:
        self.losses.add(where)
        for box in list(self.world.machines[where].boxes.values()):
            box.die()

    # --- callers

    async def _insist(
        self, work: Callable[[WorldApp], Awaitable[Any]], times: int = 1000, *, gone: int | None = None
    ) -> Any:
        """Ask until it is answered; raises what is no matter of time, and after so many times anything.

        Who asks first is ``gone`` after so many steps, and asks again.
        """
        for left in range(times, 0, -1):
            try:
                return await self.world.ask(work, gone)
            except LATER:
                gone = None
                if left == 1:
                    raise
                await asyncio.sleep(0.3)
        raise AssertionError

    async def _call(self, about: dict[str, Any]) -> None:
        call = self.calls[about["number"]] = Asked(about["number"], about, self.world.loop.now_s)
        call.cancelled = about["trajectory"] in self._ended_in_part
        body = json.dumps(
            {"command": json.dumps(about["script"])} if about["function"] != "search" else {"s": 0.2}
        ).encode()
        attempts = 1000 if call.durable else 1
        sync = about["mode"] == "sync"

        async def submit(app: WorldApp) -> Told:
            request = InvocationRequest(
                function=about["function"],
                input=json.loads(body),
                body=body,
                mode=Mode.SYNC if sync else Mode.ASYNC,
                trajectory=about["trajectory"],
                key=about["key"],
            )
            invocation = await app.invocations.invoke(request)
            call.ids.setdefault(invocation.record.id)
            if sync:
                try:
                    await invocation.has_ended(None)
                finally:
                    app.invocations.leave(invocation)
                if invocation.refusal is not None:
                    raise invocation.refusal
            return self._shown(app, invocation)

        try:
            self._tell(call, await self._insist(submit, attempts, gone=about.get("gone")))
        except ConnectionError:
            call.unknown = True
            call.cancelled = call.cancelled or not call.kept
        except CodedError as error:
            call.refused = error.message
            self.note(f"call {call.number} is refused: {error.message}")
        if call.ids and not sync:
            await self._follow(call)

    async def _follow(self, call: Asked) -> None:
        """Ask for the end of an asynchronous call until it is told."""
        id = next(iter(call.ids))

        async def wait(app: WorldApp) -> Told:
            invocation = await app.invocations.get(id)
            await invocation.has_ended(5.0)
            return self._shown(app, invocation)

        while True:
            try:
                told = await self._insist(wait)
            except NotFound:
                if call.told:
                    call.refused = "what was accepted is not known any more"
                return
            self._tell(call, told)
            if told.state in ENDED:
                return

    def _shown(self, app: WorldApp, invocation: LiveInvocation) -> Told:
        """Return what a caller is told, as of now."""
        record = app.invocations.shown(invocation.record)
        reason = None if record.reason is None else record.reason.value
        at_s, refused = self.world.loop.now_s, app.store.failure is not None
        return Told(at_s, record.id, record.state.value, reason, record.result, record.message, refused)

    def _tell(self, call: Asked, told: Told) -> None:
        call.ids.setdefault(told.id)
        call.told.append(told)
        call.told.sort(key=lambda each: each.at_s)  # an answer may overtake another
        self.note(f"call {call.number} is told {told.id[:11]} {told.state} {told.reason} {told.message}")

    async def _cancel(self, number: int, gone: int | None) -> None:
        call = self.calls.get(number)
        if call is None or not call.ids:
            return
        id = next(iter(call.ids))

        async def cancel(app: WorldApp) -> Told:
            invocation = await app.invocations.cancel(id)
            await invocation.has_ended(10.0)
            return self._shown(app, invocation)

        call.cancelled = True
        try:
            self._tell(call, await self._insist(cancel, 20, gone=gone))
        except (*LATER, Conflict, NotFound) as error:
            self.note(f"cancel of call {number}: {error}")

    async def _end(self, trajectory: str, gone: int | None) -> None:
        try:
            await self._insist(lambda app: app.engine.end_trajectory(trajectory), 3, gone=gone)
        except (*LATER, CodedError) as error:
            self._ended_in_part.add(trajectory)
            self.note(f"end of {trajectory}: {error}")
        finally:
            # It may end what was asked for before it was answered, also what was asked for after it.
            for call in self.calls.values():
                if call.about["trajectory"] == trajectory:
                    call.cancelled = True

    # --- the end

    async def _come_to_rest(self) -> None:
        """Wait for the ends of all, end every trajectory, see that nothing is left, and read all once more."""
        places = [(call, id) for call in self.calls.values() for id in call.ids]
        names = sorted({call.about["trajectory"] for call in self.calls.values()} - {None})

        async def end_all(app: WorldApp) -> None:
            for _, id in places:
                with suppress(NotFound):
                    await (await app.invocations.get(id)).has_ended(REST_S)
            for name in names:
                await app.engine.end_trajectory(name)

        await self._insist(end_all)
        for _ in range(40):
            await asyncio.sleep(0.5)
            self.remains = self.left()
            if not self.remains:
                break
        await self._insist(partial(self._read, places))

    async def _read(self, places: Sequence[tuple[Asked, str]], app: WorldApp) -> None:
        for call, id in places:
            with suppress(NotFound):
                invocation = await app.invocations.get(id)
                rows = await app.logs.read(invocation.record.seq, 0)
                call.log = [row.data for row in rows if row.stream in ("stdout", "truncated", "dropped", "system")]
                call.record = replace(invocation.record)
                self._tell(call, self._shown(app, invocation))

    def left(self) -> list[str]:
        """Return what is held though nothing is to be done any more."""
        world, found = self.world, []
        app = world.app
        if app is not None:
            found += [f"invocation {each.record.id} lives" for each in app.invocations.living]
            found += [app.store.failure] if app.store.failure is not None else []
            found += [f"{name} is full of {pool}" for name, pool in _held(app)]
            remotes = [machine.remote for machine in app.machines._machines.values()]
            found += [f"{remote.name}: {len(remote._calls)} calls" for remote in remotes if remote._calls]
        for machine in world.machines.values():
            found += [f"sandbox {name} is left on {machine.name}" for name in machine.boxes]
        for name, daemon in world.daemons.items():
            if world.nodes[name].alive and daemon.busy:
                found.append(f"{name} keeps {list(daemon._attempts)}")
        if self._at_rest:
            for name, held in self.held().items():
                more = held - self._at_rest[HERE if name == HERE else "node"]
                found += [f"{name} keeps {count} {kind}" for kind, count in more.items()]
        return found

    def held(self) -> dict[str, Counter[str]]:
        """Count what each process has in memory, under way and open."""
        world, found = self.world, {}
        if world.app is not None and world.gateway is not None:
            found[HERE] = world.gateway.holds() + _objects(world.app)
        for name, daemon in world.daemons.items():
            if world.nodes[name].alive:
                found[name] = world.nodes[name].holds() + _objects(daemon)
        return found


AT_REST = tuple(
    SimOperation(
        1.0,
        "call",
        {
            "number": number,
            "function": function,
            "trajectory": trajectory,
            "key": f"k{number}",
            "mode": "async",
            "script": {"s": 0.2, "say": 1},
        },
    )
    for number, (function, trajectory) in enumerate((("shell", "t0"), ("again", None)))
)


@cache
def at_rest(nodes: tuple[str, ...], local: str) -> dict[str, Counter[str]]:
    """Return what a gateway and a node hold once a call or two have ended."""
    history = SimHistory(0, Plan(SimSetting(nodes=nodes, local=local), AT_REST))
    found: dict[str, Counter[str]] = {}
    read = history._read

    async def look(*given: Any) -> None:
        found.update(history.held())
        await read(*given)

    history._read = look  # type: ignore[method-assign, assignment]
    try:
        history.run()
    except TimeoutError:
        raise AssertionError(f"the world does not come to rest: {history.world.complaints[:1]}") from None
    of_nodes = [held for name, held in found.items() if name != HERE]
    return {HERE: found[HERE], "node": reduce(or_, of_nodes, Counter())}


def _objects(root: object) -> Counter[str]:
    """Count the product's objects that one of them leads to, but for what may stay."""
    found: Counter[str] = Counter()
    seen, todo = {id(root)}, [root]
    while todo:
        for each in gc.get_referents(todo.pop()):
            kind = type(each)
            house = kind.__module__.partition(".")[0]
            if id(each) in seen or issubclass(kind, ELSEWHERE) or house in ("tests", "structlog", "logging"):
                continue
            seen.add(id(each))
            todo.append(each)
            if house in ("gateway", "manager", "runtimes") and kind.__name__ not in MAY_STAY:
                found[kind.__name__] += 1
    return found


#: What leads out of a process.
ELSEWHERE = (type, ModuleType, FunctionType, BuiltinFunctionType, FrameType, CodeType, Context, Enum)


def _held(app: WorldApp) -> list[tuple[str, str]]:
    return [(pool.name, str(dict(pool.held))) for pool in app.engine._core.state.resources if pool.held]
