"""The registry: what a new configuration changes, and that it comes whole or not at all."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.config.load import GatewayConfig, load
from gateway.registry import Registry
from manager.config import NodeSpec
from manager.errors import InvalidConfig, NotFound, Unsatisfiable, Unsupported
from manager.function import FunctionSpec

NODE = NodeSpec(name="n", numa=((0, 1),), memory_bytes=4 * 2**30)


@dataclass
class RegistryBench:
    """A registry over files in a directory, and what it did."""

    directory: Path
    prepared: list[str] = field(default_factory=list)
    switched: list[GatewayConfig] = field(default_factory=list)
    refuse: set[str] = field(default_factory=set)

    def write(self, text: str) -> GatewayConfig:
        (self.directory / "tangram.yaml").write_text(text)
        return load([self.directory], {})

    def registry(self, text: str) -> Registry:
        registry = Registry(
            self.write(text), prepare=self.prepare, nodes=lambda: (NODE,), paths=[self.directory], env={}
        )
        registry.on_switch.append(self.switched.append)
        return registry

    async def prepare(self, function: FunctionSpec) -> None:
        self.prepared.append(function.name)
        if function.name in self.refuse:
            raise Unsupported(f"{function.name} cannot run here", component="test")


@pytest.fixture
def bench(tmp_path: Path) -> RegistryBench:
    return RegistryBench(tmp_path)


ONE = "functions: {a: {runtime: exec}, b: {runtime: exec}}"
TWO = "functions: {a: {runtime: exec, timeout: 5s}, c: {runtime: exec}}\ntasks: {t: {weight: 2}}"


def test_a_plan_names_what_is_added_changed_and_removed_and_changes_nothing(bench: RegistryBench) -> None:
    registry = bench.registry(ONE)
    diff = registry.plan(bench.write(TWO))
    assert (diff.added, diff.changed, diff.removed, diff.unchanged) == (("c",), {"a": ("timeout_s",)}, ("b",), ())
    assert diff.tasks == ("t",)
    assert [each.name for each in registry.all()] == ["a", "b"]


async def test_a_changed_function_serves_new_invocations_only(bench: RegistryBench) -> None:
    registry = bench.registry(ONE)
    held = registry.get("a")
    await registry.apply(bench.write(TWO))
    assert (held.timeout_s, registry.get("a").timeout_s) == (60.0, 5.0)
    assert held.revision != registry.get("a").revision
    with pytest.raises(NotFound, match="registered: a, c"):
        registry.get("b")
    assert bench.prepared == ["c", "a"]
    assert bench.switched == [registry.config]


async def test_a_function_that_cannot_run_here_leaves_everything_as_it_was(bench: RegistryBench) -> None:
    registry = bench.registry(ONE)
    bench.refuse = {"c"}
    before = registry.config
    with pytest.raises(Unsupported, match=r"tangram\.yaml:1: functions\.c: c cannot run here"):
        await registry.apply(bench.write(TWO))
    assert registry.config is before
    assert not bench.switched


async def test_all_functions_that_cannot_run_here_are_told_at_once(bench: RegistryBench) -> None:
    registry = bench.registry("functions: {}")
    bench.refuse = {"a", "c"}
    with pytest.raises(InvalidConfig, match=r"2 functions cannot run here:\n.*functions\.a.*\n.*functions\.c"):
        await registry.apply(bench.write(TWO))


async def test_a_cost_that_no_node_can_satisfy_is_refused_with_the_largest_node(bench: RegistryBench) -> None:
    registry = bench.registry(ONE)
    with pytest.raises(Unsatisfiable, match="2 cores"):
        await registry.apply(bench.write("functions: {big: {runtime: exec, cost: {cpu: 3}}}"))
    assert bench.prepared == []


async def test_keys_that_are_read_at_the_start_only_are_refused_by_name(bench: RegistryBench) -> None:
    registry = bench.registry(ONE)
    with pytest.raises(InvalidConfig, match=r"server\.port, node\.name, sandbox\.provider cannot change") as caught:
        await registry.apply(
            bench.write(f"{ONE}\nserver: {{port: 1}}\nnode: {{name: x}}\nsandbox: {{provider: process}}")
        )
    assert caught.value.detail["needs_restart"] == ["server.port", "node.name", "sandbox.provider"]
    diff = registry.plan(bench.write(f"{ONE}\nsandbox: {{memory: 1Gi}}"))
    assert not diff.needs_restart and diff.changed == {"a": ("sandbox",), "b": ("sandbox",)}


async def test_two_configurations_are_applied_one_after_the_other(bench: RegistryBench) -> None:
    registry = bench.registry("functions: {}")
    first, second = bench.write(ONE), bench.write(TWO)
    diffs = await asyncio.gather(registry.apply(first), registry.apply(second))
    assert (diffs[0].added, diffs[1].removed, diffs[1].added) == (("a", "b"), ("b",), ("c",))


async def test_a_door_may_send_files_or_yaml_or_have_the_own_files_read_again(bench: RegistryBench) -> None:
    registry = bench.registry(ONE)
    sent = {"files": [{"path": "functions/c/function.yaml", "text": "functions: {c: {runtime: exec}}"}]}
    answer = await registry.configure(json.dumps(sent).encode(), True)
    assert (answer.added, answer.removed, answer.applied) == (("c",), ("a", "b"), False)
    answer = await registry.configure(b"functions: {a: {runtime: exec}}", False)
    assert (answer.removed, answer.applied) == (("b",), True)
    answer = await registry.configure(b"", False)
    assert answer.added == ("b",)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"files": 3}', "write"),
        (b'{"files": [3]}', "needs a path and a text"),
        (b'{"files": [], "more": 1}', "write"),
        (b'{"functons": {}}', "did you mean 'functions'"),
        (b"\xff\xfe", "."),
        (b'{"files": [{"path": "x.yaml", "text": "functions: {f: {runtime: nope}}"}]}', "x.yaml:1"),
    ],
)
async def test_a_document_that_is_no_configuration_is_refused(bench: RegistryBench, body: bytes, expected: str) -> None:
    registry = bench.registry(ONE)
    with pytest.raises(InvalidConfig, match=expected):
        await registry.configure(body, False)
    assert [each.name for each in registry.all()] == ["a", "b"]


async def test_sections_of_the_server_that_are_not_sent_stay_as_they_are(bench: RegistryBench) -> None:
    text = "server: {port: 9}\nsandbox: {memory: 1Gi}\nscheduler: {policy: paper}\nfunctions: {a: {runtime: exec}}"
    registry = bench.registry(text)
    answer = await registry.configure(b"functions: {a: {runtime: exec}}", False)
    assert (answer.unchanged, answer.needs_restart) == (("a",), ())
