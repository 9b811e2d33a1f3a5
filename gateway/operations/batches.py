"""Batches: many calls that are accepted with one commit, each with its own verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.invocations.invocation import InvocationRequest, LiveInvocation
from gateway.services import Services
from manager.errors import CodedError, TooLarge

#: A call, or why it cannot be read; what became of it.
ReadCall = InvocationRequest | CodedError
Verdict = LiveInvocation | CodedError


def check_batch(services: Services, count: int) -> None:
    """Raise TooLarge for more calls than a batch may hold."""
    if count > services.bounds.batch_max:
        raise TooLarge(f"{count} calls are more than server.batch_max, {services.bounds.batch_max}", component="batch")


async def invoke_batch(services: Services, calls: Sequence[ReadCall], wait: str, timeout_s: float) -> list[Verdict]:
    """Accept those that can be read, and wait for the ends of none, any or all; verdicts in the order of the calls."""
    readable = [call for call in calls if isinstance(call, InvocationRequest)]
    accepted = iter(await services.invocations.invoke_all(readable))
    verdicts = [next(accepted) if isinstance(call, InvocationRequest) else call for call in calls]
    if wait != "none":
        await _wait(verdicts, asyncio.FIRST_COMPLETED if wait == "any" else asyncio.ALL_COMPLETED, timeout_s)
    return verdicts


async def _wait(verdicts: Sequence[Verdict], until: str, timeout_s: float) -> None:
    waits = {
        asyncio.ensure_future(verdict.ended.wait())
        for verdict in verdicts
        if isinstance(verdict, LiveInvocation) and not verdict.ended.is_set()
    }
    already = any(isinstance(verdict, LiveInvocation) and verdict.ended.is_set() for verdict in verdicts)
    try:
        if waits and not (already and until == asyncio.FIRST_COMPLETED):
            await asyncio.wait(waits, timeout=timeout_s, return_when=until)
    finally:
        for wait in waits:
            wait.cancel()
