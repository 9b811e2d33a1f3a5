"""Inputs of benches and tests: recorded ones from a directory that is named, else small generated ones."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from runtimes.sandbox.runner.runner import DEFAULT_PATH

#: PATH of process sandboxes whose python3 is the one that runs this: it has pytest.
OWN_PATH = f"{sys.prefix}/bin:{DEFAULT_PATH}"
#: The environment variable that names the directory of recorded inputs.
VARIABLE = "TANGRAM_DATA"
PROGRAMS = "code_actions_humaneval.jsonl.gz"
STEPS = "mini_swe_agent_swebench_dev_steps.jsonl.gz"
#: Programs and trajectories that are generated where none are recorded.
GENERATED = 48


def real_input(name: str) -> Path | None:
    """Where the file or folder ``name`` of the recorded inputs lies; None if no directory was named.

    Raises FileNotFoundError if the directory that was named does not have it.
    """
    directory = os.environ.get(VARIABLE, "")
    if not directory:
        return None
    found = Path(directory) / name
    if not found.exists():
        raise FileNotFoundError(f"{VARIABLE}={directory} holds no {name}")
    return found


def told(name: str) -> str:
    """Where an input came from, for the note of a report."""
    if real_input(name) is None:
        return f"generated inputs; not run on recorded ones: {name} ({VARIABLE} names no directory)"
    return f"recorded inputs: {name}"


def programs() -> list[dict[str, str]]:
    """Python programs with their ``id``, ``program`` and ``verdict``: pass, fail or timeout (8 s of processor time)."""
    path = real_input(PROGRAMS)
    if path is not None:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    made = []
    for n in range(GENERATED):
        verdict = "fail" if n % 3 == 1 else "pass"
        total = n * (n - 1) // 2 + (verdict == "fail")
        made.append({"id": f"sum-{n}", "program": f"assert sum(range({n})) == {total}\n", "verdict": verdict})
    return [*made, {"id": "endless", "program": "while True: pass\n", "verdict": "timeout"}]


def commands() -> Mapping[str, Sequence[str]]:
    """The shell commands of agents, in order, by trajectory."""
    path = real_input(STEPS)
    if path is None:
        looks = ("ls -la", "grep -rn needle . | wc -l", "cat missing.txt", "find . -name '*.txt' | sort | tail -3")
        return {
            f"agent-{n}": [
                f"mkdir -p src/{n} && echo 'hay needle {n}' > src/{n}/a.txt",
                *looks,
                f"python3 -c 'print({n} ** 9)'",
                f"exit {n % 3}",
            ]
            for n in range(GENERATED)
        }
    steps: dict[str, list[str]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            step = json.loads(line)
            steps.setdefault(f"{step['traj']}-{step['run']}", []).append(step["command"])
    return steps


def unplugged() -> Iterator[str]:
    """Yield options that keep pytest from importing whatever plugins this machine has: only xdist is wanted."""
    for entry in entry_points(group="pytest11"):
        if not entry.value.startswith("xdist"):
            yield from ("-p", f"no:{entry.name}")
