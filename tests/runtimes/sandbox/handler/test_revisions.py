"""Revisions of a handler: the one that serves has its instances, whatever is made ready beside it."""

from __future__ import annotations

import asyncio

from runtimes.sandbox.handler.runtime import HandlerRuntime
from tests.runtimes.sandbox.handler.conftest import DEADLINE_S, Function, call, until


async def test_a_new_revision_serves_new_actions_while_the_old_one_ends(
    runtime: HandlerRuntime, function: Function
) -> None:
    old = function("def score(event, context): return 'old'", revision="1")
    new = function("def score(event, context): return 'new'", revision="2")
    await runtime.prepare(old)
    assert await call(runtime, old) == "old"
    await runtime.prepare(new)
    assert (await call(runtime, new), await call(runtime, old)) == ("new", "old")
    assert runtime.instances() == {"reward": 1}


async def test_a_revision_that_is_prepared_and_never_served_takes_nothing_from_the_one_that_is(
    runtime: HandlerRuntime, function: Function
) -> None:
    """As where another function of the same change cannot be prepared."""
    counting = """
        calls = 0
        def score(event, context):
            global calls
            calls += 1
            return calls
    """
    old, new = function(counting, revision="1"), function(counting, revision="2")
    await runtime.prepare(old)
    await runtime.prepare(new)
    assert [await call(runtime, old) for _ in range(3)] == [1, 2, 3]
    assert [await call(runtime, new) for _ in range(3)] == [1, 2, 3]
    await until(lambda: runtime.instances() == {"reward": 1})
    await runtime.prepare(old)  # back to the first one
    assert [await call(runtime, old) for _ in range(2)] == [1, 2]


async def test_two_revisions_may_be_prepared_at_once(runtime: HandlerRuntime, function: Function) -> None:
    """As where a function is changed while its first form is still being made ready: both tries come to an end."""
    slow = "import time\ntime.sleep(0.3)\ndef score(event, context): return {!r}"
    revisions = [function(slow.format(each), revision=each, instances_min=2) for each in "12"]
    async with asyncio.timeout(DEADLINE_S):
        first, second = (asyncio.create_task(runtime.prepare(each)) for each in revisions)
        await until(lambda: len(runtime.sandboxes) >= 2)
        assert await call(runtime, revisions[1]) == "2"
        await asyncio.gather(first, second)
        await until(lambda: runtime.instances() == {"reward": 2})
        assert await call(runtime, revisions[1]) == "2"
