"""The registry: what a new configuration changes, and that it comes whole or not at all."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.config.load import GatewayConfig, load
from gateway.registry import Registry, function_info
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
    answer = await registry.configure(json.dumps(sent).encode(), True, True)
    assert (answer.added, answer.removed, answer.applied) == (("c",), ("a", "b"), False)
    answer = await registry.configure(b"functions: {a: {runtime: exec}}", False, True)
    assert (answer.removed, answer.applied) == (("b",), True)
    answer = await registry.configure(b"", False)
    assert answer.added == ("b",)


@pytest.mark.parametrize("body", [b"{}", b"null", b'{"files": []}', b"version: 1", b"functions: {}"])
async def test_what_names_no_function_removes_none_unless_it_is_told_to(bench: RegistryBench, body: bytes) -> None:
    registry = bench.registry(f"{ONE}\ntasks: {{t: {{weight: 2}}}}\nresources: {{r: {{kind: concurrency, limit: 1}}}}")
    answer = await registry.configure(body, False)
    assert (answer.empty, answer.unchanged, answer.applied) == (True, ("a", "b"), True)
    planned = await registry.configure(body, True, True)
    assert (planned.removed, planned.tasks, planned.resources) == (("a", "b"), ("t",), ("r",))
    assert [each.name for each in registry.all()] == ["a", "b"]
    assert (await registry.configure(body, False, True)).removed == ("a", "b")
    assert registry.all() == ()


async def test_what_is_added_may_use_what_is_there(bench: RegistryBench) -> None:
    there = "resources: {r: {kind: concurrency, limit: 1}, s: {kind: concurrency, limit: 4, needs: [r]}}"
    registry = bench.registry(there)
    await registry.configure(b"functions: {f: {runtime: exec, cost: {s: 1}}}\ntasks: {t: {caps: {s: 2}}}", False)
    assert set(registry.get("f").cost) == {"s", "r"}
    with pytest.raises(InvalidConfig, match="in a cycle"):
        await registry.configure(b"resources: {r: {kind: concurrency, limit: 1, needs: [s]}}", False)
    assert [each.name for each in registry.all()] == ["f"]


async def test_two_requests_at_once_both_count(bench: RegistryBench) -> None:
    registry = bench.registry("functions: {}")
    texts = [f"functions: {{f{n}: {{runtime: exec}}}}".encode() for n in range(4)]
    await asyncio.gather(*(registry.configure(text, False) for text in texts))
    assert [each.name for each in registry.all()] == ["f0", "f1", "f2", "f3"]


async def test_a_request_reads_nothing_of_the_gateways_environment(bench: RegistryBench) -> None:
    config = bench.write(ONE)
    env = {"TANGRAM_SECRET_KEY": "sesame"}
    registry = Registry(config, prepare=bench.prepare, nodes=lambda: (NODE,), paths=[bench.directory], env=env)
    asking = "functions: {a: {runtime: exec, description: '${TANGRAM_SECRET_KEY}'}}"
    sent = {"files": [{"path": "f.yaml", "text": asking}]}
    for body in (asking.encode(), json.dumps(sent).encode()):
        with pytest.raises(InvalidConfig, match="TANGRAM_SECRET_KEY is not defined"):
            await registry.configure(body, False)
    await registry.configure(asking.replace("KEY}", "KEY:-none}").encode(), False)
    assert registry.get("a").description == "none"
    await registry.configure(json.dumps({**sent, "variables": {"TANGRAM_SECRET_KEY": "mine"}}).encode(), False)
    assert registry.get("a").description == "mine"


async def test_a_request_points_only_below_what_is_served(bench: RegistryBench, tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    (tmp_path / "token").write_text("sesame")
    (tmp_path / "f.py").write_text("def handle(event, context): ...")
    (served / "out").symlink_to(tmp_path)
    registry = RegistryBench(served).registry(ONE)
    text = "functions: {h: {runtime: handler, handler: 'f:handle'}}"
    for path in ("../f.yaml", str(tmp_path / "f.yaml"), "out/f.yaml", "/etc/f.yaml", "a/../../f.yaml", "a\0b"):
        sent = json.dumps({"files": [{"path": path, "text": text}]}).encode()
        with pytest.raises(InvalidConfig, match=r"outside of the directories|is no path"):
            await registry.configure(sent, False)
    (served / "f.py").write_text("def handle(event, context): ...")
    await registry.configure(json.dumps({"files": [{"path": str(served / "f.yaml"), "text": text}]}).encode(), False)
    model = f"functions: {{m: {{runtime: model, model: {{path: {tmp_path}, action: score}}}}}}"
    with pytest.raises(InvalidConfig, match="outside of the directories"):
        await registry.configure(model.encode(), False)
    with pytest.raises(InvalidConfig, match=r"server\.token_file cannot change") as caught:
        await registry.configure(f"server: {{token_file: {tmp_path}/token}}".encode(), False)
    assert "server.token," not in caught.value.message, "the file was read"


async def test_a_checkpoint_that_is_served_may_be_named_wherever_it_lies(tmp_path: Path) -> None:
    served, elsewhere = tmp_path / "served", tmp_path / "models" / "judge"
    served.mkdir()
    elsewhere.mkdir(parents=True)
    (elsewhere / "config.json").write_text("{}")
    (elsewhere / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    text = f"functions: {{m: {{runtime: model, model: {{path: {elsewhere}, action: score}}}}}}"
    (served / "tangram.yaml").write_text(text)
    registry = RegistryBench(served).registry(text)
    diff = await registry.configure(text.encode(), True)
    assert (diff.unchanged, diff.changed) == (("m",), {})
    changed = text.replace("score}", "score}, description: anew")
    assert "description" in (await registry.configure(changed.encode(), True)).changed["m"]
    other = text.replace(str(elsewhere), str(tmp_path / "models"))
    with pytest.raises(InvalidConfig, match=r"outside of the directories .*tangram apply --own"):
        await registry.configure(other.encode(), True)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"files": 3}', "write"),
        (b'{"files": [3]}', r"write.*files\[0\]"),
        (b'{"files": [{"path": "x"}]}', r"write.*`text`"),
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


def test_a_plan_tells_of_a_section_what_differs_in_it_and_no_value_of_an_environment(bench: RegistryBench) -> None:
    text = "functions: {a: {runtime: exec, sandbox: {pids: %d, env: {KEY: %s, SAME: kept}}}}"
    diff = bench.registry(text % (64, "sesame")).plan(bench.write(text % (65, "poppy")))
    change = diff.values["a"]["sandbox"]
    assert change.was == '{"env":{"KEY":"[secret]"},"pids":64}'
    assert change.now == '{"env":{"KEY":"[secret]"},"pids":65}'


def test_what_an_environment_holds_is_told_to_nobody(bench: RegistryBench) -> None:
    env = "{KEY: sesame, REFERENCE: '${secret:KEY}'}"
    registry = bench.registry(f"functions: {{a: {{runtime: exec, sandbox: {{env: {env}}}}}}}")
    told = function_info(registry.get("a"))
    assert told.sandbox
    assert told.sandbox.env == {"KEY": "[secret]", "REFERENCE": "${secret:KEY}"}
    assert registry.get("a").sandbox is not None and "sesame" in str(registry.get("a").sandbox)
