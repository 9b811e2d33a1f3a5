"""The yardstick of programs: what SandboxFusion's own runner does for one, and no more.

A fresh directory, the program in a file of it, ``bash -c "python FILE"`` in a session of its own with bounds of its
address space, output read to its end, the whole group killed. Nothing keeps programs apart, and as many run at once as
are asked for. `main` serves ``/run_code`` and says its port.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from gateway.http.server import listen, serve

BOUNDED = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_STACK)


def bounding(limit_bytes: int) -> Callable[[], None]:
    """Return what a child does before its program: it bounds itself."""

    def bound() -> None:
        for kind in BOUNDED:
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard), hard))

    return bound


async def run_code(request: Request) -> JSONResponse:
    """Run a program of Python, and tell how it ended."""
    asked = await request.json()
    limit_bytes = int(asked["memory_limit_MB"]) * 2**20
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / f"{secrets.token_hex(8)}.py"
        file.write_text(asked["code"])
        child = await asyncio.create_subprocess_exec(
            "/bin/bash",
            "-c",
            shlex.join([sys.executable, str(file)]),
            cwd=name,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=bounding(limit_bytes) if limit_bytes > 0 else None,
        )
        result: dict[str, object] = {"status": "Finished", "stdout": "", "stderr": ""}
        try:
            async with asyncio.timeout(asked["run_timeout"]):
                out, err = await child.communicate((asked["stdin"] or "").encode())
            result |= {"stdout": out.decode("utf-8", "replace"), "stderr": err.decode("utf-8", "replace")}
        except TimeoutError:
            result["status"] = "TimeLimitExceeded"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
    late = result["status"] != "Finished"
    result |= {"return_code": None if late else child.returncode, "execution_time": time.perf_counter() - began}
    status = "Success" if result["return_code"] == 0 else "Failed"
    body = {"status": status, "message": "", "compile_result": None, "run_result": result}
    return JSONResponse({**body, "executor_pod_name": None, "files": {}})


async def serving() -> None:
    """Serve to the end of the process, and say where."""
    listener = listen("127.0.0.1", 0)
    print(json.dumps({"http": listener.getsockname()[1]}), flush=True)
    app = Starlette(routes=[Route("/run_code", run_code, methods=["POST"])])
    await serve(app, listener, asyncio.Event().wait, 1.0)


def main() -> None:
    """Be the server."""
    asyncio.run(serving())
