"""Trajectories and their sandboxes, warm pools, the gate before the engine, and the runtime over them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manager.action import Grant, Lease
from manager.errors import (
    ActionFailed,
    CapacityExceeded,
    CodedError,
    Conflict,
    InvalidConfig,
    NotFound,
    Reason,
    Unsupported,
)
from manager.function import Background, FunctionSpec, Isolation, SandboxSpec, Warm
from runtimes.sandbox.command import Command
from runtimes.sandbox.environments import DEMAND_S, Environments, EnvironmentSettings, WarmPool
from runtimes.sandbox.exec import ExecRuntime
from runtimes.sandbox.runner.client import lost
from runtimes.sandbox.sandbox import CreationGate, Provider, Sandbox
from runtimes.secrets import Secrets
from tests.runtimes.recorder import assert_as_declared, execution_of
from tests.virtual_clock import VirtualClock

DEADLINE_S = 60.0


@pytest.fixture
async def environments(local: Provider) -> AsyncIterator[Environments]:
    made = Environments(local)
    yield made
    await made.close()


async def say(sandbox: Sandbox, text: str) -> bytes:
    return (await sandbox.run(Command(shell=text))).stdout


async def test_a_secret_in_the_environment_is_filled_in_when_the_sandbox_is_made(local: Provider) -> None:
    secrets = Secrets(environ={"TANGRAM_SECRET_KEY": "sesame"})
    made = Environments(local, EnvironmentSettings(secrets=secrets))
    spec = SandboxSpec(env={"KEY": "Bearer ${secret:key}", "PLAIN": "as it is"})
    try:
        assert await say(await made.ensure("t", spec), 'echo "$KEY, $PLAIN"') == b"Bearer sesame, as it is\n"
        with pytest.raises(InvalidConfig, match="TANGRAM_SECRET_OTHER"):
            await made.ensure("u", replace(spec, env={"KEY": "${secret:other}"}))
    finally:
        await made.close()


class TestTrajectories:
    @pytest.mark.promise("A trajectory has one sandbox, and its files survive from action to action.")
    async def test_a_trajectory_keeps_its_sandbox(self, environments: Environments) -> None:
        first, second = await asyncio.gather(environments.ensure("t"), environments.ensure("t"))
        assert first is second
        other = await environments.ensure("u")
        assert other is not first
        await say(first, "echo kept > file")
        assert await say(await environments.ensure("t"), "cat file") == b"kept\n"
        assert sorted(str(entry["trajectory"]) for entry in environments.list()) == ["t", "u"]

    async def test_the_end_removes_it_and_is_idempotent(self, environments: Environments) -> None:
        sandbox = await environments.ensure("t")
        await environments.end("t")
        await environments.end("t")
        assert (environments.get("t"), environments.list(), sandbox.alive) == (None, [], False)

    async def test_the_existing_sandbox_wins_but_isolation_is_always_checked(self, environments: Environments) -> None:
        sandbox = await environments.ensure("t", SandboxSpec(memory_bytes=2**28))
        assert await environments.ensure("t", SandboxSpec(memory_bytes=2**29)) is sandbox
        with pytest.raises(Unsupported, match="isolation: container"):
            await environments.ensure("t", SandboxSpec(isolation=Isolation.CONTAINER))

    async def test_an_unseen_death_is_told_once_before_a_new_sandbox_is_made(self, environments: Environments) -> None:
        sandbox = await environments.ensure("t")
        await environments.provider.reap(())
        async with asyncio.timeout(DEADLINE_S):
            assert isinstance(sandbox, Sandbox)
            await sandbox.lost.wait()
        with pytest.raises(ActionFailed) as caught:
            await environments.ensure("t")
        assert caught.value.reason is Reason.ENVIRONMENT_LOST
        assert (await environments.ensure("t")).alive

    async def test_a_death_that_an_action_told_is_not_told_again(self, environments: Environments) -> None:
        sandbox = await environments.ensure("t")
        begun = asyncio.Event()
        task = asyncio.create_task(sandbox.run(Command(shell="echo; sleep 1000"), lambda *_: begun.set()))
        async with asyncio.timeout(DEADLINE_S):
            await begun.wait()
            await environments.provider.reap(())
            with pytest.raises(ActionFailed):
                await task
        assert await environments.ensure("t") is not sandbox

    async def test_a_failed_creation_leaves_nothing_and_can_be_tried_again(self, environments: Environments) -> None:
        with pytest.raises(CodedError):
            await environments.ensure("t", SandboxSpec(workdir="relative"))
        assert (environments.get("t"), environments.list()) == (None, [])
        assert (await environments.ensure("t")).alive

    async def test_an_action_without_a_trajectory_has_a_sandbox_of_its_own(self, environments: Environments) -> None:
        async with environments.ephemeral() as one, environments.ephemeral() as other:
            assert one is not other
            assert await say(one, "echo hello") == b"hello\n"
        await environments.close()
        assert not one.alive

    async def test_the_reaper_spares_what_is_made_or_claimed_and_has_no_owner_yet(
        self, environments: Environments, local: Provider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        create, relabel, passes = local.create, Sandbox.relabel, 0

        async def made(*given: Any, **more: Any) -> Sandbox:
            nonlocal passes
            sandbox = await create(*given, **more)
            await environments._reap()  # where a provider still has to put something on record
            passes += 1
            return sandbox

        async def relabelled(sandbox: Sandbox, labels: Mapping[str, str]) -> None:
            nonlocal passes
            await environments._reap()
            passes += 1
            await relabel(sandbox, labels)

        monkeypatch.setattr(local, "create", made)
        monkeypatch.setattr(Sandbox, "relabel", relabelled)
        assert await say(await environments.ensure("t"), "echo on") == b"on\n"
        pool = environments.pool(SandboxSpec(warm=Warm(min=1, max=1)))
        pool.start()
        await pool.filled()
        assert await say(await environments.ensure("u", pool.spec), "echo on") == b"on\n"
        await pool.filled()
        assert passes == 4, "two that were made for the pool, one of which was claimed, and the first"

    async def test_the_next_gateway_adopts_what_was_kept(self, local: Provider) -> None:
        first = Environments(local, EnvironmentSettings(keep_on_close=True))
        await say(await first.ensure("kept"), "echo kept > file")
        await first.ensure("unknown")
        await first.close()
        second = Environments(local)
        assert await second.start({"kept"}) == ["kept"]
        assert await say(await second.ensure("kept"), "cat file") == b"kept\n"
        await second.close()
        assert await local.adopt() == []

    async def test_a_snapshot_is_of_a_sandbox_that_lives(self, environments: Environments) -> None:
        with pytest.raises(NotFound):
            await environments.snapshot("nobody")
        await (await environments.ensure("t")).close()
        with pytest.raises(Conflict, match="closed"):
            await environments.snapshot("t")
        assert environments.provider.snapshots.ids == set(), "nothing is left of one that could not be taken"


class TestWarmPool:
    async def test_a_warm_sandbox_is_claimed_and_replaced(self, environments: Environments) -> None:
        spec = SandboxSpec(image="any", warm=Warm(min=2, max=3))
        await environments.warm(spec)
        pool = environments.pool(spec)
        async with asyncio.timeout(DEADLINE_S):
            await pool.filled()
            ready = {sandbox.id for sandbox in pool.living()}
            claimed = await environments.ensure("t", spec)
            assert claimed.id in ready
            await pool.filled()
        assert pool.idle == 2
        assert claimed.id not in {sandbox.id for sandbox in pool.living()}

    async def test_one_that_died_while_it_lay_ready_is_removed_and_replaced(
        self, environments: Environments, tmp_path: Path
    ) -> None:
        spec = SandboxSpec(image="any", warm=Warm(min=1, max=1))
        await environments.warm(spec)
        pool = environments.pool(spec)
        async with asyncio.timeout(DEADLINE_S):
            await pool.filled()
            (ready,) = pool.living()
            assert isinstance(ready, Sandbox)
            (record,) = (tmp_path / "state" / "sandboxes").glob("*/record.json")
            os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
            await ready.lost.wait()
            await environments._reap()
            assert not record.exists()
            await pool.filled()
        assert [sandbox.alive for sandbox in pool.living()] == [True]

    async def test_a_claimed_sandbox_is_adopted_as_its_trajectorys(self, local: Provider) -> None:
        first = Environments(local, EnvironmentSettings(keep_on_close=True))
        spec = SandboxSpec(image="any", warm=Warm(min=1, max=1))
        await first.warm(spec)
        async with asyncio.timeout(DEADLINE_S):
            await first.pool(spec).filled()
        await first.ensure("t", spec)
        await first.close()
        second = Environments(local)
        assert await second.start() == ["t"]
        await second.close()

    async def test_recent_demand_raises_the_target_up_to_the_maximum(self, local: Provider) -> None:
        clock = VirtualClock()

        async def never() -> Sandbox:
            raise AssertionError("not started")

        pool = WarmPool(SandboxSpec(warm=Warm(min=1, max=3)), never, clock)
        assert pool.target == 1
        for _ in range(5):
            assert pool.claim() is None
        assert pool.target == 3
        clock.advance_to(DEMAND_S + 1)
        assert pool.target == 1


class TestStarting:
    async def test_no_more_than_the_limit_are_made_at_once(self) -> None:
        gate = CreationGate(2)
        going, peak = 0, 0

        async def make(name: str) -> None:
            nonlocal going, peak
            async with gate.slot(name):
                going += 1
                peak = max(peak, going)
                await asyncio.sleep(0)
                going -= 1

        await asyncio.gather(*(make(str(index)) for index in range(10)))
        assert (peak, gate.names) == (2, set())

    async def test_the_gate_is_open_once_the_engine_is_back(self) -> None:
        gate = CreationGate(1, threshold=1, clock=VirtualClock())
        with pytest.raises(OSError, match="gone"):
            async with gate.slot("x"):
                raise OSError("the engine is gone")
        waits = [(gate.note_trouble(trouble), gate.wait_s)[1] for trouble in ("", "gone", "")]
        assert waits == [1.0, 1.0, 0.0]

    async def test_failures_close_the_gate_for_a_growing_while(self) -> None:
        clock = VirtualClock()
        gate = CreationGate(1, threshold=2, backoff_s=1.0, clock=clock)

        async def fail(error: Exception) -> None:
            async with gate.slot("x"):
                raise error

        for _ in range(2):
            with pytest.raises(CodedError, match="broken"):
                await fail(CodedError("broken"))
        with pytest.raises(CapacityExceeded, match=r"2 sandboxes in a row could not be made \(broken\)") as caught:
            await fail(CodedError("broken"))
        assert caught.value.retry_after_s == 1.0
        clock.advance_to(1.5)
        with pytest.raises(CodedError, match="broken"):
            await fail(CodedError("broken"))
        assert gate.wait_s == 2.0
        clock.advance_to(10.0)
        async with gate.slot("x"):
            pass
        with pytest.raises(CodedError, match="broken"):
            await fail(CodedError("broken"))
        assert gate.wait_s == 0.0

    async def test_a_shortage_is_told_while_it_lasts_and_tried_again_soon(self) -> None:
        clock = VirtualClock()
        gate = CreationGate(1, clock=clock)
        for minute in range(20):
            clock.advance_to(60.0 * minute)
            with pytest.raises(CapacityExceeded, match="ran short"):
                async with gate.slot("x"):
                    raise CapacityExceeded("the machine ran short: Too many open files")
            assert gate.wait_s <= 5.0 and (not gate.wait_s or "ran short" in gate.shortage)
        clock.advance_to(clock.now() + 5.0)
        assert gate.shortage == ""
        async with gate.slot("x"):
            pass
        assert (gate.wait_s, gate.shortage) == (0.0, "")

    async def test_a_search_sees_what_was_begun_and_made_while_it_looked(self) -> None:
        gate = CreationGate(2)
        async with gate.slot("before"):
            with gate.watching() as young, gate.watching() as other:
                async with gate.slot("meanwhile"):
                    pass
                assert young == other == {"before", "meanwhile"}
        async with gate.slot("after"):
            assert young == {"before", "meanwhile"}

    async def test_the_callers_mistakes_do_not_count(self) -> None:
        gate = CreationGate(1, threshold=1, clock=VirtualClock())
        with pytest.raises(Unsupported):
            async with gate.slot("x"):
                raise Unsupported("never")
        assert gate.wait_s == 0.0


class TestExecRuntime:
    function = FunctionSpec(name="shell", runtime="exec", sandbox=SandboxSpec(), output_limit_bytes=1000)

    async def test_a_command_becomes_a_result_a_log_and_a_measured_use(self, environments: Environments) -> None:
        runtime = ExecRuntime(environments)
        script = "printf 'grüße\\n'; echo err >&2; exit 4"
        execution, log = execution_of(self.function, {"command": script, "env": {"A": "b"}}, trajectory="t")
        result = await runtime.execute(execution)
        assert_as_declared(self.function, result.value)
        assert isinstance(result.value, dict)
        duration_s = result.value.pop("duration_s")
        assert isinstance(duration_s, float)
        assert result.value == {
            "exit_code": 4,
            "signal": None,
            "stdout": "grüße\n",
            "stderr": "err\n",
            "stdout_truncated": False,
            "stderr_truncated": False,
        }
        assert (log.text("stdout"), log.text("stderr")) == ("grüße\n", "err\n")
        assert {"cpu_s", "peak_memory_bytes"} <= result.usage.keys()
        assert execution.execution_s >= duration_s * 0.5

    @pytest.mark.promise("A log is kept to its own bound, and its end counts the missing bytes.")
    async def test_the_log_takes_more_than_the_result_and_counts_the_rest(self, environments: Environments) -> None:
        function = replace(self.function, log_limit_bytes=5000)
        script = "head -c 20000 /dev/zero | tr '\\0' x; echo the end"
        execution, log = execution_of(function, {"command": script})
        value = (await ExecRuntime(environments).execute(execution)).value
        assert isinstance(value, dict)
        assert value["stdout"].endswith("\n" + "the end\n".rjust(500, "x"))
        assert (log.text("stdout"), log.omitted_bytes) == ("x" * 5000, 15_008)

    async def test_an_action_that_has_succeeded_stays_so_though_its_sandbox_does_not_rest(
        self, environments: Environments, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def fails(sandbox: Sandbox, background: Background) -> None:
            raise lost("it died just now")

        monkeypatch.setattr(Sandbox, "quiesce", fails)
        execution, _ = execution_of(self.function, {"command": "echo done"}, trajectory="t")
        result = (await ExecRuntime(environments).execute(execution)).value
        assert isinstance(result, dict)
        assert result["stdout"] == "done\n"

    async def test_a_command_finds_the_trace_that_it_is_part_of(self, environments: Environments) -> None:
        script = 'echo "$TRACEPARENT|$TRACESTATE"'
        trace = f"00-{'1' * 32}-{'2' * 16}-01"
        said = []
        for env, state in (({}, "vendor=1"), ({"TRACEPARENT": "own"}, "vendor=1"), ({}, None)):
            execution, log = execution_of(self.function, {"command": script, "env": env}, trajectory="t")
            call = replace(execution.call, traceparent=trace if state else None, tracestate=state)
            execution.call = call
            await ExecRuntime(environments).execute(execution)
            said.append(log.text("stdout"))
        assert said == [f"{trace}|vendor=1\n", "own|\n", "|\n"]

    async def test_bytes_that_are_no_text_come_as_base64_too(self, environments: Environments) -> None:
        execution, _ = execution_of(self.function, {"argv": ["printf", "\\377"]})
        value = (await ExecRuntime(environments).execute(execution)).value
        assert_as_declared(self.function, value)
        assert isinstance(value, dict)
        assert (value["stdout"], value["stdout_base64"]) == ("\ufffd", "/w==")

    async def test_the_cores_of_the_lease_are_the_commands_cores(self, environments: Environments) -> None:
        script = "import os; print(sorted(os.sched_getaffinity(0)))"
        execution, log = execution_of(self.function, {"argv": ["python3", "-c", script]}, trajectory="t", cores=(0,))
        await ExecRuntime(environments).execute(execution)
        assert log.text("stdout") == "[0]\n"

    async def test_a_sandbox_that_cannot_be_made_is_a_typed_end(self, environments: Environments) -> None:
        function = replace(self.function, sandbox=SandboxSpec(isolation=Isolation.CONTAINER))
        for trajectory in ("t", None):
            execution, _ = execution_of(function, {"command": "true"}, trajectory=trajectory)
            with pytest.raises(ActionFailed, match="isolation: container") as caught:
                await ExecRuntime(environments).execute(execution)
            assert caught.value.reason is Reason.INVALID_INPUT

    async def test_a_user_is_held_against_the_functions_own_list_also_in_anothers_sandbox(
        self, environments: Environments
    ) -> None:
        await environments.ensure("t", SandboxSpec(users=("1000", "root")))
        function = replace(self.function, sandbox=SandboxSpec())
        execution, _ = execution_of(function, {"command": "true", "user": "root"}, trajectory="t")
        with pytest.raises(ActionFailed, match=r"list it: sandbox\.users") as caught:
            await ExecRuntime(environments).execute(execution)
        assert (caught.value.reason, caught.value.detail["path"]) == (Reason.INVALID_INPUT, "$.user")

    async def test_a_resize_of_an_ended_action_is_nothing(self, environments: Environments) -> None:
        runtime = ExecRuntime(environments)
        execution, _ = execution_of(self.function, {"command": "true"}, trajectory="t")
        await runtime.execute(execution)
        lease = Lease(action_id="a1", node="local", grants={"cpu": Grant(pool="cpu:local", units=1, cores=(0,))})
        await runtime.resize(execution.action, lease)

    async def test_what_is_no_command_is_invalid_input_with_its_path(self, environments: Environments) -> None:
        rows: list[tuple[dict[str, object], str]] = [
            ({}, "$"),
            ({"command": "a", "argv": ["b"]}, "$"),
            ({"command": ""}, "$.command"),
            ({"command": 5}, "$.command"),
            ({"argv": []}, "$.argv"),
            ({"argv": ["a", 1]}, "$.argv"),
            ({"argv": "a"}, "$.argv"),
            ({"command": "a", "env": {"A": 1}}, "$.env"),
            ({"command": "a", "env": []}, "$.env"),
            ({"command": "a\0b"}, "$.command"),
            ({"command": "a", "cwd": 7}, "$.cwd"),
            ({"command": "a", "shell": True}, "$.shell"),
            ({"argv": ["a", "b" * 2**17]}, "$.argv[1]"),
            ({"command": "a", "env": {"A": "b" * 2**17}}, "$.env.A"),
            ({"command": "a" * 2**21}, "$.command"),
            ({"command": "a", "env": dict.fromkeys(map(str, range(2**18)), "b")}, "$.env"),
        ]
        for input, path in rows:
            execution, _ = execution_of(self.function, input)
            with pytest.raises(ActionFailed) as caught:
                await ExecRuntime(environments).execute(execution)
            assert (caught.value.reason, caught.value.detail["path"]) == (Reason.INVALID_INPUT, path)
            assert execution.began_s is None
