"""A Docker engine on another machine: what is true of it alone. The shared tests run on it, too."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from manager.errors import ActionFailed, InvalidConfig, InvalidInput, Reason, Unsupported
from manager.function import Background, Network, SandboxSpec
from runtimes.sandbox.command import Command, CommandResult
from runtimes.sandbox.docker.engine import known_here
from runtimes.sandbox.docker.provider import ContainerProvider
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.provider import DockerSettings, ProviderSettings, make_provider
from runtimes.sandbox.sandbox import Sandbox
from tests.remote_engine import RemoteEngine
from tests.runtimes.sandbox.conftest import unique

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("remote-engine")]
DEADLINE_S = 60.0


async def sh(sandbox: Sandbox, text: str) -> CommandResult:
    return await sandbox.run(Command(shell=text, kill_grace_s=0.2))


@asynccontextmanager
async def containers(state_dir: Path, **docker: object) -> AsyncIterator[ContainerProvider]:
    """A provider; whatever a test leaves behind is removed."""
    settings = DockerSettings(**docker)  # type: ignore[arg-type]  # the tests' own options
    # In a thread, as the network to the engine may be a task of ours.
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
async def provider(remote_engine: RemoteEngine, tmp_path: Path) -> AsyncIterator[ContainerProvider]:
    async with containers(tmp_path / "state", host=remote_engine.host) as made:
        yield made


async def test_another_runtime_is_spoken_to_over_the_engine(
    remote_engine: RemoteEngine, provider: ContainerProvider, spec: SandboxSpec
) -> None:
    if "crun" not in provider.info.runtimes:
        pytest.skip("crun is not installed (Debian: apt-get install crun)")
    sandbox = await provider.create(replace(spec, runtime="crun"), name=unique("crun"), labels={}, mounts={})
    assert remote_engine.docker("inspect", "-f", "{{.HostConfig.Runtime}}", f"tangram-{sandbox.id}") == "crun"
    await sandbox.quiesce(Background.FREEZE)
    assert (await sh(sandbox, "echo here")).stdout == b"here\n"
    await sandbox.close()


class Wire:
    """The network between gateway and engine, which can be cut; with TLS where it is given a context."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self.up = True

    @classmethod
    @asynccontextmanager
    async def laid(cls, port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[Wire, str]]:
        wire = cls(port)
        server = await asyncio.start_server(wire.accept, "127.0.0.1", 0, ssl=tls)
        try:
            yield wire, f"tcp://localhost:{server.sockets[0].getsockname()[1]}"
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
        if not self.up:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, back}
        await asyncio.gather(self._carry(reader, back), self._carry(there, writer))
        self._writers -= {writer, back}

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()


async def test_who_shares_no_files_is_attached_to_and_who_does_is_not(
    remote_engine: RemoteEngine, docker: str, tmp_path: Path
) -> None:
    for host, transport in ((remote_engine.host, "attach"), ("", "socket")):
        async with containers(tmp_path / transport, host=host) as provider:
            assert provider.info.engine.endswith(f"{transport} transport")
        assert not list((tmp_path / transport).glob("tangram-probe-*"))


async def test_nothing_of_this_machine_is_in_the_container(
    provider: ContainerProvider, remote_engine: RemoteEngine, spec: SandboxSpec
) -> None:
    sandbox = await provider.create(spec, name=unique("bare"), labels={}, mounts={})
    name = f"tangram-{sandbox.id}"
    shown = remote_engine.docker("inspect", "--format", "{{.Mounts}} {{.HostConfig.Binds}} {{.Config.StdinOnce}}", name)
    assert shown == "[] [] false"
    assert (await sh(sandbox, "ls -d /.tangram || ls /proc/1/cwd")).exit_code != 0
    [found] = await provider._engine.list(f"tangram.sandbox={sandbox.id}")
    assert (await provider._engine.inspect(found.id)).pid == 0  # whose it is here, nobody knows


def test_a_process_id_of_another_machine_is_nobodys_here() -> None:
    """To freeze or to confine by it would hit whoever has that number on this machine."""
    own = Path("/proc/self/cgroup").read_text(encoding="utf-8").split("\n", 1)[0]
    assert known_here(os.getpid(), "f" * 64) == 0
    assert known_here(os.getpid(), own) == os.getpid()


async def test_cores_are_the_engines_business_and_rest_is_the_runners(
    provider: ContainerProvider, remote_engine: RemoteEngine, spec: SandboxSpec
) -> None:
    sandbox = await provider.create(spec, name=unique("grip"), labels={}, mounts={})
    shown = "{{.HostConfig.CpusetCpus}} {{.HostConfig.CpuQuota}} {{.HostConfig.CpuShares}}"
    await sh(sandbox, "sleep 1000 >/dev/null 2>&1 &")

    def grip() -> list[str]:
        return remote_engine.docker("inspect", "--format", shown, f"tangram-{sandbox.id}").split()

    await sandbox.set_cores([0])
    assert grip() == ["0", "100000", "1024"]
    await sandbox.quiesce(Background.RUN)
    assert grip()[2:] == ["2"]
    await sandbox.quiesce(Background.FREEZE)
    states = remote_engine.docker("top", f"tangram-{sandbox.id}", "-eo", "pid,comm,stat")
    assert re.search(r" T[N<sl]*\b", states)
    assert (await sh(sandbox, "ps -eo stat= | grep -c ^T")).stdout == b"0\n"


async def test_a_copy_in_place_of_a_mount_is_bounded(
    remote_engine: RemoteEngine, spec: SandboxSpec, tmp_path: Path
) -> None:
    source = tmp_path / "function"
    source.mkdir()
    (source / "big").write_bytes(b"x" * 2000)
    async with containers(tmp_path / "state", host=remote_engine.host, copy_limit_bytes=1000) as provider:
        with pytest.raises(InvalidConfig, match=r"more than 1000 bytes.*copy_limit"):
            await provider.create(spec, name=unique("big"), labels={}, mounts={str(source): "/function"})
        assert remote_engine.docker("ps", "-aq", "--filter", "label=tangram.gateway") == ""


async def test_egress_needs_rules_of_the_gateway_or_a_network_that_has_its_own(
    provider: ContainerProvider, remote_engine: RemoteEngine, spec: SandboxSpec, tmp_path: Path
) -> None:
    egress = replace(spec, network=Network.EGRESS)
    assert not provider.info.limits["egress"]
    with pytest.raises(Unsupported, match="egress_network"):
        await provider.check(egress)
    async with containers(tmp_path / "named", host=remote_engine.host, egress_network="host-rules") as named:
        assert not named.info.limits["egress"]
        await named.check(egress)
        with pytest.raises(Unsupported, match="'host-rules' are not the gateway's"):
            await named.check(replace(egress, allow=("192.0.2.0/24",)))


async def test_a_snapshot_is_forked_there(provider: ContainerProvider, spec: SandboxSpec) -> None:
    environments = Environments(provider)
    await sh(await environments.ensure("one", spec), "echo shared > file")
    taken = await environments.snapshot("one")
    copy = await environments.ensure("two", replace(spec, snapshot=taken.id, chosen=True))
    assert (await sh(copy, "cat file")).stdout == b"shared\n"
    await environments.close()
    await provider.snapshots.remove(taken.id)


@pytest.fixture
def bare(remote_engine: RemoteEngine, docker: str) -> str:
    """An image without Python, on the engine."""
    image = f"tangram-test:bare-{secrets.token_hex(4)}"
    made = remote_engine.docker("create", "--network", "none", docker, "/bin/sh", "-c", "rm -f /usr/bin/python*")
    remote_engine.docker("start", "-a", made)
    remote_engine.docker("commit", made, image)
    remote_engine.docker("rm", made)
    return image


async def test_an_image_without_python_works_through_docker_exec(
    provider: ContainerProvider, spec: SandboxSpec, bare: str
) -> None:
    sandbox = await provider.create(replace(spec, image=bare), name=unique("bare"), labels={}, mounts={})
    assert (await sandbox.run(Command(shell="cat; exit 3", stdin=b"in"))).stdout == b"in"
    await sandbox.write_file("deep/file", b"data")
    assert await sandbox.read_file("deep/file", limit_bytes=4) == b"data"
    assert (await sandbox.run(Command(shell="sleep 1000", timeout_s=0.3, kill_grace_s=0.1))).timed_out
    await sandbox.close()


@asynccontextmanager
async def behind_a_wire(
    engine: RemoteEngine, spec: SandboxSpec, state_dir: Path
) -> AsyncIterator[tuple[Wire, Sandbox]]:
    """A sandbox whose engine is reached over a network that can be cut; bounded in time."""
    async with (
        Wire.laid(engine.port) as (wire, host),
        containers(state_dir, host=host) as provider,
        asyncio.timeout(DEADLINE_S),
    ):
        yield wire, await provider.create(spec, name=unique("cut"), labels={}, mounts={})


class TestCuts:
    """Connections and engines go; sandboxes stay."""

    async def test_a_cut_between_two_commands_is_not_noticed(
        self, remote_engine: RemoteEngine, spec: SandboxSpec, tmp_path: Path
    ) -> None:
        async with behind_a_wire(remote_engine, spec, tmp_path) as (wire, sandbox):
            await sh(sandbox, "echo kept > file; sleep 1000 >/dev/null 2>&1 &")
            for posture in (Background.RUN, Background.FREEZE):
                await sandbox.quiesce(posture)
                wire.cut()
                assert (await sh(sandbox, "cat file; pgrep -c sleep")).stdout == b"kept\n1\n"
                wire.cut()
                assert await sandbox.read_file("file", limit_bytes=10) == b"kept\n"

    async def test_a_command_goes_on_through_cuts_and_its_engines_death(
        self, remote_engine: RemoteEngine, spec: SandboxSpec, tmp_path: Path
    ) -> None:
        async with behind_a_wire(remote_engine, spec, tmp_path) as (wire, sandbox):
            begun = asyncio.Event()
            script = "echo begun; while [ ! -e go ]; do sleep 0.01; done; echo done; exit 3"
            running = asyncio.create_task(sandbox.run(Command(shell=script), lambda *_: begun.set()))
            await begun.wait()
            wire.cut()
            await sh(sandbox, "true")
            remote_engine.kill()
            await sandbox.write_file("go", b"")
            result = await running
            assert (result.stdout, result.exit_code) == (b"begun\ndone\n", 3)

    async def test_an_engine_out_of_reach_ends_the_action_and_not_the_sandbox(
        self, remote_engine: RemoteEngine, spec: SandboxSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("runtimes.sandbox.docker.attach_client.AWAY_S", 0.5)
        async with behind_a_wire(remote_engine, spec, tmp_path) as (wire, sandbox):
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

    async def test_a_trajectory_outlives_its_engines_death(
        self, provider: ContainerProvider, remote_engine: RemoteEngine, spec: SandboxSpec
    ) -> None:
        sandbox = await provider.create(spec, name=unique("death"), labels={}, mounts={})
        await sh(sandbox, "echo kept > file")
        remote_engine.kill()
        async with asyncio.timeout(DEADLINE_S):
            assert (await sh(sandbox, "cat file")).stdout == b"kept\n"

    async def test_the_end_of_an_idle_container_is_known_at_once(
        self, provider: ContainerProvider, remote_engine: RemoteEngine, spec: SandboxSpec
    ) -> None:
        environments = Environments(provider)
        sandbox = await environments.ensure("t", spec)
        assert isinstance(sandbox, Sandbox)
        remote_engine.docker("rm", "-f", f"tangram-{sandbox.id}")
        async with asyncio.timeout(DEADLINE_S):
            await sandbox.lost.wait()
        with pytest.raises(ActionFailed) as caught:
            await environments.ensure("t", spec)
        assert caught.value.reason is Reason.ENVIRONMENT_LOST
        await environments.close()


def openssl(directory: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True, timeout=60)


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A directory as DOCKER_CERT_PATH wants it, and the server's own certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    directory = tmp_path / "certificates"
    directory.mkdir()
    subject = ("-nodes", "-newkey", "rsa:2048", "-days", "2")
    openssl(directory, "req", "-x509", *subject, "-subj", "/CN=ca", "-keyout", "ca-key.pem", "-out", "ca.pem")
    for name, keys in (("server", ("server-key.pem", "server.pem")), ("client", ("key.pem", "cert.pem"))):
        openssl(directory, "req", *subject, "-subj", f"/CN={name}", "-keyout", keys[0], "-out", f"{name}.csr")
        (directory / "names").write_text("subjectAltName=DNS:localhost\n")
        signing = ("-CA", "ca.pem", "-CAkey", "ca-key.pem", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl(directory, "x509", "-req", "-in", f"{name}.csr", *signing, "-out", keys[1])
    return directory


async def test_the_engine_may_stand_behind_tls(
    remote_engine: RemoteEngine,
    spec: SandboxSpec,
    tmp_path: Path,
    certificates: Path,
    monkeypatch: pytest.MonkeyPatch,
    bare: str,
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates / "ca.pem"))
    tls.load_cert_chain(certificates / "server.pem", certificates / "server-key.pem")
    tls.verify_mode = ssl.CERT_REQUIRED
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(certificates))
    async with Wire.laid(remote_engine.port, tls) as (wire, host):
        provider = await asyncio.to_thread(
            make_provider,
            ProviderSettings(kind="container", state_dir=tmp_path / "state", docker=DockerSettings(host=host)),
        )
        sandbox = await provider.create(spec, name=unique("tls"), labels={}, mounts={})
        data = os.urandom(200_000)
        assert (await sandbox.run(Command(argv=("cat",), stdin=data))).stdout == data
        wire.cut()
        assert (await sh(sandbox, "echo on")).stdout == b"on\n"
        await sandbox.close()
        sandbox = await provider.create(replace(spec, image=bare), name=unique("tls"), labels={}, mounts={})
        assert (await sh(sandbox, "echo on")).stdout == b"on\n"
        with pytest.raises(InvalidInput, match="no standard input there; write a file"):
            await sandbox.run(Command(argv=("cat",), stdin=data))
        await sandbox.close()
        await provider.close()


@pytest.fixture
def ssh_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An ssh server of our own, and an ssh client that knows it; its address."""
    if shutil.which("sshd") is None or shutil.which("ssh") is None or os.geteuid() != 0:
        pytest.skip("an ssh server of our own needs sshd, ssh and root")
    place = tmp_path / "ssh"
    place.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / name)], check=True, timeout=60)
    (place / "authorized").write_bytes((place / "user.pub").read_bytes())
    Path("/run/sshd").mkdir(exist_ok=True)
    (place / "sshd_config").write_text(
        f"HostKey {place}/host\nAuthorizedKeysFile {place}/authorized\nPidFile none\nStrictModes no\nUsePAM no\n"
    )
    (place / "ssh_config").write_text(
        f"Host test-engine\n HostName localhost\n User root\n IdentityFile {place}/user\n"
        f" ProxyCommand {shutil.which('sshd')} -i -f {place}/sshd_config\n"
        " StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
    )
    (place / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {place}/ssh_config "$@"\n')
    (place / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    yield "ssh://test-engine"


async def test_the_engine_may_stand_behind_ssh(docker: str, ssh_server: str, spec: SandboxSpec, tmp_path: Path) -> None:
    state = tmp_path / ("deep" * 30)
    state.mkdir(parents=True)
    async with containers(state, host=ssh_server, transport="attach") as provider, asyncio.timeout(DEADLINE_S):
        sandbox = await provider.create(spec, name=unique("ssh"), labels={}, mounts={})
        await sh(sandbox, "echo kept > file")
        forward = provider._engine._connection.forward
        assert forward is not None
        assert forward._process is not None
        os.kill(forward._process.pid, signal.SIGKILL)
        assert (await sh(sandbox, "cat file")).stdout == b"kept\n"
        process = forward._process
    assert process.poll() is not None
    assert not (state / "engine.sock").exists()


def test_an_engine_that_ssh_does_not_reach_is_told_with_its_words(ssh_server: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"no Docker engine answers.*nowhere"):
        make_provider(
            ProviderSettings(
                kind="container",
                state_dir=tmp_path,
                docker=DockerSettings(host="ssh://nowhere.invalid"),
                start_wait_s=0.0,
            )
        )
