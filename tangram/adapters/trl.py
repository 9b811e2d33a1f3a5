"""Reward functions for TRL's GRPO and RLOO trainers; needs no TRL to be imported.

GRPOTrainer(reward_funcs=[reward("math", lambda prompt, completion, row: {"answer": completion, ...})], ...)
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tangram.adapters.rewards import GatewayRewards, step_of

#: What a function of the gateway is given for a completion: the prompt, the completion, and the row's other columns.
RewardInput = Callable[[Any, Any, Mapping[str, Any]], Mapping[str, Any] | None]


def reward(
    function: str,
    make_input: RewardInput | None = None,
    *,
    name: str | None = None,
    counts: bool = True,
    **options: Any,
) -> Callable[..., Awaitable[list[float | None]]]:
    """Return a reward function: one action for each completion, all at once.

    ``make_input`` says what the function is given: ``{"prompt", "response", "label"}``, of a column ``label``, without.
    None from it is a completion that this reward does not concern. ``name`` is how TRL logs it. Each action counts as a
    rollout of the trainer's step (its ``global_step``): of several rewards let one count, and the others not.
    ``options`` are those of `GatewayRewards`: ``server``, ``token``, ``task``, ``timeout_s``, ``failed_as``.
    """
    rewards = GatewayRewards(function, **options)
    make = make_input or _input

    async def judge(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        rows = [
            {key: values[index] for key, values in columns.items() if _is_column(values, len(prompts))}
            for index in range(len(prompts))
        ]
        inputs = [make(*each) for each in zip(prompts, completions, rows, strict=True)]
        present = [each for each in inputs if each is not None]
        step = step_of(getattr(columns.get("trainer_state"), "global_step", None)) if counts else None
        scores = iter(await rewards.scores(present, key=f"trl-{uuid.uuid4().hex}", step=step))
        return [None if each is None else next(scores) for each in inputs]

    judge.__name__ = name or function
    return judge


def _input(prompt: Any, completion: Any, row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"prompt": prompt, "response": text_of(completion), "label": row.get("label")}


def text_of(completion: Any) -> str:
    """Return the text of a completion: TRL gives a list of messages where the prompt was a conversation."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)


def _is_column(values: object, rows: int) -> bool:
    return isinstance(values, list) and len(values) == rows
