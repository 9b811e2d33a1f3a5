"""What each door adds: its smallest call beside the same work by the gateway's own route, in turns."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from bench.facades.serving import SERVER, ServedDoors, dumped, served
from bench.gateway import BenchConnection, timed
from bench.report import Figure, median

EACH, WARM = 20, 5
HANDLER = "def grade(event, context):\n    return 1.0\n"
CONFIG = (
    SERVER
    + """\
  facades:
    rewards: {{}}
    sandboxfusion: {{languages: {{python: shell}}}}
    mcp: {{functions: [shell]}}
    swerex: {{function: shell}}
sandbox: {{provider: process}}
functions:
  grade: {{runtime: handler, handler: "noop:grade", cost: {{cpu: 1}}, scale: {{min: 1, max: 1}}, idempotent: true}}
  shell: {{runtime: exec, cost: {{cpu: 1}}, timeout: 30s, idempotent: true}}
"""
)
NATIVE_GRADE, NATIVE_SHELL = "/v1/functions/grade/invocations", "/v1/functions/shell/invocations"
TRUE = dumped({"argv": ["true"]})

Call = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class DoorPair:
    """A door's call, and the same work without the door."""

    door: Call
    native: Call


async def overheads(directory: Path, rounds: int) -> dict[str, Figure]:
    """Return the medians of both, and their ratio, by door."""
    async with served(directory, CONFIG, noop=HANDLER) as doors:
        connection = await doors.connection()
        try:
            by_door = await pairs(doors, connection)
            return {name: await compared(pair, rounds) for name, pair in by_door.items()}
        finally:
            connection.close()


async def compared(pair: DoorPair, rounds: int) -> dict[str, Figure]:
    """Return both medians in milliseconds and how many times the door's is the native one's."""

    async def door() -> None:
        await pair.door()

    async def native() -> None:
        await pair.native()

    for call in (door, native):
        await timed(call, WARM)
    doors_ms: list[float] = []
    natives_ms: list[float] = []
    for _ in range(rounds):
        doors_ms += await timed(door, EACH)
        natives_ms += await timed(native, EACH)
    return overhead(median(doors_ms), median(natives_ms))


def overhead(door_ms: float, native_ms: float) -> dict[str, Figure]:
    """Return both medians and their ratio as a row of the report."""
    return {
        "door_p50_ms": round(door_ms, 2),
        "native_p50_ms": round(native_ms, 2),
        "door_over_native": round(door_ms / native_ms, 2),
    }


async def pairs(doors: ServedDoors, connection: BenchConnection) -> dict[str, DoorPair]:
    """Return what is compared: one connection, so nothing is measured beside its work."""
    numbers = itertools.count()
    graded = dumped({"prompt": "1+1=", "response": "2", "label": "2"})
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}
    opening = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": hello}
    accepting = {"accept": "application/json, text/event-stream"}
    opened = await doors.http.post("/mcp", json=opening, headers=accepting)
    opened.raise_for_status()
    session = f"Accept: application/json, text/event-stream\r\nMcp-Session-Id: {opened.headers['mcp-session-id']}\r\n"
    await doors.post("/swerex/shell/agent/create_session", {})

    def post(path: str, body: bytes, headers: str = "") -> Call:
        return lambda: connection.post(path, body, headers)

    def tool() -> Awaitable[object]:
        params = {"name": "shell", "arguments": {"argv": ["true"]}}
        call = {"jsonrpc": "2.0", "id": next(numbers), "method": "tools/call", "params": params}
        return connection.post("/mcp", dumped(call), session)

    program = dumped({"code": "pass", "language": "python", "run_timeout": 10})
    python = dumped({"argv": ["python3", "-c", "pass"]})
    in_trajectory = post(NATIVE_SHELL, TRUE, "X-Trajectory-Id: native\r\n")
    execute = dumped({"command": ["true"]})
    typed = dumped({"command": "true", "check": "silent", "action_type": "bash"})
    return {
        "rewards": DoorPair(post("/rm/grade", graded), post(NATIVE_GRADE, graded)),
        "sandboxfusion": DoorPair(post("/sandboxfusion/run_code", program), post(NATIVE_SHELL, python)),
        "mcp": DoorPair(tool, in_trajectory),
        "swerex_execute": DoorPair(post("/swerex/shell/agent/execute", execute), in_trajectory),
        "swerex_session": DoorPair(post("/swerex/shell/agent/run_in_session", typed), in_trajectory),
    }
