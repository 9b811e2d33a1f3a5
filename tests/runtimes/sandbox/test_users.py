"""Whom commands run as: a user of the sandbox's own, or one that is listed."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from manager.errors import InvalidConfig, InvalidInput
from manager.function import SandboxSpec
from runtimes.sandbox.command import Command, CommandResult
from runtimes.sandbox.sandbox import Provider, Sandbox
from tests.runtimes.sandbox.conftest import unique

DEADLINE_S = 60.0


async def sh(sandbox: Sandbox, text: str, *, user: str = "") -> CommandResult:
    return await sandbox.run(Command(shell=text, kill_grace_s=0.2, user=user))


async def test_commands_run_as_the_users_own_self(sandbox: Sandbox) -> None:
    result = await sh(sandbox, "id -u; id -g; echo $HOME; touch mine && echo written")
    uid = result.stdout.split()[0]
    assert int(uid) >= 1000
    assert result.stdout == b"%s\n%s\n/workspace\nwritten\n" % (uid, uid)
    name = await sh(sandbox, "id -un; mkdir in && cd in && touch file && stat -c %U:%G file")
    assert name.stdout in (b"agent\nagent:agent\n", b"sandbox\nsandbox:sandbox\n")


async def test_a_listed_user_keeps_the_id_that_it_has(provider: Provider, spec: SandboxSpec) -> None:
    fixed = replace(spec, user="1000", users=("1000",))
    sandbox = await provider.create(fixed, name=unique("fixed"), labels={}, mounts={})
    assert (await sh(sandbox, "id -u; touch mine && echo written")).stdout == b"1000\nwritten\n"
    await sandbox.close()


async def test_each_sandbox_has_a_user_and_so_the_kernels_quotas_of_its_own(
    provider: Provider, sandbox: Sandbox, spec: SandboxSpec
) -> None:
    if not provider.info.limits["own_user"]:
        pytest.skip("only root has other users' ids to give")
    other = await provider.create(spec, name=unique("other"), labels={}, mounts={})
    watch = (
        "import ctypes, os, sys, time\nlibc = ctypes.CDLL(None)\nlibc.inotify_init.restype = ctypes.c_int\n"
        "most = int(open('/proc/sys/fs/inotify/max_user_instances').read())\n"
        "got = sum(libc.inotify_init() >= 0 for _ in range(min(most, 2000)))\n"
        "print(got == min(most, 2000), flush=True)\nsys.stdin.read()\n"
    )
    holder = await sandbox.spawn(Command(argv=("python3", "-c", watch), timeout_s=math.inf))
    async with asyncio.timeout(DEADLINE_S):
        assert await anext(holder.chunks()) == ("stdout", b"True\n")
        assert (await other.run(Command(argv=("python3", "-c", watch)))).stdout == b"True\n"
    await holder.kill()
    uids = [(await sh(each, "id -u")).stdout for each in (sandbox, other)]
    assert len(set(uids)) == 2 or provider.info.kind != "container"  # there each has its own block of ids
    await other.release()
    adopted = {each.id: each for each, _ in await provider.adopt()}
    assert (await sh(adopted[other.id], "id -u")).stdout == uids[1]
    await adopted[other.id].close()


async def test_another_user_can_be_asked_for(sandbox: Sandbox) -> None:
    assert (await sh(sandbox, "id -u", user="65534")).stdout == b"65534\n"
    assert (await sh(sandbox, "id -u", user="root")).stdout == b"0\n"


@pytest.mark.parametrize("user", ["root", "0", "00", "65534", "sandbox", "1000:0"])
async def test_no_user_but_those_listed_can_be_asked_for(provider: Provider, spec: SandboxSpec, user: str) -> None:
    alone = replace(spec, user="1000", users=())
    sandbox = await provider.create(alone, name=unique("alone"), labels={}, mounts={})
    with pytest.raises(InvalidInput, match=r"list it: sandbox\.users") as refused:
        await sh(sandbox, "id -u", user=user)
    assert refused.value.detail == {"path": "$.user"}
    assert (await sh(sandbox, "id -u", user="1000")).stdout == b"1000\n"
    with pytest.raises(InvalidConfig, match=r"list it: sandbox\.users"):
        await provider.check(replace(alone, user=user, users=("1000",)))
    await sandbox.close()


async def test_a_sandbox_of_roots_own_asks_for_it_by_name(provider: Provider, spec: SandboxSpec) -> None:
    with pytest.raises(InvalidConfig, match=r"'root' is root.*list it: sandbox\.users: \[root\]"):
        await provider.create(replace(spec, user="root", users=()), name=unique("root"), labels={}, mounts={})


async def test_an_unknown_user_is_invalid_input(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidInput, match="no user 'nobody-here'"):
        await sh(sandbox, "true", user="nobody-here")


async def test_a_sandbox_whose_user_is_nowhere_is_not_made_and_says_whom_it_lacks(
    provider: Provider, spec: SandboxSpec
) -> None:
    if provider.info.kind != "container":
        pytest.skip("its own system files name whatever user it has")
    with pytest.raises(InvalidInput, match="no user 'nobody-here'"):
        await provider.create(replace(spec, user="nobody-here"), name=unique("nobody"), labels={}, mounts={})
