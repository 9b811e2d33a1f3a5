"""A member of a batch is answered when its own sequences have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from manager.function import ModelAction
from runtimes.model.processes import ForkServer
from runtimes.model.request import ModelSettings
from runtimes.model.runtime import ModelRuntime
from runtimes.runtime import Result
from tests.runtimes.model.asking import execution, function
from tests.runtimes.model.conftest import Write

IDS = [7, 3, 99, 12]


def value(result: Result) -> Mapping[str, object]:
    assert isinstance(result.value, dict)
    return result.value


@pytest.mark.promise("A short continuation is answered while a long one beside it goes on.")
async def test_a_short_continuation_is_answered_while_a_long_one_beside_it_goes_on(
    checkpoint: Write, settings: ModelSettings, fork_server: ForkServer
) -> None:
    runtime = ModelRuntime(replace(settings, gather_s=300), fork_server=fork_server)
    asked, names = function(checkpoint("qwen3", "lm"), ModelAction.GENERATE, max_new_tokens=100), ("short", "long")
    ids = {"token_ids": [IDS]}
    await runtime.prepare(asked)
    ends: list[str] = []

    async def one(name: str, **sampling: object) -> Result:
        result = await runtime.execute(execution(asked, {**ids, **sampling}, name=name, batch=names))
        ends.append(name)
        return result

    short, long = await asyncio.gather(one("short", max_new_tokens=1), one("long", max_new_tokens=100, seed=1))
    assert ends == ["short", "long"]
    assert (short.usage.get("early"), long.usage.get("early")) == (1.0, None)
    assert (short.usage["batch"], short.usage["devices"]) == (2.0, 1.0)
    alone = await runtime.execute(execution(asked, {**ids, "max_new_tokens": 1}))
    assert value(short)["token_ids"] == value(alone)["token_ids"]
    assert len(value(long)["token_ids"][0]) > 1  # type: ignore[index]
    await runtime.close()
