"""Processes beside the gateway: fork server, pipes and messages."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import runtimes
from manager.errors import ActionFailed, Reason
from manager.function import ModelAction
from runtimes.chores import end_chores
from runtimes.model.checkpoint import Head, Layout
from runtimes.model.request import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """One sequence, as token ids, and what is asked of it: actions that share a service may share a batch."""

    ids: tuple[int, ...]
    action: ModelAction
    sampling: Sampling | None = None
    #: Likeliest tokens to tell of each position (`logprobs`); None tells the actual token's number alone.
    top: int | None = None
    #: Positions whose values are told (`step_scores`).
    positions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Of every token of a sequence but the first: log-probability, rank from 1 on, and the likeliest in its place."""

    logprobs: list[float]
    ranks: list[int]
    #: [token id, log-probability], likeliest first.
    top: list[list[list[int | float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """New tokens of one sequence, and why they end: ``stop`` (an end token) or ``length``."""

    ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRef:
    """A filled host image: its identity, its path for mapping, and its layout."""

    id: str
    path: str
    layout: Layout


# To a device's process.


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """Map an image (and pin it on CUDA) before the first restore from it."""

    image: ImageRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Detach:
    """Unmap an image; slots restored from it stay."""

    image_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A service on a chunk, from the point of view of one of its ranks."""

    service: str
    image_id: str
    dop: int
    rank: int
    #: First device of the chunk.
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Bring a service in beside what computes if it fits; answered by whether it did."""

    place: Placed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBatch:
    """Compute one action, or one batch of actions of the same service; restores the service first if need be."""

    place: Placed
    items: tuple[WorkItem, ...]
    budget_tokens: int
    #: Services that the manager chose to evict for this one.
    evict: tuple[str, ...] = ()
    #: Rendezvous file of the chunk's group; its name is new with every new set of processes.
    group: str = ""
    #: CPU cores granted (``cpu`` devices); empty leaves the device's own bound.
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """Release every slot of these services."""

    services: tuple[str, ...]


# To the tokenizer process.


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Check a checkpoint and lay out its image under a head."""

    path: Path
    head: Head
    dtype: str
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A usable checkpoint: its layout and fingerprint."""

    layout: Layout
    fingerprint: str
    #: The tokens that end a generation, as the checkpoint's configuration has them.
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Read a checkpoint into the shared memory at ``image_path``."""

    path: Path
    layout: Layout
    image_path: str
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Encode:
    """Turn texts or conversations into token ids."""

    path: Path
    fingerprint: str
    texts: tuple[str, ...] = ()
    conversations: tuple[tuple[Mapping[str, object], ...], ...] = ()
    limit: int
    #: The side on which what is longer is cut; empty: it is refused.
    cut: str
    #: Whether the conversation is to be continued (generate) or judged as it is.
    continued: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """Token ids by sequence, and which sequences were cut."""

    ids: tuple[tuple[int, ...], ...]
    truncated: tuple[int, ...]
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Turn generated ids into texts."""

    path: Path
    fingerprint: str
    ids: tuple[tuple[int, ...], ...]


# Back to the gateway.


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """One slot of one device."""

    service: str
    dop: int
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Measured in one run of one rank, in seconds and bytes."""

    restored: bool = False
    restore_s: float = 0.0
    restore_bytes: int = 0
    compute_s: float = 0.0
    evict_s: float = 0.0
    tokens: int = 0
    evicted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first frame of every process."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A sign of life of a request; ``restored`` when its weights have arrived."""

    request: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """One sequence of a request has ended before the others; what was measured until then."""

    request: int
    position: int
    value: object
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The answer to a request."""

    request: int
    value: object = None
    usage: Usage = field(default_factory=Usage)
    #: None from processes that hold no device.
    resident: tuple[Resident, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A request that could not be done. ``broken`` marks a process that should be replaced."""

    request: int
    kind: str
    message: str
    reason: Reason = Reason.MODEL_ERROR
    broken: bool = False
    resident: tuple[Resident, ...] | None = None


#: What is sent down a pipe: the number of the request and what is asked.
Request = tuple[int, object]


_LENGTH = struct.Struct("<I")

#: Largest frame: an action's tokens or results; far above any, it only stops garbage.
FRAME_BYTES_MAX = 1 << 30


def encode(message: object) -> bytes:
    """One frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {len(body)} bytes exceeds {FRAME_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader) -> object:
    """The next message; raises IncompleteReadError when the process is gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > FRAME_BYTES_MAX:
        raise ConnectionError(f"a frame claims {length} bytes")
    return pickle.loads(await reader.readexactly(length))


class MessagePipe:
    """The end of a pipe inside a model process: blocking, and safe to write from several threads."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._connection = connection
        self._incoming = connection.makefile("rb")
        self._writing = threading.Lock()

    def receive(self) -> object:
        """The next message; raises EOFError when the gateway is gone."""
        head = self._incoming.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            raise EOFError
        (length,) = _LENGTH.unpack(head)
        body = self._incoming.read(length)
        if len(body) < length:
            raise EOFError
        return pickle.loads(body)

    def send(self, message: object) -> None:
        with self._writing:
            self._connection.sendall(encode(message))


_COMPONENT = "model.process"
_INCARNATIONS = itertools.count(1)


class Gone(Exception):
    """The process died, or was killed because it was stuck."""


class RequestRefused(Exception):
    """The process answered that it could not."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


class ForkServer:
    """The parent of every model process; itself started at the first fork. One may serve several runtimes."""

    #: What its process runs.
    module = "runtimes.model.fork_server"

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self, role: str, options: Mapping[str, object], environment: Mapping[str, str] | None) -> socket.socket:
        """Start a process and return our end of its socket; with an ``environment`` of its own, a new interpreter."""
        ours, theirs = socket.socketpair()
        message = {"do": "fork", "role": role, "options": options, "environment": environment}
        try:
            self._send(message, [theirs.fileno()])
        except OSError:
            self.close()  # it died: its children died with it, and a new one takes over
            self._send(message, [theirs.fileno()])
        finally:
            theirs.close()
        ours.setblocking(False)
        return ours

    def kill(self, pid: int) -> None:
        """SIGKILL a process that is still the fork server's child; a no-op for any other."""
        with suppress(OSError):
            self._send({"do": "kill", "pid": pid}, [])

    def close(self) -> None:
        """End the fork server, and with it every process; idempotent."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._control = None

    def _send(self, message: Mapping[str, object], descriptors: list[int]) -> None:
        if self._control is None:
            self._start()
        assert self._control is not None
        socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(runtimes.__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        # Checkpoints are local by definition, and asking CUDA anything but through NVML would spoil the forks.
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "OMP_NUM_THREADS": "1",
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )


@dataclass(slots=True)
class _Pending:
    """A request on its way."""

    future: asyncio.Future[Done]
    on_progress: Callable[[str], None] | None
    on_ended: Callable[[Ended], None] | None
    seen_s: float = field(default_factory=time.monotonic)


class ModelProcess:
    """One model process, started on demand. Replacing it gives it a new ``incarnation``."""

    def __init__(
        self,
        fork_server: ForkServer,
        role: str,
        options: Mapping[str, object],
        *,
        environment: Mapping[str, str] | None = None,
        start_s: float,
    ) -> None:
        self._fork_server, self._role, self._options = fork_server, role, options
        self._environment, self._start_s = environment, start_s
        self.incarnation = 0
        self.pid: int | None = None
        self.restarts = 0
        #: Images that this incarnation was told of.
        self.attached: set[str] = set()
        self._writer: asyncio.StreamWriter | None = None
        self._closing: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count(1)
        self._starting = asyncio.Lock()

    @property
    def alive(self) -> bool:
        return self._writer is not None

    async def start(self) -> None:
        """Start the process if it does not run; raises ActionFailed(model_error) if it does not come up in time."""
        async with self._starting:
            if self._writer is not None:
                return
            await self.close()
            connection = self._fork_server.fork(self._role, self._options, self._environment)
            reader, writer = await asyncio.open_connection(sock=connection)
            hello = await self._read_hello(reader, writer)
            self.restarts += self.incarnation > 0
            self.incarnation, self.pid, self._writer = next(_INCARNATIONS), hello.pid, writer
            self.attached.clear()
            self._listening = asyncio.create_task(self._listen(reader), name=f"model {self._role} {hello.pid}")

    async def _read_hello(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Hello:
        """Return its first message; raises ActionFailed with its reason for not starting."""
        try:
            hello = await asyncio.wait_for(read(reader), self._start_s)
            detail = f": {hello.message}" if isinstance(hello, Failed) else ""
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            hello, detail = None, f" ({type(error).__name__}); see the gateway's stderr"
        if isinstance(hello, Hello):
            return hello
        writer.close()
        raise ActionFailed(Reason.MODEL_ERROR, f"the {self._role} process did not start{detail}", component=_COMPONENT)

    async def ask(
        self,
        message: object,
        *,
        stuck_s: float | None = None,
        on_progress: Callable[[str], None] | None = None,
        on_ended: Callable[[Ended], None] | None = None,
    ) -> Done:
        """Return the answer; raises RequestRefused, or Gone if it died or showed no progress for ``stuck_s``."""
        await self.start()
        if self._writer is None:
            raise Gone(f"the {self._role} process died as it started")
        number = next(self._numbers)
        pending = _Pending(asyncio.get_running_loop().create_future(), on_progress, on_ended)
        self._pending[number] = pending
        try:
            self._writer.write(encode((number, message)))
            while not pending.future.done():
                left = None if stuck_s is None else pending.seen_s + stuck_s - time.monotonic()
                if left is not None and left <= 0:
                    self.kill()
                    raise Gone(f"the {self._role} process {self.pid} showed no progress for {stuck_s:.0f} s")
                await asyncio.wait([pending.future], timeout=left)
            return pending.future.result()
        finally:
            self._pending.pop(number, None)
            pending.future.cancel()

    def tell(self, message: object) -> None:
        """Send without waiting for the answer; a no-op if the process is not alive."""
        if self._writer is not None:
            self._writer.write(encode((0, message)))

    def kill(self) -> None:
        """SIGKILL the process; those who wait for an answer get Gone."""
        if self.pid is not None:
            self._fork_server.kill(self.pid)

    async def gone(self, within_s: float) -> None:
        """Wait until a killed process has let go of its socket."""
        if self._listening is not None:
            await asyncio.wait([self._listening], timeout=within_s)

    async def close(self) -> None:
        """Let the process end; idempotent."""
        listening, self._listening = self._listening, None
        if listening is not None:
            if not listening.done():
                self.kill()
                await asyncio.wait([listening], timeout=self._start_s)
            await end_chores(listening)
        closing, self._closing = self._closing, None
        if closing is not None:  # its transport is gone a turn of the loop later, which may be about to close
            await asyncio.gather(closing.wait_closed(), return_exceptions=True)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._dispatch(await read(reader))
        except (asyncio.IncompleteReadError, OSError):
            pass  # the process is gone: its callers learn it below
        finally:
            writer, self._writer, self.pid = self._writer, None, None
            for pending in self._pending.values():
                if not pending.future.done():
                    pending.future.set_exception(Gone(f"the {self._role} process died"))
            if writer is not None:
                writer.close()
                self._closing = writer

    def _dispatch(self, message: object) -> None:
        assert isinstance(message, Done | Ended | Failed | Progress)
        pending = self._pending.get(message.request)
        if pending is None or pending.future.done():
            return  # nobody waits for it any more
        pending.seen_s = time.monotonic()
        match message:
            case Progress():
                if pending.on_progress is not None:
                    pending.on_progress(message.what)
            case Ended():
                if pending.on_ended is not None:
                    pending.on_ended(message)
            case Done():
                pending.future.set_result(message)
            case Failed():
                pending.future.set_exception(RequestRefused(message))
