"""The client of a container whose image has no python3: ``docker exec`` with a runner's semantics, slower."""

from __future__ import annotations

import asyncio
import math
import posixpath
import secrets
import threading
import time
from collections.abc import Mapping

from manager.errors import CapacityExceeded, CodedError, InvalidInput, NotFound, Unsupported
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
from runtimes.sandbox.docker.engine import DockerEngine
from runtimes.sandbox.docker.spool import on_disk
from runtimes.sandbox.record import SandboxRecord
from runtimes.sandbox.runner.conversation import KeptOutput, SandboxProcess
from runtimes.sandbox.runner.protocol import COMMAND_FORM, FILE_ERROR, lost

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
            told = f"the image {self._spec.image!r} has no python3: there are no sessions in it"
            raise Unsupported(told, component=COMPONENT)
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
                _words(command),
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
        result = CommandResult(
            exit_code=None if signal is not None else code,
            signal=signal,
            timed_out=timed_out,
            duration_s=time.monotonic() - started_s,
        )
        return output.completed(result)

    async def spawn(self, command: Command) -> SandboxProcess:
        raise Unsupported(
            f"the image {self._spec.image!r} has no python3: it cannot hold a long-lived process", component=COMPONENT
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
        _, told = await self._script(WRITE_SCRIPT, directory, place, user=user)
        words = told.decode("ascii", "replace").split()
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
            told = f"{path!r} is no directory in the sandbox ({kind})"
            raise NotFound(told, component=COMPONENT, detail={FILE_ERROR: kind})
        found = []
        for line in output.decode("utf-8", "replace").splitlines():
            size, mode, name = line.split(" ", 2)
            bits = int(mode, 16)
            found.append(
                FileStat(
                    path=posixpath.join(path, name),
                    size_bytes=int(size),
                    directory=bits & 0o170000 == 0o040000,
                    mode=bits & 0o7777,
                )
            )
        return sorted(found, key=lambda entry: entry.path)

    def keep(self, claims: str, *, detached: bool) -> None:
        """Do nothing: a ``docker exec`` ends with its gateway."""

    async def rest(self, *, resting: bool) -> None:
        await self._script(STOP_SCRIPT if resting else CONTINUE_SCRIPT, user="0")

    def lend(self, fd: int) -> bool:
        """Return True: it has no runner that would end itself."""
        return True

    async def sweep(self) -> int:
        await self._script(SWEEP_SCRIPT, user="0")
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


def _words(command: Command) -> list[str]:
    """Return the command as an argument vector; the shell joins its two streams if they are wanted in one."""
    if command.argv:
        return ["/bin/sh", "-c", 'exec "$0" "$@" 2>&1', *command.argv] if command.merge else list(command.argv)
    return ["/bin/sh", "-c", f"exec 2>&1\n{command.shell}" if command.merge else command.shell]


async def _within(work: asyncio.Future[int | None], seconds: float) -> bool:
    done, _ = await asyncio.wait([work], timeout=seconds if math.isfinite(seconds) else None)
    return bool(done)
