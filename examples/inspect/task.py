"""A task without a model: its solver works in the sample's sandbox."""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import solver
from inspect_ai.util import sandbox


@solver
def worker():
    async def solve(state, generate):
        await sandbox().write_file("answer.py", "print(6 * 7)")
        state.output.completion = (await sandbox().exec(["python3", "answer.py"])).stdout
        return state

    return solve


@task
def arithmetic():
    chosen = str(Path(__file__).with_name("sandbox.yaml"))
    sample = Sample(input="6 * 7", target="42")
    return Task(dataset=[sample], solver=worker(), scorer=includes(), sandbox=("tangram", chosen))
