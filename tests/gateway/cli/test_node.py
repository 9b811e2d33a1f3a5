"""Nodes from the command line: devices, tickets, functions that none runs, and `tangram cluster check`."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.cli.node import RayUnseen, check, given_ticket, homeless, look, offered_devices
from gateway.config.schema import DevicesConfig
from gateway.registry import function_info
from manager.action import UnitSet
from manager.errors import InvalidConfig
from manager.function import FunctionSpec, RequestSpec
from runtimes.model.engine import nvml
from tangram.types import NodeCondition, NodeStatus

SEEN: dict[str, Any] = {
    "python": "3.12.1",
    "version": "2.60.0",
    "token": True,
    "nodes": [
        {
            "id": "head" * 14,
            "address": "10.0.0.1",
            "head": True,
            "labels": {},
            "total": {"CPU": 8.0, "GPU": 0.0},
            "free": {"CPU": 8.0, "GPU": 0.0},
            "draining_ms": None,
        },
        {
            "id": "abcd" * 14,
            "address": "10.0.0.2",
            "head": False,
            "labels": {"tangram-pool": "a"},
            "total": {"CPU": 64.0, "GPU": 8.0},
            "free": {"CPU": 2.0, "GPU": 8.0},
            "draining_ms": None,
        },
    ],
}


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


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that prints the file beside it, whatever it is asked."""
    made = tmp_path / "python"
    made.write_text(f"#!/bin/sh\ncat {tmp_path}/said; cat {tmp_path}/complaint >&2 2>/dev/null; exit 0\n")
    made.chmod(stat.S_IRWXU)
    (tmp_path / "said").write_text(json.dumps(SEEN))
    return made


def checked(python: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(check, ["--python", str(python), "--json", *options])
    assert done.exit_code in (0, 1), done.output
    return done.exit_code, json.loads(done.stdout)


def test_a_machine_that_has_what_is_asked_would_be_taken(python: Path) -> None:
    status, told = checked(python, "--label", "tangram-pool=*", "--cpus", "2", "--gpus", "8")
    assert status == 0 and told["notes"] == [] and told["ray"] == "2.60.0"
    assert [machine["taken"] for machine in told["machines"]] == ["no", "yes"]


def test_what_others_hold_is_told_before_anybody_waits_for_it(python: Path) -> None:
    status, told = checked(python)
    assert status == 1 and told["notes"] == ["abcdabcdabcd would wait: 64 CPUs asked, 2 free"]


def test_the_head_is_taken_if_it_is_asked_for(python: Path) -> None:
    _, told = checked(python, "--head", "--cpus", "1")
    assert [machine["taken"] for machine in told["machines"]] == ["yes", "yes"]


def test_a_cluster_without_a_token_or_without_such_machines_is_told_of(python: Path) -> None:
    (python.parent / "said").write_text(json.dumps(SEEN | {"token": False}))
    status, told = checked(python, "--label", "tangram-pool=b")
    assert status == 1 and "no machine would be taken" in told["notes"][0] and "no token" in told["notes"][1]


def test_people_get_a_table(python: Path) -> None:
    done = CliRunner().invoke(check, ["--python", str(python)])
    assert "abcdabcdabcd" in done.output and "2 CPUs, 8 GPUs" in done.output and "note: " in done.output


@pytest.mark.parametrize("label", ["pool", "=a", "pool="])
def test_a_label_that_is_none_is_refused(python: Path, label: str) -> None:
    done = CliRunner().invoke(check, ["--python", str(python), "--label", label])
    assert isinstance(done.exception, InvalidConfig)


def test_a_cluster_that_cannot_be_seen_is_told_in_rays_words(python: Path) -> None:
    (python.parent / "said").write_text(
        json.dumps({"python": "3.12.1", "why": "ConnectionError: token", "token": False})
    )
    with pytest.raises(RayUnseen, match=r"head:6379, seen by Python 3.12.1: ConnectionError: token"):
        look(str(python), "head:6379", 60.0)


def test_an_interpreter_that_is_none_is_told_of(python: Path, tmp_path: Path) -> None:
    with pytest.raises(RayUnseen, match="cannot be run"):
        look(str(tmp_path / "nowhere"), "auto", 60.0)
    (tmp_path / "said").write_text("Python 3.12.1")
    with pytest.raises(RayUnseen, match="nothing of a cluster"):
        look(str(python), "auto", 60.0)
