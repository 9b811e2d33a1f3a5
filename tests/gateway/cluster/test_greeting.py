"""What a node may say of itself when it greets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gateway.cluster.cluster import CORES_MAX, DEVICES_MAX, described, is_changed
from manager.config import NodeSpec
from manager.errors import InvalidConfig
from manager.resources.devices import split
from runtimes.node.protocol import NodeHello
from tests.runtimes.node.session import hello


def greeting(**fields: Any) -> NodeHello:
    spec = NodeSpec(name="it says so", numa=((0, 2), (1, 3)), memory_bytes=4, devices=2, device_bytes=8)
    return msgspec.structs.replace(hello(), spec=replace(spec, **fields), labels={"pool": "a"})


def test_a_node_has_the_name_and_labels_that_it_greets_with() -> None:
    spec = described(greeting(labels={"pool": "b", "zone": "c"}))
    assert (spec.name, spec.labels, spec.able) == ("n1", {"pool": "a", "zone": "c"}, frozenset())
    assert (spec.cores, spec.memory_bytes, spec.devices, spec.device_bytes) == (4, 4, 2, 8)
    assert described(greeting(numa=(), devices=0, memory_bytes=0)).cores == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"devices": -1},
        {"devices": DEVICES_MAX + 1},
        {"device_bytes": -1},
        {"memory_bytes": -1},
        {"numa": ((0, 1), (1,))},
        {"numa": ((-1,),)},
        {"numa": ((CORES_MAX,),)},
        {"numa": ((0,), ())},
    ],
)
def test_a_machine_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match="n1 describes a machine that cannot be"):
        described(greeting(**fields))


@pytest.mark.parametrize(
    ("before", "awaited", "changed"),
    [
        ({}, False, False),
        ({"devices": 1}, False, True),
        ({"device_bytes": 7}, False, True),
        ({"devices": 0, "device_bytes": 0}, False, False),
        ({"devices": 0, "device_bytes": 0}, True, False),
        ({"devices": 1}, True, False),
        ({"memory_bytes": 5}, True, True),
        ({"numa": ((0, 1), (2, 3))}, True, True),
    ],
)
def test_a_node_keeps_what_may_be_leased_of_it(before: dict[str, Any], awaited: bool, changed: bool) -> None:
    assert is_changed(described(greeting()), described(greeting(**before)), awaited=awaited) is changed


def test_no_interval_is_split_that_cannot_be() -> None:
    assert [*split(0, 0)] == []
    with pytest.raises(AssertionError, match="-1 devices"):
        next(split(0, -1))
