"""This terminal, and what is relayed between it and a session: keys, size, signals one way, output the other."""

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
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

from tangram.cli.printing.output import say
from tangram.client.sync.session import SessionHandle
from tangram.errors import ConflictError, TangramError
from tangram.types import SessionEnd

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

    def __enter__(self) -> Self:
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
