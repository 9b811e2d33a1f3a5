"""Nodes from the command line: devices, tickets, and functions that none runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.cli.node import given_ticket, homeless, offered_devices
from gateway.config.schema import DevicesConfig
from gateway.registry import function_info
from manager.action import UnitSet
from manager.errors import InvalidConfig
from manager.function import FunctionSpec, RequestSpec
from runtimes.model.engine import nvml
from tangram.types import NodeCondition, NodeStatus


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("cuda", DevicesConfig(kind="cuda")),
        ("cuda:8", DevicesConfig(kind="cuda", count=8)),
        ("cpu:2:4Gi", DevicesConfig(kind="cpu", count=2, memory_bytes=4 * 2**30)),
        ("cpu::64Mi", DevicesConfig(kind="cpu", memory_bytes=64 * 2**20)),
        ("auto", DevicesConfig()),
        ("none", DevicesConfig(kind="none")),
    ],
)
def test_devices_are_named_as_kind_count_and_size(given: str, found: DevicesConfig) -> None:
    assert offered_devices(given, DevicesConfig(kind="cpu", count=1)) == found


@pytest.mark.parametrize("given", ["gpu", "cpu:0", "cpu:-1", "cpu:two", "cpu:1:large", ":2"])
def test_what_is_no_devices_is_refused_with_the_form(given: str) -> None:
    with pytest.raises(InvalidConfig, match=r"is not KIND\[:COUNT\[:SIZE\]\] such as"):
        offered_devices(given, DevicesConfig())


def test_without_the_option_the_configuration_counts() -> None:
    configured = DevicesConfig(kind="cpu", count=2)
    assert offered_devices("", configured) == configured


@pytest.mark.skipif(bool(nvml().gpus()), reason="this machine has a GPU, which is then offered")
def test_a_node_of_which_nothing_is_said_offers_no_cpu_devices() -> None:
    assert offered_devices("", DevicesConfig()) == DevicesConfig(kind="none")


def told(nodes: Sequence[NodeStatus], labels: Mapping[str, str] | None = None) -> Sequence[str]:
    """What is said of a function with such labels and of one that needs no machine."""
    shell = FunctionSpec(name="shell", runtime="exec", cost={"cpu": UnitSet.fixed(1)}, nodes=labels or {})
    free = replace(
        shell, name="free", runtime="api", cost={}, nodes={}, request=RequestSpec(method="GET", url="http://a.example")
    )
    return homeless([function_info(shell), function_info(free)], nodes)


def machine(state: NodeCondition = "ready", *able: str, local: bool = False, pool: str = "big") -> NodeStatus:
    return NodeStatus(
        node="n1",
        state=state,
        why="",
        since_s=1.0,
        local=local,
        cores=1,
        devices=0,
        device_kind="",
        memory_bytes=2**30,
        labels={"pool": pool, "zone": "a"},
        running=0,
        trajectories=0,
        able=able,
        unable={},
    )


def test_a_function_whose_labels_no_machine_has_is_named() -> None:
    (line,) = told([machine("ready", "shell", pool="small")], {"pool": "big"})
    assert line.startswith(
        "shell runs nowhere: no machine has the labels pool=big: have one join with `--labels pool=big`"
    )
    assert "functions.shell.nodes" in line
    assert told([machine("ready", "shell")], {"pool": "big"}) == []
    assert told([machine(local=True, pool="small")], {"pool": "big"}), "a gateway that is alone has labels too"


def test_a_function_that_no_machine_is_able_to_run_is_named() -> None:
    assert told([machine("ready", "other")]) == ["shell runs nowhere: none of n1 is able to"]
    assert told([machine("ready", "other"), machine("ready", "shell")]) == []
    assert told([machine(local=True)]) == [], "a gateway that is alone asks no machine"
    for gone in ("lost", "drained"):
        assert told([machine(gone, "shell")]) == ["shell runs nowhere: there is no machine: have one join"]
    assert told([]) == ["shell runs nowhere: there is no machine: have one join"]
    assert told([machine("suspect", "shell")]) == [], "it comes back, or is counted lost"


def test_a_ticket_comes_from_a_file_and_from_one_place_alone(tmp_path: Path) -> None:
    file = tmp_path / "ticket"
    file.write_text("abc.def\n")
    assert given_ticket("", file, tmp_path) == given_ticket("abc.def", None, tmp_path) == "abc.def"
    with pytest.raises(InvalidConfig, match="one of --ticket, TANGRAM_TICKET and --ticket-file"):
        given_ticket("abc.def", file, tmp_path)
    with pytest.raises(InvalidConfig, match=r"--ticket-file: .*No such file"):
        given_ticket("", tmp_path / "nothing", tmp_path)
    (tmp_path / "key").touch()
    assert given_ticket("", tmp_path / "nothing", tmp_path) == "", "it was let in before, and has a key"
