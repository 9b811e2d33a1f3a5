"""What `logprobs` tells beside each token, as transformers has it: its id, its rank and the likeliest in its place."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.model

from manager.errors import ActionFailed
from runtimes.model.runtime import ModelRuntime
from tests.runtimes.model.asking import execution
from tests.runtimes.model.checkpoints import IDS, plain_table
from tests.runtimes.model.conftest import Write
from tests.runtimes.model.test_runtime import GIVEN, teacher, value


@pytest.mark.parametrize("dop", [1, 2, 4])
async def test_the_likeliest_tokens_and_ranks_are_those_of_transformers(
    dop: int, checkpoint: Write, runtime: ModelRuntime
) -> None:
    asked = teacher(checkpoint, (dop,))
    given = {"token_ids": IDS, "top_logprobs": 5}
    told: Any = value(await runtime.execute(execution(asked, given, (0, dop))))
    plain: Any = value(await runtime.execute(execution(asked, GIVEN, (0, dop))))
    assert told["token_ids"] == IDS
    for index, ids in enumerate(IDS):
        table = plain_table(asked.model.path, ids)  # type: ignore[union-attr]
        assert told["logprobs"][index] == pytest.approx(plain["logprobs"][index], abs=1e-6)
        for position, token in enumerate(ids[1:]):
            best = table[position].topk(5)
            shown = told["top_logprobs"][index][position]
            assert [each for each, _ in shown] == best.indices.tolist()
            assert [number for _, number in shown] == pytest.approx(best.values.tolist(), abs=1e-5)
            assert told["ranks"][index][position] == 1 + int((table[position] > table[position, token]).sum())


async def test_none_of_the_likeliest_still_tells_ids_and_ranks(checkpoint: Write, runtime: ModelRuntime) -> None:
    asked = teacher(checkpoint, (1,))
    told: Any = value(await runtime.execute(execution(asked, {"token_ids": [[7, 3], [9]], "top_logprobs": 0})))
    assert (told["token_ids"], told["top_logprobs"]) == ([[7, 3], [9]], [[[]], []])
    assert [len(row) for row in told["ranks"]] == [1, 0]


@pytest.mark.parametrize("count", [-1, 129, 1.5, True, "1"])
async def test_a_count_of_likeliest_tokens_that_is_none_is_refused(
    count: object, checkpoint: Write, runtime: ModelRuntime
) -> None:
    with pytest.raises(ActionFailed, match="top_logprobs"):
        await runtime.execute(execution(teacher(checkpoint, (1,)), {"token_ids": IDS, "top_logprobs": count}))
