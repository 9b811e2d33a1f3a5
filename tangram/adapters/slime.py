"""A custom reward for slime; needs no slime to be imported.

    --custom-rm-path tangram.adapters.slime.reward        with TANGRAM_REWARD_FUNCTION=math in the environment

The function is given ``{"prompt", "response", "label"}`` as by slime's own ``remote_rm``. With ``--group-rm`` slime
calls it with a list of samples, and is answered with a list.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tangram.adapters.rewards import GatewayRewards


class SlimeSample(Protocol):
    """What is read of slime's samples."""

    @property
    def prompt(self) -> Any: ...

    @property
    def response(self) -> str: ...

    @property
    def label(self) -> Any: ...

    @property
    def metadata(self) -> Mapping[str, Any] | None: ...


async def reward(args: object, sample: SlimeSample | Sequence[SlimeSample], **ignored: object) -> float | list[float]:
    """Return the reward of a sample, or of each of a list; raises InfrastructureFailed and CommandTimedOut.

    The function is ``metadata["reward_function"]`` of the sample, else TANGRAM_REWARD_FUNCTION. What a failure is worth
    stands in TANGRAM_REWARD_FAILED_AS (``{"timeout": 0.0}``), else it is raised.
    """
    samples = list(sample) if isinstance(sample, Sequence) else [sample]
    by_function: dict[str, list[int]] = {}
    for index, each in enumerate(samples):
        by_function.setdefault(_function(each), []).append(index)
    scores = [0.0] * len(samples)
    for function, indices in by_function.items():
        inputs = [_input(samples[index]) for index in indices]
        rewards = GatewayRewards(function, failed_as=_failed_as())
        told = await rewards.scores(inputs, key=f"slime-{uuid.uuid4().hex}")
        for index, score in zip(indices, told, strict=True):
            scores[index] = score
    return scores if isinstance(sample, Sequence) else scores[0]


def _input(sample: SlimeSample) -> dict[str, Any]:
    return {"prompt": sample.prompt, "response": sample.response, "label": sample.label}


def _function(sample: SlimeSample) -> str:
    name = (sample.metadata or {}).get("reward_function") or os.environ.get("TANGRAM_REWARD_FUNCTION")
    if not name:
        raise ValueError("name the function: TANGRAM_REWARD_FUNCTION, or reward_function in the sample's metadata")
    return str(name)


def _failed_as() -> dict[str, float]:
    return dict(json.loads(os.environ.get("TANGRAM_REWARD_FAILED_AS", "{}")))
