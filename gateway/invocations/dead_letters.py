"""Dead letters: asynchronous work that ended badly and waits for somebody to look at it."""

from __future__ import annotations

import asyncio

from gateway import wire
from gateway.invocations.invocation import InvocationRequest, LiveInvocation
from gateway.invocations.invocations import Invocations
from gateway.invocations.record import Mode, Record
from gateway.store.listing import Filter
from gateway.store.store import Store
from manager.errors import Conflict

#: Records that one purge reads at a time.
PAGE = 500


class DeadLetters:
    """List by `Invocations.find` with ``dead``; here they are sent again or let go of."""

    def __init__(self, invocations: Invocations, store: Store) -> None:
        self._invocations = invocations
        self._store = store
        #: Redrives under way, by the id of the dead letter.
        self._redrives: dict[str, asyncio.Task[LiveInvocation]] = {}

    async def redrive(self, invocation_id: str) -> LiveInvocation:
        """Submit the same call anew, as an invocation of its own that names the old one, which leaves the list.

        Two that do so at once get the same invocation. Raises NotFound, Conflict if it is no dead letter, and
        whatever refuses a submission.
        """
        task = self._redrives.get(invocation_id)
        if task is None:
            task = self._redrives[invocation_id] = asyncio.create_task(self._redrive(invocation_id))
            task.add_done_callback(lambda _: self._redrives.pop(invocation_id))
        return await asyncio.shield(task)

    async def _redrive(self, invocation_id: str) -> LiveInvocation:
        record = await self._dead(invocation_id)
        body = record.input or b"{}"
        timeout_s = record.options.get("timeout_s")
        request = InvocationRequest(
            function=record.function,
            input=wire.loads_object(body),
            body=body,
            mode=Mode.ASYNC,
            task=record.task,
            trajectory=record.trajectory,
            timeout_s=timeout_s if isinstance(timeout_s, float) else None,
            **record.trace,
            redrive_of=record.id,
            key=f"redrive-of:{record.id}",
        )
        invocation = await self._invocations.invoke(request)
        self._let_go(record)
        return invocation

    async def purge(self, invocation_id: str) -> None:
        """Take one off the list; its record stays. Raises NotFound or Conflict."""
        self._let_go(await self._dead(invocation_id))
        await self._store.commit()

    async def purge_all(self, function: str | None) -> int:
        """Take all (of one function) off the list; returns how many."""
        count, before = 0, None
        while True:
            page = await self._store.find(Filter(dead=True, function=function, before=before, limit=PAGE))
            for record in page.records:
                self._let_go(record)
            await self._store.commit()
            count += len(page.records)
            before = page.before
            if before is None:
                return count

    async def _dead(self, invocation_id: str) -> Record:
        record = (await self._invocations.get(invocation_id)).record
        if not record.dead:
            raise Conflict(f"invocation {invocation_id} is no dead letter", invocation_id=invocation_id)
        return record

    def _let_go(self, record: Record) -> None:
        record.dead = False
        self._store.note("let_go", record.seq)
