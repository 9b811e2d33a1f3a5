"""Processes of this tree beside the one that measures."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from bench.serving import ROOT


@asynccontextmanager
async def child(*words: str, given: bytes = b"") -> AsyncIterator[asyncio.subprocess.Process]:
    """A process of this tree's Python, with a line on its standard input; killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if os.environ.get("BENCH_SPEAK") else subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(given)
        await process.stdin.drain()
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
