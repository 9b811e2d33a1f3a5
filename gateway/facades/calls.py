"""Calls of foreign clients: held in the queue as long as the client waits, and withdrawn a second before it gives up.

To wait is no failure. Most of these clients turn a 429 or 503 into a reward of zero, or end the training: a call that
finds the queue full stands in line here, and what has not ended in time is taken back before its client is told to
come again.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress

from starlette.requests import ClientDisconnect, Request

from gateway.invocations.admission import Admission, HeldInputs
from gateway.invocations.invocation import InvocationRequest, LiveInvocation
from gateway.invocations.invocations import Invocations
from gateway.services import Services
from manager.errors import CapacityExceeded, CodedError, Conflict, QuotaExceeded

#: Seconds between the answer and the moment at which the client gives up.
MARGIN_S = 1.0
#: Seconds after which one in line tries again though nobody called it: what was full may have been another bound.
RECHECK_S = 5.0
AGAIN_S = 1.0


def deadline_s(client_timeout_s: float) -> float:
    """Return the instant on the loop's clock at which to answer a client that gives up after so many seconds."""
    now_s = asyncio.get_running_loop().time()
    return now_s + max(client_timeout_s - MARGIN_S, client_timeout_s / 2)


class WaitingLine:
    """Calls that found the queue full, first come first served; as many as there are open connections at most."""

    def __init__(self, admission: Admission) -> None:
        self._waiting: OrderedDict[asyncio.Future[None], str] = OrderedDict()
        self._by_function: Counter[str] = Counter()
        admission.on_leave.append(self._left)

    def __len__(self) -> int:
        return len(self._waiting)

    def has(self, function: str) -> bool:
        """Return whether a call of the function waits."""
        return self._by_function[function] > 0

    async def wait(self, function: str, timeout_s: float) -> None:
        """Return when it is this call's turn to try, or after ``timeout_s``."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = function
        self._by_function[function] += 1
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # called, and gone: the next one's turn
                self._left(function)
            raise
        finally:
            self._waiting.pop(turn, None)
            self._by_function[function] -= 1
            self._by_function += Counter()  # forgets those of whom none waits

    def _left(self, function: str) -> None:
        """A call of ``function`` left the queue: the first that waits for it may try, else the first of all."""
        if not self._waiting:
            return
        turn = next((each for each, name in self._waiting.items() if name == function), next(iter(self._waiting)))
        del self._waiting[turn]
        if not turn.done():
            turn.set_result(None)


class ForeignCalls:
    """Makes the calls of all foreign doors."""

    def __init__(self, services: Services) -> None:
        self._invocations: Invocations = services.invocations
        self._held: HeldInputs = services.held
        self.line = WaitingLine(services.admission)

    async def run(self, request: Request, calls: Sequence[InvocationRequest], until_s: float) -> list[LiveInvocation]:
        """Return the calls' invocations, ended; the caller is watched meanwhile, and takes its calls with it.

        Raises CapacityExceeded, the calls withdrawn, at ``until_s`` on the loop's clock (calls with a key go on);
        CodedError for a call that is refused; ClientDisconnect.
        """
        loop = asyncio.get_running_loop()
        work = loop.create_task(self._run(calls, until_s))
        watcher = loop.create_task(_gone(request))
        try:
            await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise ClientDisconnect()
        finally:
            for task in (work, watcher):
                task.cancel()
            await asyncio.gather(work, watcher, return_exceptions=True)

    async def accept(self, call: InvocationRequest, until_s: float) -> LiveInvocation:
        """Return an asynchronous call, accepted; raises CapacityExceeded at ``until_s``, CodedError."""
        invocation = await self._admit(call, until_s)
        self.leave(invocation)
        return invocation

    async def attend(self, call: InvocationRequest, until_s: float) -> LiveInvocation:
        """Return a call, accepted, that lasts no longer than its caller, who must `leave` it; raises as `accept`."""
        return await self._admit(call, until_s)

    def leave(self, invocation: LiveInvocation) -> None:
        """Its caller is gone; one that has not ended, and is not to go on alone, ends."""
        self._invocations.leave(invocation)

    async def _run(self, calls: Sequence[InvocationRequest], until_s: float) -> list[LiveInvocation]:
        now = asyncio.get_running_loop().time
        made: list[LiveInvocation] = []
        try:
            for call in calls:
                made.append(await self._admit(call, until_s))  # noqa: PERF401  # what was made is left, also if one is refused
            for invocation in made:
                if not await invocation.has_ended(max(0.0, until_s - now())):
                    raise await self._withdrawn(made)
                if invocation.refusal is not None:
                    raise invocation.refusal
            return made
        finally:
            for invocation in made:
                if not invocation.record.terminal:
                    self._invocations.leave(invocation)

    async def _admit(self, call: InvocationRequest, until_s: float) -> LiveInvocation:
        """Return the accepted call, which may stand in line first; its bytes are counted meanwhile."""
        now = asyncio.get_running_loop().time
        full = f"calls of {call.function} wait already"
        if not self.line.has(call.function):
            try:
                return await self._invocations.invoke(call)
            except (QuotaExceeded, CapacityExceeded) as error:
                full = error.message
        while (left_s := until_s - now()) > 0:
            await self._stand(call, min(left_s, RECHECK_S))
            if now() < until_s:
                try:
                    return await self._invocations.invoke(call)
                except (QuotaExceeded, CapacityExceeded) as error:
                    full = error.message
        raise _late(full)

    async def _stand(self, call: InvocationRequest, timeout_s: float) -> None:
        self._held.take(len(call.body))
        try:
            await self.line.wait(call.function, timeout_s)
        finally:
            self._held.give(len(call.body))

    async def _withdrawn(self, made: Sequence[LiveInvocation]) -> CodedError:
        """Take back what has not ended, but for what a client's next try joins; return what the client is told."""
        left = [invocation for invocation in made if not invocation.record.terminal]
        for invocation in left:
            if not invocation.record.detached:
                with suppress(Conflict):
                    await self._invocations.cancel(invocation.record.id, "withdrawn: its client would have given up")
        error = _late("the call was not ended in the time that its client waits")
        error.invocation_id = left[0].record.id if left else None
        return error


def _late(message: str) -> CapacityExceeded:
    return CapacityExceeded(f"{message}; send it again", component="facades", retry_after_s=AGAIN_S)


async def _gone(request: Request) -> None:
    """Return when the connection closes."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
