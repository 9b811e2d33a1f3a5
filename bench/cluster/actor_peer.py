"""The peer, run by an interpreter that has Ray: what a call of an actor costs its driver. It imports nothing of ours.

``actor_peer.py COUNT IN_FLIGHT`` prints one JSON object: CPU time of a call in microseconds with so many in flight,
calls a second, and milliseconds of one call at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

PAYLOAD = {"action": {"id": "a" * 24, "function": "noop", "input": "x" * 200}}
WARM_UP, ALONE = 200, 200


class NoopActor:
    """Does nothing, as the channel's other side does."""

    async def execute(self, action: dict[str, Any]) -> dict[str, Any]:
        return {"state": "succeeded", "result": {"exit_code": 0, "stdout": ""}}


async def measured(actor: Any, count: int, in_flight: int) -> dict[str, float]:
    gate = asyncio.Semaphore(in_flight)

    async def call() -> None:
        async with gate:
            await actor.execute.remote(PAYLOAD)

    await asyncio.gather(*[call() for _ in range(WARM_UP)])
    alone = []
    for _ in range(ALONE):
        began_s = time.perf_counter()
        await actor.execute.remote(PAYLOAD)
        alone.append((time.perf_counter() - began_s) * 1e3)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*[call() for _ in range(count)])
    took_s, spent_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    return {"cpu_us": spent_s / count * 1e6, "per_s": count / took_s, "p50_ms": sorted(alone)[ALONE // 2]}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_AUTO_CONNECT": "0"}
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    actor = ray.remote(NoopActor).options(num_cpus=0, max_concurrency=2000).remote()
    found = asyncio.run(measured(actor, int(sys.argv[1]), int(sys.argv[2])))
    found["version"] = ray.__version__
    ray.shutdown()
    out.write(json.dumps(found) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
