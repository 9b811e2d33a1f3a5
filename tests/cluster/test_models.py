"""Model services on nodes: one gateway that only schedules, and daemons with devices."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.cluster.conftest import MakeNode
from tests.cluster.world import ClusterGateway, document
from tests.faults.world import HTTP, until
from tests.runtimes.model import checkpoints  # it imports torch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]


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


def test_one_service_serves_on_two_nodes_and_is_copied_to_the_idle_one(
    start_models: StartModels, make_node: MakeNode, teacher: Path
) -> None:
    gateway = start_models({"judge": model(teacher), "write": model(teacher, "generate")})
    for name in ("n1", "n2"):
        make_node(gateway, name).start(devices=f"cpu:1:{DEVICE}")
    for name in ("n1", "n2"):
        gateway.until_able(name, "judge")
        gateway.until_able(name, "write")
    first = gateway.answer("judge")
    expected = checkpoints.plain_logprobs(teacher, [7, 3, 99])
    assert first["result"]["logprobs"][0] == pytest.approx(expected, abs=1e-4)
    until(lambda: all(gateway.has(name).resident for name in ("n1", "n2")), "the service is on both nodes")
    (service,) = gateway.has("n1").resident
    assert gateway.has("n1").resident == gateway.has("n2").resident == {service: ((0, 1),)}
    pool = gateway.pool("gpu")
    assert (pool["total"], set(pool["regions"])) == (2, {"n1", "n2"})
    assert [[copy["service"] for copy in device["resident"]] for device in pool["devices"]] == [[service], [service]]


def test_a_daemon_that_is_killed_takes_its_device_processes_along_and_what_may_runs_again(
    start_models: StartModels, make_node: MakeNode, teacher: Path
) -> None:
    functions = {name: model(teacher, "generate", idempotent=name == "again") for name in ("again", "once")}
    gateway = start_models(functions)
    node = make_node(gateway, "n1")
    node.start(devices=f"cpu:2:{DEVICE}")
    for name in functions:
        gateway.until_able("n1", name)
        gateway.answer(name, max_new_tokens=4)
    processes = model_processes(node.pid)
    assert processes
    freeze(processes)
    asked = {name: gateway.ask(name, max_new_tokens=4, seed=1) for name in functions}
    until(lambda: all(map(node.has_begun, asked.values())), "both have begun")
    node.kill()
    until(lambda: not alive(processes), "nothing of the daemon is left")
    gateway.until_state("n1", "suspect")
    node.start(devices=f"cpu:2:{DEVICE}")
    again, once = gateway.ended(asked["again"]), gateway.ended(asked["once"])
    assert (again["state"], again["node"]) == ("succeeded", "n1"), again
    assert (once["state"], once["reason"]) == ("lost", "node_lost"), once
    assert gateway.answer("once", max_new_tokens=4)["node"] == "n1"
