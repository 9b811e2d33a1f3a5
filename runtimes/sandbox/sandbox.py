"""The sandbox: its parts, its making, and what is left of one."""

from __future__ import annotations

import asyncio
import fnmatch
import hmac
import math
import os
import posixpath
import re
import secrets
import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from manager.clock import Clock, MonotonicClock
from manager.errors import (
    FILES_LOST,
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
from manager.function import AUTO, Background, SandboxSpec
from runtimes.sandbox.command import (
    Command,
    CommandResult,
    FileContent,
    FileSource,
    FileStat,
    FileStream,
    OnOutput,
    ResumableCommand,
    fitting,
)
from runtimes.sandbox.linux import ASIDE, STEP_S, Cgroup, CpuWeight, Freezer, Hierarchy, remove_tree
from runtimes.sandbox.runner.client import COMPONENT, SandboxProcess, lost, out_of_memory
from runtimes.sandbox.runner.runner import ENDED_MAX
from runtimes.sandbox.snapshots import SNAPSHOTS, SnapshotStore
from runtimes.sandbox.spec import SANDBOXES, ImageKeeper, ProviderInfo, SandboxRecord, is_held, read_records

T = TypeVar("T")


class RunnerClient(Protocol):
    """How a sandbox is spoken to: over a stream to its runner, or by ``docker exec`` if it has none."""

    @property
    def lost(self) -> asyncio.Event: ...

    @property
    def resumable(self) -> Mapping[str, ResumableCommand]: ...

    @property
    def started(self) -> frozenset[str] | None: ...

    @property
    def hides(self) -> bool:
        """Whether commands may `Command.hide` variables from what starts them."""

    async def run(self, command: Command, on_output: OnOutput | None = None) -> CommandResult: ...

    def keep(self, claims: str, *, detached: bool) -> None: ...

    async def spawn(self, command: Command) -> SandboxProcess: ...

    async def read_file(self, path: str, *, limit_bytes: int) -> bytes: ...

    async def open_file(self, path: str, *, limit_bytes: int, user: str = "") -> FileStream: ...

    async def write_file(
        self, path: str, content: FileContent, *, mode: int | None, locked: bool = False, user: str = ""
    ) -> bool: ...

    async def list_files(self, path: str, *, user: str = "") -> list[FileStat]: ...

    async def rest(self, *, resting: bool, still: bool = False) -> None:
        """Stop every process but the runner, or let them run again; what does not stand ``still`` then is ended."""

    def lend(self, fd: int) -> bool:
        """Lend the runner what it lets its sandbox's processes go with, for its own end; False if that cannot be."""

    async def sweep(self, clear_bytes: int | None = None) -> int: ...

    def close(self) -> None: ...


class SandboxControl(ABC):
    """How a sandbox is governed from outside: cores, freezing, memory, removal. By its control group if it has one."""

    def __init__(self, group: Cgroup | None, runner: int) -> None:
        """``runner`` is its runner's process as this machine knows it, 0 if it does not."""
        self.group = group
        self._freezer = Freezer(group, runner)

    def processes(self) -> list[int]:
        """Return every process in it, in this machine's numbers; none if they cannot be seen."""
        return [] if self.group is None else self.group.processes()

    @abstractmethod
    async def set_cores(self, cores: Sequence[int], weight: CpuWeight = CpuWeight.ACTION) -> None: ...

    async def freeze(self, lend: Callable[[int], bool]) -> bool:
        """Stop every process but the runner, which can end itself; False if only the runner can stop them.

        ``lend`` is `RunnerClient.lend`.
        """
        with suppress(FileNotFoundError):
            return self._freezer.freeze(lend)
        return True

    async def thaw(self) -> None:
        with suppress(FileNotFoundError):
            self._freezer.thaw()

    async def gather(self) -> None:
        """Let what the runner starts from now on be frozen with the others."""
        with suppress(FileNotFoundError):
            self._freezer.gather()

    def oom_kills(self) -> int:
        """Return how many processes were ended for want of memory so far, as far as can be seen."""
        return 0 if self.group is None else self.group.oom_kills()

    def peak_memory_bytes(self) -> int:
        return 0 if self.group is None else self.group.peak_memory_bytes()

    def forks_refused(self) -> int:
        """Return how many new processes were refused so far because of ``sandbox.pids``, as far as can be seen."""
        return 0 if self.group is None else self.group.forks_refused()

    @abstractmethod
    async def cause_of_death(self) -> str:
        """Return why it ended, as far as can be known; ``out_of_memory`` alone is a reason of its own."""

    @abstractmethod
    async def snapshot(self, spec: SandboxSpec, id: str, place: Path, limit_bytes: int) -> int:
        """Keep its files, as an image or below an existing directory ``place``; return the bytes that they take.

        Its processes stand still. Raises TooLarge, if that is seen, beyond ``limit_bytes``, and CodedError or OSError.
        """

    @abstractmethod
    async def remove(self) -> None:
        """End and remove it, with everything inside; idempotent."""


logger = structlog.get_logger("sandbox")

PATH_MAX_BYTES = 4096
#: Of a TCP connection, as the kernel lists it, that may hold unread bytes: established, or closed by the other end.
OPEN_STATES = ("01", "08")
#: Names that are noted of uploads, and of which files how many bytes are kept: what a test suite reads at its start.
UPLOADED_MAX, UPLOADED_KEPT_BYTES = 2000, 64 * 2**10
UPLOADED_KEPT = frozenset(
    {
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "tox.ini",
        "setup.cfg",
        "pyproject.toml",
    }
)
#: Who runs the programs of a solution beside its tests: an id to which no image gives files.
SOLUTION_USER = "65533"
#: What is added for it to the id of a sandbox's own user, where ids are the machine's and not of the sandbox alone.
SOLUTIONS = 2**20


class Sandbox:
    """A living environment, spoken to by a client and governed by a control.

    Its methods raise ActionFailed(environment_lost) if it is gone, and never hang.
    """

    def __init__(
        self,
        *,
        record: SandboxRecord,
        directory: Path,
        client: RunnerClient,
        control: SandboxControl,
        shared_cores: Sequence[int],
    ) -> None:
        self.id = record.name
        self.spec = record.spec
        self._client = client
        self._control = control
        self._shared_cores = tuple(shared_cores)
        #: Whether its processes are stopped, and whether by the runner.
        self._frozen = self._resting = False
        #: The cores of each action that runs in it: one, and those beside it.
        self._occupants: dict[str, tuple[int, ...]] = {}
        #: Whether it has cores of an action.
        self._leased = False
        #: Files on their way in or out, and whether it is frozen when the last of them is there.
        self._transfers = 0
        #: What becomes of its processes when the last transfer ends.
        self._rest_due: Background | None = None
        #: Held while its files are copied.
        self._copying = asyncio.Lock()
        #: The claims of commands under way, and whether they are detached.
        self._under_way: dict[str, bool] = {}
        #: The claims of detached commands that have ended, until that is on record.
        self._unacknowledged: deque[str] = deque(maxlen=ENDED_MAX)
        self._closed = False
        #: Whether its loss was reported to somebody (an action that ended with environment_lost).
        self.loss_reported = False
        self._killed_reason = ""
        self._record = record
        self._directory = directory
        #: Whether a command ran in it, or it is of an earlier gateway.
        self._used = False
        #: What was uploaded before, as `uploaded` says.
        self._uploaded: dict[str, bytes] | None = {}

    @property
    def alive(self) -> bool:
        """Whether it can still be used."""
        return not self._closed and not self._client.lost.is_set()

    @property
    def in_transfer(self) -> bool:
        """Whether files are on their way in or out."""
        return self._transfers > 0

    @property
    def killed_reason(self) -> str:
        """Why we have ended it, for what its processes did; empty if we have not."""
        return self._killed_reason

    @property
    def labels(self) -> Mapping[str, str]:
        """Its owner, as at its making or the last `relabel`."""
        return self._record.labels

    @property
    def lost(self) -> asyncio.Event:
        """Set if it can be spoken to no more, for whatever reason."""
        return self._client.lost

    @property
    def resumable(self) -> Mapping[str, ResumableCommand]:
        """The commands of an earlier gateway that can still be claimed, by claim."""
        return self._client.resumable

    @property
    def hides(self) -> bool:
        """Whether commands may `Command.hide` variables from what starts them."""
        return self._client.hides

    async def run(self, command: Command, on_output: OnOutput | None = None) -> CommandResult:
        """Execute to the end; cancelling kills the process tree, setsid children included.

        A command that is `resumable` is claimed instead: its output comes from its start, and nothing is run twice.
        """
        self._require_allowed(command.user)
        self._used = True
        refused = self._control.forks_refused()
        if command.claim:
            self._under_way[command.claim] = command.detached
        try:
            if self._frozen or self._rest_due is not None:
                await self.thaw()
            else:
                self._require()
            await self._control.gather()
            result = await self._client.run(fitting(self._bounded(command)), on_output)
            if self._under_way.get(command.claim):
                self._unacknowledged.append(command.claim)
        except ActionFailed as failure:
            raise await self._explained(failure) from None
        except asyncio.CancelledError:
            if self._client.lost.is_set() and not self._closed:  # nobody can ask for its end
                await self._end_whole()
            raise
        finally:
            self._under_way.pop(command.claim, None)
        if result.exit_code == 0:
            return result
        return self.with_shortage(replace(result, forks_refused=self._control.forks_refused() - refused))

    def _bounded(self, command: Command) -> Command:
        return command if command.still_s is not None else replace(command, still_s=self.spec.still_s)

    def with_shortage(self, result: CommandResult) -> CommandResult:
        """Return how a command ended, with what the kernel says of memory if it failed. Each kill is told once."""
        kills = 0 if result.exit_code == 0 else self._control.oom_kills()
        if kills <= self._record.oom_told:
            return result
        with suppress(OSError):  # a full disk: the action has ended all the same
            self._note(replace(self._record, oom_told=kills))
        return out_of_memory(result, self._control.peak_memory_bytes())

    def keep(self, claims: str, *, detached: bool) -> None:
        """Say whether commands with such claims are kept for the next gateway; resumable ones are ended if not."""
        running = [claim for claim in self._under_way if claim.startswith(claims)]
        self._under_way.update(dict.fromkeys(running, detached))
        if not detached:
            others = [claim for claim in self._unacknowledged if not claim.startswith(claims)]
            self._unacknowledged = deque(others, maxlen=ENDED_MAX)
        if self.alive and (running or not detached):
            self._client.keep(claims, detached=detached)

    def has_detached(self, claims: str) -> bool:
        """Return whether `release` would leave a detached command with such a claim, running or ended."""
        kept = [*(claim for claim, detached in self._under_way.items() if detached), *self._unacknowledged]
        return self.spec.unattended_s > 0 and self.alive and any(claim.startswith(claims) for claim in kept)

    def never_started(self, claims: str) -> bool:
        """Return whether it is certain that an earlier gateway started no detached command with such a claim.

        Holds until what was started is acknowledged by `keep`, and for commands whose end may not be on record.
        """
        started = self._client.started if self.spec.unattended_s > 0 and self.alive else None
        return started is not None and not any(claim.startswith(claims) for claim in started)

    def secret(self, purpose: str) -> str:
        """Return 32 hexadecimal digits that nobody inside can know, and that the next gateway knows too."""
        return hmac.new(self._record.token.encode(), purpose.encode(), "sha256").hexdigest()[:32]

    @property
    def solution_user(self) -> str:
        """Who runs the programs of a solution: no other sandbox has that user, nor by it the kernel's quotas."""
        uid = self._record.uid
        return str(uid + SOLUTIONS) if uid >= FIRST else SOLUTION_USER

    async def spawn(self, command: Command) -> SandboxProcess:
        """Start a long-lived process; raises InvalidInput for a user that cannot be.

        ``stdin`` is written first and left open. No output limit applies, and ``timeout_s`` only if it is finite
        (``math.inf``: until killed).
        """
        if command.user != self.solution_user:
            self._require_allowed(command.user)
        self._used |= not self._transfers
        await self._thaw()  # it may be that of a transfer, with whose end the others stand still again
        await self._control.gather()
        return await self._client.spawn(self._bounded(command))

    async def occupy(self, action: str, cores: Sequence[int]) -> None:
        """Let an action run in it, or run on other cores, with those that do already; it runs on the cores of all."""
        self._occupants[action] = tuple(cores)
        await self._share_cores()
        await self.thaw()

    async def vacate(self, action: str, background: Background | None) -> None:
        """An action has ended. With the last one it rests, as `quiesce` says; not at all without ``background``."""
        self._occupants.pop(action, None)
        if self._occupants and self.alive:
            await self._share_cores()
        elif background is not None:
            await self.quiesce(background)

    async def _share_cores(self) -> None:
        if cores := sorted({core for each in self._occupants.values() for core in each}):
            await self.set_cores(cores)

    async def set_cores(self, cores: Sequence[int]) -> None:
        """Confine the sandbox to these cores (cpuset and quota, or affinity); callable while a command runs."""
        self._require()
        self._leased = True
        await self._control.set_cores(cores)

    async def thaw(self) -> None:
        """Let its processes run."""
        self._rest_due = None
        await self._thaw()

    async def _thaw(self) -> None:
        self._require()
        if self._resting:
            await self._client.rest(resting=False)
        elif self._frozen:
            await self._control.thaw()
        self._frozen = self._resting = False

    async def quiesce(self, background: Background) -> None:
        """Freeze, kill, or leave its background processes between actions, and give the cores back."""
        self._leased = False
        if not self.alive:
            return
        if background is Background.KILL:
            await self.thaw()
            await self._client.sweep()
        if background is Background.RUN:
            await self._control.set_cores(self._shared_cores, CpuWeight.BACKGROUND)
        elif self._transfers:
            self._rest_due = Background.FREEZE
        elif not self._frozen:
            self._resting = not await self._control.freeze(self._client.lend)
            if self._resting:
                await self._client.rest(resting=True)
            self._frozen = True

    async def write_file(self, path: str, data: FileSource, *, mode: int | None = None, user: str = "") -> int:
        """Write a file as ``user`` (by default the sandbox's own), making its directories; return its bytes.

        One that is there keeps its owner and, without ``mode``, its mode; a new one is 644. Raises InvalidInput for a
        path that leaves the sandbox (links included), or where the user may not write.
        """
        self._require_allowed(user)
        content = FileContent(data, self.spec.disk_bytes)
        async with self._transfer(path):
            await self._client.write_file(path, content, mode=mode, user=_own(user))
            if not self._used:
                await self._note_uploaded(path)
        return content.size_bytes

    @property
    def uploaded(self) -> Mapping[str, bytes] | None:
        """What was uploaded before the first command, by whole path; None if there was more than is looked at.

        Nothing as long as no command has run: what is uploaded and graded at once is the agent's answer, not its
        environment. Files of the names `UPLOADED_KEPT` are there with their content, others without.
        """
        return self._uploaded if self._used else {}

    async def note_uploaded_tree(self, path: str) -> None:
        """Take note of a directory that was uploaded, with what lies below it."""
        waiting = [] if self._used else [path]
        while waiting and self._uploaded is not None:
            for each in await self._client.list_files(waiting.pop()):
                await self._note_uploaded(each.path, directory=each.directory)
                waiting += [each.path] if each.directory and posixpath.basename(each.path) != ".git" else []

    async def _note_uploaded(self, path: str, *, directory: bool = False) -> None:
        if self._uploaded is None or len(self._uploaded) >= UPLOADED_MAX:
            self._uploaded = None
            return
        content = b""
        if not directory and posixpath.basename(path) in UPLOADED_KEPT:
            with suppress(InvalidInput, NotFound, TooLarge):
                content = await self._client.read_file(path, limit_bytes=UPLOADED_KEPT_BYTES)
        self._uploaded[posixpath.normpath(posixpath.join(self.spec.workdir, path))] = content

    async def lock_file(self, path: str, data: bytes, *, mode: int = 0o444) -> bool:
        """Write a file as `write_file`; return whether its user cannot change it any more, nor put another there.

        That needs a runner that is root and a user that is not. Nobody else may be at work in the sandbox meanwhile.
        """
        async with self._transfer(path):
            return await self._client.write_file(path, FileContent(data), mode=mode, locked=True)

    async def sweep(self) -> int:
        """End every process in it but the runner; return how many there were, as far as can be seen.

        What they left in memory goes as well: shared memory, and a ``/tmp`` in memory that takes half of the sandbox's.
        """
        await self.thaw()
        return await self._client.sweep(self.spec.memory_bytes // 2)

    async def read_file(self, path: str, *, limit_bytes: int) -> bytes:
        """Read a file; raises NotFound, TooLarge, or InvalidInput if it is no regular file or leaves the sandbox."""
        async with self._transfer(path):
            return await self._client.read_file(path, limit_bytes=limit_bytes)

    @asynccontextmanager
    async def open_file(self, path: str, *, limit_bytes: int, user: str = "") -> AsyncIterator[FileStream]:
        """Read a file piece by piece; raises as `read_file` does. Meanwhile it is not frozen."""
        self._require_allowed(user)
        async with self._transfer(path):
            file = await self._client.open_file(path, limit_bytes=limit_bytes, user=_own(user))
            try:
                yield file
            finally:
                file.close()

    async def list_files(self, path: str, *, user: str = "") -> list[FileStat]:
        """Return the entries of a directory, sorted by name; raises NotFound if there is none."""
        self._require_allowed(user)
        await self._prepare_path(path)
        return await self._client.list_files(path, user=_own(user))

    @asynccontextmanager
    async def transfer(self, path: str, *, user: str) -> AsyncIterator[None]:
        """Keep it from being frozen within the block, in which a user's process works on a path.

        Between two actions that has the shared cores: those of the last action may be another's by now.
        """
        self._require_allowed(user)
        place = posixpath.normpath(posixpath.join(self.spec.workdir, path))
        if self._record.base and not f"{place}/".startswith(f"{self.spec.workdir.rstrip('/')}/"):
            raise InvalidInput(f"{path!r} leaves the sandbox", component=COMPONENT)
        async with self._transfer(path):
            if not self._leased:
                await self._control.set_cores(self._shared_cores, CpuWeight.TRANSFER)
                self._rest_due = Background.RUN if self.spec.background is Background.RUN else self._rest_due
            yield

    def has_unread(self) -> bool:
        """Return whether a connection in it holds what nobody has read yet, as far as that can be seen."""
        for pid in self._control.processes()[:1]:
            for name in ("tcp", "tcp6"):
                with suppress(OSError):
                    for line in Path(f"/proc/{pid}/net/{name}").read_text(encoding="ascii").splitlines()[1:]:
                        state, queues = line.split()[3:5]
                        if state in OPEN_STATES and queues.rpartition(":")[2] != "00000000":
                            return True
        return False

    async def relabel(self, labels: Mapping[str, str]) -> None:
        """Record its owner from now on: `Provider.adopt` returns these labels."""
        self._note(replace(self._record, labels=dict(labels)))

    async def snapshot(self, id: str, place: Path, limit_bytes: int) -> int:
        """Keep its files as they are now (`SandboxControl.snapshot`), while its processes stand still.

        Those that will not are ended, where no control group holds them. Raises Conflict while files are on their way
        in or out; those that are asked for meanwhile wait.
        """
        async with self._copying:
            self._require()
            if self.in_transfer:
                message = "files are on their way into the sandbox or out of it: try again when they have arrived"
                raise Conflict(message, component=COMPONENT)
            running = not self._frozen
            await self.quiesce(Background.FREEZE)
            try:
                if self._resting:
                    await self._client.rest(resting=True, still=True)
                size_bytes = await self._control.snapshot(self.spec, id, place, limit_bytes)
                self._require()  # else its files were being removed while they were read
                return size_bytes
            except Exception:
                self._require()
                raise
            finally:
                if running and self.alive:
                    await self._thaw()

    async def close(self) -> None:
        """Remove it and everything in it; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._client.close()
        await self._control.remove()

    async def kill_for(self, cause: str) -> None:
        """End it for a reason of ours; the action that runs in it, or else the next one, is told."""
        if self.alive:
            self._killed_reason = cause
            self._client.close()
            await self._control.remove()

    async def release(self) -> None:
        """Leave it to `Provider.adopt` of the next gateway, without ending it; idempotent.

        Detached commands go on; whoever waits for one here is told environment_lost.
        """
        if self.alive and not any(self._under_way.values()):
            await self.quiesce(self.spec.background)
        self._closed = True
        self._client.close()

    @asynccontextmanager
    async def _transfer(self, path: str) -> AsyncIterator[None]:
        """Keep it from being frozen within the block."""
        self._transfers += 1
        try:
            await self._prepare_path(path)
            yield
        finally:
            self._transfers -= 1
            if self._rest_due is not None and not self._transfers:
                due, self._rest_due = self._rest_due, None
                if not self._leased:
                    await self.quiesce(due)

    async def _prepare_path(self, path: str) -> None:
        if not path or "\0" in path or len(path.encode("utf-8", "replace")) > PATH_MAX_BYTES:
            raise InvalidInput("a path of 1 to 4096 bytes without NUL is needed", component=COMPONENT)
        reported = self.loss_reported
        try:
            async with self._copying:
                await self._thaw()
        except ActionFailed:
            self.loss_reported = reported  # it is actions that must be told
            raise

    def _require_allowed(self, user: str) -> None:
        if user and (refused := self.spec.refuses(user)):
            raise InvalidInput(f"the sandbox: {refused}", component=COMPONENT, detail={"path": "$.user"})

    def _note(self, record: SandboxRecord) -> None:
        """Write down what the next gateway must know about it."""
        self._record = record
        record.write(self._directory)

    def _require(self) -> None:
        if self._closed:
            raise Conflict("the sandbox is closed", component=COMPONENT)
        if self._client.lost.is_set():
            self.loss_reported = True
            cause = f" ({self._killed_reason})" if self._killed_reason else ""
            raise lost(f"the sandbox {self.id} is gone{cause}; its files and processes are lost")

    async def _end_whole(self) -> None:
        """End what of it goes on though nobody can speak to its runner; who is cancelled meanwhile waits as well."""

        async def end() -> None:
            with suppress(CodedError, OSError):  # the reaper tries again
                await self._control.remove()

        ending = asyncio.ensure_future(end())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    async def _explained(self, failure: ActionFailed) -> ActionFailed:
        """Return the failure of a command, with its cause if the sandbox was lost: then nothing of it goes on."""
        if failure.reason is not Reason.ENVIRONMENT_LOST or self._closed:
            return failure
        self.loss_reported = True
        cause = self._killed_reason or await self._control.cause_of_death()
        logger.warning("sandbox lost", sandbox=self.id, cause=cause or failure.message)
        detail = {FILES_LOST: True, "cause": cause, "peak_memory_bytes": self._control.peak_memory_bytes()}
        await self._end_whole()
        reason = Reason.OUT_OF_MEMORY if cause == "out_of_memory" else failure.reason
        key = " (sandbox.memory)" if reason is Reason.OUT_OF_MEMORY else ""
        message = f"{failure.message}: {cause}{key}; its files and processes are lost" if cause else failure.message
        return ActionFailed(reason, message, component=COMPONENT, result=failure.result, detail=detail)


def _own(user: str) -> str:
    """Return a user as the runner is told: empty for the sandbox's own."""
    return "" if user == AUTO else user


class Provider(Protocol):
    """Makes sandboxes of one kind."""

    @property
    def info(self) -> ProviderInfo: ...

    @property
    def images(self) -> ImageKeeper | None: ...

    @property
    def snapshots(self) -> SnapshotStore: ...

    async def check(self, spec: SandboxSpec) -> None:
        """Raise InvalidConfig or Unsupported, with the remedy, if such a sandbox can never be made."""
        ...

    async def trouble(self) -> str:
        """Return why none can be made now, and what mends that; empty if nothing is known to be wrong."""
        ...

    async def create(
        self, spec: SandboxSpec, *, name: str, labels: Mapping[str, str], mounts: Mapping[str, str]
    ) -> Sandbox:
        """Make and start one. ``mounts`` maps host directories to read-only paths inside."""
        ...

    async def adopt(self) -> list[tuple[Sandbox, Mapping[str, str]]]:
        """Return the living sandboxes of an earlier gateway of the same state directory, with their labels."""
        ...

    async def reap(self, living: Collection[str]) -> int:
        """Remove what is left of this state directory's sandboxes but the ``living`` (ids); return how many.

        So are snapshots that are too old, and what is left of those that were half taken.
        """
        ...

    async def close(self) -> None:
        """Disconnect from the engine (sandboxes are closed by their owner); idempotent."""
        ...


#: In the command line of whatever leads to a runner: its directory on this machine.
RUN_DIRECTORY = re.compile(rf"^(/.*)/{SANDBOXES}/([^/]+)/run$")
RUNNER_FILE = "runner.py"
GROUP = "tangram-"
#: Times that the processes of a sandbox are killed until none is left.
KILLS_MAX = 200
#: An empty control group younger than this may be about to be entered.
YOUNG_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """Something of ours that was found. It is removed by whoever found it."""

    kind: str
    name: str
    #: The directory of the provider that made it; empty if nothing tells.
    state_dir: str
    #: Whether a living gateway may need it.
    held: bool
    why: str


class Orphans(Protocol):
    """Finds and removes remnants of some kinds."""

    def find(self) -> list[Orphan]: ...

    def remove(self, orphan: Orphan) -> None:
        """Raises CodedError or OSError if it cannot be removed."""
        ...


def verdict(state_dir: str) -> tuple[bool, str]:
    """Return whether the sandboxes of a state directory of this machine are somebody's, and why."""
    try:
        exists = Path(state_dir).is_dir()
    except PermissionError:
        return True, "it is another user's"
    if is_held(Path(state_dir)):
        return True, "its gateway lives"
    return False, "its gateway is gone" if exists else "its state directory is gone"


class LocalOrphans:
    """Process sandboxes, their directories and snapshots, and control groups that nobody is in.

    Directories are looked for in ``known`` state directories and in those of the processes that are found; those of
    ``others`` (names) are left to whoever found these.
    """

    def __init__(self, known: Iterable[str] = (), others: Collection[str] = ()) -> None:
        self._known = set(known)
        self._others = others
        self._hierarchy = Hierarchy.discover()

    def find(self) -> list[Orphan]:
        running = _runners()
        matches = [self._orphan("process sandbox", place) for place in running]
        for state_dir in sorted({*self._known, *(state_dir for state_dir, _ in running)}):
            for directory in sorted(Path(state_dir, SANDBOXES).glob("*/")):
                place = (state_dir, directory.name)
                if place not in running and directory.name not in self._others:
                    matches += [self._orphan("directory", place)]
            for directory in sorted(Path(state_dir, SNAPSHOTS).glob("*/")):
                if directory.name not in self._others:
                    matches += [self._orphan("snapshot", (state_dir, directory.name))]
        return [*matches, *self._empty_groups()]

    def _orphan(self, kind: str, place: tuple[str, str]) -> Orphan:
        held, why = verdict(place[0])
        return Orphan(kind=kind, name=place[1], state_dir=place[0], held=held, why=why)

    def _empty_groups(self) -> list[Orphan]:
        """Return control groups without processes: whoever makes one is in it a moment later."""
        user = os.geteuid()
        groups = [group for group in self._groups(f"{GROUP}*") if not user or _owner(group) == user]
        old_s = time.time() - YOUNG_S
        kept = {group.name for group in groups if _any_process(group) or _born_s(group) > old_s}
        return [
            Orphan(kind="control group", name=name, state_dir="", held=False, why="nobody is in it")
            for name in sorted({group.name for group in groups} - kept)
        ]

    def _groups(self, pattern: str) -> Iterator[Path]:
        for root in () if self._hierarchy is None else self._hierarchy.roots:
            for directory, names, _ in os.walk(root):  # passes over groups that go meanwhile
                yield from (Path(directory, name) for name in fnmatch.filter(names, pattern))

    def remove(self, orphan: Orphan) -> None:
        place = (orphan.state_dir, orphan.name)
        if orphan.kind == "snapshot":
            remove_tree(Path(orphan.state_dir, SNAPSHOTS, orphan.name))
            return
        if orphan.kind == "process sandbox":
            for group in self._groups(f"{GROUP}{orphan.name}"):
                with suppress(OSError):  # of another controller; what is frozen under version 1 cannot be ended
                    (group / "freezer.state").write_text("THAWED", encoding="ascii")
            _end(lambda: _runners().get(place, []))
        if orphan.kind == "control group":
            self._remove_groups(orphan.name)
        else:
            remove_tree(Path(orphan.state_dir, SANDBOXES, orphan.name))
            self._remove_groups(f"{GROUP}{orphan.name}")

    def _remove_groups(self, name: str) -> None:
        for group in sorted([*self._groups(name), *self._groups(f"{name}{ASIDE}")], reverse=True):
            for below in sorted(group.glob("**/"), reverse=True):
                with suppress(OSError):  # somebody is in it
                    below.rmdir()


def _runners() -> dict[tuple[str, str], list[int]]:
    """Return the processes of each process sandbox, by state directory and name: only our own where we are not root."""
    result: dict[tuple[str, str], list[int]] = {}
    user = os.geteuid()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if user and place.stat().st_uid != user:
                continue
            arguments = os.fsdecode((place / "cmdline").read_bytes()).split("\0")
            names = [match.groups() for argument in arguments if (match := RUN_DIRECTORY.match(argument))]
            if names and any(argument.endswith(f"/{RUNNER_FILE}") for argument in arguments):
                state_dir, name = names[0]
                result.setdefault((state_dir, name), []).append(int(place.name))
    for (state_dir, name), pids in result.items():
        record = SandboxRecord.read(Path(state_dir, SANDBOXES, name))
        pids += [] if record is None or not record.runs() else [record.pid]
    return result


def _end(pids: Callable[[], list[int]]) -> None:
    """SIGKILL processes and all that descends from them; bounded."""
    for _ in range(KILLS_MAX):
        if not (living := pids()):
            return
        for pid in [*living, *descendants(living)]:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(STEP_S)


def descendants(pids: Iterable[int]) -> list[int]:
    """Return every process below these."""
    result: list[int] = []
    fresh = list(pids)
    while fresh:
        below: list[int] = []
        for pid in fresh:
            with suppress(OSError):  # it may end meanwhile, or any of its threads
                for thread in list(Path(f"/proc/{pid}/task").iterdir()):
                    with suppress(OSError):
                        below += map(int, (thread / "children").read_text(encoding="ascii").split())
        result += below
        fresh = below
    return result


def _any_process(group: Path) -> bool:
    """Whether somebody is in a group or below it; nobody is in one that goes meanwhile."""
    for directory, _, _ in os.walk(group):
        with suppress(FileNotFoundError):
            if Path(directory, "cgroup.procs").read_text(encoding="ascii").strip():
                return True
    return False


def _owner(group: Path) -> int:
    """Whose it is; nobody's if it has gone."""
    try:
        return group.stat().st_uid
    except FileNotFoundError:
        return -1


def _born_s(group: Path) -> float:
    """When it was made; now if it has gone, so that it is left alone."""
    try:
        return group.stat().st_ctime
    except FileNotFoundError:
        return time.time()


#: Failures that say nothing about the engine's health.
CALLERS_FAULT = (InvalidConfig, InvalidInput, Unsupported)


async def to_its_end(work: Callable[[], T]) -> T:
    """Do blocking work in a thread; if this is cancelled it is over, too: nothing is undone beside it."""
    doing = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        while not doing.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([doing])
        if not doing.cancelled():
            doing.exception()  # seen: nobody comes back for it
        raise


class CreationGate:
    """At most ``limit`` creations at a time; after ``threshold`` failures in a row none for a growing while."""

    def __init__(
        self,
        limit: int,
        *,
        threshold: int = 3,
        backoff_s: float = 1.0,
        backoff_max_s: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        self._semaphore = asyncio.Semaphore(limit)
        self._threshold = threshold
        self._backoff_s, self._backoff_max_s = backoff_s, backoff_max_s
        self._clock = clock or MonotonicClock()
        self._failures, self._why, self._is_short = 0, "", False
        self._trouble = ""
        self._closed_s = -math.inf
        self._closed_until_s = 0.0
        #: What is being made now.
        self.names: set[str] = set()
        self._watched: list[set[str]] = []

    @property
    def wait_s(self) -> float:
        """Seconds until another creation may be tried; 0 if the gate is open."""
        return max(0.0, self._closed_until_s - self._clock.now())

    @property
    def shortage(self) -> str:
        """What this machine ran short of, for which no sandbox is made now; empty if the gate is open."""
        return self._why if self._is_short and self.wait_s > 0 else ""

    def note_trouble(self, trouble: str) -> str:
        """Return what the engine is said to suffer from, empty: nothing; once that is over the gate is open."""
        if self._trouble and not trouble:
            self._failures, self._closed_until_s = 0, 0.0  # what failed meanwhile says nothing of it now
        self._trouble = trouble
        return trouble

    @contextmanager
    def watching(self) -> Iterator[set[str]]:
        """Yield the names of what is being made within the block: a search must not take it for left behind."""
        young = set(self.names)
        self._watched.append(young)
        try:
            yield young
        finally:
            self._watched = [other for other in self._watched if other is not young]

    @asynccontextmanager
    async def slot(self, name: str) -> AsyncIterator[None]:
        """Hold a slot for one creation; raises CapacityExceeded while the gate is closed."""
        async with self._semaphore:
            if self.wait_s > 0:
                raise CapacityExceeded(
                    f"{self._failures} sandboxes in a row could not be made ({self._why}); trying again soon",
                    component="sandbox",
                    retry_after_s=self.wait_s,
                )
            for names in (self.names, *self._watched):
                names.add(name)
            began_s = self._clock.now()
            try:
                yield
            except (asyncio.CancelledError, *CALLERS_FAULT):
                raise
            except Exception as error:
                self._failed(began_s, error)
                raise
            else:
                self._failures, self._closed_until_s = 0, 0.0  # there is one that could be made
            finally:
                self.names.discard(name)

    def _failed(self, began_s: float, error: Exception) -> None:
        if began_s <= self._closed_s:
            return  # what was under way when the gate closed tells nothing new
        self._failures, self._why = self._failures + 1, str(error)
        self._is_short = isinstance(error, CapacityExceeded)
        beyond = self._failures - self._threshold
        if beyond >= 0:
            pause_s = min(self._backoff_max_s, self._backoff_s * 2**beyond)
            self._closed_s = self._clock.now()
            self._closed_until_s = self._closed_s + pause_s
            logger.warning("no sandboxes are made for a while", failures=self._failures, pause_s=pause_s)


USERS_COMPONENT = "sandbox"
#: Below are the machine's own users.
LOWEST = 1000
#: Where a range begins that nobody has set: above what machines give to users, and below what archives can hold.
FIRST = 1_000_000


class OwnUsers:
    """Gives out the ids of a range; one is free again when its sandbox's directory is gone."""

    def __init__(self, first: int, count: int, root: Path) -> None:
        """Know the ids of the sandboxes that have a directory in ``root``. Raises InvalidConfig."""
        if first < LOWEST:
            raise InvalidConfig(f"sandbox.uids.first: {first} is below {LOWEST}, among the machine's own users")
        self._range = range(first, first + count)
        self._root = root
        self._held = {path.name: record.uid for path, record in read_records(root) if record is not None}

    def take(self, name: str, uid: int = 0) -> int:
        """Return an id for a sandbox: the ``wanted`` one if it is of the range (its files are), else a free one.

        Raises CapacityExceeded if all are taken.
        """
        if len(self._held) >= len(self._range):
            self._held = {one: uid for one, uid in self._held.items() if (self._root / one).is_dir()}
        if uid not in self._range:
            taken = set(self._held.values())
            start = secrets.randbelow(len(self._range))  # beside another gateway that has the same range
            ids = (self._range[(start + step) % len(self._range)] for step in range(len(self._range)))
            uid = next((uid for uid in ids if uid not in taken), 0)
        if not uid:
            message = f"all {len(self._range)} user ids of sandboxes are taken: raise sandbox.uids.count"
            raise CapacityExceeded(message, component=USERS_COMPONENT)
        self._held[name] = uid
        return uid
