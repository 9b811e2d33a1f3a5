"""An engine that falls silent holds nobody up; one that is only slow is waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from manager.errors import CapacityExceeded
from runtimes.sandbox.docker.engine import DaemonThreads, EngineWatchdog

SILENCE_S = 0.1
DEADLINE_S = 60.0


class SlowEngine:
    """An engine that keeps its callers until it is let go, and answers pings or not."""

    def __init__(self) -> None:
        self.answers = True
        self.pinged = threading.Semaphore(0)
        self.released = threading.Event()
        self.begun = threading.Semaphore(0)

    def ping(self, within_s: float) -> bool:
        assert within_s == SILENCE_S / 2
        self.pinged.release()
        return self.answers

    def work(self) -> str:
        self.begun.release()
        assert self.released.wait(DEADLINE_S)
        return "done"


@pytest.fixture
def engine() -> Iterator[SlowEngine]:
    engine = SlowEngine()
    yield engine
    engine.released.set()


async def test_a_slow_call_is_waited_for_while_the_engine_answers(engine: SlowEngine) -> None:
    watchdog = EngineWatchdog(engine.ping, threads=1, silence_s=SILENCE_S)
    call = asyncio.create_task(watchdog.call(engine.work))
    for _ in range(3):
        assert await asyncio.to_thread(engine.pinged.acquire, timeout=DEADLINE_S)
    engine.released.set()
    assert await call == "done"
    await watchdog.close()


async def test_a_silent_engine_is_given_up_by_all_and_asked_nothing_more_until_it_answers(engine: SlowEngine) -> None:
    engine.answers = False
    watchdog = EngineWatchdog(engine.ping, threads=2, silence_s=SILENCE_S)
    async with asyncio.timeout(DEADLINE_S):
        ends = await asyncio.gather(*(watchdog.call(engine.work) for _ in range(4)), return_exceptions=True)
        assert [type(end) for end in ends] == [CapacityExceeded] * 4
        with pytest.raises(CapacityExceeded, match="does not answer") as refusal:
            await watchdog.call(lambda: pytest.fail("it was asked"))
        assert refusal.value.retry_after_s == SILENCE_S / 2
        engine.answers = True
        engine.released.set()
        while watchdog.silent:
            await asyncio.to_thread(engine.pinged.acquire, timeout=DEADLINE_S)
        assert await watchdog.call(lambda: "heard") == "heard"
        await watchdog.close()
    begun = sum(iter(lambda: int(engine.begun.acquire(blocking=False)), 0))
    assert begun == 2, "what waited for a thread was carried out after all"


async def test_a_look_tells_whether_it_answers_and_no_call_is_refused_for_it(engine: SlowEngine) -> None:
    watchdog = EngineWatchdog(engine.ping, threads=1, silence_s=SILENCE_S)
    assert await watchdog.look()
    engine.answers = False
    assert not await watchdog.look()
    assert not watchdog.silent and await watchdog.call(lambda: "tried") == "tried"
    engine.answers = True
    assert await watchdog.look(), "and so it is seen when it is back"
    await watchdog.close()


async def test_what_a_call_raises_is_raised(engine: SlowEngine) -> None:
    watchdog = EngineWatchdog(engine.ping, threads=1, silence_s=SILENCE_S)

    def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await watchdog.call(work)
    await watchdog.close()


async def test_a_cancelled_call_lets_go_at_once(engine: SlowEngine) -> None:
    watchdog = EngineWatchdog(engine.ping, threads=1, silence_s=60.0)
    call = asyncio.create_task(watchdog.call(engine.work))
    assert await asyncio.to_thread(engine.begun.acquire, timeout=DEADLINE_S)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    engine.released.set()
    assert await watchdog.call(lambda: "free") == "free"
    await watchdog.close()


async def test_the_end_does_not_wait_for_a_silent_engine(engine: SlowEngine) -> None:
    engine.answers = False
    watchdog = EngineWatchdog(engine.ping, threads=1, silence_s=SILENCE_S)
    with pytest.raises(CapacityExceeded):
        await watchdog.call(engine.work)
    async with asyncio.timeout(DEADLINE_S / 2):
        await watchdog.close()
    assert not engine.released.is_set()


def test_threads_are_started_as_they_are_needed_and_used_again() -> None:
    threads = DaemonThreads(2, "test")
    names = {threads.submit(lambda: threading.current_thread().name).result(DEADLINE_S) for _ in range(5)}
    assert len(names) <= 2
    barrier = threading.Barrier(2)
    both = [threads.submit(lambda: barrier.wait(DEADLINE_S)) for _ in range(2)]
    assert sorted(each.result(DEADLINE_S) for each in both) == [0, 1]
    threads.close(DEADLINE_S)
