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

from manager.errors import ActionFailed, CodedError, InvalidConfig, NotFound, Unsupported
from manager.function import Network, SandboxSpec
from runtimes.sandbox.cgroup import Hierarchy
from runtimes.sandbox.creation_gate import CreationGate
from runtimes.sandbox.disk import DiskWatch
from runtimes.sandbox.docker.control import ContainerControl
from runtimes.sandbox.docker.engine import Blueprint, DockerEngine, Found, NoRunner
from runtimes.sandbox.docker.exec_client import ExecClient
from runtimes.sandbox.docker.installer import AttachInstaller, RunnerInstaller, SharedDirectoryInstaller
from runtimes.sandbox.docker.leftovers import LeftoverCleaner
from runtimes.sandbox.docker.network import Egress
from runtimes.sandbox.record import SandboxRecord, note_container, noted_container, read_records
from runtimes.sandbox.runner.protocol import lost
from runtimes.sandbox.sandbox import PROMISES, ProviderInfo, RunnerClient, Sandbox, require_workdir

logger = structlog.get_logger("sandbox.container")

COMPONENT = "sandbox.container"
#: Exit status of a first process that was ended by SIGKILL.
KILLED = 128 + signal.SIGKILL
GATEWAY, NAME = "tangram.gateway", "tangram.sandbox"
INTERNAL_NETWORK = "tangram-isolated"
#: The sandbox itself: an engine asks its own machine's name server on behalf of whoever has no way to it.
NO_NAMES = ("127.0.0.1",)
#: The runner's own; a command that runs as another user than root has none of them.
CAPABILITIES = ("SETUID", "SETGID", "KILL", "CHOWN")
#: What keeps a container without python3 alive; as PID 1 it reaps what is orphaned.
IDLE = ("/bin/sh", "-c", "trap : TERM INT; while :; do sleep 86400 & wait $!; done")
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
        hierarchy: Hierarchy | None = None,
    ) -> None:
        self._engine = engine
        self._transport = transport
        attach = AttachInstaller(engine, copy_limit_bytes)
        self._installers: Mapping[str, RunnerInstaller] = {
            each.name: each for each in (SharedDirectoryInstaller(), attach)
        }
        self._root = state_dir / "sandboxes"
        self._label = f"{gateway_id}-{_state_id(state_dir)}"
        self._gate = gate
        self._shared_cores = tuple(shared_cores)
        self._hierarchy = Hierarchy.discover() if hierarchy is None else hierarchy
        self._cleaner = LeftoverCleaner(self._hierarchy, state_dir / "removed")
        #: Images found to have no python3.
        self._bare: set[str] = set()
        self._abandoned: set[asyncio.Task[None]] = set()
        self._disk = DiskWatch()

    @property
    def info(self) -> ProviderInfo:
        engine = self._engine
        return ProviderInfo(
            kind="container",
            engine=f"docker {engine.version} (cgroup v{engine.cgroup_version}), {self._transport} transport",
            isolation="a container without network and capabilities, with no-new-privileges; the kernel is shared",
            limits={**dict.fromkeys(PROMISES, True), "seccomp": engine.seccomp},
        )

    async def check(self, spec: SandboxSpec) -> None:
        require_workdir(spec)
        if spec.allow and spec.network is not Network.EGRESS:
            raise InvalidConfig("sandbox.allow needs network: egress", component=COMPONENT)
        if spec.allow:
            Egress.check()
            if self._transport != SharedDirectoryInstaller.name:
                raise Unsupported(
                    "network: egress with an allow list needs an engine on this machine", component=COMPONENT
                )
        await self._engine.require_image(spec.image)

    async def create(
        self, spec: SandboxSpec, *, name: str, labels: Mapping[str, str], mounts: Mapping[str, str]
    ) -> Sandbox:
        async with self._gate.slot(name):
            await self.check(spec)
            making = asyncio.create_task(self._create(spec, name, labels, mounts))
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
            directories = [directory for directory, _ in await asyncio.to_thread(read_records, self._root)]
            kept = {*living, *young}
        removed = sum([await self._discard(found) for found in listed if found.labels.get(NAME) not in kept])
        for directory in directories:
            if directory.name not in kept:
                await asyncio.to_thread(self._forget, directory, {found.id for found in listed})
        return removed + await asyncio.to_thread(self._cleaner.sweep)

    def _forget(self, directory: Path, listed: Collection[str]) -> None:
        """Remove what is left of a sandbox; its container the engine may have forgotten."""
        container = noted_container(directory)
        if container and container not in listed:
            self._cleaner.watch(container)
        shutil.rmtree(directory, ignore_errors=True)

    async def remove_snapshot(self, name: str) -> None:
        await self._engine.remove_image(name)

    async def close(self) -> None:
        await self._disk.close()
        while self._abandoned:
            await asyncio.gather(*self._abandoned, return_exceptions=True)
        await self._engine.close()

    # --- making

    async def _create(
        self, spec: SandboxSpec, name: str, labels: Mapping[str, str], mounts: Mapping[str, str]
    ) -> Sandbox:
        directory = self._root / name
        token, runner = secrets.token_hex(16), spec.image not in self._bare
        record = SandboxRecord(
            name=name, token=token, spec=spec, labels=dict(labels), runner=runner, transport=self._transport
        )
        container = ""
        try:
            await asyncio.to_thread(_lay_out, directory, record)
            egress = await Egress.resolve(spec) if spec.allow else None
            if spec.network is Network.INTERNAL:
                await self._engine.isolated_network(INTERNAL_NETWORK)
            blueprint = self._blueprint(record, directory, mounts, egress)
            container = await self._made(blueprint, mounts)
            await asyncio.to_thread(note_container, directory, container)
            try:
                found = await self._engine.start(container)
            except NoRunner as error:
                await self._engine.remove(container)
                container = await self._made(self._without_runner(blueprint, record, error), mounts)
                await asyncio.to_thread(note_container, directory, container)
                record = replace(record, runner=False)
                await asyncio.to_thread(record.write, directory)
                found = await self._engine.start(container)
            if egress is not None:
                await egress.enforce(found.pid)
            return await self._assemble(found, record, directory)
        except BaseException:
            if container:
                with suppress(CodedError):
                    await self._engine.remove(container)
                    await asyncio.to_thread(self._cleaner.watch, container)
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            raise

    async def _made(self, blueprint: Blueprint, mounts: Mapping[str, str]) -> str:
        container = await self._engine.create(blueprint)
        try:
            await self._installers[self._transport].furnish(container, mounts)
        except BaseException:
            await self._engine.remove(container)
            raise
        return container

    def _blueprint(
        self, record: SandboxRecord, directory: Path, mounts: Mapping[str, str], egress: Egress | None
    ) -> Blueprint:
        spec = record.spec
        networks = {Network.NONE: "none", Network.INTERNAL: INTERNAL_NETWORK, Network.EGRESS: "bridge"}
        blueprint = Blueprint(
            name=record.name,
            image=spec.image,
            argv=IDLE,
            user="0",
            workdir="/",
            env=spec.env,
            labels={GATEWAY: self._label, NAME: record.name, **record.labels},
            binds={},
            capabilities=CAPABILITIES,
            memory_bytes=spec.memory_bytes,
            pids=spec.pids + PIDS_OF_OURS,
            shm_bytes=spec.shm_bytes,
            disk_bytes=spec.disk_bytes,
            network=networks[spec.network],
            hosts={} if egress is None else egress.hosts,
            dns=NO_NAMES if spec.network is Network.INTERNAL else (),
        )
        blueprint = self._installers[self._transport].equip(blueprint, directory, mounts)
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
            client = ExecClient(self._engine, found.id, spec)
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
        sandbox = Sandbox(
            record=record,
            directory=directory,
            client=client,
            control=self._control(found),
            shared_cores=self._shared_cores,
        )
        self._watch_disk(sandbox, found)
        return sandbox

    def _watch_disk(self, sandbox: Sandbox, found: Found) -> None:
        """Watch its layer if the engine does not bound it: from here, or else by asking the engine."""
        if self._engine.bounds_disk:
            return
        limit_bytes = sandbox.spec.disk_bytes
        if found.pid and found.layer and os.access(found.layer, os.R_OK):
            self._disk.add(sandbox, Path(found.layer), limit_bytes)
        else:
            self._disk.add_remote(sandbox, lambda: self._engine.layer_bytes(found.id), limit_bytes)

    async def _adopt(self, found: Found, record: SandboxRecord) -> Sandbox:
        if not found.running:
            raise lost("it is not running")
        if found.paused:  # by a gateway that saw no cgroup
            await self._engine.unpause(found.id)
        await self._control(found).thaw()
        return await self._assemble(found, record, self._root / record.name, adopted=True)

    def _control(self, found: Found) -> ContainerControl:
        cgroup = None if self._hierarchy is None or not found.pid else self._hierarchy.of_process(found.pid)
        return ContainerControl(
            self._engine, found.id, self._root / found.labels.get(NAME, "unknown"), cgroup, self._cleaner
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


def _lay_out(directory: Path, record: SandboxRecord) -> None:
    """Make the directory with its record, and that of the socket, which only root may enter here and inside."""
    (directory / "run").mkdir(parents=True, mode=0o700)
    record.write(directory)


def _state_id(state_dir: Path) -> str:
    """Return what tells this state directory from every other on the same engine."""
    path = state_dir / "state-id"
    with suppress(FileExistsError), path.open("x", encoding="ascii") as file:
        file.write(secrets.token_hex(6))
    return path.read_text(encoding="ascii")
