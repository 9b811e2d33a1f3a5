"""What gateways left behind is shown and removed; what a living one needs is not."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.private_docker import PrivateDocker, private_docker
from manager.function import Background, Network, SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.disk import ImageBound, probe
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.provider import DockerSettings, ProviderSettings, make_provider
from runtimes.sandbox.sandbox import Provider, Sandbox
from runtimes.sandbox.spec import SandboxRecord
from tests.runtimes.sandbox.conftest import unique
from tests.tangram.cli.conftest import Tangram

SPEC = SandboxSpec(image="tangram-base:bookworm", memory_bytes=128 * 2**20, pids=32)
JOINED = replace(SPEC, network=Network.INTERNAL)


def entries(tangram: Tangram, *words: str) -> dict[str, dict[str, Any]]:
    """What is found, by name."""
    return {each["name"]: each for each in json.loads(tangram("clean", "--json", *words)[1])["found"]}


async def left(provider: Provider, spec: SandboxSpec = SPEC) -> Sandbox:
    """A sandbox with a frozen process in it, left to the next gateway."""
    sandbox = await provider.create(spec, name=unique("left"), labels={}, mounts={})
    await sandbox.run(Command(shell="sleep 1000 >/dev/null 2>&1 &"))
    await sandbox.quiesce(Background.FREEZE)
    return sandbox


async def test_a_process_sandbox_is_kept_while_its_gateway_lives_and_removed_afterwards(
    tangram: Tangram, tmp_path: Path
) -> None:
    state_dir = tmp_path / "state"
    provider = make_provider(ProviderSettings(kind="process", state_dir=state_dir))
    sandbox = await left(provider)
    record = SandboxRecord.read(state_dir / "sandboxes" / sandbox.id)
    assert record is not None
    one = entries(tangram)[sandbox.id]
    assert (one["kind"], one["removable"], one["why"]) == ("process sandbox", False, "its gateway lives")
    await sandbox.release()
    await provider.close()
    assert entries(tangram)[sandbox.id]["removable"]
    assert record.runs()  # so far it was only shown
    assert set(entries(tangram, str(state_dir), "--yes")) == {sandbox.id}
    assert not record.runs()
    assert not list((state_dir / "sandboxes").iterdir())
    assert entries(tangram, str(state_dir)) == {}
    assert f"tangram-{sandbox.id}" not in entries(tangram)  # its control group


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_what_a_gateway_left_that_died_while_it_made_a_sandbox_is_removed_with_its_mount(
    tangram: Tangram, tmp_path: Path
) -> None:
    images, work = tmp_path / "images", tmp_path / "state" / "sandboxes" / "half-made" / "work"
    if why := probe(images):
        pytest.skip(why)
    work.mkdir(parents=True)
    ImageBound(images, 1).bind(work, 2**20)
    assert work.is_mount()
    found = entries(tangram, str(tmp_path / "state"), "--yes")
    assert set(found) == {"half-made"}
    assert not work.is_mount() and not work.parent.exists()
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_a_tree_that_is_deeper_than_any_path_is_removed(tangram: Tangram, tmp_path: Path) -> None:
    place = tmp_path / "state" / "sandboxes" / "deep"
    place.mkdir(parents=True)
    fd = os.open(place, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    assert set(entries(tangram, str(tmp_path / "state"), "--yes")) == {"deep"}
    assert not place.exists()


async def test_another_users_sandboxes_are_not_looked_into(
    tangram: Tangram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose state directory may be closed to us."""
    provider = make_provider(ProviderSettings(kind="process", state_dir=tmp_path / "state"))
    sandbox = await left(provider)
    assert sandbox.id in entries(tangram)
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 54321)
        found = entries(tangram)
        assert sandbox.id not in found and f"tangram-{sandbox.id}" not in found
    await sandbox.close()
    await provider.close()


async def test_the_state_directory_of_a_gateway_or_node_names_what_it_has_below(
    tangram: Tangram, tmp_path: Path
) -> None:
    state_dir = tmp_path / "state"
    provider = make_provider(ProviderSettings(kind="process", state_dir=state_dir / "sandboxes"))
    sandbox = await left(provider)
    await sandbox.release()
    await provider.close()
    assert set(entries(tangram, str(state_dir), "--yes")) == {sandbox.id}
    assert entries(tangram, str(state_dir)) == {}


async def test_what_is_named_is_removed_whoever_needs_it(tangram: Tangram, tmp_path: Path) -> None:
    provider = make_provider(ProviderSettings(kind="process", state_dir=tmp_path / "state"))
    sandbox = await left(provider)
    tangram("clean", "--yes", sandbox.id)
    assert sandbox.id not in entries(tangram)
    assert sandbox.lost.is_set() or not (tmp_path / "state" / "sandboxes" / sandbox.id).exists()
    await provider.reap(())
    await provider.close()


@pytest.fixture(scope="module")
def engine(docker: str) -> Iterator[PrivateDocker]:
    if os.geteuid() != 0:
        pytest.skip("only root can start a second engine")
    with private_docker(docker) as made:
        yield made


def networks_of(engine: PrivateDocker) -> list[str]:
    """The names of our networks there."""
    return engine.docker("network", "ls", "--filter", "label=tangram.gateway", "--format", "{{.Name}}").split()


@pytest.fixture
async def provider(engine: PrivateDocker, tmp_path: Path) -> AsyncIterator[Provider]:
    settings = ProviderSettings(kind="container", state_dir=tmp_path / "state", docker=DockerSettings(host=engine.host))
    made = make_provider(settings)
    yield made
    await made.close()


@pytest.mark.promise("`tangram clean` shows and removes what killed gateways left.")
@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.xdist_group("private-engine")
async def test_containers_and_networks_of_the_dead_go_and_those_of_the_living_stay(
    tangram: Tangram, engine: PrivateDocker, provider: Provider, tmp_path: Path
) -> None:
    gone = make_provider(
        ProviderSettings(kind="container", state_dir=tmp_path / "gone", docker=DockerSettings(host=engine.host))
    )
    dead, living = await left(gone, JOINED), await left(provider, JOINED)
    kept, needed_still = [await Environments(one).ensure("t", SPEC) for one in (gone, provider)]
    gone_snapshot, living_snapshot = [
        await one.snapshots.take("t", "", SPEC, sandbox.snapshot)
        for one, sandbox in ((gone, kept), (provider, needed_still))
    ]
    await kept.close()
    await needed_still.close()
    await dead.release()
    await gone.close()
    engine.docker("create", "--name", "stranger", "--network", "none", SPEC.image, "true")
    engine.docker(
        "create", "--name", "unknown", "--network", "none", "--label", "tangram.gateway=old", SPEC.image, "true"
    )
    shown = entries(tangram, "--host", engine.host)
    wanted = {name: each["removable"] for name, each in shown.items() if each["kind"] == "container"}
    assert wanted == {f"tangram-{dead.id}": True, f"tangram-{living.id}": False, "unknown": False}
    snapshots = {name: each["removable"] for name, each in shown.items() if each["kind"] == "snapshot"}
    assert snapshots == {gone_snapshot.id: True, living_snapshot.id: False}
    networks = {name: each["removable"] for name, each in shown.items() if each["kind"] == "network"}
    assert sorted(networks.values()) == [False, True] and set(networks_of(engine)) == set(networks)
    [needed] = [name for name, removable in networks.items() if not removable]
    assert len(engine.containers()) == 4
    tangram("clean", "--yes", "--host", engine.host, str(tmp_path / "gone"))
    assert sorted(engine.containers()) == sorted(["stranger", "unknown", f"tangram-{living.id}"])
    assert networks_of(engine) == [needed]
    assert engine.docker("images", "-q", gone_snapshot.image) == ""
    assert engine.docker("images", "-q", living_snapshot.image) != ""
    assert not list((tmp_path / "gone" / "snapshots").iterdir())
    await provider.snapshots.remove(living_snapshot.id)
    assert not list((tmp_path / "gone" / "sandboxes").iterdir())
    assert (await living.run(Command(shell="echo here"))).stdout == b"here\n"
    tangram("clean", "--yes", "--host", engine.host, "unknown", f"tangram-{living.id}", needed)
    assert networks_of(engine) == []
    assert engine.containers() == ["stranger"]
    engine.docker("rm", "stranger")
