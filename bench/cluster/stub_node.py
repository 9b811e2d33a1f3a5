"""A real daemon with a runtime that does no work: ``python -m bench.cluster.stub_node HOST PORT FINGERPRINT NAME TICKET
DIRECTORY CORES``. It prints when its first action began.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import structlog
import uvloop

from bench.cluster.stub_runtime import NoEnvironments, StubRuntime
from manager.config import NodeSpec
from manager.function import FunctionSpec
from runtimes.executor import LocalExecutor
from runtimes.node.daemon import DaemonSettings, NodeDaemon, NodeRuntimes
from runtimes.runtime import Runtime


def serve_node(runtime: Runtime) -> None:
    """Join as the command line says, and serve with this runtime for every function until killed."""
    host, port, fingerprint, name, ticket, directory, cores = sys.argv[1:]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))

    async def check(function: FunctionSpec) -> None: ...

    async def close() -> None: ...

    async def run() -> None:
        settings = DaemonSettings(
            host=host,
            port=int(port),
            fingerprint=fingerprint,
            ticket=ticket,
            state_dir=Path(directory),
            spec=NodeSpec(name=name, numa=(tuple(range(int(cores))),), memory_bytes=2**41),
        )
        executor = LocalExecutor(dict.fromkeys(("exec", "handler", "pytest"), runtime))
        parts = NodeRuntimes(executor=executor, environments=NoEnvironments(), prepare=check, close=close)
        await NodeDaemon(settings, parts).run()

    uvloop.run(run())


if __name__ == "__main__":
    serve_node(StubRuntime(lambda began_s: print(began_s, flush=True)))
