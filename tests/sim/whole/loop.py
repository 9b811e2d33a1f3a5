"""An event loop with a virtual clock, on which simulated processes run, are delayed and are killed.

Nothing sleeps and no thread runs: when nothing is ready, the clock jumps to the next timer. Which process runs next is
drawn from the seed; within one process callbacks keep their order, as asyncio promises.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

#: More callbacks than any history has: what goes beyond is stuck.
TURNS_MAX = 400_000
#: Seconds for which a thread's work waits to begin, and its result to be known.
THREAD_S = 0.004


class Killed(BaseException):
    """Raised where a process ends in the middle of a write."""


class Stuck(AssertionError):
    """Raised when a history does not come to its end."""


class SimProcess:
    """What is killed as a whole: every callback and task that was begun within it."""

    def __init__(self, name: str, loop: SimLoop) -> None:
        self.name = name
        self.loop = loop
        self.alive = True
        #: What is to happen after so many callbacks and writes: (how many, tie, what), and how many there were.
        self._fuses: list[tuple[int, int, Callable[[], object]]] = []
        self._steps = 0
        #: What it holds of the world outside, each with what ends it when it is killed or has ended.
        self.held: dict[object, Callable[[], None]] = {}
        self.ready: deque[asyncio.Handle] = deque()
        self.context = copy_context()
        self.context.run(PROCESS.set, self)
        self.tasks: dict[int, asyncio.Task[Any]] = {}

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin a task of it."""
        return self.context.copy().run(self.loop.create_task, work)

    def holds(self) -> Counter[str]:
        """Count what goes on in it and what it has open, by kind."""
        living = [task.get_coro().__qualname__ for task in self.tasks.values() if not task.done()]  # type: ignore[union-attr]
        opened = [type(each).__name__ for each in self.held if not isinstance(each, tuple)]  # those are notes of ours
        return Counter([f"task {name}" for name in living] + opened)

    def burn(self, steps: int, then: Callable[[], object]) -> None:
        """Have something happen to it at the callback or write that comes after so many others."""
        heapq.heappush(self._fuses, (self._steps + steps, len(self._fuses), then))

    def step(self) -> None:
        """One more callback or write: it may be its last."""
        if self._fuses:
            self._steps += 1
            while self._fuses and self._fuses[0][0] < self._steps:
                self.context.copy().run(heapq.heappop(self._fuses)[2])

    def kill(self) -> None:
        """End it here and now; idempotent."""
        if not self.alive:
            return
        self.alive = False
        self.ready.clear()
        for task in self.tasks.values():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        for let_go in list(self.held.values()):
            let_go()


PROCESS: ContextVar[SimProcess] = ContextVar("process")


def write(process: SimProcess) -> None:
    """A write of a process is about to happen; raises Killed if it does not live to do it."""
    process.step()
    if not process.alive:
        raise Killed


class SimTask(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class SimFuture(asyncio.Future[Any]):
    """A future likewise."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class SimLoop(asyncio.AbstractEventLoop):
    """See the module."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.now_s = 1000.0
        self.turns = 0
        self._count = 0
        #: (instant, tie, handle).
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        #: Processes that have something ready.
        self._ready: list[SimProcess] = []
        #: What no task took up: reported to nobody, and a fault of ours.
        self.errors: list[str] = []
        self.outside = SimProcess("outside", self)
        self._debug = False

    # --- what asyncio asks of a loop

    def time(self) -> float:
        return self.now_s

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        self._count += 1
        future = SimFuture(loop=self)
        future.number = self._count
        return future

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        self._count += 1
        number = self._count
        SimTask.number = number
        task = SimTask(coro, loop=self, name=name or "task", context=context)
        task.number = number
        process = PROCESS.get() if context is None else context[PROCESS]
        process.tasks[number] = task
        task.add_done_callback(lambda _: process.tasks.pop(number, None))
        if not process.alive:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        return task

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._make_ready(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        handle._scheduled = True  # type: ignore[attr-defined]
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when its time has come."""

    def run_in_executor(  # type: ignore[override]
        self, executor: object, work: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Do blocking work in one go, a moment later; its result is known another moment later."""
        done, process = self.create_future(), PROCESS.get()

        def run() -> None:
            try:
                outcome, error = work(*args), None
            except Killed:
                return
            except Exception as failure:  # noqa: BLE001  # it is raised where it is waited for
                outcome, error = None, failure
            if process.alive:
                self.call_later(self._moment(), tell, outcome, error)

        def tell(outcome: Any, error: Exception | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(outcome)
            else:
                done.set_exception(error)

        self.call_later(self._moment(), run)
        return done

    def _moment(self) -> float:
        """Seconds that a thread takes: mostly next to none, now and then so many that much happens meanwhile."""
        chance = self.chance.random()
        return THREAD_S * chance if chance < 0.9 else self.chance.choice((0.05, 0.3))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        process = PROCESS.get(None)
        if process is not None and process.alive:
            self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def add_signal_handler(self, *args: Any) -> None: ...  # type: ignore[override]

    def remove_signal_handler(self, sig: int) -> bool:
        return True

    async def shutdown_asyncgens(self) -> None: ...

    # --- running

    def _make_ready(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        assert process is not None
        if not process.alive:
            return
        if not process.ready:
            self._ready.append(process)
        process.ready.append(handle)

    def run(self, work: Coroutine[Any, Any, Any], until_s: float) -> Any:
        """Run until the work of the world outside is done; raises what it raises, and Stuck."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            task = self.outside.spawn(work)
            while not task.done():
                self._turn(until_s)
            return task.result()
        finally:
            asyncio._set_running_loop(before)

    def _turn(self, until_s: float) -> None:
        """Run one callback, or let the clock jump."""
        self.turns += 1
        if self.turns > TURNS_MAX:
            raise Stuck(f"more than {TURNS_MAX} callbacks")
        timers = self._timers
        while timers and (timers[0][0] <= self.now_s or not self._ready):
            when_s, _, handle = heapq.heappop(timers)
            if handle.cancelled():
                continue
            process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
            if process is None or not process.alive:
                continue
            if when_s > until_s:
                raise Stuck(f"not at its end after {until_s:.0f} s")
            self.now_s = max(self.now_s, when_s)
            self._make_ready(handle)
        if not self._ready:
            raise Stuck("nothing is left to happen")
        ready = self._ready
        place = self.chance.randrange(len(ready)) if len(ready) > 1 else 0
        process = ready[place]
        if not process.ready:  # it was killed
            ready[place] = ready[-1]
            ready.pop()
            return
        handle_now = process.ready.popleft()
        if not process.ready:
            ready[place] = ready[-1]
            ready.pop()
        process.step()
        if not process.alive:
            return
        if not handle_now._cancelled:
            handle_now._run()
