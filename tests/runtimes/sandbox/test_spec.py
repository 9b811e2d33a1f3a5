"""Which kind of sandbox a gateway makes, what a trajectory may choose of it, and what is recorded of it."""

from __future__ import annotations

import asyncio
import os
import socketserver
import stat
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import runtimes.sandbox.provider as choice
from manager.errors import InvalidConfig, InvalidInput, Unsupported
from manager.function import Background, Isolation, Network, SandboxSpec, TrajectoryChoices, Warm
from runtimes.sandbox.command import Command
from runtimes.sandbox.environments import DEMAND_S, Environments, EnvironmentSettings, WarmPools
from runtimes.sandbox.process import HostSupport, ProcessProvider
from runtimes.sandbox.provider import DockerSettings, ProviderSettings, make_provider
from runtimes.sandbox.sandbox import CreationGate, Provider, Sandbox
from runtimes.sandbox.spec import (
    NAME,
    OtherSandbox,
    SandboxRecord,
    chosen,
    chosen_env,
    contradiction,
    difference,
    is_held,
    read_records,
    require_image_name,
)
from runtimes.secrets import Secrets
from tangram.types import SandboxChoice
from tests.runtimes.sandbox.conftest import say, unique
from tests.virtual_clock import VirtualClock

DEADLINE_S = 60.0


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of our own, with nothing of Docker on this machine."""
    found = tmp_path / "programs"
    found.mkdir()
    for name in ("unshare", "cat", "sh"):
        (found / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(found))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(choice, "DOCKER_SOCKET", tmp_path / "docker.sock")
    monkeypatch.setattr(choice, "RETRY_S", 0.01)
    return found


def bubblewrap(programs: Path, script: str) -> None:
    (programs / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (programs / "bwrap").chmod(0o755)


def settings(tmp_path: Path, **more: object) -> ProviderSettings:
    return ProviderSettings(state_dir=tmp_path / "state", **more)  # type: ignore[arg-type]


def test_without_docker_auto_is_bubblewrap(programs: Path, tmp_path: Path) -> None:
    (programs / "bwrap").symlink_to("/usr/bin/bwrap")
    provider = make_provider(settings(tmp_path))
    assert (provider.info.kind, provider.info.engine) == ("process", "bubblewrap")


def test_without_either_it_does_not_start(programs: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"bubblewrap is not installed; .*sandbox\.provider: none .*, plain runs"):
        make_provider(settings(tmp_path, start_wait_s=1000.0))


def test_a_bubblewrap_that_fails_once_decides_nothing(programs: Path, tmp_path: Path) -> None:
    count = tmp_path / "count"
    bubblewrap(programs, f'echo >> {count}\n[ -s {count} ] && [ "$(cat {count} | /usr/bin/wc -l)" -gt 2 ]')
    assert make_provider(settings(tmp_path)).info.kind == "process"


def test_a_bubblewrap_that_goes_on_failing_is_told_with_its_reason(programs: Path, tmp_path: Path) -> None:
    bubblewrap(programs, "echo No permissions to create new namespace >&2; exit 1")
    with pytest.raises(Unsupported, match=r"No permissions to create new namespace.*tried for 0\.05 s"):
        make_provider(settings(tmp_path, start_wait_s=0.05))


def test_docker_that_is_installed_but_does_not_answer_is_no_reason_for_less(programs: Path, tmp_path: Path) -> None:
    (programs / "bwrap").symlink_to("/usr/bin/bwrap")
    mute = DockerSettings(host=f"unix://{tmp_path}/mute")
    with socketserver.UnixStreamServer(f"{tmp_path}/mute", socketserver.BaseRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        with pytest.raises(Unsupported, match=r"no Docker engine answers.*sandbox\.provider: process"):
            make_provider(settings(tmp_path, docker=mute, start_wait_s=0.05))
        server.shutdown()
        serving.join()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:2375", "ssh://machine", "docker.sock", "unix://"])
def test_an_engine_of_another_machine_is_refused_with_the_remedy_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", address)
    with pytest.raises(InvalidConfig, match=r"joins as a node"):
        make_provider(settings(tmp_path, start_wait_s=1000.0))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs the second word")
def test_plain_processes_as_root_need_a_second_word(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"sandbox\.plain_as_root"):
        make_provider(settings(tmp_path, kind="plain"))


def test_plain_processes_say_what_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = make_provider(settings(tmp_path, kind="plain", plain_as_root=True)).info
    assert any("commands see the host's files" in weakening for weakening in info.weakenings)
    warned = [line for line in capsys.readouterr().out.splitlines() if "weaker than they could be" in line]
    assert len(warned) == len(info.weakenings) and all("warning" in line for line in warned)


@pytest.mark.promise("Less isolation than was served is refused until it is requested.")
def test_less_than_was_served_needs_the_flag(tmp_path: Path) -> None:
    make_provider(settings(tmp_path, kind="process"))
    weak = settings(tmp_path, kind="plain", plain_as_root=True)
    with pytest.raises(InvalidConfig, match=r"processes in bubblewrap.*--weaker-isolation"):
        make_provider(weak)
    told = make_provider(settings(tmp_path, kind="plain", plain_as_root=True, weaker=True)).info.weakenings
    assert "processes in bubblewrap were served before (--weaker-isolation)" in told
    assert make_provider(weak).info.kind == "plain"


def _own_status(pid: int) -> str:
    """What the kernel says of a child of ours, which may have ended."""
    try:
        return Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return ""


async def test_no_kind_takes_over_what_another_made(tmp_path: Path) -> None:
    """A plain sandbox's paths are the host's: it is ended. A container's directory is not ours to remove."""
    host = HostSupport(bubblewrap=None, root=os.geteuid() == 0, cgroup=None)
    plain = ProcessProvider(state_dir=tmp_path / "state", gate=CreationGate(1), shared_cores=(0,), host=host)
    sandbox = await plain.create(SandboxSpec(), name=unique("plain"), labels={}, mounts={})
    [record] = [SandboxRecord.read(path) for path in (tmp_path / "state" / "sandboxes").iterdir()]
    assert record is not None and record.provider == "plain" and record.base.endswith("/work")
    await sandbox.release()
    container = tmp_path / "state" / "sandboxes" / "container"
    container.mkdir()
    SandboxRecord(name="container", token="t", spec=SandboxSpec(), labels={}, provider="container").write(container)

    wrapped = make_provider(settings(tmp_path, kind="process"))
    assert await wrapped.adopt() == []
    await wrapped.reap(())
    assert [path.name for path in (tmp_path / "state" / "sandboxes").iterdir()] == ["container"]
    assert not _own_status(record.pid) or "State:\tZ" in _own_status(record.pid), "it has ended"
    await wrapped.close()
    await plain.close()


@pytest.mark.promise("`python3` in a process sandbox is the host's.")
async def test_python_is_the_hosts_unless_a_path_is_named(tmp_path: Path) -> None:
    show = Command(argv=("python3", "-c", "import sys; print(sys.prefix)"))
    for path, prefix in (("", "/usr"), (f"{sys.prefix}/bin:/usr/bin", sys.prefix)):
        state = tmp_path / (path and "named")
        provider = make_provider(settings(state, kind="process", **({"path": path} if path else {})))
        sandbox = await provider.create(SandboxSpec(), name=unique("python"), labels={}, mounts={})
        done = await sandbox.run(show)
        assert done.stdout.decode().strip().startswith(prefix), done.stderr
        if not path:
            gone = await sandbox.run(Command(argv=("ls", f"{sys.prefix}/bin")))
            assert gone.exit_code != 0, "the gateway's environment is not even shown"
        await sandbox.close()
        await provider.close()


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
        environments.declare("shell", replace(changed, workdir="/failed"))  # by a configuration that was then refused
        assert await environments.ensure("t", changed) is made
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


@pytest.mark.parametrize(
    "image",
    [
        "busybox",
        "tangram-base:bookworm",
        "library/python:3.12-slim",
        "localhost:5000/swebench/sweb.eval.x86_64.astropy__astropy-1776:latest",
        "registry.example/a__b/c-d:v1.0_RC",
        "[::1]:5000/a:b",
        "tangram/snapshot:0123456789ab",
        "busybox@sha256:" + "a" * 64,
        "registry.example:5000/a/b:c@sha256:" + "0" * 64,
        "sha256:" + "a" * 64,
        "a" * 64,
    ],
)
def test_a_name_is_taken(image: str) -> None:
    require_image_name(image)


@pytest.mark.promise("The name of an image leads to no other route of the engine.")
@pytest.mark.parametrize(
    "image",
    [
        "",
        "../containers/tangram-0123",
        "swebench/../../containers/x",
        "a/./b",
        "a//b",
        "/etc/passwd",
        "a/",
        "a?force=1",
        "a#b",
        "a%2e%2e/b",
        "a b",
        "a\n",
        "a\0b",
        "ü",
        "..",
        "a:../b",
        "a@sha256:../b",
        "x" * 2000,
        "a-" * 500 + "!",
    ],
)
def test_what_could_lead_to_another_route_of_the_engine_is_refused(image: str) -> None:
    with pytest.raises(InvalidConfig, match="is no name of an image"):
        require_image_name(image)


RECORD = SandboxRecord(
    name="a1b2",
    token="0f",
    spec=SandboxSpec(
        image="tangram-base:bookworm",
        network=Network.EGRESS,
        user="1000",
        allow=("10.0.0.0/8", "example.org"),
        env={"A": "b"},
        isolation=Isolation.CONTAINER,
        background=Background.RUN,
        idle_ttl_s=60.0,
        warm=Warm(min=1, max=3),
    ),
    labels={"tangram.trajectory": "t"},
    pid=7,
    started=11,
    oom_told=2,
    provider="container",
    transport="attach",
)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    RECORD.write(tmp_path)
    assert SandboxRecord.read(tmp_path) == RECORD


def test_only_the_owner_can_read_a_record_for_the_tokens_sake(tmp_path: Path) -> None:
    RECORD.write(tmp_path)
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize(
    "broken",
    [
        lambda whole: "",
        lambda whole: whole[:1],
        lambda whole: "[]",
        lambda whole: '{"name": "a"}',
        lambda whole: whole.replace('"egress"', '"moon"'),
    ],
)
def test_a_record_that_is_not_whole_is_none(tmp_path: Path, broken: Callable[[str], str]) -> None:
    (tmp_path / "one").mkdir()
    RECORD.write(tmp_path / "one")
    place = tmp_path / "one" / NAME
    place.write_text(broken(place.read_text()))
    assert read_records(tmp_path) == [(tmp_path / "one", None)]


def test_what_is_another_users_counts_as_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its gateway lives cannot be seen: nothing of it is to be removed."""
    assert not is_held(tmp_path)

    def closed(*arguments: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", closed)
    assert is_held(tmp_path)
