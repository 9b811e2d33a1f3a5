"""What the tests of foreign doors share: a gateway with doors open, whose function does what its test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from manager.function import FunctionSpec
from runtimes.runtime import Execution
from runtimes.testing import ScriptedRuntime, ScriptStep
from tests.gateway.conftest import GatewayBench, RunningGateway, function, serving

#: A handler that may run twice, one that waits alone in its queue, and one that may not be repeated.
HANDLERS = {
    "reward": function("reward", idempotent=True, max_queued=4096),
    "narrow_reward": function("narrow_reward", idempotent=True, max_queued=1, cost={}),
    "once": function("once"),
}


@asynccontextmanager
async def doors(
    directory: Path,
    facades: Mapping[str, object],
    script: Callable[[Execution], ScriptStep],
    functions: Mapping[str, FunctionSpec] | None = None,
    **server: object,
) -> AsyncIterator[RunningGateway]:
    """A gateway whose handlers follow the script, with these doors open."""
    bench = GatewayBench(
        directory, functions=HANDLERS | dict(functions or {}), server={"facades": dict(facades), **server}
    )
    async with serving(bench, runtime=ScriptedRuntime(script)) as running:
        yield running
