"""Rewards from a function of a gateway, for trainers that call a Python function: TRL, slime, verl and their like."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, SupportsIndex

from tangram.adapters.provider import InfrastructureFailed, failure_of, refusal_of
from tangram.client import AsyncClient, InvocationResult
from tangram.errors import TangramError

#: Completions of one trainer that are judged at once; the gateway queues what it has no cores for.
CONCURRENCY = 512


class GatewayRewards:
    """Judges completions by one function: a handler, a pytest function or a reward model.

    The function returns a number, or an object with ``reward`` or ``score``. ``failed_as`` says what a failure is
    worth, by its reason: ``{"timeout": 0.0}`` takes a program that never ends for a wrong one. A reason that it does
    not name raises InfrastructureFailed or CommandTimedOut, so that training stops with a message instead of learning
    from rewards that nobody gave. ``no_reward`` is the reason of a result without a number.

    Each call has a key, so it survives a gateway that is killed and started again. ``server`` and ``token`` default
    to TANGRAM_SERVER and TANGRAM_TOKEN; it may be pickled and used from several event loops.
    """

    def __init__(
        self,
        function: str,
        *,
        server: str | None = None,
        token: str | None = None,
        task: str | None = None,
        timeout_s: float | None = None,
        failed_as: Mapping[str, float] | None = None,
        client: AsyncClient | None = None,
    ) -> None:
        self.function, self.task, self.timeout_s = function, task, timeout_s
        self.failed_as = dict(failed_as or {})
        self._client = shared_client(server, token) if client is None else client

    async def scores(
        self, inputs: Sequence[Mapping[str, Any]], key: str | None = None, *, step: int | None = None
    ) -> list[float]:
        """Return the reward of each input, in order; what is asked again with the same ``key`` runs nothing twice.

        Each counts as a rollout of the ``step`` of the task, if one is named.
        """
        try:
            ends = await self._client.map(
                self.function,
                inputs,
                task=self.task,
                step=step,
                key=key,
                timeout_s=self.timeout_s,
                concurrency=max(1, min(CONCURRENCY, len(inputs))),
                return_failures=True,
            )
        except TangramError as error:
            raise refusal_of(error, "") from error
        return [self.score(end) for end in ends]

    def score(self, end: InvocationResult | TangramError) -> float:
        """Return the reward of one end; raises what `failed_as` does not name."""
        if isinstance(end, TangramError):
            reason, error = end.code, refusal_of(end, "")
        elif not end.ok:
            reason, error = end.reason or end.state, failure_of(end, "")
        else:
            reward = bare(end.result)
            if reward is not None:
                return reward
            reason = "no_reward"
            message = f"{end.function} {end.id} gave no reward: {end.result!r:.200}"
            error = InfrastructureFailed(message, reason, invocation=end.id)
        if reason in self.failed_as:
            return self.failed_as[reason]
        raise error


def step_of(value: object) -> int | None:
    """Return the number of a step that a trainer tells of, in whatever integer type; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    step = value.__index__()
    return step if 0 <= step < 2**31 else None


def bare(result: object) -> float | None:
    """Return the number of a result, or of its ``reward`` or ``score``; None for what is none."""
    if isinstance(result, Mapping):
        result = result.get("reward", result.get("score"))
    if isinstance(result, bool) or not isinstance(result, int | float) or not math.isfinite(result):
        return None
    return float(result)


@cache
def shared_client(server: str | None, token: str | None) -> AsyncClient:
    """Return this process's client of a gateway: trainers call from many places, and none of them says when it ends."""
    return AsyncClient(server, token=token)
