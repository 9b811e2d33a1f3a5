"""Containers that are attached to, as a gateway in a container or a kernel of their own needs it."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from bench.private_docker import PrivateDocker, private_docker
from manager.errors import ActionFailed, InvalidConfig, Reason, Unsupported
from manager.function import Background, Network, SandboxSpec
from runtimes.sandbox.command import PIECE_BYTES, Command, CommandResult
from runtimes.sandbox.docker.engine import EngineConnection, known_here
from runtimes.sandbox.docker.provider import ContainerProvider
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.provider import DockerSettings, ProviderSettings, make_provider
from runtimes.sandbox.sandbox import Sandbox
from tests.runtimes.sandbox import test_rest, test_sandbox
from tests.runtimes.sandbox.conftest import unique

pytestmark = pytest.mark.docker
DEADLINE_S = 60.0

SHARES = """
import sys
from pathlib import Path
from runtimes.sandbox.docker.engine import EngineConnection
print(EngineConnection.open("", timeout_s=60, workers=1).shares(Path(sys.argv[1])))
"""


async def sh(sandbox: Sandbox, text: str) -> CommandResult:
    return await sandbox.run(Command(shell=text, kill_grace_s=0.2))


def docker_says(*words: str) -> str:
    return subprocess.run(["docker", *words], capture_output=True, text=True, check=True, timeout=120).stdout.strip()


@asynccontextmanager
async def containers(state_dir: Path, **docker: object) -> AsyncIterator[ContainerProvider]:
    """A provider; whatever a test leaves behind is removed."""
    settings = DockerSettings(**docker)  # type: ignore[arg-type]  # the tests' own options
    # In a thread, as the way to the engine may be a task of ours.
    provider = await asyncio.to_thread(
        make_provider, ProviderSettings(kind="container", state_dir=state_dir, docker=settings)
    )
    assert isinstance(provider, ContainerProvider)
    try:
        yield provider
    finally:
        await provider.reap(())
        await provider.close()


@pytest.fixture
def unseen(docker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container of the gateway's own: the engine sees none of its files, and it none of the processes."""
    monkeypatch.setattr(EngineConnection, "shares", lambda connection, directory: False)
    monkeypatch.setattr("runtimes.sandbox.docker.engine.known_here", lambda pid, container: 0)


@pytest.fixture
async def provider(unseen: None, tmp_path: Path) -> AsyncIterator[ContainerProvider]:
    async with containers(tmp_path / "state") as made:
        assert made.info.engine.endswith("attach transport")
        yield made


class TestAttachedRest(test_rest.TestRest):
    """What is true of every sandbox between its actions."""


class TestAttachedLoss(test_sandbox.TestLoss):
    """What is true of every sandbox that is lost, adopted or left."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has mounts of its own")
def test_who_sees_files_of_its_own_shares_none(docker: str, tmp_path: Path) -> None:
    asking = (sys.executable, "-c", SHARES, str(tmp_path))
    apart = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(tmp_path))
    for command, shares in ((asking, "True"), ((*apart, *asking), "False")):
        assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip() == shares
        assert not list(tmp_path.iterdir())


async def test_nothing_of_this_machine_is_in_the_container(provider: ContainerProvider, spec: SandboxSpec) -> None:
    sandbox = await provider.create(spec, name=unique("bare"), labels={}, mounts={})
    name = f"tangram-{sandbox.id}"
    shown = docker_says("inspect", "--format", "{{.Mounts}} {{.HostConfig.Binds}} {{.Config.StdinOnce}}", name)
    assert shown == "[] [] false"
    assert (await sh(sandbox, "ls -d /.tangram || ls /proc/1/cwd")).exit_code != 0


def test_a_process_id_of_another_namespace_is_nobodys_here() -> None:
    """To freeze or to confine by it would hit whoever has that number on this machine."""
    own = Path("/proc/self/cgroup").read_text(encoding="utf-8").split("\n", 1)[0]
    assert known_here(os.getpid(), "f" * 64) == 0
    assert known_here(os.getpid(), own) == os.getpid()


async def test_cores_are_the_engines_business_and_rest_is_the_runners(
    provider: ContainerProvider, spec: SandboxSpec
) -> None:
    sandbox = await provider.create(spec, name=unique("grip"), labels={}, mounts={})
    shown = "{{.HostConfig.CpusetCpus}} {{.HostConfig.CpuQuota}} {{.HostConfig.CpuShares}}"
    await sh(sandbox, "sleep 1000 >/dev/null 2>&1 &")

    def grip() -> list[str]:
        return docker_says("inspect", "--format", shown, f"tangram-{sandbox.id}").split()

    await sandbox.set_cores([0])
    assert grip() == ["0", "100000", "1024"]
    await sandbox.quiesce(Background.RUN)
    assert grip()[2:] == ["2"]
    await sandbox.quiesce(Background.FREEZE)
    states = docker_says("top", f"tangram-{sandbox.id}", "-eo", "pid,comm,stat")
    assert re.search(r" T[N<sl]*\b", states)
    assert (await sh(sandbox, "ps -eo stat= | grep -c ^T")).stdout == b"0\n"


async def test_files_come_and_go_and_too_little_memory_is_told(provider: ContainerProvider, spec: SandboxSpec) -> None:
    sandbox = await provider.create(spec, name=unique("files"), labels={}, mounts={})
    sizes: list[int] = []

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * PIECE_BYTES
            sizes.append(len(await sandbox.list_files(".")))

    assert await sandbox.write_file("file", pieces()) == 3 * PIECE_BYTES
    assert sizes == [0, 0, 0], "it waits on the disk, for the connection may be cut"
    async with sandbox.open_file("file", limit_bytes=3 * PIECE_BYTES) as file:
        assert sum([len(chunk) async for chunk in file.chunks()]) == 3 * PIECE_BYTES
    result = await sandbox.run(Command(argv=("python3", "-c", "x = bytearray(10**9)")))
    assert (result.out_of_memory, result.signal) == (True, 9)
    assert (await sh(sandbox, "echo alive")).stdout == b"alive\n"


async def test_a_disk_that_cannot_be_seen_is_asked_for(provider: ContainerProvider, spec: SandboxSpec) -> None:
    small = replace(spec, disk_bytes=2 * 2**20)
    sandbox = await provider.create(small, name=unique("disk"), labels={}, mounts={})
    await provider._disk.check()
    assert sandbox.alive
    await sh(sandbox, "head -c 2000000 /dev/zero > one; head -c 2000000 /dev/zero > two")
    await provider._disk.check()
    with pytest.raises(ActionFailed, match="disk bound"):
        await sh(sandbox, "true")


async def test_a_copy_in_place_of_a_mount_is_bounded(
    unseen: None, docker: str, spec: SandboxSpec, tmp_path: Path
) -> None:
    source = tmp_path / "function"
    source.mkdir()
    (source / "big").write_bytes(b"x" * 2000)
    async with containers(tmp_path / "state", copy_limit_bytes=1000) as provider:
        with pytest.raises(InvalidConfig, match=r"more than 1000 bytes.*copy_limit"):
            await provider.create(spec, name=unique("big"), labels={}, mounts={str(source): "/function"})
        assert await provider.reap(()) == 0


async def test_egress_needs_rules_of_the_gateway_or_a_network_that_has_its_own(
    provider: ContainerProvider, spec: SandboxSpec, tmp_path: Path
) -> None:
    egress = replace(spec, network=Network.EGRESS)
    assert not provider.info.limits["egress"]
    with pytest.raises(Unsupported, match="egress_network"):
        await provider.check(egress)
    async with containers(tmp_path / "named", egress_network="host-rules") as named:
        assert not named.info.limits["egress"]
        await named.check(egress)
        with pytest.raises(Unsupported, match="'host-rules' are not the gateway's"):
            await named.check(replace(egress, allow=("192.0.2.0/24",)))


async def test_a_snapshot_is_forked(provider: ContainerProvider, spec: SandboxSpec) -> None:
    environments = Environments(provider)
    await sh(await environments.ensure("one", spec), "echo shared > file")
    taken = await environments.snapshot("one")
    copy = await environments.ensure("two", replace(spec, snapshot=taken.id, chosen=True))
    assert (await sh(copy, "cat file")).stdout == b"shared\n"
    await environments.close()
    await provider.snapshots.remove(taken.id)


async def test_the_next_gateway_takes_over_what_runs(provider: ContainerProvider, spec: SandboxSpec) -> None:
    lasting = replace(spec, unattended_s=60.0)
    sandbox = await provider.create(lasting, name=unique("next"), labels={}, mounts={})
    begun = asyncio.Event()
    script = "echo begun; while [ ! -e go ]; do sleep 0.01; done; echo done; exit 3"
    command = Command(shell=script, claim="i.1", detached=True)
    running = asyncio.create_task(sandbox.run(command, lambda *_: begun.set()))
    await begun.wait()
    await sandbox.release()
    with suppress(ActionFailed):
        await running
    [(adopted, _)] = await provider.adopt()
    assert list(adopted.resumable) == ["i.1"]
    resumed = asyncio.create_task(adopted.run(command))
    await adopted.write_file("go", b"")
    result = await resumed
    assert (result.stdout, result.exit_code) == (b"begun\ndone\n", 3)


class Wire:
    """The way from a gateway to its engine, which can be cut."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self.up = True

    @classmethod
    @asynccontextmanager
    async def laid(cls, engine: str, path: Path) -> AsyncIterator[tuple[Wire, str]]:
        """Yield it, and the address of its end at ``path``."""
        wire = cls(engine)
        server = await asyncio.start_unix_server(wire.accept, path)
        try:
            yield wire, f"unix://{path}"
        finally:
            server.close()
            while wire._serving:
                wire.cut()
                await asyncio.wait(wire._serving)
            await server.wait_closed()

    def cut(self) -> None:
        """Every connection, without a word."""
        for writer in self._writers:
            writer.transport.abort()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not self.up:
                raise ConnectionError("it is cut")
            there, back = await asyncio.open_unix_connection(self._engine)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        await asyncio.gather(self._carry(reader, back), self._carry(there, writer))
        self._writers -= {writer, back}

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.fixture(scope="module")
def engine(docker: str) -> Iterator[PrivateDocker]:
    """An engine of our own, which may be killed."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a second engine")
    with private_docker(docker) as made:
        yield made


@asynccontextmanager
async def behind_a_wire(
    engine: PrivateDocker, spec: SandboxSpec, state_dir: Path
) -> AsyncIterator[tuple[Wire, Sandbox]]:
    """A sandbox whose engine is reached over connections that can be cut; bounded in time."""
    async with (
        Wire.laid(engine.host.removeprefix("unix://"), engine.directory / unique("wire")) as (wire, host),
        containers(state_dir, host=host) as provider,
        asyncio.timeout(DEADLINE_S),
    ):
        yield wire, await provider.create(spec, name=unique("cut"), labels={}, mounts={})


@pytest.mark.slow
@pytest.mark.usefixtures("unseen")
class TestCuts:
    """Connections and engines go; sandboxes stay."""

    async def test_a_cut_between_two_commands_is_not_noticed(
        self, engine: PrivateDocker, spec: SandboxSpec, tmp_path: Path
    ) -> None:
        async with behind_a_wire(engine, spec, tmp_path) as (wire, sandbox):
            await sh(sandbox, "echo kept > file; sleep 1000 >/dev/null 2>&1 &")
            for posture in (Background.RUN, Background.FREEZE):
                await sandbox.quiesce(posture)
                wire.cut()
                assert (await sh(sandbox, "cat file; pgrep -c sleep")).stdout == b"kept\n1\n"
                wire.cut()
                assert await sandbox.read_file("file", limit_bytes=10) == b"kept\n"

    async def test_a_command_goes_on_through_cuts_and_its_engines_death(
        self, engine: PrivateDocker, spec: SandboxSpec, tmp_path: Path
    ) -> None:
        async with behind_a_wire(engine, spec, tmp_path) as (wire, sandbox):
            begun = asyncio.Event()
            script = "echo begun; while [ ! -e go ]; do sleep 0.01; done; echo done; exit 3"
            running = asyncio.create_task(sandbox.run(Command(shell=script), lambda *_: begun.set()))
            await begun.wait()
            wire.cut()
            await sh(sandbox, "true")
            await asyncio.to_thread(engine.kill)
            await asyncio.to_thread(engine.start)
            await sandbox.write_file("go", b"")
            result = await running
            assert (result.stdout, result.exit_code) == (b"begun\ndone\n", 3)

    async def test_an_engine_out_of_reach_ends_the_action_and_not_the_sandbox(
        self, engine: PrivateDocker, spec: SandboxSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("runtimes.sandbox.docker.attach.AWAY_S", 0.5)
        async with behind_a_wire(engine, spec, tmp_path) as (wire, sandbox):
            await sh(sandbox, "echo kept > file")
            wire.up = False
            wire.cut()
            for attempt in (sh(sandbox, "cat file"), sandbox.set_cores([0])):
                with pytest.raises(ActionFailed, match="may live on") as caught:
                    await attempt
                assert caught.value.reason is Reason.NODE_LOST
            await sandbox.quiesce(Background.FREEZE)
            assert sandbox.alive
            wire.up = True
            assert (await sh(sandbox, "cat file")).stdout == b"kept\n"

    async def test_the_end_of_an_idle_container_is_known_at_once(
        self, engine: PrivateDocker, spec: SandboxSpec, tmp_path: Path
    ) -> None:
        async with behind_a_wire(engine, spec, tmp_path) as (_, sandbox):
            engine.docker("rm", "-f", f"tangram-{sandbox.id}")
            await sandbox.lost.wait()
            with pytest.raises(ActionFailed) as caught:
                await sh(sandbox, "true")
            assert caught.value.reason is Reason.ENVIRONMENT_LOST
