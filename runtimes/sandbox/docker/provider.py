"""Container sandboxes: made hardened, held by their cgroup, spoken to through the resident runner."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import structlog

from manager.errors import ActionFailed, CodedError, NotFound, Unsupported, exhaustion
from manager.function import AUTO, SandboxSpec
from runtimes.sandbox.capabilities import capabilities_of
from runtimes.sandbox.cgroup import Hierarchy
from runtimes.sandbox.creation_gate import CreationGate
from runtimes.sandbox.disk.bound import DiskBound, WalkBound
from runtimes.sandbox.disk.image import files_max, is_bounded
from runtimes.sandbox.disk.watch import RUN_BYTES, RUN_FILES, DiskWatch
from runtimes.sandbox.docker.control import ContainerControl, release_noted
from runtimes.sandbox.docker.engine import Blueprint, DockerEngine, Found, NoRunner
from runtimes.sandbox.docker.exec_client import ExecClient
from runtimes.sandbox.docker.images import ImageStore
from runtimes.sandbox.docker.installer import AttachInstaller, RunnerInstaller, SharedDirectoryInstaller
from runtimes.sandbox.docker.leftovers import LeftoverCleaner
from runtimes.sandbox.docker.network import ContainerNetworks
from runtimes.sandbox.docker.remains import GATEWAY, MACHINE, NAME, STATE, UID, machine_id
from runtimes.sandbox.docker.snapshots import ContainerSnapshots
from runtimes.sandbox.egress import Egress
from runtimes.sandbox.own_users import FIRST, OwnUsers
from runtimes.sandbox.parts import RunnerClient
from runtimes.sandbox.promises import PROMISES, ProviderInfo, require_user, require_workdir
from runtimes.sandbox.record import (
    HOSTS,
    SANDBOXES,
    TASK,
    SandboxRecord,
    hold,
    note_bounded,
    note_container,
    noted_bounded,
    noted_container,
    read_records,
)
from runtimes.sandbox.runner.protocol import lost
from runtimes.sandbox.sandbox import Sandbox
from runtimes.sandbox.seccomp import Seccomp, engine_profile
from runtimes.sandbox.snapshots.record import SNAPSHOTS, SnapshotSettings
from runtimes.sandbox.snapshots.store import SnapshotStore

logger = structlog.get_logger("sandbox.container")

COMPONENT = "sandbox.container"
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
        hierarchy: Hierarchy | None = None,
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
        self._hierarchy = Hierarchy.discover() if hierarchy is None else hierarchy
        self._cleaner = LeftoverCleaner(self._hierarchy, state_dir / "removed")
        #: Images found to have no python3.
        self._bare: set[str] = set()
        self._abandoned: set[asyncio.Task[None]] = set()
        self._bound = bound or WalkBound()
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
        return self._gate.hear(await self._engine.trouble())

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
        for found in await self._engine.list(f"{GATEWAY}={self._label}"):
            record = records.get(found.labels.get(NAME, ""))
            try:
                if record is None:
                    raise lost("there is no record of it")
                sandbox = await self._adopt(await self._engine.inspect(found.id), record)
                adopted.append((sandbox, record.labels))
            except CodedError as failure:
                logger.warning("not adopted", container=found.id[:12], why=failure.message)
                await self._discard(found)
        return adopted

    async def reap(self, living: Collection[str]) -> int:
        with self._gate.watching() as young:
            listed = await self._engine.list(f"{GATEWAY}={self._label}")
            found = await asyncio.to_thread(read_records, self._root)
            directories = [directory for directory, record in found if record is None or record.in_container]
            kept = {*living, *young}
        removed = sum([await self._discard(found) for found in listed if found.labels.get(NAME) not in kept])
        await self._networks.sweep()
        await self._snapshots.reap()
        for directory in directories:
            if directory.name not in kept:
                await asyncio.to_thread(self._forget, directory, {found.id for found in listed})
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
            container = await self._made(blueprint, record, mounts, directory)
            await asyncio.to_thread(note_container, directory, container)
            try:
                found = await self._engine.start(container)
            except NoRunner as error:
                await self._engine.remove(container)
                bare = self._without_runner(blueprint, record, error)
                container = await self._made(bare, record, mounts, directory)
                await asyncio.to_thread(note_container, directory, container)
                record = replace(record, runner=False)
                await asyncio.to_thread(record.write, directory)
                found = await self._engine.start(container)
            await self._networks.enforce(egress, found.pid)
            return await self._assemble(found, record, directory)
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

    async def _made(
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
        if isinstance(self._bound, WalkBound):
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
        self, found: Found, record: SandboxRecord, directory: Path, *, adopted: bool = False
    ) -> Sandbox:
        """Return a started container as a sandbox."""
        spec = record.spec
        if found.pid:
            self._cleaner.learn(found.id, found.pid)
        client: RunnerClient
        if not record.runner:
            client = ExecClient(self._engine, found.id, record)
            await (client.end_left() if adopted else client.prepare_workdir())
        else:
            try:
                client = await self._installers[record.transport].connect(found, record, directory)
            except ActionFailed as failure:
                state = await self._engine.inspect(found.id)
                if not state.running and state.exit_code != KILLED:
                    message = f"the runner does not start in {spec.image!r}: its python3 must be 3.8 or newer"
                    raise Unsupported(message, component=COMPONENT) from failure
                raise
        control = self._control(found)
        sandbox = Sandbox(
            record=record,
            directory=directory,
            client=client,
            control=control,
            shared_cores=self._shared_cores,
        )
        self._watch_disk(sandbox, found, control)
        return sandbox

    def _watch_disk(self, sandbox: Sandbox, found: Found, control: ContainerControl) -> None:
        """Watch what no file system of its own bounds: its layer, or no more than a few files that it shares with us.

        From here, or else by asking the engine.
        """
        disk_bytes, processes = sandbox.spec.disk_bytes, control.processes
        directory = self._root / sandbox.id
        shared = (directory / "run", directory / HOSTS, *map(Path, found.etc))
        imaged = not isinstance(self._bound, WalkBound)
        if found.pid and imaged and is_bounded(Path(f"/proc/{found.pid}/root"), disk_bytes):
            self._disk.add(sandbox, shared, RUN_BYTES, RUN_FILES, processes)
        elif found.pid and found.layer and os.access(found.layer, os.R_OK):
            self._disk.add(sandbox, (Path(found.layer), *shared), disk_bytes, files_max(disk_bytes), processes)
        else:
            self._disk.add_unseen(sandbox, lambda: self._engine.layer_bytes(found.id), disk_bytes)

    async def _adopt(self, found: Found, record: SandboxRecord) -> Sandbox:
        if not found.running:
            raise lost("it is not running")
        await self._networks.require(found, record, here=self._is_here(record.spec.runtime))
        if found.paused:  # by a gateway that saw no cgroup
            await self._engine.unpause(found.id)
        await self._control(found).thaw()
        place = noted_bounded(self._root / record.name)
        if place is not None:
            self._bound.adopt(place)
        return await self._assemble(found, record, self._root / record.name, adopted=True)

    def _control(self, found: Found) -> ContainerControl:
        cgroup = None if self._hierarchy is None or not found.pid else self._hierarchy.of_process(found.pid)
        return ContainerControl(
            self._engine,
            found.id,
            self._root / found.labels.get(NAME, "unknown"),
            cgroup,
            self._cleaner,
            self._bound,
            found.pid,
            removed=self._networks.after(found),
        )

    async def _discard(self, found: Found) -> bool:
        """Remove it, or leave it to the next search; return whether it is gone."""
        try:
            known = await self._engine.inspect(found.id)
            if known.pid:
                self._cleaner.learn(known.id, known.pid)
            await self._control(known).remove()
        except NotFound:
            await asyncio.to_thread(self._cleaner.watch, found.id)
            return False
        except CodedError as error:
            logger.warning("not removed", container=found.id[:12], why=error.message)
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
