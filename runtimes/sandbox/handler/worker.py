"""The handler worker: the process inside a sandbox that imports a function once and calls it for each invocation.

One file, standard library only, Python 3.9 on; run as
``python3 -c SOURCE DIRECTORY MODULE CALLABLE PER_INSTANCE OUTPUT_LIMIT_BYTES``. A frame is ``length:u32`` in network
order, then JSON:

    in    {"id", "event", "context": {"function", "trajectory", "task", "attempt", "timeout_s", ...}}
    out   {"ready": {...}} or {"fatal": {"type", "message", "traceback"}}, once
          {"id", "log": [stream, text]}
          {"id", "result", "usage"} or {"id", "error": {"kind", "type", "message", "traceback"}, "usage"}

Frames go through private copies of descriptors 0 and 1. User code reads nothing from 0; what it prints is cut into
lines and sent for its own invocation; what bypasses Python (a C library, a child process) leaves by the real stderr.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import inspect
import io
import json
import logging
import os
import resource
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

HEADER = struct.Struct("!I")
LINE_MAX_BYTES = 16 * 2**10
TRACEBACK_MAX_CHARS = 16 * 2**10
MESSAGE_MAX_CHARS = 2000

Handler = Callable[[Any, "Context"], Any]


class WorkerChannel:
    """Frames to and from the gateway, away from the descriptors that user code writes to."""

    def __init__(self) -> None:
        self._incoming = os.fdopen(os.dup(0), "rb")
        self._outgoing = os.dup(1)
        self._lock = threading.Lock()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, None if the gateway has hung up."""
        head = self._incoming.read(HEADER.size)
        if len(head) < HEADER.size:
            return None
        body = self._incoming.read(HEADER.unpack(head)[0])
        message: dict[str, Any] = json.loads(body)
        return message

    def send(self, message: dict[str, Any]) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, body: bytes) -> None:
        view = memoryview(HEADER.pack(len(body)) + body)
        with self._lock:
            while view:
                view = view[os.write(self._outgoing, view) :]


class Context:
    """What a handler is told about its invocation."""

    def __init__(self, invocation_id: str, fields: dict[str, Any], log: Callable[[dict[str, Any]], None]) -> None:
        self.invocation_id = invocation_id
        self.function: str = fields["function"]
        self.trajectory: str | None = fields["trajectory"]
        self.task: str = fields["task"]
        #: Which try this is, from 1.
        self.attempt: int = fields["attempt"]
        self.traceparent: str | None = fields["traceparent"]
        self.tracestate: str | None = fields.get("tracestate")
        self.timeout_s: float = fields["timeout_s"]
        self._deadline_s: float = time.monotonic() + self.timeout_s
        self._log = log

    @property
    def remaining_s(self) -> float:
        """Seconds until the invocation is ended by force; never negative."""
        return max(0.0, self._deadline_s - time.monotonic())

    def log(self, message: str, *, level: str = "info", **fields: Any) -> None:
        """Add a structured record to the invocation's log."""
        self._log({"level": level, "message": message, **fields})


class HandlerCall:
    """One call under way, and the output of its print and logging."""

    def __init__(self, channel: WorkerChannel, message: dict[str, Any]) -> None:
        self.id: str = message["id"]
        self.event = message["event"]
        self.context = Context(self.id, message["context"], self.record)
        self._channel = channel
        self._lines = {"stdout": bytearray(), "stderr": bytearray()}
        self._lock = threading.Lock()

    def write(self, stream: str, data: bytes) -> None:
        """Send whole lines at once; the rest waits for its end, or until it is too long."""
        with self._lock:
            line = self._lines[stream]
            line += data
            end = len(line) if len(line) > LINE_MAX_BYTES else line.rfind(b"\n") + 1
            if end:
                self._send(stream, bytes(line[:end]))
                del line[:end]

    def record(self, fields: dict[str, Any]) -> None:
        text = json.dumps(fields, default=str, ensure_ascii=True)
        self._channel.send({"id": self.id, "log": ["log", text + "\n"]})

    def flush(self) -> None:
        with self._lock:
            for stream, line in self._lines.items():
                if line:
                    self._send(stream, bytes(line))
                    line.clear()

    def _send(self, stream: str, data: bytes) -> None:
        self._channel.send({"id": self.id, "log": [stream, data.decode("utf-8", "replace")]})


class OutputCapture(io.RawIOBase):
    """A standard stream that belongs to the invocation whose code writes to it."""

    def __init__(self, calls: Calls, name: str, fd: int) -> None:
        super().__init__()
        self._calls = calls
        self._stream = name
        self._fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        content = bytes(data)
        invocation = self._calls.current()
        if invocation is None:
            os.write(self._fd, content)
        else:
            invocation.write(self._stream, content)
        return len(content)


class Records(logging.Handler):
    """logging's records, sent as the structured log of the invocation that made them."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def emit(self, record: logging.LogRecord) -> None:
        fields = {"level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            fields["exception"] = _shortened(logging.Formatter().formatException(record.exc_info), TRACEBACK_MAX_CHARS)
        invocation = self._calls.current()
        if invocation is None:
            os.write(2, (json.dumps(fields) + "\n").encode())
        else:
            invocation.record(fields)


class Calls:
    """The invocations under way: calls the handler and answers for it."""

    def __init__(self, channel: WorkerChannel, output_limit_bytes: int) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._output_limit_bytes = output_limit_bytes
        self._running: dict[str, HandlerCall] = {}
        self._current: contextvars.ContextVar[HandlerCall | None] = contextvars.ContextVar("invocation", default=None)

    def current(self) -> HandlerCall | None:
        """Return the invocation whose code runs in this thread or task, or the only one there is."""
        result = self._current.get()
        if result is None and len(self._running) == 1:
            result = next(iter(self._running.values()), None)
        return result

    def run(self, handler: Handler, message: dict[str, Any], loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Call the handler on this thread; an awaitable is awaited on ``loop``."""
        invocation, began_s = self._enter(message)
        try:
            value = handler(invocation.event, invocation.context)
            if inspect.isawaitable(value):
                value = loop.run_until_complete(value) if loop is not None else asyncio.run(_await(value))
            answer = self._result(value)
        except BaseException as error:  # noqa: BLE001 (sys.exit() in a handler is its error, not our end)
            answer = self._error(error)
        if os.getpid() != self._pid:
            os._exit(0)  # a child that came back out of the handler: the call, and those to come, are its parent's
        self._leave(invocation, answer, time.thread_time() - began_s)

    async def arun(self, handler: Handler, message: dict[str, Any]) -> None:
        """Call the async handler as a task of the running loop; CPU time of tasks is not told apart."""
        invocation, _ = self._enter(message)
        try:
            answer = self._result(await handler(invocation.event, invocation.context))
        except BaseException as error:  # noqa: BLE001 (as above)
            answer = self._error(error)
        if os.getpid() != self._pid:
            os._exit(0)  # as above
        self._leave(invocation, answer, 0.0)

    def _enter(self, message: dict[str, Any]) -> tuple[HandlerCall, float]:
        invocation = HandlerCall(self._channel, message)
        self._running[invocation.id] = invocation
        self._current.set(invocation)
        return invocation, time.thread_time()

    def _leave(self, invocation: HandlerCall, answer: bytes, cpu_s: float) -> None:
        self._current.set(None)
        invocation.flush()
        del self._running[invocation.id]
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        usage = encode({"cpu_s": cpu_s, "peak_memory_bytes": peak_bytes})
        self._channel.send_encoded(b'{"id":' + encode(invocation.id) + b"," + answer + b',"usage":' + usage + b"}")

    def _result(self, value: Any) -> bytes:
        try:
            encoded = encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            message = f"the handler returned {type(value).__name__}, which is not JSON: {error}"
            return b'"error":' + encode({"kind": "result", "type": "TypeError", "message": message, "traceback": ""})
        if len(encoded) > self._output_limit_bytes:
            message = (
                f"the handler's result has {len(encoded)} bytes, more than {self._output_limit_bytes} (output_limit)"
            )
            return b'"error":' + encode({"kind": "limit", "type": "", "message": message, "traceback": ""})
        return b'"result":' + encoded

    def _error(self, error: BaseException) -> bytes:
        kind = "memory" if isinstance(error, MemoryError) else "raised"
        return b'"error":' + encode({"kind": kind, **describe(error)})


async def _await(value: Any) -> Any:
    return await value


def encode(value: Any) -> bytes:
    """Return strict JSON: no NaN, no lone surrogates."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def describe(error: BaseException) -> dict[str, str]:
    """Return type, message and traceback of the user's error, bounded and without this file's frames."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals is globals():
        frames = frames.tb_next
    try:
        message = str(error)
    except Exception as unprintable:  # noqa: BLE001 (the user's own __str__)
        message = f"(its message cannot be printed: {type(unprintable).__name__})"
    lines = traceback.format_exception(type(error), error, frames)
    return {
        "type": type(error).__name__,
        "message": _printable(_shortened(message, MESSAGE_MAX_CHARS)),
        "traceback": _printable(_shortened("".join(lines), TRACEBACK_MAX_CHARS)),
    }


def _shortened(text: str, limit: int) -> str:
    """Return both ends of a longer text, with a line that counts what is missing in between."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters are missing here ...]\n{text[-half:]}"


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def load(directory: str, module: str, name: str) -> Handler:
    """Import the handler from its directory, which is also where it runs; it must take (event, context)."""
    os.chdir(directory)
    sys.path[0] = directory
    handler: Handler = importlib.import_module(module)  # type: ignore[assignment]
    for part in name.split("."):
        handler = getattr(handler, part)
    inspect.signature(handler).bind(None, None)
    return handler


def require(site: str) -> None:
    """Let imports find what the handler requires: after the standard library, before what the image has."""
    if site:
        installed = (at for at, each in enumerate(sys.path) if each.endswith(("site-packages", "dist-packages")))
        sys.path.insert(next(installed, len(sys.path)), site)


def serve(channel: WorkerChannel, calls: Calls, handler: Handler, per_instance: int) -> None:
    """Serve until the gateway hangs up: one call at a time on the main thread, or several on threads or as tasks."""
    function = handler if inspect.isroutine(handler) else type(handler).__call__
    if per_instance == 1:
        loop = asyncio.new_event_loop()
        while (message := channel.receive()) is not None:
            calls.run(handler, message, loop)
    elif inspect.iscoroutinefunction(function):
        asyncio.run(_serve_tasks(channel, calls, handler))
    else:
        threads = ThreadPoolExecutor(per_instance)
        while (message := channel.receive()) is not None:
            threads.submit(calls.run, handler, message)


async def _serve_tasks(channel: WorkerChannel, calls: Calls, handler: Handler) -> None:
    loop = asyncio.get_running_loop()
    tasks = set()
    # A thread of its own: the handler may use up the loop's default threads.
    with ThreadPoolExecutor(1) as reader:
        while (message := await loop.run_in_executor(reader, channel.receive)) is not None:
            task = loop.create_task(calls.arun(handler, message))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


def main() -> None:
    directory, module, name, per_instance, output_limit_bytes, site = sys.argv[1:7]
    channel = WorkerChannel()
    calls = Calls(channel, int(output_limit_bytes))
    sys.stdout = io.TextIOWrapper(OutputCapture(calls, "stdout", 1), "utf-8", "backslashreplace", write_through=True)
    sys.stderr = io.TextIOWrapper(OutputCapture(calls, "stderr", 2), "utf-8", "backslashreplace", write_through=True)
    logging.basicConfig(level=logging.INFO, handlers=[Records(calls)])
    try:
        require(site)
        handler = load(directory, module, name)
    except BaseException as error:  # noqa: BLE001 (whatever the user's import did)
        channel.send({"fatal": describe(error)})
        os._exit(1)
    channel.send({"ready": {"python": sys.version.split()[0], "pid": os.getpid()}})
    serve(channel, calls, handler, int(per_instance))
    os._exit(0)


if __name__ == "__main__":
    main()
