"""Preparation: a gateway accepts before its functions are ready, and one that cannot be ready stops no other."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from gateway import registry
from gateway.config.schema import ServerConfig
from gateway.http.app import HttpDoor
from gateway.http.server import listen
from manager.errors import CapacityExceeded, CodedError, FunctionUnavailable, InvalidConfig, Unsupported
from manager.function import FunctionSpec
from runtimes.testing import ScriptedRuntime
from tests.gateway.conftest import GatewayBench, RunningGateway, function, serving, step_of, until


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
async def bench(tmp_path: Path) -> AsyncIterator[SlowGateway]:
    runtime = SlowToPrepare()
    functions = {"slow": function("slow"), "broken": function("broken")}
    async with serving(GatewayBench(tmp_path, functions=functions), runtime=runtime) as gateway:
        yield SlowGateway(gateway, runtime)


async def test_what_is_accepted_for_a_function_that_is_being_prepared_runs_in_order_when_it_is(
    bench: SlowGateway,
) -> None:
    ids = [await bench.submit("slow", n) for n in range(3)]
    assert (await bench.gateway.invoke({"n": 9})).status_code == 200, "the others serve"
    assert [(await bench.record(each))["state"] for each in ids] == ["queued"] * 3
    assert await bench.status("slow") == ("preparing", None)
    ready = await bench.gateway.http.get("/readyz")
    assert (ready.status_code, ready.json()["preparing"]) == (200, ["slow"])
    bench.runtime.gate.set()
    assert [(await bench.record(each, "5s"))["state"] for each in ids] == ["succeeded"] * 3
    assert bench.executed()[1:] == ids
    assert await bench.status("slow") == ("ready", None)


async def test_what_waits_behind_it_in_its_trajectory_waits_too_and_what_is_cancelled_never_runs(
    bench: SlowGateway,
) -> None:
    first, gone = await bench.submit("slow", 1, **{"X-Trajectory-Id": "t"}), await bench.submit("slow", 2)
    second = await bench.submit("echo", 3, **{"X-Trajectory-Id": "t"})
    assert (await bench.gateway.http.post(f"/v1/invocations/{gone}/cancel")).status_code == 200
    assert bench.executed() == []
    bench.runtime.gate.set()
    assert (await bench.record(second, "5s"))["state"] == "succeeded"
    assert bench.executed() == [first, second]
    assert (await bench.record(gone))["state"] == "cancelled"


async def test_a_function_that_cannot_be_prepared_is_unavailable_and_is_tried_again(
    bench: SlowGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = await bench.submit("broken", 1)
    monkeypatch.setattr(registry, "AGAIN_S", 0.01)
    await until(lambda: bench.runtime.tries["broken"] > 1)
    assert await bench.status("broken") == ("unavailable", "there is no image nowhere:1")
    ready = await bench.gateway.http.get("/readyz")
    assert (ready.status_code, ready.json()["unavailable"]) == (200, ["broken"])
    assert (await bench.record(waits))["state"] == "queued"
    bench.runtime.mended = True
    assert (await bench.record(waits, "5s"))["state"] == "succeeded"


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
    bench = GatewayBench(tmp_path, functions={"broken": function("broken"), "echo": function("echo")})
    async with serving(bench, runtime=runtime) as gateway:
        await until(lambda: gateway.app.registry.readiness("broken").status == "unavailable")
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
    bench = GatewayBench(tmp_path, functions={"broken": function("broken", queue_timeout_s=30.0)})
    async with serving(bench, runtime=runtime) as gateway:
        await until(lambda: gateway.app.registry.readiness("broken").status == "unavailable")
        call = asyncio.create_task(gateway.invoke({}, function="broken"))
        await until(lambda: call.done() or bool(gateway.app.invocations.living))
        runtime.mended = True
        gateway.app.registry.preparation.again()
        assert (await call).status_code == 200


def test_a_call_waits_for_a_try_that_runs_or_is_due_in_time_and_for_no_other() -> None:
    def refused(failures: int, again_s: float) -> bool:
        found = registry.Readiness("unavailable", "no image", failures, again_s)
        try:
            found.check(function("f", queue_timeout_s=5.0), now_s=100.0)
        except FunctionUnavailable as error:
            assert error.retry_after_s == again_s - 100.0
            return True
        return False

    few, many = registry.FAILURES_MIN - 1, registry.FAILURES_MIN
    assert (refused(few, 104.0), refused(few, 106.0), refused(many, 104.0)) == (False, True, True)
    assert not refused(many, 0.0), "a try runs"
    registry.Readiness("preparing").check(function("f"), now_s=0.0)


async def test_a_mistake_of_the_configuration_is_told_to_the_first_call_and_has_no_time_to_ask_again(
    tmp_path: Path,
) -> None:
    runtime = SlowToPrepare()
    runtime.error = InvalidConfig("sandbox.image names nothing", component="sandbox")
    bench = GatewayBench(tmp_path, functions={"broken": function("broken")})
    async with serving(bench, runtime=runtime) as gateway:
        await until(lambda: gateway.app.registry.readiness("broken").status == "unavailable")
        refused = await gateway.invoke({}, function="broken")
        assert (refused.status_code, refused.json()["code"]) == (503, "function_unavailable")
        assert "sandbox.image names nothing" in refused.json()["detail"]
        assert "Retry-After" not in refused.headers and "retry_after_s" not in refused.json()


async def test_what_waited_for_a_broken_function_is_done_by_the_one_that_takes_its_place(tmp_path: Path) -> None:
    runtime = SlowToPrepare()
    bench = GatewayBench(tmp_path, functions={"broken": function("broken")})
    async with serving(bench, runtime=runtime) as gateway:
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
        door = HttpDoor(listener, 8192, ServerConfig())
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
