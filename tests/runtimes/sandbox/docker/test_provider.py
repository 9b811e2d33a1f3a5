"""What only containers do: images, networks, life without a runner, and being attached to."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from docker import errors

from bench.private_docker import PrivateDocker, private_docker
from manager.errors import (
    ActionFailed,
    CapacityExceeded,
    CodedError,
    Conflict,
    InvalidConfig,
    InvalidInput,
    NotFound,
    Reason,
    TooLarge,
    Unsupported,
)
from manager.function import Background, Network, SandboxSpec
from runtimes.sandbox.command import PIECE_BYTES, Command
from runtimes.sandbox.docker.engine import DockerEngine, EngineConnection, known_here
from runtimes.sandbox.docker.provider import ContainerProvider, InternalNetworks, end_here, make_isolated
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.provider import DockerSettings, ProviderSettings, make_provider
from runtimes.sandbox.runner.client import MARKER
from runtimes.sandbox.sandbox import Provider, Sandbox
from runtimes.sandbox.spec import noted_bounded
from tests.listening import listening, piped
from tests.runtimes.sandbox import test_rest, test_sandbox
from tests.runtimes.sandbox.conftest import provided, sh, unique

pytestmark = pytest.mark.docker
DEADLINE_S = 60.0
SHARES = """
import sys
import time
from pathlib import Path
from runtimes.sandbox.docker.engine import EngineConnection
print(EngineConnection.open("", timeout_s=60, workers=1).shares(Path(sys.argv[1])))
"""

NETWORK_HERE = str(Path("/proc/self/ns/net").readlink())


def engine(*words: str) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


async def test_a_missing_image_names_the_remedy(containers: Provider) -> None:
    with pytest.raises(CapacityExceeded, match=r"docker pull localhost:1/nothing:here"):  # nobody serves there now
        await containers.check(SandboxSpec(image="localhost:1/nothing:here"))


async def test_the_death_of_the_runner_is_a_lost_environment(containers: Provider, spec: SandboxSpec) -> None:
    environments = Environments(containers)
    sandbox = await environments.ensure("t", spec)
    begun = asyncio.Event()
    task = asyncio.create_task(sandbox.run(Command(shell="echo; sleep 1000"), lambda *_: begun.set()))
    async with asyncio.timeout(DEADLINE_S):
        await begun.wait()
        pid = int(engine("inspect", "--format", "{{.State.Pid}}", f"tangram-{sandbox.id}"))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActionFailed) as caught:
            await task
        assert caught.value.reason is Reason.ENVIRONMENT_LOST
        assert "are lost" in caught.value.message
        assert (await sh(await environments.ensure("t", spec), "echo new")).stdout == b"new\n"
        await environments.close()
    assert engine("ps", "-aq", "--filter", f"name=tangram-{sandbox.id}") == ""


async def test_a_cancelled_creation_leaves_no_container(docker: str, spec: SandboxSpec, tmp_path: Path) -> None:
    containers = make_provider(ProviderSettings(kind="container", state_dir=tmp_path / "state"))
    name = unique("cancelled")
    task = asyncio.create_task(containers.create(spec, name=name, labels={}, mounts={}))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(DEADLINE_S):
        await containers.close()
    assert engine("ps", "-aq", "--filter", f"name=tangram-{name}") == ""


async def test_a_frozen_container_can_be_removed_by_hand(containers: Provider, spec: SandboxSpec) -> None:
    sandbox = await containers.create(spec, name=unique("frozen"), labels={}, mounts={})
    await sh(sandbox, "sleep 1000 >/dev/null 2>&1 &")
    await sandbox.quiesce(Background.FREEZE)
    engine("rm", "--force", f"tangram-{sandbox.id}")
    assert engine("ps", "-aq", "--filter", f"name=tangram-{sandbox.id}") == ""
    await sandbox.close()


async def test_a_container_made_of_a_snapshot_has_no_secret_of_another_and_its_image_goes_with_it(
    containers: Provider, spec: SandboxSpec
) -> None:
    environments = Environments(containers)
    original = await environments.ensure("one", replace(spec, env={"KEY": "a-secret", "OWN": "x"}))
    await sh(original, "echo shared > file")
    taken = await environments.snapshot("one")
    assert "KEY= " in engine("image", "inspect", "--format", "{{range .Config.Env}}{{.}} {{end}}", taken.image)
    assert taken.spec.env == {}
    copy = await environments.ensure("two", replace(spec, snapshot=taken.id, chosen=True))
    assert (await sh(copy, "cat file; id -u; echo $KEY")).stdout == (await sh(original, "cat file; id -u; echo")).stdout
    with pytest.raises(Conflict, match="'two'"):
        await containers.snapshots.remove(taken.id)
    await environments.close()
    await containers.snapshots.remove(taken.id)
    assert engine("images", "-q", taken.image) == ""


async def test_files_that_the_engine_does_not_see_make_no_empty_snapshot(
    containers: Provider, spec: SandboxSpec, tmp_path: Path
) -> None:
    environments = Environments(containers)
    original = await environments.ensure("one", spec)
    await sh(original, "echo kept > file")
    place = noted_bounded(tmp_path / "state" / "sandboxes" / original.id)
    if place is None or not await asyncio.to_thread(os.path.ismount, place):
        pytest.skip("this machine's containers have no disk image")
    await asyncio.to_thread(lambda: subprocess.run(["umount", "--lazy", place], check=True))
    assert (await sh(original, "cat file")).stdout == b"kept\n"
    with pytest.raises(ActionFailed, match="not mounted any more") as failure:
        await environments.snapshot("one")
    assert failure.value.reason is Reason.ENVIRONMENT_LOST
    assert containers.snapshots.all() == []
    await environments.close()


async def test_a_snapshot_whose_image_somebody_removed_is_forgotten(containers: Provider, spec: SandboxSpec) -> None:
    environments = Environments(containers)
    await environments.ensure("one", spec)
    taken = await environments.snapshot("one")
    engine("rmi", taken.image)
    with pytest.raises(NotFound):
        await environments.ensure("two", replace(spec, snapshot=taken.id, chosen=True))
    await environments.close()
    await containers.reap(())
    assert containers.snapshots.all() == []


async def test_an_image_that_no_record_knows_goes(containers: Provider, spec: SandboxSpec, tmp_path: Path) -> None:
    environments = Environments(containers)
    await environments.ensure("one", spec)
    taken = await environments.snapshot("one")
    await environments.close()
    shutil.rmtree(tmp_path / "state" / "snapshots" / taken.id)
    again = make_provider(ProviderSettings(kind="container", state_dir=tmp_path / "state"))
    await again.reap(())
    assert engine("images", "-q", taken.image) == ""
    await again.close()


async def test_without_a_network_there_is_a_loopback_of_its_own_and_nothing_of_the_engines(
    containers: Provider, spec: SandboxSpec
) -> None:
    one, other = [await containers.create(spec, name=unique(word), labels={}, mounts={}) for word in ("one", "other")]
    look = (
        "import os, socket\n"
        "print(os.readlink('/proc/self/ns/net'), [name for _, name in socket.if_nameindex()])\n"
        "served = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(('localhost', served.getsockname()[1]), 5)\n"
        "for place in (('192.0.2.1', 80), ('10.0.0.1', 80)):\n"
        "    try: socket.create_connection(place, 5)\n"
        "    except OSError as error: print(error.strerror)\n"
        "try: socket.getaddrinfo('example.org', 80)\n"
        "except OSError: print('no names')"
    )
    told = []
    for sandbox in (one, other):
        for user in ("", "root"):
            done = await sandbox.run(Command(argv=("python3", "-c", look), user=user))
            told.append(done.stdout.decode().split("\n"))
            assert told[-1][1:] == ["Network is unreachable", "Network is unreachable", "no names", ""], done
    assert len({NETWORK_HERE, *(lines[0].partition(" ")[0] for lines in told)}) == 3
    assert {lines[0].partition(" ")[2] for lines in told} == {"['lo']"}
    seen = json.loads(engine("inspect", "--format", "{{json .NetworkSettings.SandboxKey}}", f"tangram-{one.id}"))
    assert seen == ""  # it started no process of its own for it
    written = await sh(one, "echo 127.0.0.1 mine >> /etc/hosts && getent hosts mine", user="root")
    assert written.stdout.split() == [b"127.0.0.1", b"mine"]
    assert (await sh(other, "getent hosts mine")).exit_code != 0
    for sandbox in (one, other):
        await sandbox.close()


async def test_a_container_is_ended_by_its_own_first_process_and_by_no_other(
    containers: Provider, spec: SandboxSpec
) -> None:
    sandbox = await containers.create(spec, name=unique("ended"), labels={}, mounts={})
    name = f"tangram-{sandbox.id}"
    container, runner = engine("inspect", "--format", "{{.Id}} {{.State.Pid}}", name).split()
    assert not end_here(0, container)
    assert not end_here(os.getpid(), container)
    assert not end_here(int(runner), "0" * 64)
    assert engine("inspect", "--format", "{{.State.Running}}", name) == "true"
    assert end_here(int(runner), container)
    assert engine("wait", name) == str(128 + signal.SIGKILL)
    assert not end_here(int(runner), container)
    await sandbox.close()
    assert engine("ps", "-aq", "--filter", f"name={name}") == ""


async def test_an_internal_network_joins_the_sandboxes_of_a_task(containers: Provider, spec: SandboxSpec) -> None:
    internal = replace(spec, network=Network.INTERNAL)
    environments = Environments(containers)
    tasks = {"one": "a", "other": "a", "stranger": "b"}
    one, other, stranger = [await environments.ensure(name, internal, task=task) for name, task in tasks.items()]
    address = (await sh(one, "hostname -I")).stdout.decode().strip()
    serve = (
        "import socket\ns = socket.create_server(('0.0.0.0', 5555))\n"
        "print('up', flush=True)\ns.accept()[0].sendall(b'hi')"
    )
    up = asyncio.Event()
    server = asyncio.create_task(one.run(Command(argv=("python3", "-c", serve)), lambda *_: up.set()))
    async with asyncio.timeout(DEADLINE_S):
        await up.wait()
        call = f"import socket; print(socket.create_connection(('{address}', 5555), 2).recv(9))"
        denied = await stranger.run(Command(argv=("python3", "-c", call), user="root"))
        assert (denied.stdout, denied.exit_code) == (b"", 1)
        assert (await other.run(Command(argv=("python3", "-c", call)))).stdout == b"b'hi'\n"
        await server
        names = {task: network_of(sandbox) for task, sandbox in (("a", one), ("b", stranger))}
        assert network_of(other) == names["a"] != names["b"]
        await environments.end("one")
        assert names["a"] in networks_there()
        await environments.end("other")
        assert names["a"] not in networks_there()
        await environments.close()
        assert names["b"] not in networks_there()


async def test_internal_networks_are_bounded_and_those_of_nobody_removed(docker: str, spec: SandboxSpec) -> None:
    engine_client = DockerEngine.connect(timeout_s=60, workers=2)
    networks = InternalNetworks(engine_client, {"tangram.gateway": unique("bounded")}, 1)
    async with networks.joined("a") as name:
        assert network_labels(name)["tangram.task"] == "a"
        with pytest.raises(CapacityExceeded, match="internal_networks"):
            async with networks.joined("b"):
                pass
        await networks.sweep()
        assert name in networks_there()  # its first sandbox is not counted by the engine yet
    async with networks.joined("b") as other:  # the first one has nobody left
        assert {name, other} & networks_there() == {other}
    await networks.sweep()
    assert other not in networks_there()
    await engine_client.close()


async def test_a_container_of_another_network_is_not_adopted(containers: Provider, spec: SandboxSpec) -> None:
    sandbox = await containers.create(
        replace(spec, network=Network.INTERNAL), name=unique("kept"), labels={"tangram.task": "a"}, mounts={}
    )
    await sandbox.relabel({"tangram.task": "b"})
    await sandbox.release()
    assert await containers.adopt() == []
    assert engine("ps", "-aq", "--filter", f"name=tangram-{sandbox.id}") == ""


def network_of(sandbox: Sandbox) -> str:
    return engine("inspect", "--format", "{{.HostConfig.NetworkMode}}", f"tangram-{sandbox.id}")


def network_labels(name: str) -> dict[str, str]:
    labels = json.loads(engine("network", "inspect", name, "--format", "{{json .Labels}}"))
    assert isinstance(labels, dict)
    return labels


def networks_there() -> set[str]:
    return set(engine("network", "ls", "--format", "{{.Name}}").split())


async def test_an_internal_network_has_no_way_to_its_machine(containers: Provider, spec: SandboxSpec) -> None:
    sandbox = await containers.create(replace(spec, network=Network.INTERNAL), name=unique("in"), labels={}, mounts={})
    with ExitStack() as stack:
        services = [stack.enter_context(listener) for listener in listeners()]
        port, names = services[0].getsockname()[1], services[1]
        addresses = [str(next(subnet_of(network_of(sandbox)).hosts())), *engine_addresses()]
        assert len(addresses) > 1
        attempt = (
            "import socket, sys\nsocket.setdefaulttimeout(0.5)\n"
            f"for address in {addresses}:\n"
            f"  try: socket.create_connection((address, {port})); print('reached', address)\n"
            "  except OSError: print('refused')\n"
            "try: socket.getaddrinfo('host.example', 80); print('resolved')\nexcept OSError: print('unknown')\n"
        )
        said = (await sandbox.run(Command(argv=("python3", "-c", attempt), user="root"))).stdout.decode()
        assert said.split() == ["refused"] * len(addresses) + ["unknown"]
        with pytest.raises(BlockingIOError):
            names.recv(512)
    await sandbox.close()


def subnet_of(network: str) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network(engine("network", "inspect", network, "--format", "{{(index .IPAM.Config 0).Subnet}}"))


def listeners() -> Iterator[socket.socket]:
    """A service on every address of this machine, and its name server."""
    yield socket.create_server(("0.0.0.0", 0))
    names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    names.setblocking(False)
    with suppress(OSError):  # taken: by a real one
        names.bind(("127.0.0.1", 53))
    yield names


def engine_addresses() -> list[str]:
    """This machine's own, but for the loopback."""
    done = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True)
    return [word for word in done.stdout.split() if ":" not in word]


async def test_a_network_of_that_name_that_is_not_isolated_is_not_used(containers: Provider, spec: SandboxSpec) -> None:
    assert isinstance(containers, ContainerProvider)
    name = unique("tangram-test")
    engine("network", "create", "--internal", name)
    with pytest.raises(InvalidConfig, match=f"docker network rm {name}"):
        await make_isolated(containers._engine, name, {})
    engine("network", "rm", name)
    await make_isolated(containers._engine, name, {})
    await make_isolated(containers._engine, name, {})
    engine("network", "rm", name)


async def test_only_an_image_without_python_is_taken_for_one(
    containers: Provider, spec: SandboxSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(containers, ContainerProvider)
    api = containers._engine.api
    message = 'error mounting "/gone" to rootfs at "/x": no such file or directory'

    def failing(*_: object, **__: object) -> None:
        raise errors.APIError("400 Client Error", explanation=message)

    with monkeypatch.context() as patched:
        patched.setattr(api, "start", failing)
        with pytest.raises(CodedError, match="error mounting"):
            await containers.create(spec, name=unique("unlucky"), labels={}, mounts={})
    sandbox = await containers.create(spec, name=unique("lucky"), labels={}, mounts={})
    process = await sandbox.spawn(Command(argv=("true",)))  # which an image without python3 cannot hold
    assert (await process.wait()).exit_code == 0


@pytest.fixture(scope="module")
def bare(docker: str) -> Iterator[str]:
    """An image without python3."""
    name = f"tangram-test:bare-{secrets.token_hex(4)}"
    made = engine("create", "--network", "none", docker, "/bin/sh", "-c", "rm -f /usr/bin/python*")
    engine("start", "-a", made)
    engine("commit", made, name)
    engine("rm", made)
    yield name
    engine("rmi", name)


class TestWithoutPython:
    """An image without python3: the same semantics, a docker exec for each command."""

    @pytest.fixture
    async def sandbox(self, containers: Provider, spec: SandboxSpec, bare: str) -> Sandbox:
        assert isinstance(containers, ContainerProvider)
        return await containers.create(replace(spec, image=bare), name=unique("bare"), labels={}, mounts={})

    async def test_commands(self, sandbox: Sandbox) -> None:
        seen: list[tuple[str, bytes]] = []
        command = Command(
            shell='cat; echo "$PWD $A" >&2; id -u >&2; exit 3', stdin=b"in\x00\xff", env={"A": "b"}, cwd="."
        )
        result = await sandbox.run(command, lambda *chunk: seen.append(chunk))
        assert (result.stdout, result.exit_code) == (b"in\x00\xff", 3)
        assert re.fullmatch(rb"/workspace b\n1\d{6}\n", result.stderr)  # its own user
        assert b"".join(data for name, data in seen if name == "stdout") == b"in\x00\xff"
        cut = await sandbox.run(Command(argv=("head", "-c", "100000", "/dev/zero"), output_limit_bytes=10))
        assert (cut.stdout, cut.stdout_truncated) == (b"\0" * 5 + MARKER % (100_000 - 10) + b"\0" * 5, True)

    async def test_a_timeout_kills_there_too_and_spares_earlier_processes(self, sandbox: Sandbox) -> None:
        await sh(sandbox, "sleep 3000 >/dev/null 2>&1 & echo on")
        async with asyncio.timeout(DEADLINE_S):
            # A busy engine may take seconds to begin a docker exec, which count.
            result = await sh(sandbox, "echo before; (setsid sleep 12321 &); sleep 1000", timeout_s=8.0)
        assert (result.timed_out, result.stdout) == (True, b"before\n")
        assert (
            await sh(sandbox, "pgrep -f 'sleep 1232[1]' || echo none; pgrep -cf 'sleep 300[0]'")
        ).stdout == b"none\n1\n"

    async def test_cancelling_kills(self, sandbox: Sandbox) -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(sandbox.run(Command(shell="echo; sleep 12321"), lambda *_: begun.set()))
        async with asyncio.timeout(DEADLINE_S):
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await sh(sandbox, "pgrep -f 'sleep 1232[1]' || echo none")).stdout == b"none\n"

    async def test_files(self, sandbox: Sandbox) -> None:
        await sandbox.write_file("deep/file", b"data", mode=0o640)
        assert await sandbox.read_file("deep/file", limit_bytes=4) == b"data"
        [entry] = await sandbox.list_files("deep")
        assert (entry.path, entry.size_bytes, entry.mode) == ("deep/file", 4, 0o640)
        with pytest.raises(TooLarge):
            await sandbox.read_file("deep/file", limit_bytes=3)
        with pytest.raises(NotFound):
            await sandbox.read_file("nothing", limit_bytes=3)
        with pytest.raises(InvalidInput):
            await sandbox.read_file("deep", limit_bytes=3)
        with pytest.raises(InvalidInput):
            await sandbox.write_file("../../etc/passwd", b"x")

    async def test_its_death_is_told(self, sandbox: Sandbox) -> None:
        engine("rm", "-f", f"tangram-{sandbox.id}")
        with pytest.raises(ActionFailed) as caught:
            await sh(sandbox, "true")
        assert caught.value.reason is Reason.ENVIRONMENT_LOST

    async def test_what_needs_a_runner_is_unsupported(self, sandbox: Sandbox) -> None:
        with pytest.raises(Unsupported, match="no python3"):
            await sandbox.spawn(Command(argv=("cat",)))


@pytest.fixture
def unseen(docker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container of the gateway's own: the engine sees none of its files, and it none of the processes."""
    monkeypatch.setattr(EngineConnection, "shares", lambda connection, directory: False)
    monkeypatch.setattr("runtimes.sandbox.docker.engine.known_here", lambda pid, container: 0)


@pytest.fixture
async def provider(unseen: None, tmp_path: Path) -> AsyncIterator[ContainerProvider]:
    async with provided(tmp_path / "state", "container") as made:
        assert isinstance(made, ContainerProvider)
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
    shown = engine("inspect", "--format", "{{.Mounts}} {{.HostConfig.Binds}} {{.Config.StdinOnce}}", name)
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
        return engine("inspect", "--format", shown, f"tangram-{sandbox.id}").split()

    await sandbox.set_cores([0])
    assert grip() == ["0", "100000", "1024"]
    await sandbox.quiesce(Background.RUN)
    assert grip()[2:] == ["2"]
    await sandbox.quiesce(Background.FREEZE)
    until_s = time.monotonic() + 60  # a signal is seen when the kernel gives its process a turn
    while not re.search(r" T[N<sl]*\b", engine("top", f"tangram-{sandbox.id}", "-eo", "pid,comm,stat")):
        assert time.monotonic() < until_s
    await sh(sandbox, "while ps -eo stat= | grep -q ^T; do :; done", timeout_s=60)


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
    async with provided(tmp_path / "state", "container", docker=DockerSettings(copy_limit_bytes=1000)) as provider:
        with pytest.raises(InvalidConfig, match="more than 1000 bytes, too many to be copied"):
            await provider.create(spec, name=unique("big"), labels={}, mounts={str(source): "/function"})
        assert await provider.reap(()) == 0


async def test_egress_needs_rules_of_the_gateway_or_a_network_that_has_its_own(
    provider: ContainerProvider, spec: SandboxSpec, tmp_path: Path
) -> None:
    egress = replace(spec, network=Network.EGRESS)
    assert not provider.info.limits["egress"]
    with pytest.raises(Unsupported, match="egress_network"):
        await provider.check(egress)
    async with provided(tmp_path / "named", "container", docker=DockerSettings(egress_network="host-rules")) as named:
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

    def __init__(self, private_engine: str) -> None:
        self._engine = private_engine
        self._writers: set[asyncio.StreamWriter] = set()
        self.up = True

    def cut(self) -> None:
        """Every connection, without a word."""
        for writer in self._writers:
            writer.transport.abort()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.up:
            return writer.transport.abort()
        there = await asyncio.open_unix_connection(self._engine)
        ends = {writer, there[1]}
        self._writers |= ends
        try:
            await piped((reader, writer), there)
        finally:
            self._writers -= ends
            there[1].transport.abort()


@pytest.fixture(scope="module")
def private_engine(docker: str) -> Iterator[PrivateDocker]:
    """An engine of our own, which may be killed."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a second engine")
    with private_docker(docker) as made:
        yield made


@asynccontextmanager
async def behind_a_wire(
    private_engine: PrivateDocker, spec: SandboxSpec, state_dir: Path
) -> AsyncIterator[tuple[Wire, Sandbox]]:
    """A sandbox whose engine is reached over connections that can be cut; bounded in time."""
    wire, path = Wire(private_engine.host.removeprefix("unix://")), private_engine.directory / unique("wire")
    async with (
        listening(wire.carry, path=path),
        provided(state_dir, "container", docker=DockerSettings(host=f"unix://{path}")) as provider,
        asyncio.timeout(DEADLINE_S),
    ):
        yield wire, await provider.create(spec, name=unique("cut"), labels={}, mounts={})


@pytest.mark.slow
@pytest.mark.usefixtures("unseen")
class TestCuts:
    """Connections and engines go; sandboxes stay."""

    @pytest.mark.promise("A command that is attached to goes on through cuts and its engine's death.")
    async def test_a_command_goes_on_through_cuts_and_its_engines_death(
        self, private_engine: PrivateDocker, spec: SandboxSpec, tmp_path: Path
    ) -> None:
        async with behind_a_wire(private_engine, spec, tmp_path) as (wire, sandbox):
            begun = asyncio.Event()
            script = "echo begun; while [ ! -e go ]; do sleep 0.01; done; echo done; exit 3"
            running = asyncio.create_task(sandbox.run(Command(shell=script), lambda *_: begun.set()))
            await begun.wait()
            wire.cut()
            await sh(sandbox, "true")
            await asyncio.to_thread(private_engine.kill)
            await asyncio.to_thread(private_engine.start)
            await sandbox.write_file("go", b"")
            result = await running
            assert (result.stdout, result.exit_code) == (b"begun\ndone\n", 3)

    async def test_an_engine_out_of_reach_ends_the_action_and_not_the_sandbox(
        self, private_engine: PrivateDocker, spec: SandboxSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("runtimes.sandbox.docker.attach.AWAY_S", 0.5)
        async with behind_a_wire(private_engine, spec, tmp_path) as (wire, sandbox):
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
