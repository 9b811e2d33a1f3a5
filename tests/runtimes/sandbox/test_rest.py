"""What happens to a sandbox's processes between actions, and when no gateway comes any more."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from manager.function import Background, SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.linux import CpuWeight
from runtimes.sandbox.sandbox import Provider, Sandbox
from runtimes.sandbox.spec import SandboxRecord
from tests.runtimes.sandbox.conftest import sh, unique

DEADLINE_S = 60.0


class TestRest:
    async def test_between_actions_background_processes_stand_still(self, sandbox: Sandbox) -> None:
        await sh(sandbox, "(while :; do echo >> ticks; sleep 0.01; done) >/dev/null 2>&1 &")
        await sandbox.quiesce(Background.FREEZE)
        await sandbox.quiesce(Background.FREEZE)
        result = await sh(sandbox, "wc -l < ticks; while [ $(wc -l < ticks) -lt 20 ]; do sleep 0.01; done; echo on")
        assert result.stdout.endswith(b"on\n")

    @pytest.mark.parametrize("background", [Background.FREEZE, Background.KILL])
    async def test_what_one_action_runs_goes_on_though_another_beside_it_ends(
        self, sandbox: Sandbox, background: Background
    ) -> None:
        await sandbox.occupy("one", ())
        script = "touch runs; until [ -e go ]; do sleep 0.01; done; echo on"
        running = asyncio.create_task(sandbox.run(Command(argv=("sh", "-c", script))))
        await sandbox.occupy("two", ())
        assert (await sh(sandbox, "until [ -e runs ]; do sleep 0.01; done")).exit_code == 0
        await sandbox.vacate("two", background)
        await sandbox.write_file("go", b"")
        assert (await running).stdout == b"on\n"
        await sandbox.vacate("one", background)

    async def test_what_stands_still_goes_on_with_the_next_gateway(self, provider: Provider, sandbox: Sandbox) -> None:
        await sh(sandbox, "(while :; do echo >> ticks; sleep 0.01; done) >/dev/null 2>&1 &")
        await sandbox.release()
        [adopted] = [each for each, _ in await provider.adopt() if each.id == sandbox.id]
        script = "before=$(wc -l < ticks); until [ $(wc -l < ticks) -gt $before ]; do sleep 0.01; done; echo on"
        async with asyncio.timeout(DEADLINE_S):
            assert (await sh(adopted, script)).stdout == b"on\n"
        await adopted.quiesce(Background.FREEZE)
        assert (await sh(adopted, script)).stdout == b"on\n"
        await adopted.close()

    @pytest.mark.promise("A sandbox whose gateway does not come back ends itself.")
    async def test_a_sandbox_whose_gateway_is_gone_ends_itself_and_what_stands_still_in_it(
        self, provider: Provider, spec: SandboxSpec, tmp_path: Path
    ) -> None:
        brief = replace(spec, idle_ttl_s=0.5)
        sandbox = await provider.create(brief, name=unique("orphan"), labels={}, mounts={})
        await sh(sandbox, "sleep 1000 >/dev/null 2>&1 & (while :; do :; done) >/dev/null 2>&1 &")
        await sandbox.release()
        async with asyncio.timeout(DEADLINE_S):
            if provider.info.kind == "container":
                waiting = await asyncio.create_subprocess_exec("docker", "wait", f"tangram-{sandbox.id}")
                assert await waiting.wait() == 0
            else:
                record = SandboxRecord.read(tmp_path / "state" / "sandboxes" / sandbox.id)
                assert record is not None
                await asyncio.to_thread(wait_for_end, record.pid)
        assert await provider.adopt() == []

    async def test_between_actions_background_processes_may_be_killed(self, sandbox: Sandbox) -> None:
        await sh(sandbox, "sleep 1000 >/dev/null 2>&1 &")
        await sandbox.quiesce(Background.KILL)
        assert (await sh(sandbox, "pgrep sleep || echo none")).stdout == b"none\n"

    async def test_between_actions_background_processes_may_run_on(self, sandbox: Sandbox) -> None:
        await sh(sandbox, "mkfifo pipe; (cat pipe > copy; touch finished) >/dev/null 2>&1 &")
        await sandbox.quiesce(Background.RUN)
        result = await sh(sandbox, "echo hello > pipe; while [ ! -e finished ]; do sleep 0.01; done; cat copy")
        assert result.stdout == b"hello\n"

    async def test_what_runs_on_yields_again_once_files_have_travelled(
        self, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        weights: list[CpuWeight] = []
        set_cores = sandbox._control.set_cores

        async def told(cores: Sequence[int], weight: CpuWeight = CpuWeight.ACTION) -> None:
            weights.append(weight)
            await set_cores(cores, weight)

        monkeypatch.setattr(sandbox._control, "set_cores", told)
        sandbox.spec = replace(sandbox.spec, background=Background.RUN)
        await sandbox.quiesce(Background.RUN)
        async with sandbox.transfer("d", user=""), sandbox.transfer("e", user=""):
            process = await sandbox.spawn(Command(argv=("true",)))
            await process.wait()
        assert weights == [CpuWeight.BACKGROUND, CpuWeight.TRANSFER, CpuWeight.TRANSFER, CpuWeight.BACKGROUND]


def wait_for_end(pid: int) -> None:
    """Return once a process, which is not a child, has ended."""
    with suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        assert select.select([fd], [], [], DEADLINE_S)[0]
        os.close(fd)
