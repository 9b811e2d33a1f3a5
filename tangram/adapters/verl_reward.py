"""A reward function for verl; needs no verl to be imported.

reward.custom_reward_function:
  path: pkg://tangram.adapters.verl_reward
  name: compute_score
  reward_kwargs: {function: math, failed_as: {timeout: 0.0}}
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from tangram.adapters.rewards import GatewayRewards, step_of


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    function: str,
    **options: Any,
) -> float:
    """Return the reward of one solution; raises InfrastructureFailed and CommandTimedOut.

    The function is given ``{"response", "label", "data_source"}``, or what ``input`` of the row's ``extra_info`` holds:
    what a pytest function needs stands there, with ``{solution}`` in its files where the solution belongs. It counts as
    a rollout of the step that ``global_steps`` of ``extra_info`` names, if it is there.
    """
    template = (extra_info or {}).get("input")
    if template is not None:
        item = filled(template, solution_str)
    else:
        item = {"response": solution_str, "label": ground_truth, "data_source": data_source}
    rewards = GatewayRewards(function, **options)
    step = step_of((extra_info or {}).get("global_steps"))
    (score,) = await rewards.scores([item], key=f"verl-{uuid.uuid4().hex}", step=step)
    return score


def filled(value: Any, solution: str) -> Any:
    """Return it with the solution in place of ``{solution}``, in whatever texts it holds."""
    if isinstance(value, str):
        return value.replace("{solution}", solution)
    if isinstance(value, Mapping):
        return {key: filled(each, solution) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [filled(each, solution) for each in value]
    return value
