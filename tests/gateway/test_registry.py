"""The registry: what a configuration changes, how functions are prepared, and what outlives a restart."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest

from gateway import registry
from gateway.app import gateway as opened_gateway
from gateway.config.load import GatewayConfig, load
from gateway.config.schema import ServerConfig
from gateway.dashboard.stream import Troubles, verdict
from gateway.http.app import HttpListener
from gateway.http.server import listen
from gateway.registry import KEPT, Registry, Revisions, function_info
from manager.config import NodeSpec
from manager.errors import (
    CapacityExceeded,
    CodedError,
    InvalidConfig,
    NotFound,
    Unsatisfiable,
    Unsupported,
)
from manager.function import FunctionSpec, SandboxSpec
from runtimes.sandbox.spec import ImageState, require_image_name
from runtimes.testing import ScriptedRuntime
from tangram.types import ValueChange
from tests.gateway.conftest import (
    DEADLINE_S,
    GatewayBench,
    RunningGateway,
    function,
    scripted_runtimes,
    serving,
    step_of,
    until,
)

ONE = "functions: {a: {runtime: exec}, b: {runtime: exec}}"
TWO = "functions: {a: {runtime: exec, timeout: 5s}, c: {runtime: exec}}\ntasks: {t: {weight: 2}}"
OWN = "functions: {own: {runtime: exec}}\nserver: {port: 0, grpc_port: 0, drain_grace: 200ms, state_dir: state}\n"
APPLIED = (
    "functions: {own: {runtime: exec}, one: {runtime: exec, timeout: 5s}, two: {runtime: exec, cost: {seats: 1}}}\n"
)
SEATS = "resources: {seats: {kind: concurrency, limit: 2}}\n"
RUN_S = 120.0
CONFIG = """
functions: {say: {runtime: toy, times: 2}}
sandbox: {provider: process}
server: {port: 0, grpc_port: 0, state_dir: state}
"""

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


def test_a_plan_tells_each_key_that_differs_and_no_value_of_an_environment(bench: RegistryBench) -> None:
    text = "functions: {a: {runtime: exec, sandbox: {pids: %d, env: {KEY: %s, SAME: kept}}}}"
    diff = bench.registry(text % (64, "sesame")).plan(bench.write(text % (65, "poppy")))
    assert diff.values["a"] == {
        "sandbox.env.KEY": ValueChange(was="[secret]", now="[secret]"),
        "sandbox.pids": ValueChange(was="64", now="65"),
    }


def test_what_an_environment_holds_is_told_to_nobody(bench: RegistryBench) -> None:
    env = "{KEY: sesame, REFERENCE: '${secret:KEY}'}"
    registry = bench.registry(f"functions: {{a: {{runtime: exec, sandbox: {{env: {env}}}}}}}")
    told = function_info(registry.get("a"))
    assert told.sandbox
    assert told.sandbox.env == {"KEY": "[secret]", "REFERENCE": "${secret:KEY}"}
    assert registry.get("a").sandbox is not None and "sesame" in str(registry.get("a").sandbox)


@dataclass
class AppliedBench:
    """A gateway over files, and a client of it."""

    http: httpx.AsyncClient

    async def apply(self, text: str, query: str = "") -> dict[str, object]:
        answer = await self.http.put(f"/v1/config{query}", content=text)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert isinstance(found, dict)
        return found

    async def sources(self) -> Mapping[str, str]:
        found = (await self.http.get("/v1/functions")).json()["functions"]
        return {each["name"]: each["source"] for each in found}


@asynccontextmanager
async def serving_files(directory: Path, files: str = OWN) -> AsyncIterator[AppliedBench]:
    (directory / "tangram.yaml").write_text(files)
    make = scripted_runtimes(ScriptedRuntime(step_of), directory)
    async with opened_gateway(load([directory], {}), paths=[directory], env={}, make=make) as app:
        assert app.tokens is not None
        headers = {"Authorization": f"Bearer {app.tokens.admin}"}
        task = asyncio.create_task(app.serve())
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{app.http_port}", headers=headers, timeout=DEADLINE_S
        ) as client:
            try:
                yield AppliedBench(client)
            finally:
                app.stop()
                await task


async def test_what_was_applied_is_there_after_a_restart_with_its_resources_and_may_be_removed(tmp_path: Path) -> None:
    both = {"own": "files", "one": "applied", "two": "applied"}
    async with serving_files(tmp_path) as bench:
        await bench.apply(APPLIED + SEATS)
        assert await bench.sources() == both
    async with serving_files(tmp_path) as bench:
        assert await bench.sources() == both
        assert "seats" in (await bench.http.get("/v1/resources")).json()["pools"]
        own = await bench.http.delete("/v1/functions/own")
        assert (own.status_code, own.json()["code"]) == (409, "conflict") and "tangram.yaml:1" in own.json()["detail"]
        assert (await bench.http.delete("/v1/functions/one")).json()["removed"] == ["one"]
        assert (await bench.http.delete("/v1/functions/one")).status_code == 404
    async with serving_files(tmp_path) as bench:
        assert await bench.sources() == {"own": "files", "two": "applied"}


async def test_the_files_win_for_the_names_that_they_declare(tmp_path: Path) -> None:
    async with serving_files(tmp_path) as bench:
        await bench.apply(APPLIED + SEATS)
    files = OWN.replace("own: {runtime: exec}", "own: {runtime: exec}, one: {runtime: exec, timeout: 9s}")
    async with serving_files(tmp_path, files) as bench:
        assert await bench.sources() == {"own": "files", "one": "files", "two": "applied"}
        assert (await bench.http.get("/v1/functions/one")).json()["timeout_s"] == 9.0


async def test_what_cannot_be_had_any_more_keeps_no_gateway_from_starting(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text("def work(event, context):\n    return event\n")
    async with serving_files(tmp_path) as bench:
        await bench.apply("functions: {own: {runtime: exec}, work: {runtime: handler, handler: 'work:work'}}")
    (tmp_path / "work.py").unlink()
    async with serving_files(tmp_path) as bench:
        assert await bench.sources() == {"own": "files"}
    (tmp_path / "work.py").write_text("def work(event, context):\n    return event\n")
    async with serving_files(tmp_path) as bench:
        assert await bench.sources() == {"own": "files", "work": "applied"}


async def test_each_document_may_use_what_earlier_ones_and_the_caller_gave_and_prune_forgets_it(tmp_path: Path) -> None:
    text = "functions: {late: {runtime: exec, timeout: '${LIMIT}', cost: {seats: 1}}}"
    sent = {"files": [{"path": "late.yaml", "text": text}], "variables": {"LIMIT": "7s"}}
    for again in (False, True):
        async with serving_files(tmp_path) as bench:
            if not again:
                await bench.apply(SEATS)
                await bench.apply(json.dumps(sent))
            assert await bench.sources() == {"own": "files", "late": "applied"}
            assert (await bench.http.get("/v1/functions/late")).json()["timeout_s"] == 7.0
    database = tmp_path / "state" / "tangram.sqlite"
    async with serving_files(tmp_path) as bench:
        assert (await bench.apply("functions: {own: {runtime: exec}}", "?prune=true"))["removed"] == ["late"]
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT body FROM documents WHERE name = 'applied'").fetchall() == [("[]",)]
    async with serving_files(tmp_path) as bench:
        assert await bench.sources() == {"own": "files"}
        assert "seats" not in (await bench.http.get("/v1/resources")).json()["pools"]


async def test_the_files_of_a_registered_handler_come_with_the_record_wherever_it_lies(tmp_path: Path) -> None:
    """As where a backup of the record is restored, or the whole state directory was moved to another disk."""
    code = "def score(event, context):\n    return 'ä'\n"
    definition = {"runtime": "handler", "handler": "rewards.h:score"}
    body = {"definition": definition, "sources": {"rewards/h.py": code, "rewards/__init__.py": ""}}
    both = {"own": "files", "mine": "applied"}

    def kept(state: str) -> list[Path]:
        return [each for each in (tmp_path / state / "handlers").rglob("h.py") if each.read_text() == code]

    async with serving_files(tmp_path) as bench:
        dry = await bench.http.put("/v1/functions/other?dry_run=true", json=body)
        made = await bench.http.put("/v1/functions/mine", json=body)
        assert (dry.status_code, made.status_code) == (200, 200), made.text
    shutil.rmtree(tmp_path / "state" / "handlers")
    async with serving_files(tmp_path) as bench:
        assert await bench.sources() == both
        assert len(kept("state")) == 1
    (tmp_path / "state").rename(tmp_path / "moved")
    moved = OWN.replace("state_dir: state", "state_dir: moved")
    async with serving_files(tmp_path, moved) as bench:
        assert await bench.sources() == both
        assert len(kept("moved")) == 1
    assert not (tmp_path / "state").exists()
    async with serving_files(tmp_path, moved) as bench:
        assert (await bench.http.delete("/v1/functions/mine")).status_code == 200
    async with serving_files(tmp_path, moved) as bench:
        assert (await bench.sources(), kept("moved")) == ({"own": "files"}, [])
    with closing(sqlite3.connect(tmp_path / "moved" / "tangram.sqlite")) as record:
        assert record.execute("SELECT name FROM documents WHERE name LIKE 'handler:%'").fetchall() == []


def spec(revision: str, **changed: object) -> FunctionSpec:
    return replace(function("f"), revision=revision, **changed)  # type: ignore[arg-type]  # a test's keywords


@pytest.fixture
def revisions() -> Revisions:
    return Revisions({"f": spec("a", timeout_s=1.0)}, lambda: 1000.0)


def test_only_the_source_of_a_handler_is_a_change_without_values(revisions: Revisions) -> None:
    revisions.switched({"f": spec("b", timeout_s=1.0)})
    revisions.switched({"f": spec("b", timeout_s=1.0)})
    (change,) = revisions.of("f")
    assert change.values == {}


def test_few_changes_are_kept_and_none_of_what_is_gone(revisions: Revisions) -> None:
    for number in range(KEPT + 5):
        revisions.switched({"f": spec(str(number))})
    assert [change.now for change in revisions.of("f")] == [str(KEPT + 4 - each) for each in range(KEPT)]
    revisions.switched({})
    assert revisions.of("f") == ()


class SlowToPrepare(ScriptedRuntime):
    """Prepares ``slow`` when ``gate`` is set, and ``broken`` when ``mended`` is."""

    def __init__(self) -> None:
        super().__init__(step_of)
        self.gate = asyncio.Event()
        self.mended = False
        self.error: CodedError = Unsupported("there is no image nowhere:1", component="docker")
        self.tries: dict[str, int] = defaultdict(int)

    async def prepare(self, function: FunctionSpec) -> None:
        self.tries[function.name] += 1
        if function.name == "slow":
            await self.gate.wait()
        if function.name == "broken" and not self.mended:
            raise self.error
        await super().prepare(function)


@dataclass
class SlowGateway:
    """A gateway with a slow function and a broken one, and their runtime."""

    gateway: RunningGateway
    runtime: SlowToPrepare

    async def submit(self, name: str, n: int, **headers: str) -> str:
        answer = await self.gateway.invoke({"n": n}, function=name, mode="async", headers=headers)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    async def record(self, invocation_id: str, wait: str = "0s") -> dict[str, object]:
        found = (await self.gateway.http.get(f"/v1/invocations/{invocation_id}", params={"wait": wait})).json()
        assert isinstance(found, dict)
        return found

    async def status(self, name: str) -> tuple[str, str | None]:
        found = (await self.gateway.http.get(f"/v1/functions/{name}")).json()
        return found["status"], found.get("problem")

    def executed(self) -> list[str]:
        return [each for verb, each in self.runtime.seen if verb == "execute"]


@pytest.fixture
async def slow_gateway(tmp_path: Path) -> AsyncIterator[SlowGateway]:
    runtime = SlowToPrepare()
    functions = {"slow": function("slow"), "broken": function("broken")}
    async with serving(GatewayBench(tmp_path, functions=functions), runtime=runtime) as gateway:
        yield SlowGateway(gateway, runtime)


@pytest.mark.promise("The gateway accepts before its functions are prepared, and what it accepts then runs in order.")
async def test_what_is_accepted_for_a_function_that_is_being_prepared_runs_in_order_when_it_is(
    slow_gateway: SlowGateway,
) -> None:
    ids = [await slow_gateway.submit("slow", n) for n in range(3)]
    assert (await slow_gateway.gateway.invoke({"n": 9})).status_code == 200, "the others serve"
    assert [(await slow_gateway.record(each))["state"] for each in ids] == ["queued"] * 3
    assert await slow_gateway.status("slow") == ("preparing", None)
    ready = await slow_gateway.gateway.http.get("/readyz")
    assert (ready.status_code, ready.json()["preparing"]) == (200, ["slow"])
    slow_gateway.runtime.gate.set()
    assert [(await slow_gateway.record(each, "5s"))["state"] for each in ids] == ["succeeded"] * 3
    assert slow_gateway.executed()[1:] == ids
    assert await slow_gateway.status("slow") == ("ready", None)


async def test_what_waits_for_its_function_stands_in_the_queue_with_task_cause_and_age(
    slow_gateway: SlowGateway,
) -> None:
    app = slow_gateway.gateway.app
    first = await slow_gateway.submit("slow", 1, **{"X-Trajectory-Id": "t", "X-Task": "rl"})
    second = await slow_gateway.submit("echo", 2, **{"X-Trajectory-Id": "t", "X-Task": "rl"})
    changed = replace(app.config, functions={**app.config.functions, "slow": function("slow", timeout_s=7.0)})
    applying = asyncio.create_task(app.registry.apply(changed))
    await until(lambda: app.engine.queue()["waiting"] == 3)
    page = (await slow_gateway.gateway.http.get("/v1/queue")).json()
    assert [(row["id"], row["function"], row["task"], row["waits_for"]) for row in page["queue"]] == [
        (first, "slow", "rl", "function slow, which is being prepared"),
        (second, "echo", "rl", "the earlier actions of trajectory t"),
        ("registration-slow", "(registration)", "", "function slow, which is being prepared"),
    ]
    assert {row["cause"]["kind"] for row in page["queue"]} == {"function", "trajectory"}
    assert all(0 <= row["age_s"] < DEADLINE_S for row in page["queue"])
    tasks = (await slow_gateway.gateway.http.get("/v1/tasks")).json()["tasks"]
    assert {each["task"]: each["queued"] for each in tasks}["rl"] == 2
    slow_gateway.runtime.gate.set()
    await applying
    assert (await slow_gateway.record(second, "5s"))["state"] == "succeeded"
    assert (await slow_gateway.gateway.http.get("/v1/queue")).json()["waiting"] == 0


class GatedImages:
    """`ImageKeeper` of a registry that answers when it is let, and has no image."""

    bound_bytes = 0

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    def pulls(self, image: str) -> bool:
        return not self.gate.is_set()

    def begin(self, image: str) -> None:
        require_image_name(image)

    async def settled(self, images: Sequence[str], within_s: float) -> None:
        await self.gate.wait()

    async def require(self, image: str) -> object:
        await self.gate.wait()
        raise InvalidConfig(f"there is no image {image}", component="images")

    async def states(self) -> list[ImageState]:
        return []


async def test_what_waits_for_an_image_stands_in_the_queue_and_on_the_page(
    slow_gateway: SlowGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    http, app, keeper = slow_gateway.gateway.http, slow_gateway.gateway.app, GatedImages()
    provider = app.runtimes.provider
    monkeypatch.setattr(provider, "images", keeper, raising=False)
    info = replace(provider.info, kind="container")
    monkeypatch.setattr(type(provider), "info", property(lambda _: info))
    choosy = SandboxSpec(images=("far/*",))
    app.registry.config = replace(
        app.config, functions={**app.config.functions, "choosy": function("choosy", sandbox=choosy)}
    )
    body = {"function": "choosy", "task": "rl", "sandbox": {"image": "far/big:1"}}
    opening = asyncio.create_task(http.put("/v1/trajectories/u", json=body))
    pulling = asyncio.create_task(http.put("/v1/images", params={"wait": "60s"}, json={"images": ["far/big:1"]}))
    await until(lambda: opening.done() or pulling.done() or app.engine.queue()["waiting"] == 2)
    page = (await http.get("/v1/queue")).json()
    assert {(row["id"], row["function"], row["task"], row["waits_for"]) for row in page["queue"]} == {
        ("opening-u", "(opening)", "rl", "image far/big:1"),
        ("pull-far/big:1", "(pull)", "", "image far/big:1"),
    }
    said = verdict(app.engine.summary(), Troubles(None, []), {}, 0)
    assert said == ("waiting", "2 of 2 waiting actions wait for images that are pulled")
    keeper.gate.set()
    assert (await opening).json()["detail"] == "there is no image far/big:1"
    assert (await pulling).status_code == 200
    assert app.engine.queue()["waiting"] == 0


async def test_what_waits_behind_it_in_its_trajectory_waits_too_and_what_is_cancelled_never_runs(
    slow_gateway: SlowGateway,
) -> None:
    first, gone = await slow_gateway.submit("slow", 1, **{"X-Trajectory-Id": "t"}), await slow_gateway.submit("slow", 2)
    second = await slow_gateway.submit("echo", 3, **{"X-Trajectory-Id": "t"})
    assert (await slow_gateway.gateway.http.post(f"/v1/invocations/{gone}/cancel")).status_code == 200
    assert slow_gateway.executed() == []
    slow_gateway.runtime.gate.set()
    assert (await slow_gateway.record(second, "5s"))["state"] == "succeeded"
    assert slow_gateway.executed() == [first, second]
    assert (await slow_gateway.record(gone))["state"] == "cancelled"


async def test_a_function_that_cannot_be_prepared_is_unavailable_and_is_tried_again(
    slow_gateway: SlowGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = await slow_gateway.submit("broken", 1)
    monkeypatch.setattr(registry, "AGAIN_S", 0.01)
    await until(lambda: slow_gateway.runtime.tries["broken"] > 1)
    assert await slow_gateway.status("broken") == ("unavailable", "there is no image nowhere:1")
    ready = await slow_gateway.gateway.http.get("/readyz")
    assert (ready.status_code, ready.json()["unavailable"]) == (200, ["broken"])
    assert (await slow_gateway.record(waits))["state"] == "queued"
    slow_gateway.runtime.mended = True
    assert (await slow_gateway.record(waits, "5s"))["state"] == "succeeded"


async def test_what_waits_for_an_unavailable_function_ends_at_its_queue_timeout_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "AGAIN_MAX_S", 0.01)
    monkeypatch.setattr(registry, "FAILURES_MIN", 10**9)
    functions = {"broken": function("broken", queue_timeout_s=0.2)}
    runtime = SlowToPrepare()
    async with serving(GatewayBench(tmp_path, functions=functions), runtime=runtime) as gateway:
        refused = await gateway.invoke({}, function="broken")
        assert refused.status_code == 408
        record = refused.json()["invocation"]
        assert (record["state"], record["reason"]) == ("timed_out", "queue_timeout")
        assert record["message"].endswith("its function is unavailable: there is no image nowhere:1")
        assert 200 <= record["queue_ms"] < 5000


async def test_a_function_that_stays_unavailable_refuses_calls_at_once_with_why_until_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "AGAIN_S", 60.0)
    monkeypatch.setattr(registry, "FAILURES_MIN", 1)
    runtime = SlowToPrepare()
    slow_gateway = GatewayBench(tmp_path, functions={"broken": function("broken"), "echo": function("echo")})
    async with serving(slow_gateway, runtime=runtime) as gateway:
        await until(lambda: gateway.app.registry.preparation.of("broken").status == "unavailable")
        for mode in ("sync", "async"):
            refused = await gateway.invoke({}, function="broken", mode=mode)
            told = refused.json()
            assert (refused.status_code, told["code"]) == (503, "function_unavailable")
            assert "there is no image nowhere:1" in told["detail"] and 0 < told["retry_after_s"] <= 60
        assert (await gateway.invoke({"n": 1})).status_code == 200, "the others serve"
        runtime.mended = True
        gateway.app.registry.preparation.again()
        assert (await gateway.invoke({}, function="broken")).status_code == 200


async def test_a_call_waits_for_the_first_node_however_long_it_takes_to_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "AGAIN_S", 60.0)
    monkeypatch.setattr(registry, "FAILURES_MIN", 1)
    runtime = SlowToPrepare()
    runtime.error = CapacityExceeded("no node has joined yet that could run it", component="cluster")
    slow_gateway = GatewayBench(tmp_path, functions={"broken": function("broken", queue_timeout_s=30.0)})
    async with serving(slow_gateway, runtime=runtime) as gateway:
        await until(lambda: gateway.app.registry.preparation.of("broken").status == "unavailable")
        call = asyncio.create_task(gateway.invoke({}, function="broken"))
        await until(lambda: call.done() or bool(gateway.app.invocations.living))
        runtime.mended = True
        gateway.app.registry.preparation.again()
        assert (await call).status_code == 200


async def test_a_mistake_of_the_configuration_is_told_to_the_first_call_and_has_no_time_to_ask_again(
    tmp_path: Path,
) -> None:
    runtime = SlowToPrepare()
    runtime.error = InvalidConfig("sandbox.image names nothing", component="sandbox")
    slow_gateway = GatewayBench(tmp_path, functions={"broken": function("broken")})
    async with serving(slow_gateway, runtime=runtime) as gateway:
        await until(lambda: gateway.app.registry.preparation.of("broken").status == "unavailable")
        refused = await gateway.invoke({}, function="broken")
        assert (refused.status_code, refused.json()["code"]) == (503, "function_unavailable")
        assert "sandbox.image names nothing" in refused.json()["detail"]
        assert "Retry-After" not in refused.headers and "retry_after_s" not in refused.json()


async def test_what_waited_for_a_broken_function_is_done_by_the_one_that_takes_its_place(tmp_path: Path) -> None:
    runtime = SlowToPrepare()
    slow_gateway = GatewayBench(tmp_path, functions={"broken": function("broken")})
    async with serving(slow_gateway, runtime=runtime) as gateway:
        waits = (await gateway.invoke({}, function="broken", mode="async")).json()["id"]
        await until(lambda: runtime.tries["broken"] > 0)
        runtime.mended = True
        mended = GatewayBench(tmp_path, functions={"broken": function("broken", revision="mended", timeout_s=7.0)})
        await gateway.app.registry.apply(mended.config())
        record = (await gateway.http.get(f"/v1/invocations/{waits}", params={"wait": "5s"})).json()
        assert (record["state"], record["revision"]) == ("succeeded", "mended")
        assert runtime.leases[waits]


async def test_the_process_says_that_it_lives_before_there_is_a_gateway() -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b""})  # type: ignore[operator]

    with listen("127.0.0.1", 0) as listener:
        door = HttpListener(listener, 8192, ServerConfig())
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            assert (await client.get("/healthz")).json()["status"] == "ok"
            starting = await client.get("/readyz")
            assert (starting.status_code, starting.json()["status"]) == (503, "starting")
            early = await client.post("/v1/functions/echo/invocations", json={})
            assert (early.status_code, early.headers["retry-after"]) == (503, "1")
            door.open(app)
            assert (await client.get("/healthz")).status_code == 204
        await door.close()


async def test_a_node_that_joins_has_the_others_asked_no_more_and_a_change_in_the_middle_of_a_try_is_not_missed() -> (
    None
):
    shell = FunctionSpec(name="shell", runtime="exec")
    asked: list[str] = []
    ready, failed, go_on = asyncio.Event(), asyncio.Queue[str](), asyncio.Event()

    async def everywhere(function: FunctionSpec) -> None:
        asked.append("all")
        failed.put_nowait("all")
        await go_on.wait()
        raise Unsupported("nobody can")

    def told(name: str, able: bool) -> registry.Prepare:
        async def by_it(function: FunctionSpec) -> None:
            asked.append(name)
            failed.put_nowait(name)
            if not able:
                raise Unsupported(f"{name} cannot")

        return by_it

    prepared = registry.Preparation(everywhere)
    prepared.on_ready.append(lambda name: ready.set())
    prepared.begin([shell])
    async with asyncio.timeout(10.0):
        await failed.get()
        prepared.again(told("n1", able=False))  # it joins while all are asked
        go_on.set()
        assert await failed.get() == "n1"
        prepared.again(told("n2", able=True))
        await ready.wait()
    assert asked == ["all", "n1", "n2"]
    await prepared.close()


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_kind_that_has_its_row_is_configured_made_told_of_and_served(tmp_path: Path) -> None:
    (tmp_path / "tangram.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "tests.gateway.toy_kind", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert ran.returncode == 0, ran.stderr
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert (answers["function"]["runtime"], answers["function"]["own"]) == ("toy", {"times": 2})
    assert answers["function"]["input_schema"]["required"] == ["text"]
    assert answers["good"]["result"] == {"text": "abab"}
    assert answers["bad"] == 422
    assert answers["change"]["changed"] == {"say": ["times"]}
    assert answers["changed"]["result"] == {"text": "ababab"}
    assert answers["changed"]["revision"] != answers["good"]["revision"]
    assert answers["chapters"] == ["functions.NAME, runtime toy"]
