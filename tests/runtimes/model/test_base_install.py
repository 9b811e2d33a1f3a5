"""The base install has no torch: the runtime imports all the same, and refuses a model with the remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

PROGRAM = """
import asyncio, sys
from pathlib import Path
{before}
from manager.action import UnitSet
from manager.errors import Unsupported
from manager.function import FunctionSpec, ModelAction, ModelSpec
from runtimes.model.runtime import ModelRuntime

assert sys.modules.get("torch") is None, "the gateway's process imported torch"
model = ModelSpec(path=Path("nowhere"), action=ModelAction.SCORE)
function = FunctionSpec(name="f", runtime="model", cost={{"gpu": UnitSet.fixed(1)}}, model=model)
try:
    asyncio.run(ModelRuntime().prepare(function))
except Unsupported as error:
    print(error.message)
"""


def run(before: str) -> str:
    program = PROGRAM.format(before=before)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.stdout


def test_without_torch_a_model_function_is_refused_with_the_remedy() -> None:
    assert "pip install tangram-gateway[model]" in run("sys.modules['torch'] = sys.modules['transformers'] = None")
