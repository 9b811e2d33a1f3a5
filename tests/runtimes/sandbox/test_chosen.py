"""What a trajectory may choose for its sandbox, and which functions are served in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from manager.clock import VirtualClock
from manager.errors import InvalidInput
from manager.function import Network, SandboxSpec, TrajectoryChoices, Warm
from runtimes.sandbox.command import Command
from runtimes.sandbox.environments import DEMAND_S, Environments, EnvironmentSettings, WarmPools
from runtimes.sandbox.provider import ProviderSettings, make_provider
from runtimes.sandbox.sandbox import Provider, Sandbox
from runtimes.sandbox.spec import OtherSandbox, chosen, chosen_env, contradiction, difference
from runtimes.secrets import Secrets
from tangram.types import SandboxChoice

DEADLINE_S = 60.0
OWN = SandboxSpec(image="base", memory_bytes=2**28, env={"OWN": "1"})
OPEN = replace(
    OWN,
    images=("swebench/*",),
    users=("root", "app"),
    user="app",
    trajectory=TrajectoryChoices(networks=(Network.EGRESS,), env=("TASK_*",), memory_bytes=2**30, idle_ttl_s=7200.0),
)


@pytest.mark.parametrize(
    ("asked", "field", "remedy"),
    [
        (SandboxChoice(image="other/x"), "image", "sandbox.images"),
        (SandboxChoice(env={"PATH": "/evil"}), "env.PATH", "sandbox.trajectory.env"),
        (SandboxChoice(user="root"), "user", "sandbox.users"),
        (SandboxChoice(memory="1Gi"), "memory", "sandbox.trajectory.memory"),
        (SandboxChoice(network="egress"), "network", "sandbox.trajectory.networks"),
        (SandboxChoice(idle_ttl="10h"), "idle_ttl", "sandbox.trajectory.idle_ttl"),
    ],
)
def test_what_the_function_does_not_allow_is_refused_by_field_with_the_remedy(
    asked: SandboxChoice, field: str, remedy: str
) -> None:
    with pytest.raises(InvalidInput, match=remedy) as caught:
        chosen(OWN, asked)
    assert caught.value.detail["path"] == f"$.sandbox.{field}"


def test_what_is_allowed_is_taken_and_the_rest_is_the_functions_own() -> None:
    asked = SandboxChoice(
        image="swebench/a:1", env={"TASK_ID": "7"}, workdir="/testbed/", user="root", memory=2**30, network="egress",
        idle_ttl=7200,
    )  # fmt: skip
    assert chosen(OPEN, asked) == replace(
        OPEN, image="swebench/a:1", env={"OWN": "1", "TASK_ID": "7"}, workdir="/testbed", user="root",
        memory_bytes=2**30, network=Network.EGRESS, idle_ttl_s=7200.0, chosen=True,
    )  # fmt: skip


def test_less_than_the_functions_own_needs_no_leave() -> None:
    networked = replace(OWN, network=Network.EGRESS, allow=("example.org",))
    taken = chosen(networked, SandboxChoice(memory="64Mi", network="none", idle_ttl="1m", image="base"))
    assert (taken.memory_bytes, taken.network, taken.allow, taken.idle_ttl_s) == (2**26, Network.NONE, (), 60.0)


def test_a_secret_of_the_server_is_never_filled_in_for_a_trajectory() -> None:
    with pytest.raises(InvalidInput, match="secret"):
        chosen(OPEN, SandboxChoice(env={"TASK_KEY": "${secret:key}"}))


def test_what_was_chosen_is_told_from_what_is_the_functions_own() -> None:
    own = replace(OPEN, env={"OWN": "1", "TASK_KEY": "${secret:key}"})
    assert chosen_env(chosen(own, SandboxChoice(env={"TASK_A": "x"}))) == {"TASK_A": "x"}


def test_an_environment_is_bounded() -> None:
    with pytest.raises(InvalidInput, match="characters"):
        chosen(OPEN, SandboxChoice(env={"TASK_A": "x" * 2**16}))


def test_a_snapshot_is_no_image_that_can_be_named() -> None:
    everything = replace(OWN, images=("*",))
    for image in ("tangram-snapshot:ab", "docker.io/library/tangram-snapshot:ab"):
        with pytest.raises(InvalidInput):
            chosen(everything, SandboxChoice(image=image))


@pytest.mark.parametrize(
    "place", ["/", "/etc", "/etc/ssl", "/proc/1", "/usr", "/usr/bin/x", "/a/../etc", "//etc", "/tmp"]
)
def test_no_directory_of_the_system_becomes_the_users(place: str) -> None:
    with pytest.raises(InvalidInput, match="directory of the system"):
        chosen(OWN, SandboxChoice(workdir=place))
    assert chosen(OWN, SandboxChoice(workdir="/usr/src/app")).workdir == "/usr/src/app"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (replace(OWN, image="other"), "image"),
        (replace(OWN, network=Network.EGRESS), "network"),
        (replace(OWN, user="app", users=("app",)), "user"),
        (replace(OWN, workdir="/elsewhere"), "workdir"),
        (replace(OWN, runtime="kata"), "runtime"),
        (replace(OWN, env={"OWN": "2"}), "env"),
    ],
)
def test_a_function_that_says_otherwise_is_not_served(spec: SandboxSpec, field: str) -> None:
    assert f"sandbox.{field}" in contradiction(spec, OWN, images=True)


def test_amounts_contradict_nothing_and_neither_does_an_image_where_there_are_none() -> None:
    assert not contradiction(replace(OWN, memory_bytes=2**31, pids=9, disk_bytes=1), OWN, images=True)
    assert not contradiction(replace(OWN, image="other"), OWN, images=False)


def test_a_function_that_lets_trajectories_choose_it_is_served_in_what_was_chosen() -> None:
    living = chosen(OPEN, SandboxChoice(image="swebench/a", network="egress", user="root", env={"TASK_A": "1"}))
    other = replace(OPEN, memory_bytes=2**31)
    assert not contradiction(other, living, images=True)
    assert "sandbox.image" in contradiction(replace(other, images=()), living, images=True)
    assert "root" in contradiction(replace(other, users=("app",)), living, images=True)


def test_an_opening_differs_in_amounts_too() -> None:
    assert "memory" in difference(replace(OWN, memory_bytes=1), OWN)
    assert not difference(replace(OWN, chosen=True), OWN)


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[Provider]:
    provider = make_provider(ProviderSettings(kind="process", state_dir=tmp_path / "state"))
    yield provider
    await provider.reap(())
    await provider.close()


async def say(sandbox: Sandbox, text: str) -> str:
    return (await sandbox.run(Command(shell=text))).stdout.decode()


async def test_what_was_chosen_holds_for_every_sandbox_of_the_trajectory(local: Provider) -> None:
    secrets = Secrets(environ={"TANGRAM_SECRET_KEY": "sesame"})
    environments = Environments(local, EnvironmentSettings(secrets=secrets))
    spec = replace(OPEN, user="auto", env={"KEY": "${secret:key}"})
    taken = chosen(spec, SandboxChoice(env={"TASK_ID": "7"}, workdir="/box"))
    try:
        made = await environments.ensure("t", taken)
        assert await say(made, "echo $TASK_ID $KEY $PWD") == "7 sesame /box\n"
        assert await environments.ensure("t", spec) is made, "its function is served, secrets and all"
        with pytest.raises(OtherSandbox, match="workdir"):
            await environments.ensure("t", chosen(spec, SandboxChoice(workdir="/other", env={"TASK_ID": "7"})))
        with pytest.raises(OtherSandbox, match="user"):
            await environments.ensure("t", replace(spec, user="app"))
        await local.reap(())
        async with asyncio.timeout(DEADLINE_S):
            await made.lost.wait()
        made.loss_reported = True
        again = await environments.ensure("t", spec)
        assert await say(again, "echo $TASK_ID $PWD") == "7 /box\n"
    finally:
        await environments.close()


async def test_a_trajectory_goes_on_where_it_began_after_a_change_of_the_configuration(local: Provider) -> None:
    secrets = Secrets(environ={"TANGRAM_SECRET_KEY": "sesame"})
    environments = Environments(local, EnvironmentSettings(secrets=secrets))
    shell, grader = replace(OWN, env={"OWN": "1", "KEY": "${secret:key}"}), replace(OWN, env={"OWN": "2"})
    try:
        environments.declare("shell", shell)
        environments.declare("grader", grader)
        made = await environments.ensure("t", shell)
        with pytest.raises(OtherSandbox, match="OWN"):
            await environments.ensure("t", grader)
        changed = replace(shell, env={"OWN": "1", "KEY": "other", "NEW": "3"}, workdir="/new")
        environments.declare("shell", changed)
        with capture_logs() as logs:
            assert await environments.ensure("t", changed) is made
            assert await environments.ensure("t", changed) is made
        assert [each["trajectory"] for each in logs if "earlier configuration" in each["event"]] == ["t"]
        for bound in (replace(changed, network=Network.EGRESS), replace(changed, user="app", users=("app",))):
            environments.declare("shell", bound)
            with pytest.raises(OtherSandbox, match=r"network|user"):
                await environments.ensure("t", bound)
    finally:
        await environments.close()


async def test_a_function_that_is_changed_alone_goes_on_in_what_others_still_agree_with(local: Provider) -> None:
    environments = Environments(local)
    changed, other = replace(OWN, env={"NEW": "1"}), replace(OWN, env={"OTHER": "1"})
    try:
        for name in ("shell", "tests"):
            environments.declare(name, OWN)
        living = await environments.ensure("t", OWN)
        environments.declare("shell", changed)
        environments.declare("late", other)
        assert await environments.ensure("t", changed) is living, "it was served there until it was changed"
        assert await environments.ensure("t", OWN) is living
        with pytest.raises(OtherSandbox, match="OTHER"):
            await environments.ensure("t", other)  # it never was
        await environments.ensure("begun after the change", OWN)
        with pytest.raises(OtherSandbox, match="NEW"):
            await environments.ensure("begun after the change", changed)
    finally:
        await environments.close()


async def test_the_next_gateway_goes_on_with_a_changed_function(local: Provider) -> None:
    first = Environments(local, EnvironmentSettings(keep_on_close=True))
    first.declare("shell", OWN)
    living = await first.ensure("t", OWN)
    await first.close()
    second = Environments(local)
    changed = replace(OWN, env={"NEW": "1"})
    try:
        second.declare("shell", changed)
        second.declare("tests", OWN)
        assert await second.start(["t"]) == ["t"]
        assert (await second.ensure("t", changed)).id == living.id
        with pytest.raises(OtherSandbox, match="network"):
            await second.ensure("t", replace(changed, network=Network.EGRESS))
    finally:
        await second.close()


async def test_the_next_gateway_makes_it_as_it_was_chosen(local: Provider) -> None:
    environments = Environments(local)
    try:
        environments.choose("t", chosen(OWN, SandboxChoice(workdir="/box")))
        assert await say(await environments.ensure("t", OWN), "pwd") == "/box\n"
    finally:
        await environments.close()


async def test_what_trajectories_choose_is_kept_ready_while_it_is_asked_for_and_within_the_bound() -> None:
    clock = VirtualClock()

    async def never(spec: SandboxSpec) -> Sandbox:
        await asyncio.Event().wait()
        raise AssertionError(spec)

    pools = WarmPools(never, clock)
    choices = replace(OPEN.trajectory, warm=2)
    warm = replace(OPEN, trajectory=choices, warm=Warm(min=1, max=2))
    for name in "abc":
        assert pools.claim(chosen(warm, SandboxChoice(image=f"swebench/{name}"))) is None
    dropped = pools.take_superfluous()
    assert [(pool.spec.image, pool.spec.warm.min) for pool in dropped] == [("swebench/a", 0)]
    assert pools.take_superfluous() == []
    clock.advance_to(DEMAND_S + 1)
    assert [pool.spec.image for pool in pools.take_superfluous()] == ["swebench/b", "swebench/c"]
    assert pools.claim(warm) is None and pools.take_superfluous() == [], "a function's own is kept by `of` alone"
    for pool in dropped:
        await pool.close()
    await pools.close()
