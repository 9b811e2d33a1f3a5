"""Rewards for AReaL; needs no AReaL to be imported.

    workflow = RLVRWorkflow(reward_fn=anything, gconfig=..., tokenizer=...)
    workflow.async_reward_fn = GatewayReward("math")

AReaL's own wrapper of rewards runs them in a few processes, gives each 15 s with the wait for a process, and after four
tries takes what has not come for a reward of 0, in silence. `GatewayReward` stands in its place: as many at once as
there are, each waits as long as it needs, and a failure is raised. Where a workflow is made from texts alone
(``workflow_kwargs: {reward_fn: tangram.adapters.areal.reward}``) the wrapper stays: see `reward`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from tangram.adapters.provider import InfrastructureFailed
from tangram.adapters.rewards import GatewayRewards

#: Seconds that `reward` waits in one try, unless TANGRAM_REWARD_PATIENCE_S says otherwise: less than the 15 after which
#: AReaL's wrapper gives its process up.
PATIENCE_S = 12.0
#: What a function of the gateway is given for a completion: the prompt, the completion, and the row's columns.
RewardInput = Callable[[str, str, Mapping[str, Any]], Mapping[str, Any]]


def _input(prompt: str, completion: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    label = next((row[name] for name in ("answer", "label", "solution") if name in row), None)
    return {"prompt": prompt, "response": completion, "label": label}


class GatewayReward:
    """A workflow's ``async_reward_fn``: one action for each completion.

    ``make_input`` says what the function is given: ``{"prompt", "response", "label"}`` without it, the label of the
    column ``answer``, ``label`` or ``solution``. ``options`` are those of `GatewayRewards`: ``server``, ``token``,
    ``task``, ``timeout_s``, ``failed_as``.
    """

    def __init__(self, function: str, make_input: RewardInput | None = None, **options: Any) -> None:
        self._rewards = GatewayRewards(function, **options)
        self._make_input = make_input or _input

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **row: Any
    ) -> float:
        """Return the reward of a completion; raises InfrastructureFailed and CommandTimedOut."""
        item = self._make_input(prompt, completions, row)
        (score,) = await self._rewards.scores([item], key=f"areal-{uuid.uuid4().hex}")
        return score


def reward(
    prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **row: Any
) -> float:
    """Return the reward of a completion, in a process of AReaL's wrapper; raises InfrastructureFailed.

    The function is TANGRAM_REWARD_FUNCTION, and TANGRAM_REWARD_FAILED_AS (``{"timeout": 0.0}``) says what a failure is
    worth. A try that has waited for TANGRAM_REWARD_PATIENCE_S (12) raises, and the wrapper's next one waits for the
    same invocation: what takes longer than its four tries is an error, and no reward of 0. A completion that comes
    twice in one training has one invocation.
    """
    function = os.environ.get("TANGRAM_REWARD_FUNCTION")
    if not function:
        raise ValueError("name the function: TANGRAM_REWARD_FUNCTION")
    patience_s = float(os.environ.get("TANGRAM_REWARD_PATIENCE_S", PATIENCE_S))
    failed_as = json.loads(os.environ.get("TANGRAM_REWARD_FAILED_AS", "{}"))
    item = _input(prompt, completions, row)
    text = json.dumps([function, item, list(prompt_ids), list(completion_ids)], sort_keys=True, default=repr)
    key = f"areal-{socket.gethostname()}-{os.getppid()}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"

    async def ask() -> list[float]:
        try:
            async with asyncio.timeout(patience_s):
                return await GatewayRewards(function, failed_as=failed_as).scores([item], key=key)
        except TimeoutError:
            message = f"{function} has not ended after {patience_s:g} s; the next try waits on for it"
            raise InfrastructureFailed(message, "not_ended") from None

    (score,) = _loop().run(ask())
    return score


@cache
def _loop() -> asyncio.Runner:
    """Return this process's event loop: its client keeps its connections from reward to reward."""
    return asyncio.Runner()
