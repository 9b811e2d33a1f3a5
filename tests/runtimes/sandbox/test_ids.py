"""Blocks of user ids: one sandbox each, across gateways and their ends; what runs as whom on the host."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from manager.errors import CapacityExceeded, InvalidConfig, Unsupported
from manager.function import SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.process import BLOCK, HostSupport, IdBlocks, IdSettings, ProcessProvider
from runtimes.sandbox.sandbox import CreationGate, Provider, Sandbox
from tests.runtimes.sandbox.conftest import unique

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root gives sandboxes ids of their own"),
    pytest.mark.xdist_group("ids"),  # they look for processes of the same ids
]
#: Beside those of gateways that this machine may run.
FIRST = 0x7800_0000

TWO = IdSettings(first=FIRST, blocks=2)


def provider_of(state_dir: Path, claims: Path) -> ProcessProvider:
    host = HostSupport.discover(IdBlocks(TWO, claims))
    assert host.no_ids == ""
    return ProcessProvider(state_dir=state_dir, gate=CreationGate(2), shared_cores=(0,), host=host)


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[ProcessProvider]:
    made = provider_of(tmp_path / "state", tmp_path / "claims")
    yield made
    await made.reap(())
    await made.close()


async def made(provider: Provider, **spec: str) -> Sandbox:
    asked = SandboxSpec(users=("root",), **spec)  # type: ignore[arg-type]
    return await provider.create(asked, name=unique("ids"), labels={}, mounts={})


async def said(sandbox: Sandbox, text: str, **options: str) -> list[str]:
    done = await sandbox.run(Command(shell=text, **options))  # type: ignore[arg-type]
    return (done.stdout + done.stderr).decode().split("\n")


async def base_of(sandbox: Sandbox) -> int:
    [line, *_] = await said(sandbox, "cat /proc/self/uid_map")
    inside, outside, count = map(int, line.split())
    assert (inside, count) == (0, BLOCK)
    return outside


def test_a_block_is_given_once_and_again_after_its_end(tmp_path: Path) -> None:
    ours, theirs = IdBlocks(TWO, tmp_path), IdBlocks(TWO, tmp_path)
    with closing(ours.claim()) as one, closing(theirs.claim()) as two:
        assert {one.base, two.base} == {FIRST, FIRST + BLOCK}
        with pytest.raises(CapacityExceeded, match="blocks of user ids"):
            ours.claim()
        one.close()
        with closing(theirs.claim()) as three:
            assert three.base == one.base


def test_a_block_whose_last_process_is_leaving_is_waited_for(tmp_path: Path) -> None:
    blocks = IdBlocks(IdSettings(first=FIRST, blocks=1), tmp_path)
    lost = blocks.claim()
    lost.close()
    with subprocess.Popen(["sleep", "0.3"], user=lost.base + 1000), closing(blocks.claim()) as again:
        assert again.base == lost.base


def test_a_block_is_not_given_while_somebody_runs_under_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtimes.sandbox.process.LEAVE_S", 0.1)
    blocks = IdBlocks(IdSettings(first=FIRST, blocks=1), tmp_path)
    lost = blocks.claim()
    lost.close()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, user=lost.base + 1000), pytest.raises(CapacityExceeded):
        blocks.claim()
    with closing(blocks.claim()) as again:
        assert again.base == lost.base


def test_a_range_begins_at_a_multiple() -> None:
    with pytest.raises(InvalidConfig, match="multiple of 65536"):
        IdBlocks(IdSettings(first=FIRST + 1))


async def test_each_sandbox_has_ids_of_its_own_and_gives_them_back(provider: ProcessProvider) -> None:
    one, two = await made(provider), await made(provider)
    bases = {await base_of(one), await base_of(two)}
    assert bases == {FIRST, FIRST + BLOCK}
    with pytest.raises(CapacityExceeded):
        await made(provider)
    await one.close()
    three = await made(provider)
    assert await base_of(three) in bases - {await base_of(two)}
    await two.close()
    await three.close()


async def test_what_the_kernel_counts_for_a_user_is_one_sandbox_alone(provider: ProcessProvider) -> None:
    """One that takes every inotify instance leaves the next one its own."""
    take = "import ctypes; print(sum(ctypes.CDLL(None).inotify_init() >= 0 for _ in range(2000)))"
    hold = f"{take}; import sys; sys.stdout.flush(); import time; time.sleep(1000)"
    one, two = await made(provider), await made(provider)
    first = await one.spawn(Command(argv=("python3", "-c", hold), timeout_s=60))
    try:
        async for _, line in first.chunks():
            assert int(line) > 0
            break
        assert int((await said(two, f"python3 -c '{take}'"))[0]) == int(line)
    finally:
        await one.close()
        await two.close()


async def test_a_sandbox_that_outlives_its_gateway_keeps_its_ids(provider: ProcessProvider, tmp_path: Path) -> None:
    kept = await made(provider)
    base = await base_of(kept)
    await kept.release()
    next_gateway = provider_of(tmp_path / "other", tmp_path / "claims")
    other = await made(next_gateway)
    assert await base_of(other) != base
    with pytest.raises(CapacityExceeded):
        await made(next_gateway)
    await other.close()
    [(adopted, _)] = await provider.adopt()
    assert await base_of(adopted) == base
    await adopted.close()


@pytest.mark.promise("Root inside a process sandbox has no rights on the host.")
@pytest.mark.parametrize("user", ["root", "0"])
async def test_root_inside_is_nobody_on_the_host(provider: ProcessProvider, user: str, tmp_path: Path) -> None:
    sandbox = await made(provider, user=user)
    base = await base_of(sandbox)
    attempts = (
        "id -u; touch file && chown 1234:1234 file && echo chown",
        "(echo x > /proc/sys/kernel/core_pattern) 2>/dev/null || echo refused",
        "(echo x > /proc/sys/net/ipv4/ip_forward) 2>/dev/null || echo refused",
        "cp /bin/true setuid; chmod 4755 setuid; test -u setuid && echo setuid",
        "mknod device b 8 0 2>/dev/null || echo refused; mount -t tmpfs x /mnt 2>/dev/null || echo refused",
    )
    answers = [line for text in attempts for line in await said(sandbox, text) if line]
    assert answers == ["0", "chown", "refused", "refused", "setuid", "refused", "refused"]
    work = tmp_path / "state" / "sandboxes" / sandbox.id / "work"
    assert (work / "setuid").stat().st_uid == base
    assert (work / "file").stat().st_uid == base + 1234
    for place in (work.parent, work.parent.parent):
        status = place.stat()
        assert (status.st_uid, status.st_mode & 0o777) == (0, 0o700)
    await sandbox.close()


async def test_without_a_namespace_nobody_is_root(tmp_path: Path, provider: ProcessProvider) -> None:
    found = HostSupport.discover(IdBlocks(TWO, tmp_path / "claims"))
    host = HostSupport(found.bubblewrap, root=True, cgroup=found.cgroup, no_ids="no user namespaces here")
    shared = ProcessProvider(state_dir=tmp_path / "shared", gate=CreationGate(1), shared_cores=(0,), host=host)
    assert shared.info.weakenings == ("all sandboxes share one user of the host (no user namespaces here)",)
    for user in ("root", "0", "00"):
        with pytest.raises(Unsupported, match="would be root on the host"):
            await made(shared, user=user)
    sandbox = await made(shared)
    assert (await said(sandbox, "id -u"))[0] == "1000"
    with pytest.raises(Exception, match="cannot run commands as"):
        await said(sandbox, "id -u", user="root")
    await sandbox.close()
