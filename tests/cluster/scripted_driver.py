"""A driver without Ray: says what a driver says of the machines that a file names, with a real actor for each.

Run by path, as the real one is: ``scripted_driver.py DIRECTORY``. ``machines.json`` there has what Ray would know, by
id: labels, and whether the reservation waits or the machine drains. It is read again five times a second.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOOK_S = 0.2
WALL = threading.Lock()
#: Machines by id, as last told: their facts, and their actor once it is ready.
told: dict[str, dict[str, Any]] = {}
actors: dict[str, Any] = {}


def tell(kind: str, **message: object) -> None:
    with WALL:
        print(json.dumps({"kind": kind, **message}), flush=True)


def actor_class() -> Any:
    """The real actor, by its path, as the real driver takes it."""
    spec = importlib.util.spec_from_file_location("actor", ROOT / "runtimes/node/ray/actor.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.NodeActor


def look(directory: Path, make: Any) -> None:
    """Tell what has changed since the last look."""
    machines = json.loads((directory / "machines.json").read_text())
    for id, facts in machines.items():
        before = told.get(id)
        told[id] = facts
        if before is None:
            tell("alive", node=id, address="127.0.0.1", labels=facts["labels"])
        if facts.get("waiting"):
            if before is None:
                tell("waiting", node=id, cpus=4.0, gpus=0.0, waited_s=30.0, free={"CPU": 1.0})
        elif id not in actors:
            actors[id] = make([])
            tell("actor", node=id, **actors[id].facts())
        if facts.get("draining") and not (before or {}).get("draining"):
            tell("draining", node=id, deadline_ms=1e12)
    for id in [id for id in told if id not in machines]:
        del told[id]
        tell("dead", node=id, why="received SIGTERM")


def obey(command: dict[str, Any]) -> None:
    id = command["node"]
    if id not in actors:
        tell("refused", node=id, why="no actor is ready")
    elif command["kind"] == "start":
        tell("started", node=id, **actors[id].start(command["command"], command["environment"], command["state_dir"]))
    else:
        tell("released", node=id, gone=actors[id].stop(bool(command.get("kill"))))


def main() -> None:
    directory, ended = Path(sys.argv[1]), threading.Event()
    json.loads(sys.stdin.readline())
    tell("connected", pid=os.getpid(), version="none")
    (directory / "driver.pid").write_text(str(os.getpid()))

    def look_for_ever() -> None:
        make = actor_class()
        while not ended.wait(LOOK_S):
            look(directory, make)

    threading.Thread(target=look_for_ever, daemon=True).start()
    for line in sys.stdin:
        command = json.loads(line)
        if command["kind"] == "ping":
            tell("pong", looked_ago_s=0.0, why="")
        else:
            threading.Thread(target=obey, args=(command,), daemon=True).start()
    ended.set()


if __name__ == "__main__":
    main()
