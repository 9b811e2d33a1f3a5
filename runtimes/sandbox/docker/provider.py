"""Sandboxes in Docker containers."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import os
import posixpath
import secrets
import shutil
import signal
import threading
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import structlog

from manager.errors import (
    ActionFailed,
    CapacityExceeded,
    CodedError,
    InvalidConfig,
    InvalidInput,
    NotFound,
    Unsupported,
    exhaustion,
)
from manager.function import AUTO, Network, SandboxSpec
from runtimes.sandbox.command import (
    Command,
    CommandResult,
    FileContent,
    FileStat,
    FileStream,
    HeldFile,
    OnOutput,
    ResumableCommand,
)
from runtimes.sandbox.disk import RUN_BYTES, RUN_FILES, DiskBound, DiskWatch, files_max, is_bounded
from runtimes.sandbox.docker.attach import AttachByteStream, AttachClient
from runtimes.sandbox.docker.engine import (
    GATEWAY,
    MACHINE,
    NAME,
    STATE,
    UID,
    Blueprint,
    ContainerState,
    DockerEngine,
    LeftoverCleaner,
    NoRunner,
    known_here,
    machine_id,
    on_disk,
)
from runtimes.sandbox.docker.images import ContainerSnapshots, ImageStore
from runtimes.sandbox.egress import Egress, EgressGuard
from runtimes.sandbox.linux import Cgroup, CpuWeight, Hierarchy, Seccomp, capabilities_of, engine_profile
from runtimes.sandbox.runner.client import (
    COMMAND_FORM,
    FILE_ERROR,
    INSIDE,
    ISOLATED,
    RUNNER,
    KeptOutput,
    RunnerEnd,
    SandboxProcess,
    SocketStream,
    StreamClient,
    cut_off,
    lost,
    packed_beside,
)
from runtimes.sandbox.sandbox import FIRST, CreationGate, OwnUsers, RunnerClient, Sandbox, SandboxControl
from runtimes.sandbox.snapshots import LABEL, REPOSITORY, SNAPSHOTS, SnapshotSettings, SnapshotStore
from runtimes.sandbox.spec import (
    HOSTS,
    PROMISES,
    SANDBOXES,
    TASK,
    ProviderInfo,
    SandboxRecord,
    hold,
    note_bounded,
    note_container,
    noted_bounded,
    noted_container,
    read_records,
    require_user,
    require_workdir,
)

logger = structlog.get_logger("sandbox.container")


class ContainerControl(SandboxControl):
    """Of a container. What is asked of the engine takes tens of milliseconds instead of 20 us."""

    def __init__(
        self,
        engine: DockerEngine,
        container: str,
        directory: Path,
        cgroup: Cgroup | None,
        cleaner: LeftoverCleaner,
        bound: DiskBound,
        runner: int,
        *,
        removed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``runner`` is its first process as this machine knows it, 0 if it does not.

        ``removed`` is called after the container has gone.
        """
        super().__init__(cgroup, runner)
        self._engine = engine
        self._container = container
        self._directory = directory
        self._cleaner = cleaner
        self._bound = bound
        self._runner = runner
        self._removed = removed

    async def set_cores(self, cores: Sequence[int], weight: CpuWeight = CpuWeight.ACTION) -> None:
        with _out_of_reach():
            if self.group is None:
                await self._engine.limit_cores(self._container, cores, weight)
            else:
                self.group.set_cores(cores, weight)

    async def cause_of_death(self) -> str:
        try:
            entry = await self._engine.inspect(self._container)
        except NotFound:
            return "the container was removed"
        except CodedError as error:
            return error.message
        if entry.out_of_memory:
            return "out_of_memory"
        return "its runner fell silent" if entry.running else f"its first process ended with status {entry.exit_code}"

    async def snapshot(self, spec: SandboxSpec, id: str, place: Path, limit_bytes: int) -> int:
        await asyncio.to_thread(self._require_shown)
        size_bytes = await self._engine.layer_bytes(self._container)
        if size_bytes <= limit_bytes:
            await self._engine.commit(self._container, f"{REPOSITORY}:{id}", {LABEL: id}, without=spec.env)
            await asyncio.to_thread(self._require_shown)  # all the while
        return size_bytes

    def _require_shown(self) -> None:
        """Raise if the engine sees an empty directory in the place of its files. Its processes may still see them."""
        bounded = noted_bounded(self._directory)
        if bounded is not None and not self._bound.shows(bounded):
            raise lost("the image of its disk is not mounted any more where its engine keeps its files")

    async def remove(self) -> None:
        await self.thaw()
        await asyncio.to_thread(release_noted, self._bound, self._directory)
        try:
            if end_here(self._runner, self._container):
                with suppress(CodedError):
                    await self._engine.ended(self._container)
            await self._engine.remove(self._container)
        except CodedError:
            if self.group is not None:  # what it holds of the machine is given back even so
                await asyncio.to_thread(self.group.kill)
            raise
        await asyncio.to_thread(self._forget)
        if self._removed is not None:
            await self._removed()

    def _forget(self) -> None:
        """Remove the directory last: while it is there the next gateway knows of the container."""
        self._cleaner.watch(self._container)
        if self.group is not None:
            self.group.remove_aside()
        shutil.rmtree(self._directory, ignore_errors=True)


def end_here(runner: int, container: str) -> bool:
    """End a container by its first process, and with that all others in it; return whether that is on its way.

    The engine would start a program for it. Return False if that process (0: unknown) is not, or no longer, its first.
    """
    if not runner:
        return False
    try:
        held = os.pidfd_open(runner)
    except OSError:
        return False
    try:
        if known_here(runner, container):  # and as it is held, it cannot become another
            signal.pidfd_send_signal(held, signal.SIGKILL)
            return True
    except OSError:
        pass
    finally:
        os.close(held)
    return False


def release_noted(bound: DiskBound, directory: Path) -> None:
    """Take away the bound that was noted in a sandbox's directory, if any was."""
    place = noted_bounded(directory)
    if place is not None:
        bound.release(place)


@contextmanager
def _out_of_reach() -> Iterator[None]:
    """Raise the loss of a container, or of the engine, as the end of the action that wanted it."""
    try:
        yield
    except (FileNotFoundError, NotFound):
        raise lost("the container is gone; its files and processes are lost") from None
    except CapacityExceeded as error:
        raise cut_off(error.message) from None


NETWORK_COMPONENT = "sandbox.network"
#: Seconds after which somebody who found all networks in use may ask again.
RETRY_S = 10.0
#: Networks of the engine's own.
NO_NETWORK, BRIDGE = "none", "bridge"
#: An internal bridge has the machine's address on it by default, and through that all of its services.
NO_HOST = {"com.docker.network.bridge.inhibit_ipv4": "true"}
#: The sandbox itself: an engine asks its own machine's name server on behalf of whoever has no way to it.
NO_NAMES = ("127.0.0.1",)


class ContainerNetworks:
    """What a provider's containers reach. ``here`` says of each whether it is on this machine, and of its kernel."""

    def __init__(
        self,
        engine: DockerEngine,
        *,
        labels: Mapping[str, str],
        name_servers: Sequence[str],
        egress_network: str,
        internal_networks: int,
    ) -> None:
        self._guard = EgressGuard(name_servers)
        self._egress_network = egress_network
        self._internal = InternalNetworks(engine, labels, internal_networks)
        self.weakenings = (
            (f"egress reaches what the network {egress_network!r} lets it (sandbox.docker.egress_network)",)
            if egress_network
            else ()
        )

    def holds_egress(self, *, here: bool) -> bool:
        """Return whether egress is the public world, by rules of ours."""
        return self._guards(here) and not self._guard.obstacle

    def _guards(self, here: bool) -> bool:
        return here and not self._egress_network

    async def check(self, spec: SandboxSpec, *, here: bool) -> None:
        """Raise InvalidConfig or Unsupported if a sandbox's network can never be what the spec says."""
        if spec.network is not Network.EGRESS or self._guards(here):
            await self._guard.check(spec)
        elif not self._egress_network:
            raise Unsupported(
                "network: egress is held to the public world by rules that cannot be set from a container, nor for a "
                "kernel of its own (sandbox.runtime); make a network of the engine that has rules of its own, and name "
                "it: sandbox.docker.egress_network",
                component=NETWORK_COMPONENT,
            )
        elif spec.allow:
            raise Unsupported(
                f"sandbox.allow: the rules of the network {self._egress_network!r} are not the gateway's to set",
                component=NETWORK_COMPONENT,
            )

    @asynccontextmanager
    async def of(self, spec: SandboxSpec, task: str) -> AsyncIterator[str]:
        """Yield the engine's network for a sandbox of a task; it is there until the block ends."""
        if spec.network is Network.INTERNAL:
            async with self._internal.joined(task) as name:
                yield name
        elif spec.network is Network.EGRESS:
            yield self._egress_network or BRIDGE
        else:
            yield NO_NETWORK

    async def resolve(self, spec: SandboxSpec, *, here: bool) -> Egress | None:
        """Return what the rules shall let through, None if there are none; raises InvalidConfig."""
        return await self._guard.resolve(spec) if self._guards(here) else None

    def name_servers(self, spec: SandboxSpec, egress: Egress | None) -> tuple[str, ...]:
        """Return a sandbox's name servers; empty takes the engine's."""
        if egress is None:
            return NO_NAMES if spec.network is Network.INTERNAL else ()
        return egress.name_servers or NO_NAMES

    async def enforce(self, egress: Egress | None, pid: int) -> None:
        """Set the rules, if any, in the network namespace of a process; raises CodedError if they cannot be set."""
        if egress is not None:
            await self._guard.enforce(egress, pid)

    async def require(self, state: ContainerState, record: SandboxRecord, *, here: bool) -> None:
        """Raise `lost` if a container's network is not the one that its spec asks for.

        One that was restarted from outside has a new network namespace, without rules.
        """
        spec, task = record.spec, record.labels.get(TASK, record.name)
        if spec.network is Network.EGRESS and self._guards(here) and not await self._guard.holds(state.pid):
            raise lost("its network namespace has no rules")
        if spec.network is Network.INTERNAL and state.network != self._internal.name_of(task):
            raise lost("its network is not that of its task")

    def after(self, state: ContainerState) -> Callable[[], Awaitable[None]] | None:
        """Return what is to be called when a container has gone."""
        return None if state.network in (NO_NETWORK, BRIDGE, self._egress_network) else self.sweep

    async def sweep(self) -> None:
        """Remove the internal networks on which no sandbox is."""
        await self._internal.sweep()


class InternalNetworks:
    """The internal networks of one gateway's sandboxes, known to the engine by their labels."""

    def __init__(self, engine: DockerEngine, labels: Mapping[str, str], limit: int) -> None:
        self._engine = engine
        self._labels = dict(labels)
        #: What tells them from another gateway's, however often this one is started and wherever it runs.
        self._own = f"{GATEWAY}={labels[GATEWAY]}"
        self._limit = limit
        self._lock = asyncio.Lock()
        #: How many sandboxes are being made on a network: the engine does not count them before they start.
        self._joining: Counter[str] = Counter()

    def name_of(self, task: str) -> str:
        """Return the name of a task's network: another gateway of this engine has others for tasks of one name."""
        spoken = f"{self._own}\0{task}"
        return f"tangram-{hashlib.sha256(spoken.encode()).hexdigest()[:16]}"

    @asynccontextmanager
    async def joined(self, task: str) -> AsyncIterator[str]:
        """Yield the name of the task's network, which is there until the block ends and a sandbox on it lives.

        Raises CapacityExceeded if there are as many networks as may be, all in use.
        """
        name = self.name_of(task)
        async with self._lock:
            self._joining[name] += 1
            try:
                await self._ensure(name, task)
            except BaseException:
                self._leave(name)
                raise
        try:
            yield name
        finally:
            self._leave(name)

    async def sweep(self) -> None:
        """Remove the networks on which no sandbox is; what cannot be removed now is left to the next time."""
        async with self._lock:
            try:
                await self._removed_unused(await self._existing())
            except CodedError as error:
                logger.warning("unused networks are not looked for", why=error.message)

    async def _ensure(self, name: str, task: str) -> None:
        existing = await self._existing()
        if name not in existing and len(existing) >= self._limit:
            existing = await self._removed_unused(existing)
        if name not in existing and len(existing) >= self._limit:
            raise CapacityExceeded(
                f"{len(existing)} tasks have an internal network, as many as sandbox.docker.internal_networks lets be",
                component=NETWORK_COMPONENT,
                retry_after_s=RETRY_S,
            )
        await make_isolated(self._engine, name, {**self._labels, TASK: task})

    async def _existing(self) -> tuple[str, ...]:
        entry = await self._engine.call(self._engine.api.networks, filters={"label": [self._own]})
        return tuple(str(item["Name"]) for item in entry)

    async def _removed_unused(self, existing: Iterable[str]) -> tuple[str, ...]:
        """Remove what nobody uses; return what is left."""
        left = []
        for name in existing:
            try:
                if self._joining[name] or not await self._removed(name):
                    left.append(name)
            except CodedError as error:
                logger.warning("an internal network was not removed", network=name, why=error.message)
                left.append(name)
        return tuple(left)

    async def _removed(self, name: str) -> bool:
        """Remove a network on which no container runs; return whether it is gone."""
        try:
            await self._engine.call(self._engine.api.remove_network, name)
        except NotFound:
            return True
        except CodedError as error:
            if "active endpoints" in error.message:
                return False
            raise
        return True

    def _leave(self, name: str) -> None:
        self._joining[name] -= 1
        if not self._joining[name]:
            del self._joining[name]


async def make_isolated(engine: DockerEngine, name: str, labels: Mapping[str, str]) -> None:
    """Make a bridge without a way out and without the engine's machine on it, once; raises InvalidConfig."""

    async def existing_networks() -> list[Mapping[str, Any]]:
        networks = await engine.call(engine.api.networks, names=[name])
        return [network for network in networks if network["Name"] == name]

    if not (existing := await existing_networks()):
        try:
            await engine.call(
                engine.api.create_network,
                name,
                driver="bridge",
                internal=True,
                check_duplicate=True,
                options=NO_HOST,
                labels=dict(labels),
            )
            return
        except CodedError:
            if not (existing := await existing_networks()):  # else somebody was faster
                raise
    if not existing[0].get("Internal") or not NO_HOST.items() <= (existing[0].get("Options") or {}).items():
        raise InvalidConfig(
            f"the network {name!r} shows the engine's machine to sandboxes: docker network rm {name}",
            component=NETWORK_COMPONENT,
        )


START_S = 30.0
PYTHON = ("python3", *ISOLATED)
#: Signs of life that a gateway gives in the time after which a runner takes it for gone.
LIFE_SIGNS = 3
#: Seconds that commands go on at least when no gateway is heard of: its engine may be starting again.
UNSEEN_S = 60.0


class RunnerInstaller(Protocol):
    """One way; the container's record names it, so that the next gateway takes the same."""

    @property
    def name(self) -> str: ...

    def equip(self, blueprint: Blueprint, directory: Path, mounts: Mapping[str, str]) -> Blueprint:
        """Return the container with its runner; ``mounts`` (path here -> path inside) can be read in it."""
        ...

    async def furnish(self, container: str, mounts: Mapping[str, str]) -> None:
        """Put in, before its start, what it cannot see from outside."""
        ...

    async def connect(self, state: ContainerState, record: SandboxRecord, directory: Path) -> RunnerClient:
        """Speak to the runner of a started container; raises ActionFailed(environment_lost)."""
        ...


class SharedDirectoryInstaller:
    """Mounts of our directories, and a Unix socket in one of them: the engine sees them, and so does the container."""

    name = "socket"

    def __init__(self, state_dir: Path) -> None:
        """Blocks for a moment: ``state_dir``, which the engine sees, gets the file that starts in each container."""
        self._runner = packed_beside(state_dir.absolute())

    def equip(self, blueprint: Blueprint, directory: Path, mounts: Mapping[str, str]) -> Blueprint:
        offline = blueprint.network == NO_NETWORK
        return replace(
            blueprint,
            offline=offline,
            argv=(*PYTHON, f"{INSIDE}/runner.py", f"{INSIDE}/run"),
            # The socket's directory is the gateway's: without privileges of its own it is no root.
            capabilities=(*blueprint.capabilities, *(() if os.geteuid() == 0 else ("DAC_OVERRIDE",))),
            binds={
                str(self._runner): (f"{INSIDE}/runner.py", "ro"),
                str(directory / "run"): (f"{INSIDE}/run", "rw"),
                **({str(directory / HOSTS): ("/etc/hosts", "rw")} if offline else {}),
                **{source: (target, "ro") for source, target in mounts.items()},
            },
        )

    async def furnish(self, container: str, mounts: Mapping[str, str]) -> None:
        """Do nothing: they are mounted."""

    async def connect(self, state: ContainerState, record: SandboxRecord, directory: Path) -> StreamClient:
        stream = SocketStream(directory / "run", peer_pid=state.pid)
        return await StreamClient.open(stream, record.greeting(own_cgroup=True), within_s=START_S)


@dataclass(frozen=True, slots=True)
class AttachInstaller:
    """Needs nothing but a connection to the engine, whatever files and kernel the container sees.

    The runner travels in the container's own command line, and speaks over its standard streams.
    """

    engine: DockerEngine
    #: Most bytes of the files that are copied in place of a mount.
    copy_limit_bytes: int
    name: str = "attach"

    def equip(self, blueprint: Blueprint, directory: Path, mounts: Mapping[str, str]) -> Blueprint:
        return replace(blueprint, argv=(*PYTHON, "-c", _packed_runner(), "--attached"), attached=True)

    async def furnish(self, container: str, mounts: Mapping[str, str]) -> None:
        for source, target in mounts.items():
            await self.engine.put_tree(container, Path(source), target, limit_bytes=self.copy_limit_bytes)

    async def connect(self, state: ContainerState, record: SandboxRecord, directory: Path) -> AttachClient:
        unattended_s = max(record.spec.unattended_s, UNSEEN_S)
        life_s = min(record.spec.idle_ttl_s, unattended_s) / LIFE_SIGNS
        stream = AttachByteStream(self.engine, state.id, token=record.token, life_s=life_s)
        sequence = 1 + secrets.randbits(31)
        hello = record.greeting(own_cgroup=True, unattended_s=unattended_s, sequence=sequence)

        async def attach(first: int) -> StreamClient:
            return await StreamClient.open(stream, hello, within_s=START_S, first=first)

        async def running() -> bool:
            return await self.engine.running(state.id)

        return await AttachClient(attach, running, detachable=record.spec.unattended_s > 0).attach()


@cache
def _packed_runner() -> str:
    """Return the runner for Python's ``-c``: small, as the engine repeats it in every list of containers."""
    packed = base64.b64encode(zlib.compress(RUNNER.read_bytes(), 9)).decode("ascii")
    return f"import base64,zlib;exec(compile(zlib.decompress(base64.b64decode('{packed}')),'runner.py','exec'))"


COMPONENT = "sandbox.container"
#: Signals every process that carries the action's marker, whatever session or parent it has taken.
SIGNAL_SCRIPT = """
for p in /proc/[0-9]*; do
  case "$(tr '\\0' '\\n' <$p/environ 2>/dev/null)" in *TANGRAM_ACTION=$1*) kill -$2 ${p#/proc/} 2>/dev/null;; esac
done; true
"""
SWEEP_SCRIPT, STOP_SCRIPT, CONTINUE_SCRIPT = "kill -9 -1", "kill -STOP -1", "kill -CONT -1"
#: Prints the markers of the commands that run: what came in from outside has no parent here.
LEFT_SCRIPT = """
for p in /proc/[0-9]*; do
  case $p in /proc/1|/proc/$$) continue;; esac
  case "$(tr '\\t\\n' '  ' <$p/status 2>/dev/null)" in *" PPid: 0 "*)
    tr '\\0' '\\n' <$p/environ 2>/dev/null |
      while read -r v; do case $v in TANGRAM_ACTION=*) echo "${v#*=}";; esac; done;;
  esac
done
"""
LIST_SCRIPT = """
[ -e "$1" ] || exit 66
[ -d "$1" ] || exit 67
cd "$1" || exit 68
for f in * .[!.]* ..?*; do [ -e "$f" ] || [ -L "$f" ] || continue; stat -c '%s %f %n' "$f"; done
"""
#: Makes the directory ($1) of a file ($2); prints ok with who asks, and the mode and owner of one that is there.
WRITE_SCRIPT = """
mkdir -p "$1" 2>/dev/null
[ -d "$2" ] && echo is_a_directory && exit
[ ! -d "$1" ] && [ -e "$1" ] && echo not_a_directory && exit
if [ -f "$2" ]; then [ -w "$2" ] || { echo permission_denied; exit; }
else [ -w "$1" ] || { echo permission_denied; exit; }; fi
echo ok "$(id -u)" $(stat -c '%a %u' "$2" 2>/dev/null)
"""
SCRIPT_S = 10.0


class ExecClient:
    """`runtimes.sandbox.sandbox.RunnerClient` over the engine."""

    hides = False

    def __init__(self, engine: DockerEngine, container: str, record: SandboxRecord) -> None:
        self._engine = engine
        self._container = container
        self._spec = record.spec
        self._user, self._own_user = record.user, record.uid > 0
        self.lost = asyncio.Event()
        #: Nothing can be claimed: only whoever started a ``docker exec`` gets its output.
        self.resumable: Mapping[str, ResumableCommand] = {}
        self.started: frozenset[str] | None = None

    async def end_left(self) -> None:
        """End the commands of an earlier gateway, whose output nobody gets any more."""
        user = self._user
        _, markers = await self._script(LEFT_SCRIPT, user=user)
        for marker in markers.decode("ascii", "replace").split():
            await self._script(SIGNAL_SCRIPT, marker, "KILL", user=user)

    async def prepare_workdir(self) -> None:
        """Make the working directory the user's."""
        script = '[ -d "$1" ] && [ "$3" = False ] || { mkdir -p "$1" && chown "$2" "$1"; }'
        await self._script(script, self._spec.workdir, self._user, str(self._own_user), user="0")

    async def run(self, command: Command, on_output: OnOutput | None = None) -> CommandResult:
        if bool(command.argv) == bool(command.shell):
            raise InvalidInput(COMMAND_FORM, component=COMPONENT)
        if command.session is not None:
            message = f"the image {self._spec.image!r} has no python3: there are no sessions in it"
            raise Unsupported(message, component=COMPONENT)
        marker = secrets.token_hex(8)
        user = command.user or self._user
        loop, abandoned = asyncio.get_running_loop(), threading.Event()

        def show(stream: str, data: bytes) -> None:
            if on_output is not None and not loop.is_closed():
                loop.call_soon_threadsafe(on_output, stream, data)

        output = KeptOutput(command, show)
        started_s = time.monotonic()
        work = asyncio.ensure_future(
            self._engine.call(
                self._engine.execute,
                self._container,
                _exec_argv(command),
                user=user,
                cwd=posixpath.join(self._spec.workdir, command.cwd),
                env={"HOME": self._spec.workdir, **self._spec.env, **command.env, "TANGRAM_ACTION": marker},
                stdin=command.stdin,
                output=output.add,
                abandoned=abandoned.is_set,
            )
        )
        try:
            timed_out = not await _within(work, command.timeout_s)
            if timed_out:
                await self._end(work, marker, user, command.kill_grace_s)
            code = await work
        except asyncio.CancelledError:
            await self._end(work, marker, user, 0.0)
            abandoned.set()
            raise
        except CodedError as error:
            raise await self._explained(error) from None
        signal = code - 128 if code is not None and timed_out and code > 128 else None
        end = RunnerEnd(
            code=None if signal is not None else code,
            signal=signal,
            timed_out=timed_out,
            duration_s=time.monotonic() - started_s,
        )
        return output.result(end)

    async def spawn(self, command: Command) -> SandboxProcess:
        raise Unsupported(
            f"the image {self._spec.image!r} has no python3: it cannot hold a long-lived process",
            component=COMPONENT,
        )

    async def read_file(self, path: str, *, limit_bytes: int) -> bytes:
        return await self._engine.get_file(self._container, self._place(path), limit_bytes=limit_bytes)

    async def open_file(self, path: str, *, limit_bytes: int, user: str = "") -> FileStream:
        """Read it whole: its archive comes from the engine, not from the sandbox."""
        if user:
            await self._require_right("-r", path, user)
        return HeldFile(await self.read_file(path, limit_bytes=limit_bytes))

    async def write_file(
        self, path: str, content: FileContent, *, mode: int | None, locked: bool = False, user: str = ""
    ) -> bool:
        """Nothing is locked by it; on its way it lies on this machine's disk."""
        place, user = self._place(path), user or self._user
        directory, name = posixpath.split(place)
        _, description = await self._script(WRITE_SCRIPT, directory, place, user=user)
        words = description.decode("ascii", "replace").split()
        if words[:1] != ["ok"]:
            kind = words[0] if words else "permission_denied"
            message = f"{place!r} cannot be written by user {user}: {kind}"
            raise InvalidInput(message, component=COMPONENT, detail={FILE_ERROR: kind})
        own, *there = words[1:]
        kept_mode, uid = there or ("644", own)
        mode = int(kept_mode, 8) if mode is None else mode
        async with on_disk(content) as file:
            await self._engine.put_file(self._container, directory, name, file, mode=mode, uid=int(uid))
        return False

    async def _require_right(self, right: str, path: str, user: str) -> None:
        """Raise InvalidInput unless the user has this right (of ``test``) to what is there."""
        code, _ = await self._script(f'[ ! -e "$1" ] || [ {right} "$1" ]', self._place(path), user=user)
        if code != 0:
            detail = {FILE_ERROR: "permission_denied"}
            raise InvalidInput(f"{path!r} may not be used by user {user}", component=COMPONENT, detail=detail)

    async def list_files(self, path: str, *, user: str = "") -> list[FileStat]:
        code, output = await self._script(LIST_SCRIPT, self._place(path), user=user or self._user)
        if code != 0:
            kind = {67: "not_a_directory", 68: "permission_denied"}.get(code, "not_found")
            message = f"{path!r} is no directory in the sandbox ({kind})"
            raise NotFound(message, component=COMPONENT, detail={FILE_ERROR: kind})
        matches = []
        for line in output.decode("utf-8", "replace").splitlines():
            size, mode, name = line.split(" ", 2)
            bits = int(mode, 16)
            matches.append(
                FileStat(
                    path=posixpath.join(path, name),
                    size_bytes=int(size),
                    directory=bits & 0o170000 == 0o040000,
                    mode=bits & 0o7777,
                )
            )
        return sorted(matches, key=lambda entry: entry.path)

    def keep(self, claims: str, *, detached: bool) -> None:
        """Do nothing: a ``docker exec`` ends with its gateway."""

    async def rest(self, *, resting: bool, still: bool = False) -> None:
        await self._script(STOP_SCRIPT if resting else CONTINUE_SCRIPT, user="0")

    def lend(self, fd: int) -> bool:
        """Return True: it has no runner that would end itself."""
        return True

    async def sweep(self, clear_bytes: int | None = None) -> int:
        await self._script(SWEEP_SCRIPT, user="0")
        if clear_bytes is not None:
            await self._script("rm -rf /dev/shm/* /dev/shm/.[!.]*", user="0")
        return 0

    def close(self) -> None:
        self.lost.set()

    # --- inside

    def _place(self, path: str) -> str:
        full = posixpath.normpath(posixpath.join(self._spec.workdir, path))
        if not path.startswith("/") and not (full + "/").startswith(self._spec.workdir.rstrip("/") + "/"):
            raise InvalidInput(f"{path!r} leaves the sandbox's working directory", component=COMPONENT)
        return full

    async def _end(self, work: asyncio.Future[int | None], marker: str, user: str, grace_s: float) -> None:
        """Send SIGTERM, wait for the grace, and send SIGKILL until the command is gone."""
        if grace_s > 0:
            await self._script(SIGNAL_SCRIPT, marker, "TERM", user=user)
            await _within(work, grace_s)
        for _ in range(3):
            await self._script(SIGNAL_SCRIPT, marker, "KILL", user=user)
            if await _within(work, 1.0):
                return
        self.lost.set()
        raise lost("a process in the sandbox does not end")

    async def _script(self, script: str, *words: str, user: str) -> tuple[int, bytes]:
        output = bytearray()
        code = await asyncio.wait_for(
            self._engine.call(
                self._engine.execute,
                self._container,
                ["/bin/sh", "-c", script, "sh", *words],
                user=user,
                cwd="/",
                env={},
                stdin=b"",
                output=lambda _, data: output.extend(data),
                abandoned=lambda: False,
            ),
            SCRIPT_S,
        )
        return code or 0, bytes(output)

    async def _explained(self, error: CodedError) -> CodedError:
        """Return the failure as the action is told it: without a running container its environment is lost."""
        if isinstance(error, CapacityExceeded):
            return lost(error.message)
        if isinstance(error, NotFound) or "is not running" in error.message:
            self.lost.set()
            return lost("the container is gone")
        return error


def _exec_argv(command: Command) -> list[str]:
    """Return the command as an argument vector; the shell joins its two streams if they are wanted in one."""
    if command.argv:
        return ["/bin/sh", "-c", 'exec "$0" "$@" 2>&1', *command.argv] if command.merge else list(command.argv)
    return ["/bin/sh", "-c", f"exec 2>&1\n{command.shell}" if command.merge else command.shell]


async def _within(work: asyncio.Future[int | None], seconds: float) -> bool:
    done, _ = await asyncio.wait([work], timeout=seconds if math.isfinite(seconds) else None)
    return bool(done)


#: Exit status of a first process that was ended by SIGKILL.
KILLED = 128 + signal.SIGKILL
#: What keeps a container without python3 alive; as PID 1 it reaps what is orphaned.
IDLE = ("/bin/sh", "-c", "trap : TERM INT; while :; do sleep 86400 & wait $!; done")
#: Whose containers share this machine's kernel, and with it the runner's socket.
SHARING = ("runc", "crun", "youki", "io.containerd.runc.v2", "nvidia")
ATTACHED = "attach"
#: The file of a state directory that remembers which images were pulled.
IMAGES = "images.json"
#: The range of sandboxes' own users in an engine with userns-remap, whose containers know so many ids in all.
REMAPPED_FIRST, REMAPPED_COUNT = 10_000, 65_536
#: What a container without a network finds in /etc/hosts: what the engine writes there.
NAMES = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
#: The runner, beside the commands' processes.
PIDS_OF_OURS = 2


class ContainerProvider:
    """Makes container sandboxes (`runtimes.sandbox.sandbox.Provider`)."""

    def __init__(
        self,
        engine: DockerEngine,
        *,
        state_dir: Path,
        gateway_id: str,
        gate: CreationGate,
        shared_cores: Sequence[int],
        transport: str = SharedDirectoryInstaller.name,
        copy_limit_bytes: int = 0,
        uids: tuple[int, int] = (0, 1000),
        seccomp: Seccomp = "default",
        bound: DiskBound | None = None,
        name_servers: Sequence[str] = (),
        egress_network: str = "",
        internal_networks: int = 16,
        images: ImageStore | None = None,
        snapshots: SnapshotSettings | None = None,
    ) -> None:
        self._engine = engine
        self._images = images or ImageStore(engine, record=state_dir / IMAGES)
        self._seccomp = engine_profile(seccomp) if engine.seccomp and seccomp != "none" else ""
        self._transport = transport
        attach = AttachInstaller(engine, copy_limit_bytes)
        self._installers: Mapping[str, RunnerInstaller] = {
            each.name: each for each in (SharedDirectoryInstaller(state_dir), attach)
        }
        self._root = state_dir / SANDBOXES
        self._held = hold(state_dir)
        first, count = uids
        remapped = engine.remapped is not None
        self._users = OwnUsers(
            first or (REMAPPED_FIRST if remapped else FIRST),
            min(count, REMAPPED_COUNT - (first or REMAPPED_FIRST)) if remapped else count,
            self._root,
        )
        self._label = f"{gateway_id}-{_state_id(state_dir)}"
        self._labels = {GATEWAY: self._label, STATE: str(state_dir.absolute()), MACHINE: machine_id()}
        self._snapshots = ContainerSnapshots(
            engine, self._images, state_dir / SNAPSHOTS, snapshots or SnapshotSettings(), self._label
        )
        self._networks = ContainerNetworks(
            engine,
            labels=self._labels,
            name_servers=name_servers,
            egress_network=egress_network,
            internal_networks=internal_networks,
        )
        self._gate = gate
        self._shared_cores = tuple(shared_cores)
        self._hierarchy = Hierarchy.discover()
        self._cleaner = LeftoverCleaner(self._hierarchy, state_dir / "removed")
        #: Images found to have no python3.
        self._bare: set[str] = set()
        self._abandoned: set[asyncio.Task[None]] = set()
        self._bound = bound or DiskBound()
        self._disk = DiskWatch()

    @property
    def info(self) -> ProviderInfo:
        engine = self._engine
        unfiltered = () if engine.seccomp else ("commands may make any system call: the engine has no seccomp",)
        return ProviderInfo(
            kind="container",
            engine=f"docker {engine.version} (cgroup v{engine.cgroup_version}), {self._transport} transport",
            isolation="a container without network and capabilities, with no-new-privileges; "
            + ("the kernel is shared" if engine.default_runtime in SHARING else f"run by {engine.default_runtime}"),
            runtime=engine.default_runtime,
            runtimes=engine.runtimes,
            limits={
                **dict.fromkeys(PROMISES, True),
                "seccomp": engine.seccomp,
                "egress": self._networks.holds_egress(here=self._is_here()),
                "root_separate": engine.remapped is not None,
            },
            weakenings=(*unfiltered, *self._networks.weakenings),
            disk=self._bound.name,
        )

    @property
    def images(self) -> ImageStore:
        return self._images

    @property
    def snapshots(self) -> SnapshotStore:
        return self._snapshots

    async def check(self, spec: SandboxSpec) -> None:
        await self._check(spec)
        self._images.keep(spec.image)
        await self._images.require(spec.image)

    async def _check(self, spec: SandboxSpec) -> None:
        require_workdir(spec)
        require_user(spec)
        if spec.runtime:
            await self._engine.require_runtime(spec.runtime)
        await self._networks.check(spec, here=self._is_here(spec.runtime))

    async def trouble(self) -> str:
        return self._gate.note_trouble(await self._engine.trouble())

    async def create(
        self, spec: SandboxSpec, *, name: str, labels: Mapping[str, str], mounts: Mapping[str, str]
    ) -> Sandbox:
        await self._check(spec)
        async with (
            self._snapshots.image_of(spec) as (image, labels_of_image),
            self._networks.of(spec, labels.get(TASK, name)) as network,
            self._gate.slot(name),
        ):
            known = labels_of_image.get(UID, "")
            uid = self._users.take(name, int(known) if known.isdecimal() else 0) if spec.user == AUTO else 0
            making = asyncio.create_task(self._create(spec, image, name, labels, mounts, uid, network))
            try:
                return await asyncio.shield(making)
            except asyncio.CancelledError:
                self._abandon(making)
                raise

    async def adopt(self) -> list[tuple[Sandbox, Mapping[str, str]]]:
        """Return the containers whose runner still answers; remove the others."""
        records = {path.name: record for path, record in await asyncio.to_thread(read_records, self._root)}
        adopted: list[tuple[Sandbox, Mapping[str, str]]] = []
        for entry in await self._engine.list(f"{GATEWAY}={self._label}"):
            record = records.get(entry.labels.get(NAME, ""))
            try:
                if record is None:
                    raise lost("there is no record of it")
                sandbox = await self._adopt(await self._engine.inspect(entry.id), record)
                adopted.append((sandbox, record.labels))
            except CodedError as failure:
                logger.warning("not adopted", container=entry.id[:12], why=failure.message)
                await self._discard(entry)
        return adopted

    async def reap(self, living: Collection[str]) -> int:
        with self._gate.watching() as young:
            listed = await self._engine.list(f"{GATEWAY}={self._label}")
            entry = await asyncio.to_thread(read_records, self._root)
            directories = [directory for directory, record in entry if record is None or record.in_container]
            kept = {*living, *young}
        removed = sum(
            [await self._discard(container) for container in listed if container.labels.get(NAME) not in kept]
        )
        await self._networks.sweep()
        await self._snapshots.reap()
        for directory in directories:
            if directory.name not in kept:
                await asyncio.to_thread(self._forget, directory, {container.id for container in listed})
        return removed + await asyncio.to_thread(self._cleaner.sweep)

    def _forget(self, directory: Path, listed: Collection[str]) -> None:
        """Remove what is left of a sandbox; its container the engine may have forgotten."""
        container = noted_container(directory)
        if container and container not in listed:
            self._cleaner.watch(container)
        release_noted(self._bound, directory)
        shutil.rmtree(directory, ignore_errors=True)

    async def close(self) -> None:
        await self._disk.close()
        await self._images.close()
        while self._abandoned:
            await asyncio.gather(*self._abandoned, return_exceptions=True)
        await self._engine.close()
        self._held.close()

    def _transport_of(self, runtime: str = "") -> str:
        """Return how a runner is spoken to: where it has a kernel of its own, a mounted socket is nobody's."""
        sharing = (runtime or self._engine.default_runtime) in SHARING
        return self._transport if sharing else ATTACHED

    def _is_here(self, runtime: str = "") -> bool:
        """Return whether a sandbox sees our files, and is of our kernel."""
        return self._transport_of(runtime) == SharedDirectoryInstaller.name

    # --- making

    async def _create(
        self,
        spec: SandboxSpec,
        image: str,
        name: str,
        labels: Mapping[str, str],
        mounts: Mapping[str, str],
        uid: int,
        network: str,
    ) -> Sandbox:
        directory = self._root / name
        token, runner = secrets.token_hex(16), spec.image not in self._bare
        record = SandboxRecord(
            name=name,
            token=token,
            spec=spec,
            labels=dict(labels),
            provider="container",
            runner=runner,
            transport=self._transport_of(spec.runtime),
            uid=uid,
        )
        container = ""
        try:
            await asyncio.to_thread(_lay_out, directory, record, self._engine.remapped)
            egress = await self._networks.resolve(spec, here=self._is_here(spec.runtime))
            blueprint = self._blueprint(record, image, directory, mounts, network, egress)
            container = await self._create_container(blueprint, record, mounts, directory)
            await asyncio.to_thread(note_container, directory, container)
            try:
                entry = await self._engine.start(container)
            except NoRunner as error:
                await self._engine.remove(container)
                bare = self._without_runner(blueprint, record, error)
                container = await self._create_container(bare, record, mounts, directory)
                await asyncio.to_thread(note_container, directory, container)
                record = replace(record, runner=False)
                await asyncio.to_thread(record.write, directory)
                entry = await self._engine.start(container)
            await self._networks.enforce(egress, entry.pid)
            return await self._assemble(entry, record, directory)
        except BaseException as error:
            if container:
                with suppress(CodedError):
                    await self._engine.remove(container)
                    await asyncio.to_thread(self._cleaner.watch, container)
            await asyncio.to_thread(release_noted, self._bound, directory)
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            if short := exhaustion(error, COMPONENT):
                raise short from None
            raise

    async def _create_container(
        self, blueprint: Blueprint, record: SandboxRecord, mounts: Mapping[str, str], directory: Path
    ) -> str:
        container = await self._engine.create(blueprint)
        try:
            await self._bind_layer(container, blueprint.disk_bytes, directory)
            await self._installers[record.transport].furnish(container, mounts)
        except BaseException:
            await self._engine.remove(container)
            raise
        return container

    async def _bind_layer(self, container: str, disk_bytes: int, directory: Path) -> None:
        """Bound the layer of a container that is not started yet, with the few entries that the engine made."""
        if self._bound.name == DiskBound.name:
            return
        layer = Path((await self._engine.inspect(container)).layer)

        def bind() -> None:
            if layer.name == "diff" and layer.is_dir():  # overlay2: beside it what the overlay works with
                release_noted(self._bound, directory)  # of a first try without a runner
                note_bounded(directory, layer.parent)
                self._bound.bind(layer.parent, disk_bytes)

        await asyncio.to_thread(bind)

    def _blueprint(
        self,
        record: SandboxRecord,
        image: str,
        directory: Path,
        mounts: Mapping[str, str],
        network: str,
        egress: Egress | None,
    ) -> Blueprint:
        spec = record.spec
        blueprint = Blueprint(
            name=record.name,
            image=image,
            argv=IDLE,
            user="0",
            workdir="/",
            env=spec.env,
            labels={**self._labels, NAME: record.name, UID: str(record.uid), **record.labels},
            binds={},
            capabilities=capabilities_of(spec),
            memory_bytes=spec.memory_bytes,
            pids=spec.pids + PIDS_OF_OURS,
            shm_bytes=spec.shm_bytes,
            disk_bytes=spec.disk_bytes,
            runtime=spec.runtime,
            network=network,
            hosts={} if egress is None else egress.hosts,
            dns=self._networks.name_servers(spec, egress),
            seccomp=self._seccomp,
        )
        blueprint = self._installers[record.transport].equip(blueprint, directory, mounts)
        return self._bare_blueprint(blueprint) if spec.image in self._bare else blueprint

    def _without_runner(self, blueprint: Blueprint, record: SandboxRecord, error: NoRunner) -> Blueprint:
        if record.spec.image in self._bare:
            message = f"the image {record.spec.image!r} has neither python3 nor /bin/sh: nothing can be run in it"
            raise Unsupported(message, component=COMPONENT) from error
        logger.warning("no python3 in the image: each command costs a docker exec", image=record.spec.image)
        self._bare.add(record.spec.image)
        return self._bare_blueprint(blueprint)

    def _bare_blueprint(self, blueprint: Blueprint) -> Blueprint:
        return replace(blueprint, argv=IDLE, attached=False)

    async def _assemble(
        self, entry: ContainerState, record: SandboxRecord, directory: Path, *, adopted: bool = False
    ) -> Sandbox:
        """Return a started container as a sandbox."""
        spec = record.spec
        if entry.pid:
            self._cleaner.learn(entry.id, entry.pid)
        client: RunnerClient
        if not record.runner:
            client = ExecClient(self._engine, entry.id, record)
            await (client.end_left() if adopted else client.prepare_workdir())
        else:
            try:
                client = await self._installers[record.transport].connect(entry, record, directory)
            except ActionFailed as failure:
                state = await self._engine.inspect(entry.id)
                if not state.running and state.exit_code != KILLED:
                    message = f"the runner does not start in {spec.image!r}: its python3 must be 3.8 or newer"
                    raise Unsupported(message, component=COMPONENT) from failure
                raise
        control = self._control(entry)
        sandbox = Sandbox(
            record=record,
            directory=directory,
            client=client,
            control=control,
            shared_cores=self._shared_cores,
        )
        self._watch_disk(sandbox, entry, control)
        return sandbox

    def _watch_disk(self, sandbox: Sandbox, entry: ContainerState, control: ContainerControl) -> None:
        """Watch what no file system of its own bounds: its layer, or no more than a few files that it shares with us.

        From here, or else by asking the engine.
        """
        disk_bytes, processes = sandbox.spec.disk_bytes, control.processes
        directory = self._root / sandbox.id
        shared = (directory / "run", directory / HOSTS, *map(Path, entry.etc))
        imaged = self._bound.name != DiskBound.name
        if entry.pid and imaged and is_bounded(Path(f"/proc/{entry.pid}/root"), disk_bytes):
            self._disk.add(sandbox, shared, RUN_BYTES, RUN_FILES, processes)
        elif entry.pid and entry.layer and os.access(entry.layer, os.R_OK):
            self._disk.add(sandbox, (Path(entry.layer), *shared), disk_bytes, files_max(disk_bytes), processes)
        else:
            self._disk.add_unseen(sandbox, lambda: self._engine.layer_bytes(entry.id), disk_bytes)

    async def _adopt(self, entry: ContainerState, record: SandboxRecord) -> Sandbox:
        if not entry.running:
            raise lost("it is not running")
        await self._networks.require(entry, record, here=self._is_here(record.spec.runtime))
        if entry.paused:  # by a gateway that saw no cgroup
            await self._engine.unpause(entry.id)
        await self._control(entry).thaw()
        place = noted_bounded(self._root / record.name)
        if place is not None:
            self._bound.adopt(place)
        return await self._assemble(entry, record, self._root / record.name, adopted=True)

    def _control(self, entry: ContainerState) -> ContainerControl:
        cgroup = None if self._hierarchy is None or not entry.pid else self._hierarchy.of_process(entry.pid)
        return ContainerControl(
            self._engine,
            entry.id,
            self._root / entry.labels.get(NAME, "unknown"),
            cgroup,
            self._cleaner,
            self._bound,
            entry.pid,
            removed=self._networks.after(entry),
        )

    async def _discard(self, entry: ContainerState) -> bool:
        """Remove it, or leave it to the next search; return whether it is gone."""
        try:
            known = await self._engine.inspect(entry.id)
            if known.pid:
                self._cleaner.learn(known.id, known.pid)
            await self._control(known).remove()
        except NotFound:
            await asyncio.to_thread(self._cleaner.watch, entry.id)
            return False
        except CodedError as error:
            logger.warning("not removed", container=entry.id[:12], why=error.message)
            return False
        return True

    def _abandon(self, making: asyncio.Task[Sandbox]) -> None:
        """Remove what nobody waits for any more once it is there."""

        async def remove() -> None:
            with suppress(CodedError):
                await (await making).close()

        task = asyncio.create_task(remove())
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)


def _lay_out(directory: Path, record: SandboxRecord, remapped: tuple[int, int] | None) -> None:
    """Make the directory with its record, and that of the socket, which only root may enter here and inside."""
    (directory / "run").mkdir(parents=True, mode=0o700)
    (directory / HOSTS).write_text(NAMES, encoding="ascii")
    (directory / HOSTS).chmod(0o644)
    if remapped is not None and os.geteuid() == 0:
        for name in ("run", HOSTS):
            os.chown(directory / name, *remapped)
    record.write(directory)


def _state_id(state_dir: Path) -> str:
    """Return what tells this state directory from every other on the same engine."""
    path = state_dir / "state-id"
    with suppress(FileExistsError), path.open("x", encoding="ascii") as file:
        file.write(secrets.token_hex(6))
    return path.read_text(encoding="ascii")
