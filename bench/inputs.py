"""Inputs of benches and tests: recorded ones from a directory that is named, else small generated ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from runtimes.sandbox.runner.runner import DEFAULT_PATH

#: PATH of process sandboxes whose python3 is the one that runs this: it has pytest.
OWN_PATH = f"{sys.prefix}/bin:{DEFAULT_PATH}"
#: The environment variable that names the directory of recorded inputs.
VARIABLE = "TANGRAM_DATA"
STEPS = "mini_swe_agent_swebench_dev_steps.jsonl.gz"


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


def unplugged() -> Iterator[str]:
    """Yield options that keep pytest from importing whatever plugins this machine has: only xdist is wanted."""
    for entry in entry_points(group="pytest11"):
        if not entry.value.startswith("xdist"):
            yield from ("-p", f"no:{entry.name}")
