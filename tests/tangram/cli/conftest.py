"""The command line in this process: alone, and against a gateway that serves beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from click.testing import CliRunner

from gateway.cli import main
from tangram import InvocationResult
from tests.gateway.conftest import DEADLINE_S, RunningGateway

NOW = datetime.now(UTC)
#: (exit status, standard output, standard error)
Ran = tuple[int, str, str]
Tangram = Callable[..., Ran]
Served = Callable[..., Awaitable[Ran]]


def id_of(number: int) -> str:
    return f"{number:011x}-{number:012x}"


def invocation(number: int, function: str, **other: Any) -> InvocationResult:
    """A record of a running invocation, or as ``other`` says."""
    empty = ("parent", "reason", "retry_after_s", "started_at", "ended_at", "execution_ms", "act_ms", "callback")
    fields: dict[str, Any] = {
        **dict.fromkeys(empty),
        **dict.fromkeys(("message", "component"), ""),
        "id": id_of(number),
        "function": function,
        "revision": "r",
        "task": "swe",
        "trajectory": f"swe-{number}",
        "mode": "sync",
        "state": "running",
        "detail": {},
        "accepted_at": NOW - timedelta(seconds=9),
        "queue_ms": 1000.0,
        "overhead_ms": 44.0,
        "node": "node-a",
        "units": {"cpu": 2},
        "usage": {},
        "attempt": 1,
        "attempts": (),
        "dead": False,
    }
    return msgspec.convert(fields | other, InvocationResult)


@pytest.fixture
def tangram(capfd: pytest.CaptureFixture[str]) -> Tangram:
    """Run one verb in this process."""

    def run(*arguments: str) -> Ran:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main(arguments)
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run


@pytest.fixture
def served(gateway: RunningGateway, tmp_path: Path) -> Iterator[Served]:
    """Run one verb against the gateway, in a thread beside it; the gateway's own lines go elsewhere meanwhile."""
    runner = CliRunner(env={"TANGRAM_SERVER": f"http://127.0.0.1:{gateway.app.http_port}"})

    def ran(*arguments: str) -> Ran:
        with runner.isolation() as (out, err, _), pytest.raises(SystemExit) as ended:
            main.main(arguments)
        assert isinstance(ended.value.code, int)
        return ended.value.code, out.getvalue().decode(), err.getvalue().decode()

    async def run(*arguments: str) -> Ran:
        return await asyncio.wait_for(asyncio.to_thread(ran, *arguments), DEADLINE_S)

    with (tmp_path / "gateway.log").open("w") as lines:
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(lines))
        yield run
        structlog.reset_defaults()
