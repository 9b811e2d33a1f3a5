"""The local process sandbox: for machines without Docker, as isolated as the machine allows.

With bubblewrap: its own process, network, IPC, UTS and mount namespaces, a read-only system, its own ``/tmp`` and
working directory. Without: a directory and a process tree. Memory, process and core bounds need writable cgroups.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal

import structlog

from manager.errors import ActionFailed, InvalidConfig, Unsupported, exhaustion
from manager.function import AUTO, Isolation, Network, SandboxSpec
from runtimes.sandbox.capabilities import require_minimal
from runtimes.sandbox.cgroup import Cgroup
from runtimes.sandbox.creation_gate import CreationGate
from runtimes.sandbox.disk.bound import DiskBound, WalkBound
from runtimes.sandbox.disk.image import files_max, is_bounded
from runtimes.sandbox.disk.watch import RUN_BYTES, RUN_FILES, DiskWatch
from runtimes.sandbox.egress import Egress, EgressGuard
from runtimes.sandbox.process.box import box_of
from runtimes.sandbox.process.control import ProcessControl, control_of, group_of, process_records, started
from runtimes.sandbox.process.files import lay_out_tmp, lay_out_work
from runtimes.sandbox.process.ids import BLOCK, IdBlock
from runtimes.sandbox.process.means import Means
from runtimes.sandbox.process.uplink import Uplink, missing_uplink
from runtimes.sandbox.promises import PROMISES, ProviderInfo, require_user, require_workdir
from runtimes.sandbox.record import SANDBOXES, SandboxRecord, hold
from runtimes.sandbox.runner.byte_stream import SocketStream
from runtimes.sandbox.runner.protocol import INSIDE, ISOLATED, RUNNER
from runtimes.sandbox.runner.runner import DEFAULT_PATH
from runtimes.sandbox.runner.stream_client import StreamClient
from runtimes.sandbox.sandbox import Sandbox
from runtimes.sandbox.seccomp import Seccomp, compiled
from runtimes.sandbox.snapshots.record import SNAPSHOTS, SnapshotSettings
from runtimes.sandbox.snapshots.store import SnapshotStore

logger = structlog.get_logger("sandbox.process")

COMPONENT = "sandbox.process"
START_S = 15.0
FILES_MAX = 4096
#: The user of a sandbox of `user: auto`, in its own block of ids.
OWN_UID = 1000
#: Where bubblewrap finds the filter of system calls and the user namespace, and what the sandbox holds while it lives:
#: the claim on its ids, and its uplink.
FILTER_FD, NAMESPACE_FD, CLAIM_FD, UPLINK_FD = 3, 4, 5, 6
#: Above which number we keep what is passed to a child.
FDS_ABOVE = 64


class ProcessProvider:
    """Makes sandboxes of local processes (`runtimes.sandbox.sandbox.Provider`)."""

    def __init__(
        self,
        *,
        state_dir: Path,
        gate: CreationGate,
        shared_cores: Sequence[int],
        means: Means,
        seccomp: Seccomp = "default",
        path: str = DEFAULT_PATH,
        weakenings: Sequence[str] = (),
        bound: DiskBound | None = None,
        name_servers: Sequence[str] = (),
        snapshots: SnapshotSettings | None = None,
    ) -> None:
        """``path`` is the PATH of commands. Raises Unsupported if a filter is wanted and none can be made."""
        self._means = means
        self._path = path
        #: In what it is weaker than it could be, besides what it sees itself.
        self._told = tuple(weakenings)
        self._filter = compiled(seccomp) if means.bubblewrap is not None and seccomp != "none" else b""
        self._root = state_dir / SANDBOXES
        self._held = hold(state_dir)
        self._snapshots_root = state_dir / SNAPSHOTS
        self._snapshots = SnapshotStore(
            self._snapshots_root, snapshots or SnapshotSettings(), provider=lambda: self.kind
        )
        self._gate = gate
        self._bound = bound or WalkBound()
        self._guard = EgressGuard(name_servers)
        self._disk = DiskWatch()
        self._shared_cores = tuple(shared_cores)

    @property
    def kind(self) -> Literal["process", "plain"]:
        return "plain" if self._means.bubblewrap is None else "process"

    @property
    def info(self) -> ProviderInfo:
        wrapped, grouped = self._means.bubblewrap is not None, self._means.cgroup is not None
        return ProviderInfo(
            kind=self.kind,
            engine="bubblewrap" if wrapped else "plain processes",
            isolation=(
                "own namespaces over a read-only view of the host's system; the kernel is shared"
                + ("" if self._filter else ", no seccomp filter")
                if wrapped
                else "none but a working directory and a process tree: commands see the host's files and network"
            ),
            limits={
                **dict.fromkeys(PROMISES, False),
                **dict.fromkeys(("filesystem", "network", "processes_hidden"), wrapped),
                "seccomp": bool(self._filter),
                **dict.fromkeys(("memory", "pids"), grouped),
                **dict.fromkeys(("cores", "freeze", "snapshot"), True),
                "disk": wrapped,
                "users_separate": self._means.root,
                **dict.fromkeys(("own_user", "root_separate"), self._means.ids is not None),
                "egress": wrapped and not self._guard.obstacle and not missing_uplink(),
            },
            weakenings=tuple(self._weakenings()),
            disk=self._bound.name,
        )

    def _weakenings(self) -> Iterator[str]:
        yield from self._told
        means = self._means
        if means.bubblewrap is None:
            yield "plain processes: commands see the host's files, processes and network"
        elif not self._filter:
            yield "commands may make any system call (sandbox.seccomp: none)"
        if means.ids is None:
            yield f"all sandboxes share one user of the host{means.no_ids and f' ({means.no_ids})'}"
        if means.cgroup is None:
            yield "memory is bounded by process, and processes are not counted: no control group can be written"

    images = None

    @property
    def snapshots(self) -> SnapshotStore:
        return self._snapshots

    async def check(self, spec: SandboxSpec) -> None:
        require_user(spec)
        if spec.isolation is Isolation.CONTAINER:
            raise Unsupported(
                "the function requires isolation: container, and this gateway has no Docker engine; "
                "start one (Debian: apt-get install docker.io) or drop the requirement",
                component=COMPONENT,
            )
        if spec.runtime:
            raise Unsupported(
                f"sandbox.runtime: {spec.runtime} runs containers, and this gateway has no Docker engine; start one "
                "(Debian: apt-get install docker.io) or drop the key",
                component=COMPONENT,
            )
        self._check_user(spec.user)
        require_minimal(spec, "" if self._means.ids else self._means.no_ids or "plain processes have none")
        await self._check_network(spec)
        require_workdir(spec)
        if self._means.bubblewrap is not None and spec.workdir.startswith("/usr/"):
            told = f"sandbox.workdir: {spec.workdir} lies in /usr, read-only in process sandboxes; choose another"
            raise Unsupported(told, component=COMPONENT)

    async def _check_network(self, spec: SandboxSpec) -> None:
        """Raise Unsupported where a network cannot be held to what it promises: egress is never the host's own."""
        if spec.network is Network.INTERNAL:
            raise Unsupported(
                "a process sandbox cannot join others: network: internal needs containers", component=COMPONENT
            )
        await self._guard.check(spec)
        if spec.network is not Network.EGRESS:
            return
        if self._means.bubblewrap is None:
            why = "it is not there without namespaces (Debian: apt-get install bubblewrap)"
        else:
            why = missing_uplink()
        if why:
            raise Unsupported(f"network: egress of a process sandbox: {why}", component=COMPONENT)

    def _check_user(self, user: str) -> None:
        """Raise Unsupported or InvalidConfig if commands cannot be that user, or would be root on the host."""
        if self._means.ids is not None:
            if user.isdigit() and int(user) >= BLOCK:
                raise InvalidConfig(f"sandbox.user must be below {BLOCK} in a process sandbox, not {user}")
        elif self._means.root and user.lstrip("0") in ("", "root"):
            raise Unsupported(
                f"user {user!r} would be root on the host: a process sandbox has a root of its own only where it can "
                f"have a user namespace ({self._means.no_ids or 'plain processes cannot'}); use containers for it",
                component=COMPONENT,
            )

    async def trouble(self) -> str:
        return ""  # there is nothing between this process and its sandboxes that could be gone

    async def create(
        self, spec: SandboxSpec, *, name: str, labels: Mapping[str, str], mounts: Mapping[str, str]
    ) -> Sandbox:
        await self.check(spec)
        async with AsyncExitStack() as stack:
            if spec.snapshot:
                await stack.enter_async_context(self._snapshots.held(spec.snapshot))
            await stack.enter_async_context(self._gate.slot(name))
            return await self._create(spec, name, labels, mounts)

    async def _create(
        self, spec: SandboxSpec, name: str, labels: Mapping[str, str], mounts: Mapping[str, str]
    ) -> Sandbox:
        directory, group = self._root / name, group_of(self._means.cgroup, name)
        egress = await self._guard.resolve(spec)
        uplink = None if egress is None else Uplink()
        parent, block = 0, None
        record = SandboxRecord(
            name=name,
            token=secrets.token_hex(16),
            spec=spec,
            labels=dict(labels),
            uid=OWN_UID if spec.user == AUTO else 0,
            provider=self.kind,
            base="" if self._means.bubblewrap is not None else str(directory / "work"),
        )
        try:
            if self._means.ids is not None:
                block = await asyncio.to_thread(self._means.ids.claim)
            await asyncio.to_thread(_lay_out, directory, record, self._means, block, self._bound, egress)
            if group is not None:
                group.make(memory_bytes=spec.memory_bytes, pids=spec.pids)
            files = self._snapshots_root / spec.snapshot if spec.snapshot else None
            base = 0 if block is None else block.base
            if files is not None:
                await asyncio.to_thread(lay_out_work, files, directory, base=base, owners=self._means.root)
            parent = self._start(directory, spec, mounts, block, uplink)
            # A gateway that is killed from here on leaves a process behind: the next one must know of it.
            replace(record, pid=parent, started=started(parent), ready=False).write(directory)
            client = await self._connect(directory, record, 0)
            if group is not None:
                group.enter(client.peer_pid)
            if files is not None:
                await asyncio.to_thread(lay_out_tmp, files, client.peer_pid, base=base, owners=self._means.root)
            if self._means.bubblewrap is not None:
                await asyncio.to_thread(self._bound.hand_over, directory / "work")
            if egress is not None and uplink is not None:
                await self._guard.enforce(egress, client.peer_pid)
                await uplink.start(client.peer_pid, directory / "log")
            record = replace(record, pid=client.peer_pid, started=started(client.peer_pid))
            record.write(directory)
        except BaseException as error:
            await ProcessControl(parent, directory, group, _children(parent, uplink), self._bound).remove()
            if short := exhaustion(error, COMPONENT):
                raise short from None
            if isinstance(error, OSError):
                raise Unsupported(f"a process sandbox cannot be made here: {error}", component=COMPONENT) from None
            raise
        finally:
            if block is not None:
                block.close()  # its runner has it
            if uplink is not None:
                uplink.close()  # likewise
        return self._sandbox(directory, record, client, group, _children(parent, uplink))

    async def adopt(self) -> list[tuple[Sandbox, Mapping[str, str]]]:
        """Return the sandboxes whose runner still answers; remove what is left of the others, containers aside.

        One that another kind of process sandbox made is not taken over: it would be less than is promised, or its
        paths would mean the host's.
        """
        adopted: list[tuple[Sandbox, Mapping[str, str]]] = []
        for directory, record in await asyncio.to_thread(process_records, self._root):
            control = control_of(self._means.cgroup, directory, record, self._bound)
            if record is not None and record.ready and control.pid != 0 and record.provider == self.kind:
                try:
                    await control.thaw()
                    client = await self._connect(directory, record, record.pid)
                except ActionFailed as failure:
                    logger.warning("not adopted", sandbox=record.name, why=failure.message)
                else:
                    self._bound.adopt(directory / "work")
                    adopted.append((self._sandbox(directory, record, client, control.group), record.labels))
                    continue
            await control.remove()
        return adopted

    async def reap(self, living: Collection[str]) -> int:
        with self._gate.watching() as young:
            found = await asyncio.to_thread(process_records, self._root)
            left = [item for item in found if item[0].name not in {*living, *young}]
        for directory, record in left:
            await control_of(self._means.cgroup, directory, record, self._bound).remove()
        await self._snapshots.prune()
        return len(left)

    async def close(self) -> None:
        await self._disk.close()
        self._held.close()

    # --- inside

    def _sandbox(
        self,
        directory: Path,
        record: SandboxRecord,
        client: StreamClient,
        group: Cgroup | None,
        children: Sequence[int] = (),
    ) -> Sandbox:
        control = ProcessControl(client.peer_pid, directory, group, children, self._bound)
        sandbox = Sandbox(
            record=record,
            directory=directory,
            client=client,
            control=control,
            shared_cores=self._shared_cores,
        )
        self._watch_disk(sandbox, directory, control)
        return sandbox

    def _watch_disk(self, sandbox: Sandbox, directory: Path, control: ProcessControl) -> None:
        """Watch what no file system of its own bounds: its work, or no more than the runner's directory."""
        work, run, disk_bytes = directory / "work", directory / "run", sandbox.spec.disk_bytes
        inside = Path(f"/proc/{control.pid}/root{sandbox.spec.workdir}") if self._means.bubblewrap else work
        if self._bound.name != WalkBound.name and is_bounded(inside, disk_bytes):
            self._disk.add(sandbox, (run,), RUN_BYTES, RUN_FILES, control.processes)
        else:
            self._disk.add(sandbox, (work, run), disk_bytes, files_max(disk_bytes), control.processes)

    async def _connect(self, directory: Path, record: SandboxRecord, pid: int) -> StreamClient:
        hello = record.greeting(
            env=dict(record.spec.env),
            bounds=_bounds(record.spec, grouped=self._means.cgroup is not None),
            **({} if self._means.ids is not None else {"root": False}),
        )
        return await StreamClient.open(SocketStream(directory / "run", peer_pid=pid), hello, within_s=START_S)

    def _start(
        self,
        directory: Path,
        spec: SandboxSpec,
        mounts: Mapping[str, str],
        block: IdBlock | None,
        uplink: Uplink | None,
    ) -> int:
        """Start the process that leads to the runner: bubblewrap, or the runner itself."""
        python = [os.path.realpath(sys.executable), *ISOLATED]
        environment = {"PATH": self._path, "LANG": "C.UTF-8"}
        with ExitStack() as closers:
            log = closers.enter_context((directory / "log").open("wb"))
            passed = {1: log.fileno(), 2: log.fileno()}
            if self._means.bubblewrap is None:
                argv = [*python, str(RUNNER), str(directory / "run"), "--shed"]
            else:
                options = []
                if self._filter:
                    passed[FILTER_FD] = _piped(self._filter, closers)
                    options += ["--seccomp", str(FILTER_FD)]
                if block is not None:
                    passed[NAMESPACE_FD] = _kept(os.dup(block.namespace.fileno()), closers)
                    passed[CLAIM_FD] = _kept(os.dup(block.claim.fileno()), closers)
                    options += ["--userns2", str(NAMESPACE_FD)]
                if uplink is not None:
                    passed[UPLINK_FD] = _kept(os.dup(uplink.held), closers)
                box = box_of(self._means, directory, spec, mounts, self._path)
                inside = [f"{INSIDE}/runner.py", f"{INSIDE}/run", "--shed", *(["--root"] if block else [])]
                argv = [self._means.bubblewrap, *options, *box, *python, *inside]
            return os.posix_spawn(
                argv[0],
                argv,
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    *((os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in passed.items()),
                ],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGINT],
            )


def _kept(fd: int, closers: ExitStack) -> int:
    """Move a descriptor above those that a child is given; return it, closed by ``closers``."""
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FDS_ABOVE)
    finally:
        os.close(fd)
    closers.callback(os.close, high)
    return high


def _piped(data: bytes, closers: ExitStack) -> int:
    """Return a descriptor from which the data, which is smaller than a pipe, can be read once."""
    source, sink = os.pipe()
    try:
        os.write(sink, data)
    finally:
        os.close(sink)
    return _kept(source, closers)


def _lay_out(
    directory: Path,
    record: SandboxRecord,
    means: Means,
    block: IdBlock | None,
    bound: DiskBound,
    egress: Egress | None,
) -> None:
    """Make the directory: ``work`` is the user's, ``run`` is ours alone; inside are two users, none of the host's.

    Nobody else on the host may enter it, as a file in it may be what a user of the host must not execute.
    """
    spec, user = record.spec, record.user
    mode = 0o711 if means.bubblewrap is None else 0o700
    directory.parent.mkdir(parents=True, exist_ok=True)
    for path in (directory.parent, directory):
        path.mkdir(exist_ok=path != directory)
        path.chmod(mode)
    run, work = directory / "run", directory / "work"
    run.mkdir(mode=0o700)
    work.mkdir(mode=0o755)
    bound.bind(work, spec.disk_bytes)
    name, number = ("sandbox", user) if user.isdigit() else (user, str(OWN_UID))
    if name == "root" or not int(number):
        name, number = "root", "0"
    number = number if means.root else str(os.geteuid())
    if means.root:
        base = 0 if block is None else block.base
        os.chown(work, base + int(number), base + int(number))
        os.chown(run, base, base)
    accounts = {"root": "0", name: number} if number != "0" else {"root": "0"}
    lines = [f"{user}:x:{uid}:{uid}::{spec.workdir}:/bin/sh\n" for user, uid in accounts.items()]
    (directory / "passwd").write_text("".join(lines), encoding="ascii")
    (directory / "group").write_text("".join(f"{user}:x:{uid}:\n" for user, uid in accounts.items()), encoding="ascii")
    servers, hosts = ((), {}) if egress is None else (egress.name_servers, egress.hosts)
    lines = [f"nameserver {server}\n" for server in servers] or ["# no names\n"]
    (directory / "resolv.conf").write_text("".join(lines), encoding="ascii")
    lines = ["127.0.0.1 localhost sandbox\n", "::1 localhost\n"]
    lines += [f"{address} {name}\n" for name, address in hosts.items()]
    (directory / "hosts").write_text("".join(lines), encoding="utf-8")


def _children(parent: int, uplink: Uplink | None) -> tuple[int, ...]:
    return (parent,) if uplink is None else (parent, uplink.pid)


def _bounds(spec: SandboxSpec, *, grouped: bool) -> dict[str, int]:
    """Bound each file; without cgroups also each process's address space, which is less than a promise."""
    bounds = {"RLIMIT_FSIZE": spec.disk_bytes, "RLIMIT_CORE": 0, "RLIMIT_NOFILE": FILES_MAX}
    return bounds if grouped else {**bounds, "RLIMIT_AS": 4 * spec.memory_bytes}
