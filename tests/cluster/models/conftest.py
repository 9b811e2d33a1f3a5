"""A gateway that only schedules, and model functions for nodes that join it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from tests.cluster.world import ClusterGateway, document, until
from tests.faults.world import HTTP
from tests.runtimes.model import checkpoints  # it imports torch

#: Two tiny models fit.
DEVICE = "64Mi"


@pytest.fixture
def provider() -> str:
    """Nothing runs in a sandbox here."""
    return "process"


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny language model that can go on for a while."""
    return checkpoints.write(tmp_path_factory.mktemp("teacher"), "llama", "lm", max_position_embeddings=4096)


class ModelGateway(ClusterGateway):
    """A gateway whose functions are models."""

    def __init__(
        self, directory: Path, functions: dict[str, Any], devices: Mapping[str, object] | None = None, **cluster: object
    ) -> None:
        """``devices`` of its own machine: none by default."""
        written = document(directory / "state", "process", **{"local": "none", **cluster})
        written["functions"] = functions
        written["node"]["devices"] = dict(devices or {"kind": "none"})
        super().__init__(directory, written)

    def until_able(self, name: str, function: str) -> None:
        def able() -> bool:
            found = self.node(name)
            return found is not None and function in found.able

        until(able, f"node {name} is able to run {function}")

    def ask(self, function: str, **options: object) -> str:
        with self.client() as client:
            return client.submit(function, {"token_ids": [[7, 3, 99]], **options}).id

    def answer(self, function: str, **options: object) -> dict[str, Any]:
        """The record of a request that has succeeded."""
        found = self.ended(self.ask(function, **options))
        assert found["state"] == "succeeded", found
        return found

    def pool(self, name: str) -> dict[str, Any]:
        """A pool as the scheduler sees it now."""
        found: dict[str, Any] = HTTP.get(f"{self.url}/v1/resources").json()["pools"][name]
        return found

    def unable(self, name: str) -> Mapping[str, str]:
        """What a node cannot run, and why; nothing before it has joined."""
        found = self.node(name)
        return {} if found is None else found.unable

    def costs(self, node: str) -> dict[str, Any]:
        """Restore seconds of each service there, by DoP."""
        found = self.pool("gpu")["services"]
        return {service: each["restore_s_by_node"].get(node) for service, each in found.items()}


StartModels = Callable[..., ModelGateway]


@pytest.fixture
def start_models(tmp_path: Path, start_gateway: object) -> Iterator[StartModels]:
    """Starts a gateway of these functions, with what its section cluster says besides; stopped after its nodes."""
    made: list[ModelGateway] = []

    def start(functions: dict[str, Any], **more: Any) -> ModelGateway:  # Any: devices, and keys of the section
        gateway = ModelGateway(tmp_path / "gateway", functions, **more)
        made.append(gateway)
        gateway.start()
        return gateway

    yield start
    for gateway in made:
        with suppress(Exception):
            gateway.stop()


def model(path: Path, action: str = "logprobs", **keys: object) -> dict[str, Any]:
    """A model function as YAML has it."""
    return {"runtime": "model", "model": {"path": str(path), "action": action}, "timeout": "5m", **keys}


def children(pid: int) -> list[int]:
    """The processes that a process has started and not yet seen the end of."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(each) for each in (task / "children").read_text().split()]
    return found


def model_processes(pid: int) -> list[int]:
    """The device processes (and the tokenizer's) of a daemon: what its fork server has forked."""
    return [each for server in children(pid) for each in children(server)]


def freeze(pids: list[int]) -> None:
    """Let them compute no more, so that what they do is met in the middle."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def thaw(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def alive(pids: list[int]) -> list[int]:
    """Those that are still there, zombies not counted."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if state != "Z":
            found.append(pid)
    return found
