"""The example checkpoints are real: trained in seconds, and their ranking means something."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.model, pytest.mark.slow]

from manager.function import ModelAction
from runtimes.model.runtime import ModelRuntime
from tests.runtimes.model.conftest import execution, function

ROOT = Path(__file__).parents[3]

SOURCES = [
    "def mean(values):\n    total = sum(values)\n    return total / len(values)\n",
    "class Reader:\n    def __init__(self, path):\n        self.path = path\n        self.lines = []\n",
    "for name in sorted(names):\n    if name not in seen:\n        seen.add(name)\n        print(name)\n",
    "try:\n    import json\nexcept ImportError:\n    json = None\n",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_checkpoint.py"), str(directory), "--steps", "60"],
        check=True,
        capture_output=True,
    )
    return directory


def scrambled(source: str) -> str:
    characters = list(source)
    random.Random(7).shuffle(characters)
    return "".join(characters)


async def test_the_reward_model_puts_source_above_scrambled_source(models: Path, runtime: ModelRuntime) -> None:
    asked = function(models / "reward", ModelAction.SCORE, (1, 2, 4, 8))
    texts = [*SOURCES, *map(scrambled, SOURCES)]
    value = (await runtime.execute(execution(asked, {"texts": texts}, (0, 2)))).value
    assert isinstance(value, dict)
    scores = value["scores"]
    assert all(good > bad for good, bad in zip(scores[:4], scores[4:], strict=True))


async def test_the_teacher_expects_source_and_answers_a_conversation(models: Path, runtime: ModelRuntime) -> None:
    teacher = function(models / "teacher", ModelAction.LOGPROBS)
    texts = [SOURCES[0], scrambled(SOURCES[0])]
    value = (await runtime.execute(execution(teacher, {"texts": texts}))).value
    assert isinstance(value, dict)
    assert value["sums"][0] > value["sums"][1]
    judge = function(models / "teacher", ModelAction.GENERATE, max_new_tokens=5)
    chat = {"messages": [{"role": "user", "content": "import"}], "temperature": 0.5, "seed": 3}
    answers = [(await runtime.execute(execution(judge, chat))).value for _ in range(2)]
    assert answers[0] == answers[1], "the same seed draws the same tokens"
    assert isinstance(answers[0], dict)
    assert len(answers[0]["texts"]) == 1
