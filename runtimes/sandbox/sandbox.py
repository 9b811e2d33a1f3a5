"""The sandbox: an environment that executes commands, whatever it is made of; and what makes one."""

from __future__ import annotations

import asyncio
import hmac
import posixpath
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import structlog

from manager.errors import FILES_LOST, ActionFailed, Conflict, InvalidInput, Reason
from manager.function import AUTO, Background, SandboxSpec
from runtimes.sandbox.cgroup import CpuWeight
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
from runtimes.sandbox.images import ImageKeeper
from runtimes.sandbox.parts import RunnerClient, SandboxControl
from runtimes.sandbox.promises import ProviderInfo
from runtimes.sandbox.record import SandboxRecord
from runtimes.sandbox.runner.conversation import SandboxProcess
from runtimes.sandbox.runner.protocol import COMPONENT, lost, out_of_memory
from runtimes.sandbox.runner.runner import ENDED_MAX
from runtimes.sandbox.snapshots.store import SnapshotStore

logger = structlog.get_logger("sandbox")

PATH_MAX_BYTES = 4096


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
        self._condemned = ""
        self._record = record
        self._directory = directory

    @property
    def alive(self) -> bool:
        """Whether it can still be used."""
        return not self._closed and not self._client.lost.is_set()

    @property
    def in_transfer(self) -> bool:
        """Whether files are on their way in or out."""
        return self._transfers > 0

    @property
    def condemned(self) -> str:
        """Why we have ended it, for what its processes did; empty if we have not."""
        return self._condemned

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
        refused = self._control.forks_refused()
        if command.claim:
            self._under_way[command.claim] = command.detached
        try:
            await self.thaw()
            result = await self._client.run(fitting(command), on_output)
            if self._under_way.get(command.claim):
                self._unacknowledged.append(command.claim)
        except ActionFailed as failure:
            raise await self._explained(failure) from None
        finally:
            self._under_way.pop(command.claim, None)
        failed_for = 0 if result.exit_code == 0 else self._control.forks_refused() - refused
        return self.with_shortage(replace(result, forks_refused=failed_for))

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

    async def spawn(self, command: Command) -> SandboxProcess:
        """Start a long-lived process. ``stdin`` is written first and left open; no output limit applies, and
        ``timeout_s`` only if it is finite (``math.inf``: until killed)."""
        self._require_allowed(command.user)
        await self._thaw()  # it may be that of a transfer, with whose end the others stand still again
        return await self._client.spawn(command)

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
        return content.size_bytes

    async def lock_file(self, path: str, data: bytes) -> bool:
        """Write a file as `write_file`; return whether its user cannot change it any more, nor put another there.

        That needs a runner that is root and a user that is not. Nobody else may be at work in the sandbox meanwhile.
        """
        async with self._transfer(path):
            return await self._client.write_file(path, FileContent(data), mode=0o444, locked=True)

    async def sweep(self) -> int:
        """End every process in it but the runner; return how many there were, as far as can be seen."""
        await self.thaw()
        return await self._client.sweep()

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

    async def relabel(self, labels: Mapping[str, str]) -> None:
        """Record its owner from now on: `Provider.adopt` returns these labels."""
        self._note(replace(self._record, labels=dict(labels)))

    async def snapshot(self, id: str, place: Path, limit_bytes: int) -> int:
        """Keep its files as they are now (`SandboxControl.snapshot`), while its processes stand still.

        Raises Conflict while files are on their way in or out; those that are asked for meanwhile wait.
        """
        async with self._copying:
            self._require()
            if self.in_transfer:
                told = "files are on their way into the sandbox or out of it: try again when they have arrived"
                raise Conflict(told, component=COMPONENT)
            running = not self._frozen
            await self.quiesce(Background.FREEZE)
            try:
                return await self._control.snapshot(self.spec, id, place, limit_bytes)
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

    async def condemn(self, cause: str) -> None:
        """End it for a reason of ours; the action that runs in it, or else the next one, is told."""
        if self.alive:
            self._condemned = cause
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
            cause = f" ({self._condemned})" if self._condemned else ""
            raise lost(f"the sandbox {self.id} is gone{cause}; its files and processes are lost")

    async def _explained(self, failure: ActionFailed) -> ActionFailed:
        """Return the failure of a command, with its cause if the sandbox was lost."""
        if failure.reason is not Reason.ENVIRONMENT_LOST or self._closed:
            return failure
        self.loss_reported = True
        cause = self._condemned or await self._control.cause_of_death()
        logger.warning("sandbox lost", sandbox=self.id, cause=cause or failure.message)
        detail = {FILES_LOST: True, "cause": cause, "peak_memory_bytes": self._control.peak_memory_bytes()}
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
