"""``tangram shell`` and ``tangram exec``: a command in a trajectory's sandbox, typed to from this terminal."""

from __future__ import annotations

import os
import queue
import select
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

import click

from tangram import Client
from tangram.cli import exit_status
from tangram.cli.options import Duration, connected, living, new_option
from tangram.cli.output import say
from tangram.client.sync import SessionHandle
from tangram.errors import ConflictError, TangramError
from tangram.types import SessionEnd

#: What a shell is if nobody says: bash where there is one.
SHELL = "if command -v bash >/dev/null; then exec bash; else exec sh; fi"

_function = click.option(
    "--function", metavar="NAME", default="shell", show_default=True, help="The exec function whose cores it has."
)
_task = click.option("--task", metavar="NAME", help="The RL task it belongs to.")
_user = click.option("--user", metavar="USER", help="Who it runs as, one of those that the function allows.")
_cwd = click.option("--cwd", metavar="PATH", help="Where it begins; the sandbox's working directory by default.")
_env = click.option("-e", "--env", multiple=True, metavar="NAME=VALUE", help="An environment variable of it.")
_timeout = click.option("--timeout", "timeout_s", type=Duration(), help="Bound of the session, at most the function's.")


@click.command()
@click.argument("trajectory")
@click.option("--attach", metavar="ID", help="Go on with this session instead, which another terminal left.")
@_function
@_task
@_user
@_cwd
@_env
@_timeout
@new_option
@connected
def shell(
    client: Client,
    trajectory: str,
    attach: str | None,
    function: str,
    task: str | None,
    user: str | None,
    cwd: str | None,
    env: tuple[str, ...],
    timeout_s: float | None,
    new: bool,
) -> int:
    """Open a shell in the sandbox of TRAJECTORY.

    It is an action: it holds its cores until it ends, and the trajectory's other actions wait for it. It goes on when
    this terminal is cut off; its id is printed, and --attach ID goes on with it.

    \b
    tangram shell t1 --new
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("a shell needs a terminal; use `tangram exec` in a script")
    with LocalTerminal(raw=True) as terminal:
        if attach is not None:
            session = client.session(attach)
        else:
            rollout = living(client, trajectory, function, task, new=new)
            session = rollout.session(
                SHELL, terminal=terminal.size(), cwd=cwd, env=_variables(env), user=user, timeout_s=timeout_s
            )
        terminal.say(f"session {session.id}")
        end = Relay(session, terminal).run()
    return _status(session, end, lossless=False)


class CommandAfterOptions(click.Command):
    """A verb whose options may also stand after its first argument: all that follows is another command, as written."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        before, rest = self._split(ctx, args)
        between, command = self._split(ctx, rest[1:])
        return super().parse_args(ctx, [*before, *between, "--", *rest[:1], *command])

    def _split(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str]]:
        """Return the options that come first, and the rest without the ``--`` that may end them."""
        options = click.Command(self.name, params=[each for each in self.params if isinstance(each, click.Option)])
        _, rest, _ = options.make_parser(ctx).parse_args(list(args))
        first = args[: len(args) - len(rest)]
        return (first[:-1] if first[-1:] == ["--"] else first), list(rest)


@click.command("exec", cls=CommandAfterOptions, context_settings={"allow_interspersed_args": False})
@click.argument("trajectory")
@click.argument("command", nargs=-1, required=True)
@click.option("-i", "--interactive", is_flag=True, help="Pass standard input on.")
@click.option("-t", "--tty", is_flag=True, help="Give it a terminal; needs one here.")
@_function
@_task
@_user
@_cwd
@_env
@_timeout
@new_option
@connected
def exec_(
    client: Client,
    trajectory: str,
    command: tuple[str, ...],
    interactive: bool,
    tty: bool,
    function: str,
    task: str | None,
    user: str | None,
    cwd: str | None,
    env: tuple[str, ...],
    timeout_s: float | None,
    new: bool,
) -> int:
    """Run COMMAND in the sandbox of TRAJECTORY, as it is written; its exit status is ours.

    Options come before COMMAND; ``--`` may stand between them and it.
    Ctrl-C interrupts the command, not this program; a second one ends it.

    \b
    tangram exec t1 --new -- python3 -c "print(1)"
    """
    if tty and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("-t needs a terminal here; leave it out")
    with LocalTerminal(raw=tty and interactive) as terminal:
        rollout = living(client, trajectory, function, task, new=new)
        size = terminal.size() if tty else None
        variables = _variables(env)
        session = rollout.session(command, terminal=size, cwd=cwd, env=variables, user=user, timeout_s=timeout_s)
        end = Relay(session, terminal, reads=interactive).run()
    return _status(session, end, lossless=True)


def _variables(words: tuple[str, ...]) -> Mapping[str, str]:
    """Return the variables of the command: what was asked for, and what our terminal can do."""
    pairs = [each.partition("=") for each in words]
    odd = next((name for name, equals, _ in pairs if not equals or not name), None)
    if odd is not None:
        raise click.BadParameter(f"{odd!r} is not NAME=VALUE", param_hint="--env")
    ours = {name: os.environ[name] for name in ("TERM",) if name in os.environ}
    return {**ours, **{name: value for name, _, value in pairs}}


def _status(session: SessionHandle, end: SessionEnd, *, lossless: bool) -> int:
    """Return the exit status of a session, and say what went wrong with it."""
    if lossless and session.missing:
        say(f"{session.missing} bytes of its output are missing: they were no longer kept")
        return exit_status.of_code("internal")
    if end.reason is not None:
        say(f"{end.reason}: {end.message}")
        return exit_status.of_reason(end.reason)
    if end.signal is not None:
        return 128 + end.signal
    return end.exit_code or 0


#: Bytes of standard input that are read at once.
PIECE_BYTES = 64 * 2**10
#: Interrupts after which we end the session instead of passing them on.
INTERRUPTS_MAX = 2
#: Signals that end this program, for which the terminal is restored first.
ENDING = (signal.SIGTERM, signal.SIGHUP)


class LocalTerminal:
    """Our terminal, in raw mode if that was asked for; leaving it restores it, however we end."""

    def __init__(self, *, raw: bool) -> None:
        self._raw = raw
        # Any: what termios keeps of a terminal has no type of its own.
        self._saved: list[Any] | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> LocalTerminal:
        for number in ENDING:
            self._handlers[number] = signal.signal(number, _end)
        if self._raw:
            self._saved = termios.tcgetattr(sys.stdin.fileno())
            tty.setraw(sys.stdin.fileno())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._saved is not None:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._saved)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @property
    def raw(self) -> bool:
        return self._saved is not None

    def size(self) -> tuple[int, int]:
        """Return its rows and columns."""
        columns, rows = shutil.get_terminal_size()
        return min(max(rows, 1), 1000), min(max(columns, 1), 1000)

    def say(self, text: str) -> None:
        """Say something of ours beside what is shown."""
        say(text + ("\r" if self.raw else ""))


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class Relay:
    """Carries one session: a thread passes on what is typed, this one shows what is said."""

    def __init__(self, session: SessionHandle, terminal: LocalTerminal, *, reads: bool = True) -> None:
        self._session = session
        self._terminal = terminal
        self._reads = reads
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._waking, False)
        #: What our thread is to do beside reading, in order.
        self._errands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._interrupts = 0
        self._over = False

    def run(self) -> SessionEnd:
        """Return how the session ended; raises TangramError if the gateway is lost."""
        handlers = {
            signal.SIGINT: signal.signal(signal.SIGINT, self._interrupted),
            signal.SIGWINCH: signal.signal(signal.SIGWINCH, self._resized),
        }
        thread = threading.Thread(target=self._pass_on, name="tangram-input", daemon=True)
        thread.start()
        try:
            for piece in self._session.output():
                _show(1 if piece.stream == "stdout" else 2, piece.data)
        finally:
            self._over = True
            self._wake()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        end = self._session.end
        assert end is not None
        return end

    # --- signals: they only leave word

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > INTERRUPTS_MAX:
            raise KeyboardInterrupt
        end = self._interrupts == INTERRUPTS_MAX
        self._errands.put(self._session.cancel if end else lambda: self._session.signal("INT"))
        self._wake()

    def _resized(self, number: int, frame: FrameType | None) -> None:
        if self._terminal.raw:
            self._errands.put(lambda: self._session.resize(*self._terminal.size()))
            self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._waking, b"\0")

    # --- the thread

    def _pass_on(self) -> None:
        """Pass on what is typed, and run errands, until the session is over."""
        stdin = sys.stdin.fileno() if self._reads else -1
        if stdin < 0:
            self._try(self._session.close_input)
        while not self._over:
            ready, _, _ = select.select([self._woken, *([stdin] if stdin >= 0 else [])], [], [])
            if self._woken in ready:
                os.read(self._woken, PIECE_BYTES)
                while not self._errands.empty():
                    self._try(self._errands.get())
            elif not self._typed(stdin):
                stdin = -1

    def _typed(self, stdin: int) -> bool:
        """Pass on one piece of standard input; return whether more may come."""
        data = os.read(stdin, PIECE_BYTES)
        if not data:
            self._try(self._session.close_input)
            return False
        return self._try(lambda: self._session.write(data)) is not False

    def _try(self, errand: Callable[[], bool | None]) -> bool | None:
        """Do it; what fails is told by the output's end, or by the lost gateway, to the other thread."""
        try:
            return errand()
        except ConflictError:
            return False  # it has ended: the output tells
        except TangramError as error:
            if not self._over:
                self._terminal.say(f"{error.component}: {error.message}")
            return False


def _show(fd: int, data: bytes) -> None:
    """Write all of it, past the buffers of Python."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
