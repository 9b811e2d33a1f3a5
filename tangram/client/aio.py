"""The asynchronous client."""

from __future__ import annotations

import posixpath
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar, cast, overload
from urllib.parse import quote
from urllib.request import getproxies, proxy_bypass

import httpx
import msgspec

from tangram.client import requests
from tangram.client.aio_primitives import AsyncCallSlots, AsyncOpened, aside, for_each, pause
from tangram.client.aio_stream import AsyncCallStream
from tangram.client.followers import LogFollower, OutputLines, SessionFollower
from tangram.client.handlers import captured, definition_of
from tangram.client.heartbeats import LEASE_S, Heartbeats
from tangram.client.requests import (
    CONCURRENCY,
    KEEPALIVE,
    ApiRequest,
    BatchCall,
    Bearer,
    FailureStreak,
    InvocationResult,
    MapEnds,
    OnProgress,
    Retries,
    connection_lost,
    error_of,
    read_streamed,
    result_of,
    server_of,
    token_of,
    trust_of,
    was_read,
)
from tangram.errors import (
    CapacityExceededError,
    ConnectionFailed,
    InvalidInputError,
    MapFailed,
    NotFoundError,
    TangramError,
    TrajectoryEndedError,
)
from tangram.types import (
    ActivityInfo,
    ConfigDiff,
    FileEntry,
    FunctionInfo,
    FunctionList,
    ImageInfo,
    ImageList,
    InvocationPage,
    LogLine,
    NodeStatus,
    NodeStatusList,
    NodeTicket,
    PageKey,
    PortInfo,
    QueueEntry,
    QueuePage,
    RayMachineStatus,
    ResourcesInfo,
    SandboxChoice,
    SessionEnd,
    SessionOutput,
    SnapshotInfo,
    SnapshotList,
    StepExpectation,
    StepInfo,
    StepList,
    TaskInfo,
    TaskList,
    TicketWanted,
    TrajectoryInfo,
    TrajectoryPage,
)

_T = TypeVar("_T")


# What differs between awaiting and blocking: pauses, slots, many calls at once, and who may use what is open.
#
# Written by hand, as is its twin `tangram.client.sync`; the rest of `sync` is generated.

_P = ParamSpec("_P")


#: Seconds after which a connection that nobody uses is closed.
IDLE_S = 30.0


class AsyncConnectionPool(httpx.AsyncBaseTransport):
    """A pool that finds a free connection at once, however many there are.

    httpx's own pool looks at all of its connections for each request (at 500 of them, 5 to 8 times the processor
    time of a request). Here each connection is an httpx transport with one connection, and the free ones are a stack.
    Whoever finds none free and the bound reached waits, in order of arrival, without a bound in time.
    """

    def __init__(self, server: httpx.URL, connections: int, ca: str | None = None, cert: str | None = None) -> None:
        self._server = server
        self._slots = AsyncCallSlots(connections)
        self.trust = trust_of(server.scheme == "https", ca, cert)
        #: What the environment names for this server.
        self.proxy = _proxy(server)
        #: Free connections and when each became free (on the monotonic clock), the latest last.
        self._free: deque[tuple[float, httpx.AsyncBaseTransport]] = deque()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send over a free connection, or a new one; it is free again once the answer is closed."""
        await self._slots.acquire()
        connection = None
        try:
            connection = self._take()
            answer = await connection.handle_async_request(request)
        except BaseException:
            if connection is None:
                self._slots.release()
            else:
                await self.drop(connection)
            raise
        assert isinstance(answer.stream, httpx.AsyncByteStream)
        return httpx.Response(
            answer.status_code,
            headers=answer.headers,
            stream=AsyncAnswerStream(self, connection, answer.stream),
            extensions=answer.extensions,
        )

    async def aclose(self) -> None:
        """Close the free connections."""
        while self._free:
            await self._free.pop()[1].aclose()

    async def drop(self, connection: httpx.AsyncBaseTransport) -> None:
        """Close it: nobody can use it again."""
        self._slots.release()
        await _close(connection)

    async def give_back(self, connection: httpx.AsyncBaseTransport) -> None:
        """Let the next request use it, and close those that were free for too long."""
        now_s = time.monotonic()
        self._free.append((now_s, connection))
        self._slots.release()
        while (eldest := self._eldest(now_s - IDLE_S)) is not None:
            await _close(eldest)

    def _take(self) -> httpx.AsyncBaseTransport:
        with suppress(IndexError):
            return self._free.pop()[1]
        return httpx.AsyncHTTPTransport(
            verify=self.trust,
            proxy=self.proxy,
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_S),
            socket_options=KEEPALIVE,
        )

    def _eldest(self, before_s: float) -> httpx.AsyncBaseTransport | None:
        """The connection that has been free for longest, if it became so before that instant; it is taken out."""
        with suppress(IndexError):
            free_s, connection = self._free.popleft()
            if free_s < before_s:
                return connection
            self._free.appendleft((free_s, connection))
        return None


class AsyncLink:
    """What a client has open in one process and event loop."""

    def __init__(self, http: httpx.AsyncClient, connections: int, stream: AsyncCallStream | None) -> None:
        self.http = http
        #: For calls, when there are several at once; None where a transport was given.
        self.stream = stream
        lasting = connections - min(SPARE, connections // 3)
        #: For calls that last, so that those which do not always find a connection.
        self.lasting = AsyncCallSlots(lasting)
        #: For those of them that wait for memory.
        self.opening = AsyncCallSlots(lasting // 2)


class AsyncAnswerStream(httpx.AsyncByteStream):
    """The body of an answer; closing it frees its connection."""

    def __init__(
        self, pool: AsyncConnectionPool, connection: httpx.AsyncBaseTransport, body: httpx.AsyncByteStream
    ) -> None:
        self._pool = pool
        self._connection = connection
        self._body = body
        self._open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._body:
            yield chunk

    async def aclose(self) -> None:
        """Close the body, once."""
        if not self._open:
            return
        self._open = False
        try:
            await self._body.aclose()
        except BaseException:  # cancelled in the midst of it: the transport takes its connection for used
            await self._pool.drop(self._connection)
            raise
        await self._pool.give_back(self._connection)


async def _close(connection: httpx.AsyncBaseTransport) -> None:
    # What failed may fail once more while it is closed; the first failure is the one to be told.
    with suppress(Exception):
        await connection.aclose()


def _proxy(server: httpx.URL) -> httpx.Proxy | None:
    """The proxy that the environment names for this server (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY)."""
    if proxy_bypass(server.netloc.decode("ascii")):
        return None
    proxies = getproxies()
    address = proxies.get(server.scheme) or proxies.get("all")
    if not address:
        return None
    return httpx.Proxy(address if "://" in address else f"http://{address}")


#: Bytes of input that are sent at once.
INPUT_PIECE_BYTES = 256 * 2**10


class AsyncSessionHandle:
    """A command in a trajectory's sandbox that somebody types to; it holds its cores until it ends.

    It goes on without this process, and whoever knows its ``id`` may attach to it: what it says is numbered byte by
    byte, and the last of it is kept. A session to which nobody is attached for a while is ended. One task, or thread,
    may read while another writes.
    """

    def __init__(self, client: AsyncClient, id: str, *, begun: bool) -> None:
        """``begun``: by this handle, and nothing was typed yet."""
        self.id = id
        self._client = client
        self._follower = SessionFollower(id, client._retries, input_offset=0 if begun else None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    @property
    def end(self) -> SessionEnd | None:
        """How it ended; None before `output` has come to its end."""
        return self._follower.end

    @property
    def missing(self) -> int:
        """Bytes of output that were no longer kept when this handle asked for them."""
        return self._follower.missing

    async def output(self) -> AsyncIterator[SessionOutput]:
        """Yield what it says until it ends, over broken connections; who was attached before is detached.

        Raises ConflictError when another caller attaches.
        """
        while self._follower.end is None:
            try:
                async for piece in self._pieces():
                    yield piece
                if self._follower.end is None:
                    raise ConnectionFailed(f"the output of session {self.id} broke off")
            except TangramError as error:
                wait_s = self._follower.again_s(error)
                if wait_s is None:
                    raise
                await pause(wait_s)

    async def _pieces(self) -> AsyncIterator[SessionOutput]:
        """Yield what one connection brings."""
        link, follower = self._client._link(), self._follower
        path, params = requests.session_path(self.id), {"offset": str(follower.offset)}
        try:
            async with link.lasting, link.http.stream("GET", path, params=params) as response:
                if not response.is_success:
                    await response.aread()
                    raise error_of(response)
                async for text in response.aiter_lines():
                    if (piece := follower.feed(text)) is not None:
                        yield piece
        except httpx.TransportError as error:
            raise connection_lost(f"session {self.id}", error) from error

    async def wait(self) -> SessionEnd:
        """Read to its end, and return how it ended."""
        async for _ in self.output():
            pass
        assert self._follower.end is not None
        return self._follower.end

    async def write(self, data: bytes | str) -> bool:
        """Type so much; return whether its command still reads. It is passed on once, however often it is sent."""
        rest = data.encode() if isinstance(data, str) else data
        while rest:
            offset = self._follower.input_offset
            fed = await self._client._send(requests.write_session(self.id, rest[:INPUT_PIECE_BYTES], offset))
            rest = rest[INPUT_PIECE_BYTES if offset is None else fed.input_offset - offset :]
            self._follower.input_offset = fed.input_offset
            if not fed.reads:
                return False
        return True

    async def close_input(self) -> None:
        """Say that there is no more input; a command that waits for its turn is waited for."""
        reads = True
        while reads:  # still reading: it has not begun, or not read what came before, for as long as the gateway waits
            request = requests.write_session(self.id, b"", self._follower.input_offset, end=True)
            reads = (await self._client._send(request)).reads

    async def resize(self, rows: int, columns: int) -> None:
        """Tell its terminal how large it is; raises ConflictError if it has none."""
        await self._client._send(requests.steer_session(self.id, size=(rows, columns)))

    async def signal(self, name: str) -> None:
        """Signal what runs in its foreground: INT, TERM, KILL, HUP, QUIT, USR1, USR2, TSTP or CONT."""
        await self._client._send(requests.steer_session(self.id, signal=name))

    async def cancel(self) -> None:
        """End it with everything that it started; raises ConflictError if it has ended."""
        await self._client._send(requests.cancel_invocation(self.id))


#: Seconds between two looks whether a server is ready.
READY_STEP_S = 0.1


class AsyncPort:
    """A server in a trajectory's sandbox, for whoever has its ``url``. It has cores only while it answers.

    It ends with its trajectory, after its ``ttl_s``, or by `close`; it may be used as an async context manager.
    """

    def __init__(self, client: AsyncClient, info: PortInfo) -> None:
        self.id = info.id
        self.trajectory = info.trajectory
        self.port = info.port
        #: Where the server's ``/`` is: it holds the right to come in, so it is to be kept like a password.
        self.url = str(info.url)
        self._client = client

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.trajectory!r}, {self.port})"

    async def __aenter__(self) -> AsyncPort:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def ws_url(self) -> str:
        """The same for WebSockets."""
        return f"ws{self.url.removeprefix('http')}"

    @property
    def tcp_url(self) -> str:
        """A WebSocket whose binary messages are the bytes of a TCP connection; an empty one ends a direction."""
        base, _, capability = self.ws_url.rpartition("/p/")
        return f"{base}/t/{capability}"

    @property
    def trust(self) -> ssl.SSLContext:
        """What the listener's certificate is checked by; of no use where the URL is http."""
        return trust_of(self.url.startswith("https:"), self._client._ca, self._client._cert)

    async def wait_ready(self, path: str = "/", timeout_s: float = 60.0) -> None:
        """Return once the server answers a GET of this path with success; raises CapacityExceededError after a while.

        Raises what ends the port: TrajectoryEndedError, NotFoundError.
        """
        until_s = time.monotonic() + timeout_s
        async with httpx.AsyncClient(verify=self.trust, timeout=timeout_s, trust_env=False) as http:
            while True:
                response, why = None, ""
                try:
                    response = await http.get(f"{self.url}/{path.removeprefix('/')}")
                    why = f"status {response.status_code}"
                except httpx.TransportError as error:
                    why = str(error) or type(error).__name__
                if response is not None and (response.is_success or response.is_redirect):
                    return
                if response is not None and response.headers.get("content-type") == "application/problem+json":
                    problem = error_of(response)
                    if isinstance(problem, TrajectoryEndedError | NotFoundError):
                        raise problem
                    why = problem.message
                if time.monotonic() + READY_STEP_S > until_s:
                    message = f"the server on port {self.port} is not ready after {timeout_s:g} s: {why}"
                    raise CapacityExceededError(message, component="ports")
                await pause(READY_STEP_S)

    async def close(self) -> None:
        """Withdraw it: its URL leads nowhere from now on, and open connections end; idempotent."""
        with suppress(NotFoundError):
            await self._client._send(requests.withdraw_port(self.trajectory, self.id))


class AsyncTrajectory:
    """One rollout: its actions run in order in one sandbox, which is removed on leaving.

    Once it was opened (by entering it, or by `open`), whatever is asked of it raises TrajectoryEndedError after its
    end, whoever ended it: it never goes on in a new, empty sandbox. It may be pickled: copies share the trajectory.
    """

    def __init__(
        self,
        client: AsyncClient,
        id: str,
        *,
        function: str,
        task: str | None,
        step: int | None = None,
        workdir: str,
        sandbox: SandboxChoice | None = None,
        snapshot: str | None = None,
        new: bool = False,
    ) -> None:
        self.id = id
        self._client = client
        self._function = function
        self._task = task
        self._step = step
        self._workdir = workdir
        self._sandbox = sandbox
        self._snapshot = snapshot
        self._new = new
        self._opened = False
        self._closed = False
        #: Whether it lived before it was opened: what another has done is in its sandbox.
        self.joined = False
        #: Whether it was pickled: it is let go, and not ended, where this process ends.
        self.shared = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    def __getstate__(self) -> dict[str, Any]:
        self.shared = True
        return self.__dict__

    async def __aenter__(self) -> AsyncTrajectory:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> AsyncTrajectory:
        """Make the sandbox as it was chosen, or join the one that lives; a closed handle begins anew.

        ``joined`` says which, and joining is warned of. Raises ConflictError instead if it was to be ``new``, and if
        it lives in another sandbox, and InvalidInputError for what the function does not allow.
        """
        chosen = (self._function, self._task, self._sandbox, self._snapshot, self._step)
        heartbeats = self._client.heartbeats
        request = requests.open_trajectory(
            self.id, *chosen, lease_s=heartbeats.lease_s, holder=heartbeats.holder, new=self._new
        )
        lives = self._opened and not self._closed
        try:
            self.joined = bool((await self._client._send(request)).joined)
        except BaseException as error:
            if requests.is_answer_lost(error):
                heartbeats.give_up([self.id])
            raise
        if self.joined and not lives:
            requests.logger.warning("trajectory %s lived already: what is in its sandbox is there to be seen", self.id)
        return self._begin()

    def _begin(self) -> AsyncTrajectory:
        """Note that it was opened, and hold it from now on."""
        self._opened, self._closed = True, False
        self._client.heartbeats.hold(self)
        return self

    async def snapshot(self) -> SnapshotInfo:
        """Keep its files as they are when all that was asked of it before has ended, for others to begin with.

        Raises ConflictError while files are on their way, CapacityExceededError while its node is not reached.
        """
        self._living()
        heartbeats = self._client.heartbeats
        taken = await self._client._send(requests.take_snapshot(self.id, heartbeats.holder))
        heartbeats.know(taken.snapshot)
        return taken

    async def fork(self, to: Sequence[str], *, step: int | None = None) -> Sequence[AsyncTrajectory]:
        """Open trajectories that begin with its files as they are now, and return their handles: all, or none.

        They count for a ``step`` of the task only if it is named here. Raises as `snapshot`, and ConflictError for a
        name that lives. Each handle is to be closed, or entered.
        """
        self._living()
        heartbeats = self._client.heartbeats
        choices = (self.id, self._function, to, self._task, step, heartbeats.lease_s, heartbeats.holder)
        try:
            answer = await self._client._send(requests.fork(*choices))
        except BaseException as error:
            if requests.is_answer_lost(error):
                heartbeats.give_up(to)
            raise
        heartbeats.know(answer.snapshot.snapshot)
        return [self._forked(each.trajectory, answer.snapshot.snapshot) for each in answer.trajectories]

    def _forked(self, id: str, snapshot: str) -> AsyncTrajectory:
        chosen: dict[str, Any] = {"function": self._function, "task": self._task, "workdir": self._workdir}
        return type(self)(self._client, id, snapshot=snapshot, **chosen)._begin()

    async def close(self) -> None:
        """End the trajectory; idempotent."""
        self._closed = True
        self._client.heartbeats.let_go(self)
        try:
            await self._client._send(requests.end_trajectory(self.id))
        except NotFoundError:
            return

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        user: str | None = None,
        merge: bool = False,
        timeout_s: float | None = None,
        key: str | None = None,
        on_output: Callable[[str], object] | None = None,
    ) -> InvocationResult:
        """Run a command: a string is shell text, a sequence an argument vector.

        With ``merge`` standard error goes to stdout, in the order in which both were written. ``on_output`` is called
        with each line that it says, as it says it (``on_output=print``).
        """
        input = requests.command(command, self._directory(cwd), env, stdin, user, merge)
        if on_output is None:
            return await self.invoke(self._function, input, timeout_s=timeout_s, key=key)
        begun = await self._client._send(self._call(self._function, input, "async", timeout_s, key))
        lines = OutputLines(on_output)
        try:
            async for line in self._client.logs(begun.id, follow=True):
                lines.take(line)
            lines.end()
            return await self._client.wait(begun.id)
        except BaseException:
            if key is None:
                with suppress(TangramError):
                    await self._client.cancel(begun.id)
            raise

    async def session(
        self,
        command: str | Sequence[str],
        *,
        terminal: tuple[int, int] | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncSessionHandle:
        """Begin a command to type to: on a terminal of so many rows and columns, or with pipes.

        It is an action of the trajectory, so it waits for the one before, and the next one waits for its end.
        """
        request = requests.open_session(
            self.id,
            self._function,
            command,
            {"cwd": self._directory(cwd), "env": None if env is None else dict(env), "user": user},
            terminal,
            task=self._task,
            timeout_s=timeout_s,
            living=self._living(),
            holder=self._client.heartbeats.holder,
        )
        begun = await self._client._send(request)
        self._client.heartbeats.know(begun.id)
        return AsyncSessionHandle(self._client, begun.id, begun=True)

    async def port(self, port: int, *, ttl_s: float | None = None) -> AsyncPort:
        """Let a server be reached that listens on this port of the sandbox's loopback, for ``ttl_s`` at most.

        Raises ConflictError where the gateway has no listener for ports, TrajectoryEndedError.
        """
        self._living()
        opened = await self._client._send(requests.open_port(self.id, self._function, port, ttl_s))
        return AsyncPort(self._client, opened)

    def _directory(self, cwd: str | None) -> str | None:
        """Return where a command runs; None for the sandbox's own working directory."""
        return self._place(cwd) if cwd else self._workdir or cwd

    async def invoke(
        self,
        function: str,
        input: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        key: str | Literal[True] | None = None,
        logs: bool = False,
    ) -> InvocationResult:
        """Run a function in this trajectory, with a ``key`` as `AsyncClient.invoke` has it."""
        return await self._client._invoke(self._call(function, input, "sync", timeout_s, key), logs)

    def _call(
        self,
        function: str,
        input: Mapping[str, Any],
        mode: str,
        timeout_s: float | None,
        key: str | Literal[True] | None,
    ) -> ApiRequest[InvocationResult]:
        """Return the request of a call in this trajectory."""
        return requests.invoke(
            function,
            input,
            mode=mode,
            task=self._task,
            step=self._step,
            trajectory=self.id,
            key=key,
            timeout_s=timeout_s,
            living=self._living(),
        )

    async def upload(self, path: str, data: bytes | str, *, mode: int | None = None, user: str | None = None) -> None:
        """Write a file, as one of the users that the function allows; a relative path begins at the working directory.

        A file that is there keeps its owner and, without ``mode``, its mode. Raises ConflictError for a place that
        cannot be written to; ``detail["file_error"]`` says why.
        """
        content = data.encode() if isinstance(data, str) else data
        await self._client._send(self._files(user).upload(self._place(path), content, mode))

    async def download(self, path: str, *, user: str | None = None) -> bytes:
        """Read a file; raises NotFoundError."""
        return await self._client._send(self._files(user).download(self._place(path)))

    async def list(self, path: str = ".", *, user: str | None = None) -> Sequence[FileEntry]:
        """Return the entries of a directory; raises NotFoundError."""
        return (await self._client._send(self._files(user).list(self._place(path)))).files

    async def upload_archive(self, path: str, data: bytes, *, user: str | None = None) -> None:
        """Unpack a tar below a directory, which is made; no entry leaves it."""
        await self._client._send(self._files(user).upload_archive(self._place(path), data))

    async def download_archive(self, path: str = ".", *, user: str | None = None) -> bytes:
        """Read a directory, or a file, as a tar; raises NotFoundError."""
        return await self._client._send(self._files(user).download_archive(self._place(path)))

    def _files(self, user: str | None) -> requests.FileRequests:
        return requests.FileRequests(trajectory=self.id, user=user, living=self._living())

    def _place(self, path: str) -> str:
        """Return a path in the sandbox; without a ``workdir`` the gateway knows where a relative one begins."""
        return posixpath.join(self._workdir, path)

    def _living(self) -> bool:
        """Return whether the gateway must know of it; raises TrajectoryEndedError if this handle was closed."""
        if self._closed:
            raise TrajectoryEndedError(f"trajectory {self.id!r} was closed")
        if (self._sandbox is not None or self._snapshot is not None) and not self._opened:
            raise InvalidInputError(f"trajectory {self.id!r} has chosen its sandbox: enter it, or call open, first")
        if self._opened:
            self._client.heartbeats.hold(self)
        return self._opened


#: Longest silence of an answer that waits for nothing, and of a followed log, which has heartbeats.
ANSWER_S = 60.0
PAGE = 100
WAIT_SLICE_S = 30.0
#: Connections of a client, and how many of them calls that last leave to the others (cancel, upload, get ...): a third
#: of fewer.
CONNECTIONS = 640
SPARE = 64


class AsyncClient:
    """A client of one gateway; use it as an async context manager, or `close` it.

    ``server`` and ``token`` default to TANGRAM_SERVER and TANGRAM_TOKEN; `http://127.0.0.1:8080` without, and the
    token that a gateway of this user on this machine wrote down.
    ``ca`` is a file of the certificates that a gateway with TLS is known by (TANGRAM_CA; the system's without), and
    ``cert`` one of the client's own with its key (TANGRAM_CERT), if the gateway wants to know it.
    A trajectory that it opened ends with this client or process, and when for ``lease_s`` seconds neither was heard of
    nor an action used it; a thread sends the heartbeats. None: it has its ``idle_ttl`` alone.
    With ``raise_failures`` an invocation that ended badly raises InvocationFailed instead of being returned.
    Every method raises the errors of `tangram.errors`.

    It may be pickled, inherited by fork, and used from several event loops: its connections are opened where it is
    used. It opens at most ``connections``; calls that find none free wait.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        token: str | None = None,
        retries: Retries | None = None,
        raise_failures: bool = False,
        connections: int = CONNECTIONS,
        ca: str | None = None,
        cert: str | None = None,
        lease_s: float | None = LEASE_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if connections < 3:
            raise InvalidInputError(f"connections must be at least 3, not {connections}")
        self.server = server_of(server)
        self._token = token_of(token)
        self._retries = retries or Retries()
        #: Whether a gateway has answered.
        self._reached = False
        self._raise_failures = raise_failures
        self._connections = connections
        self._ca, self._cert = ca, cert
        self._transport = transport
        #: Says to the gateway that whoever holds an opened trajectory lives.
        self.heartbeats = Heartbeats(self.server, self._token, lease_s if transport is None else None, ca, cert)
        self._opened = AsyncOpened(self._open)
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.server!r})"

    def __getstate__(self) -> dict[str, Any]:
        # What is open stays here; the copy opens its own when it is used.
        return {name: value for name, value in self.__dict__.items() if name != "_opened"} | {"_closed": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._opened = AsyncOpened(self._open)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the trajectories that are still open, and close what is open in this process and event loop.

        No further call is possible.
        """
        self._closed = True
        await aside(self.heartbeats.close)
        link = self._opened.take()
        if link is not None:
            if link.stream is not None:
                await link.stream.close()
            await link.http.aclose()

    async def invoke(
        self,
        function: str,
        input: Mapping[str, Any],
        *,
        task: str | None = None,
        step: int | None = None,
        trajectory: str | None = None,
        parent: str | None = None,
        key: str | Literal[True] | None = None,
        timeout_s: float | None = None,
        wait_s: float | None = None,
        logs: bool = False,
    ) -> InvocationResult:
        """Run the function and return its end; after ``wait_s`` the record as it stands, while the work goes on.

        Giving up (a cancelled coroutine, a broken connection) cancels the invocation, unless it has a ``key``. Calls
        with the same key run once, so one is sent again after a broken connection. True makes a new key.
        """
        request = requests.invoke(
            function,
            input,
            mode="sync",
            task=task,
            step=step,
            trajectory=trajectory,
            parent=parent,
            key=key,
            timeout_s=timeout_s,
            wait_s=wait_s,
        )
        return await self._invoke(request, logs)

    async def submit(
        self,
        function: str,
        input: Mapping[str, Any],
        *,
        task: str | None = None,
        step: int | None = None,
        trajectory: str | None = None,
        parent: str | None = None,
        key: str | None = None,
        timeout_s: float | None = None,
        callback_url: str | None = None,
    ) -> InvocationResult:
        """Queue the function and return its record at once; the acceptance is durable."""
        request = requests.invoke(
            function,
            input,
            mode="async",
            task=task,
            step=step,
            trajectory=trajectory,
            parent=parent,
            key=key,
            timeout_s=timeout_s,
            callback_url=callback_url,
        )
        return await self._send(request)

    async def submit_all(
        self, calls: Sequence[BatchCall], *, wait: str = "none", timeout_s: float | None = None
    ) -> list[InvocationResult | TangramError]:
        """Queue many with one request; return the verdict of each, in order: its record, or what refused it.

        ``wait`` is ``none``, ``any`` or ``all``: for whose end to wait first, at most ``timeout_s``.
        """
        return await self._send(requests.batch(calls, wait, timeout_s))

    @overload
    async def map(
        self,
        function: str,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task: str | None = None,
        step: int | None = None,
        key: str | None = None,
        timeout_s: float | None = None,
        concurrency: int = CONCURRENCY,
        progress: OnProgress | None = None,
        return_failures: Literal[False] = False,
    ) -> list[InvocationResult]: ...

    @overload
    async def map(
        self,
        function: str,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task: str | None = None,
        step: int | None = None,
        key: str | None = None,
        timeout_s: float | None = None,
        concurrency: int = CONCURRENCY,
        progress: OnProgress | None = None,
        return_failures: Literal[True],
    ) -> list[InvocationResult | TangramError]: ...

    async def map(
        self,
        function: str,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task: str | None = None,
        step: int | None = None,
        key: str | None = None,
        timeout_s: float | None = None,
        concurrency: int = CONCURRENCY,
        progress: OnProgress | None = None,
        return_failures: bool = False,
    ) -> list[InvocationResult] | list[InvocationResult | TangramError]:
        """Run the function once for each input and return the ends in the order of the inputs.

        At most ``concurrency`` run at once; inputs are taken when there is room, so they may be a generator.
        ``progress`` is called after each end. With a ``key`` each call has the key ``KEY-INDEX``: a map that is
        repeated after a crash runs nothing twice.

        A call that raises does not end the others: they all run, then MapFailed is raised, whose ``results`` holds
        every end; with ``return_failures`` the errors are returned in their places instead.
        """
        ends = MapEnds(inputs, progress)

        async def call(index: int, input: Mapping[str, Any]) -> None:
            own_key = None if key is None else f"{key}-{index}"
            ends.take(index, await self._end_of(function, input, task, step, own_key, timeout_s))

        if concurrency < 1:
            raise InvalidInputError(f"concurrency must be at least 1, not {concurrency}")
        await for_each(inputs, call, concurrency)
        if return_failures:
            return ends.ordered()
        succeeded = ends.succeeded()
        if succeeded is None:
            raise MapFailed(ends.ordered())
        return succeeded

    async def _end_of(
        self,
        function: str,
        input: Mapping[str, Any],
        task: str | None,
        step: int | None,
        key: str | None,
        timeout_s: float | None,
    ) -> InvocationResult | TangramError:
        try:
            return await self.invoke(function, input, task=task, step=step, key=key, timeout_s=timeout_s)
        except TangramError as error:
            return error

    async def wait(self, id: str, timeout_s: float | None = None) -> InvocationResult:
        """Return the end of an invocation; raises TimeoutError if it has not ended after ``timeout_s``."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = WAIT_SLICE_S if deadline_s is None else min(WAIT_SLICE_S, deadline_s - time.monotonic())
            result = await self._send(requests.get_invocation(id, max(0.0, left_s)))
            if result.ended:
                return self._judged(result)
            if left_s <= 0:
                raise TimeoutError(f"invocation {id} is {result.state} after {timeout_s} s")

    async def get(self, id: str) -> InvocationResult:
        """Return the record as it stands."""
        return await self._send(requests.get_invocation(id))

    async def list(
        self,
        *,
        function: str | None = None,
        task: str | None = None,
        trajectory: str | None = None,
        state: str | None = None,
        reason: str | None = None,
        since: str | None = None,
        until: str | None = None,
        dead: bool | None = None,
        before: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[InvocationResult]:
        """Yield records, newest first, without input and result; at most ``limit``; ``dead``: dead letters.

        ``since`` and ``until`` bound the acceptance: an instant of RFC 3339, or how long ago (``15m``); ``before`` is
        the id behind which it goes on.
        """
        filters = {"function": function, "task": task, "trajectory": trajectory, "state": state}
        filters |= {"reason": reason, "since": since, "until": until}
        filters["dead"] = None if dead is None else str(dead).lower()
        left, cursor = limit, before
        while left is None or left > 0:
            params = {**filters, "limit": str(min(PAGE, left or PAGE)), "cursor": cursor}
            page = await self._send(requests.get("/v1/invocations", InvocationPage, params))
            for record in page.invocations:
                yield result_of(record)
            left = None if left is None else left - len(page.invocations)
            cursor = page.next_cursor
            if cursor is None:
                return

    async def cancel(self, id: str) -> InvocationResult:
        """Cancel it; raises ConflictError if it has ended already."""
        return await self._send(requests.cancel_invocation(id))

    async def redrive(self, id: str) -> InvocationResult:
        """Send a dead letter again, as an invocation of its own; raises ConflictError if it is none."""
        return await self._send(requests.redrive(id))

    async def purge(self, id: str) -> int:
        """Take a dead letter off the list, its record stays; raises ConflictError if it is none."""
        return (await self._send(requests.purge(id))).purged

    async def purge_all(self, function: str | None = None) -> int:
        """Take all dead letters, or those of one function, off the list; return how many they were."""
        return (await self._send(requests.purge(None, function))).purged

    async def logs(self, id: str, *, follow: bool = False, offset: int = 0) -> AsyncIterator[LogLine]:
        """Yield the log from ``offset`` on; with ``follow`` until the invocation has ended, over broken connections."""
        follower = LogFollower(offset, self._retries, to_its_end=follow)
        while not follower.ended:
            try:
                async for line in self._log_lines(id, follow, follower):
                    yield line
                if not follower.ended:
                    raise ConnectionFailed(f"the log of {id} broke off")
            except TangramError as error:
                wait_s = follower.again_s(error)
                if wait_s is None:
                    raise
                await pause(wait_s)

    async def _log_lines(self, id: str, follow: bool, follower: LogFollower) -> AsyncIterator[LogLine]:
        """Yield what one connection brings."""
        link = self._link()
        path = f"{requests.invocation_path(id)}/logs"
        params = {"follow": "true" if follow else "false", "offset": str(follower.offset)}
        try:
            async with link.lasting, link.http.stream("GET", path, params=params) as response:
                if not response.is_success:
                    await response.aread()
                    raise error_of(response)
                async for text in response.aiter_lines():
                    if (line := follower.feed(text)) is not None:
                        yield line
        except httpx.TransportError as error:
            raise connection_lost(f"log of {id}", error) from error

    async def images(self) -> Sequence[ImageInfo]:
        """Return the container images of the gateway, and how far pulls are."""
        return (await self._send(requests.get("/v1/images", ImageList))).images

    async def pull_images(self, images: Sequence[str], *, wait_s: float | None = None) -> Sequence[ImageInfo]:
        """Begin to pull container images ahead of a run, and return their states, after ``wait_s`` at the latest."""
        return (await self._send(requests.pull_images(images, wait_s))).images

    async def queue(self, limit: int = 100) -> Sequence[QueueEntry]:
        """Return the first ``limit`` (at most 1000) actions that wait, in order of service, and for what."""
        return (await self._send(requests.get("/v1/queue", QueuePage, {"limit": str(limit)}))).queue

    async def activity(self) -> ActivityInfo:
        """Return the rates and times of the last minute, and the failures of the last 15."""
        return await self._send(requests.get("/v1/activity", ActivityInfo))

    async def trajectories(self) -> Sequence[TrajectoryInfo]:
        """Return the living trajectories."""
        infos: list[TrajectoryInfo] = []
        cursor = None
        while True:
            page = await self._send(requests.get("/v1/trajectories", TrajectoryPage, {"cursor": cursor}))
            infos += page.trajectories
            cursor = page.next_cursor
            if cursor is None:
                return infos

    async def trajectory_info(self, id: str) -> TrajectoryInfo:
        """Return one living trajectory; raises NotFoundError."""
        return await self._send(requests.get(requests.trajectory_path(id), TrajectoryInfo))

    async def end_trajectory(self, id: str) -> None:
        """End a trajectory with everything in it; raises NotFoundError."""
        await self._send(requests.end_trajectory(id))

    async def snapshots(self) -> Sequence[SnapshotInfo]:
        """Return the snapshots of trajectories, the oldest first."""
        return (await self._send(requests.get("/v1/snapshots", SnapshotList))).snapshots

    async def remove_snapshot(self, id: str) -> None:
        """Remove a snapshot; raises NotFoundError, or ConflictError while a living trajectory needs it."""
        path = f"/v1/snapshots/{quote(id, safe='')}"
        await self._send(requests.sent("DELETE", path, requests.nothing, patient=True))

    def trajectory(
        self,
        id: str | None = None,
        *,
        function: str = "shell",
        task: str | None = None,
        step: int | None = None,
        workdir: str = "",
        sandbox: SandboxChoice | Mapping[str, Any] | None = None,
        snapshot: str | None = None,
        new: bool = False,
    ) -> AsyncTrajectory:
        """Return a rollout's environment, made like ``function``'s sandbox on entering and removed on leaving.

        Without an ``id`` it is a new one, with an id of its own. One that lives is joined, unless it is to be ``new``.

        It counts as a rollout of the ``step`` of its task, if one is named (`tell_step`).
        ``workdir`` is where its commands run and relative paths begin; the sandbox's own working directory by default.
        ``sandbox`` is what it chooses within what the function allows: image, env, workdir, user, memory, network and
        idle_ttl, for example ``{"image": "swebench/x", "memory": "2Gi"}``; or ``snapshot`` is the one that it begins
        with, with the choices of the trajectory of which that was taken.
        """
        return AsyncTrajectory(
            self,
            id or requests.drawn_name(),
            function=function,
            task=task,
            step=step,
            workdir=workdir,
            sandbox=requests.sandbox_choice(sandbox),
            snapshot=snapshot,
            new=new or id is None,
        )

    async def functions(self) -> Sequence[FunctionInfo]:
        """Return every registered function."""
        return (await self._send(requests.get("/v1/functions", FunctionList))).functions

    async def function(self, name: str) -> FunctionInfo:
        """Return one registered function, with what was learned of it; raises NotFoundError."""
        return await self._send(requests.get(requests.function_path(name), FunctionInfo))

    async def remove_function(self, name: str, *, dry_run: bool = False) -> ConfigDiff:
        """Remove a function that was applied; raises NotFoundError, and ConflictError for one of the server's files."""
        return await self._send(requests.remove_function(name, dry_run))

    async def apply(
        self,
        files: Mapping[str, str] | None = None,
        *,
        dry_run: bool = False,
        prune: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> ConfigDiff:
        """Apply configuration files (path -> text), or the server's own files read again; return the differences.

        What they do not name stays, unless ``prune`` removes it. ``variables`` are what ``${NAME}`` stands for in
        ``files``.
        """
        return await self._send(requests.apply(files, dry_run, prune, variables))

    async def put_function(
        self,
        name: str,
        definition: Mapping[str, Any],
        *,
        sources: Mapping[str, str] | None = None,
        dry_run: bool = False,
    ) -> ConfigDiff:
        """Add or change one function, with the keys of its YAML; return the differences. Needs the admin token.

        ``sources`` are the files of a handler, path -> text; they are kept by the gateway, as is the function, until
        it is removed. Raises InvalidConfigError, and ConflictError for a function of the server's own files.
        """
        return await self._send(requests.put_function(name, definition, sources or {}, dry_run))

    async def register(
        self, handler: Callable[..., Any], name: str | None = None, *, dry_run: bool = False, **definition: Any
    ) -> ConfigDiff:
        """Register a Python function of this script as a handler, and return the differences. Needs the admin token.

        Sent are the function and what it names of its module's top level (`tangram.client.handlers`), no more.
        ``definition`` has the keys of a handler in YAML, over those of its decorator. Raises InvalidInputError if it
        cannot stand by itself, else as `put_function`.
        """
        sent = captured(handler)
        keys = {**definition_of(handler, definition), "runtime": "handler", "handler": sent.place}
        return await self.put_function(name or handler.__name__, keys, sources=sent.sources, dry_run=dry_run)

    async def resources(self) -> ResourcesInfo:
        """Return pools, what is held of them, and what the sandboxes and model devices are."""
        return await self._send(requests.get("/v1/resources", ResourcesInfo))

    async def nodes(self) -> Sequence[NodeStatus]:
        """Return the machines that actions run on, and how they are."""
        return (await self._send(requests.get("/v1/nodes", NodeStatusList))).nodes

    async def ray_machines(self) -> Sequence[RayMachineStatus]:
        """Return the machines of a Ray cluster that are to be nodes, and how far that has come (`cluster.ray`)."""
        return (await self._send(requests.get("/v1/nodes", NodeStatusList))).ray

    async def drain_node(self, name: str, why: str = "") -> NodeStatus:
        """Have a machine take no new work and leave when it is empty; raises NotFoundError. Needs the admin token."""
        return await self._send(requests.drain_node(name, why))

    async def node_ticket(self, name: str) -> NodeTicket:
        """Return what admits one machine once, soon (`tangram node join`). Needs the admin token."""
        request = requests.sent("POST", "/v1/node-tickets", requests.reader(NodeTicket), TicketWanted(name=name))
        return await self._send(request)

    async def page_address(self) -> str:
        """Return an address that opens the gateway's page in one browser, once. Needs the admin token."""
        issued = await self._send(requests.sent("POST", "/v1/page-keys", requests.reader(PageKey)))
        return f"{self.server}/?key={issued.key}"

    async def tasks(self) -> Sequence[TaskInfo]:
        """Return the RL tasks: weights, bounds and use, and their steps that have not ended."""
        return (await self._send(requests.get("/v1/tasks", TaskList))).tasks

    async def steps(self, task: str) -> Sequence[StepInfo]:
        """Return the steps of a task that the gateway keeps, that opened last first."""
        return (await self._send(requests.get(requests.steps_path(task), StepList))).steps

    async def tell_step(self, task: str, step: int, *, expected: int) -> StepInfo:
        """Tell how many rollouts a step is to have: trajectories opened under it, and calls of none that name it."""
        path, body = f"{requests.steps_path(task)}/{step}", StepExpectation(expected=expected)
        return await self._send(requests.sent("PUT", path, requests.reader(StepInfo), body))

    async def session(self, id: str) -> AsyncSessionHandle:
        """Attach to a session that was begun before, here or elsewhere; raises NotFoundError."""
        await self._send(requests.get_invocation(id))
        return AsyncSessionHandle(self, id, begun=False)

    async def _invoke(self, request: ApiRequest[InvocationResult], logs: bool) -> InvocationResult:
        result = await self._send(request)
        if logs:
            result = msgspec.structs.replace(result, logs=tuple([line async for line in self.logs(result.id)]))
        return self._judged(result)

    async def _send(self, request: ApiRequest[_T]) -> _T:
        """Send, and send again where that is safe."""
        failing = FailureStreak(self._retries)
        while True:
            try:
                return await self._send_once(request)
            except TangramError as error:
                wait_s = failing.again_s(error, repeatable=request.repeatable, new=not self._reached)
                if wait_s is None:
                    raise
            await pause(wait_s)

    async def _send_once(self, request: ApiRequest[_T]) -> _T:
        link = self._link()
        if request.streamed is None or link.stream is None:
            return await self._over_http(link, request)
        link.stream.enter()
        try:
            answer = await link.stream.carry(request.streamed)
            if answer is None:
                return await self._over_http(link, request)
        finally:
            link.stream.leave()
            self._reached |= link.stream.has_opened
        return cast(_T, read_streamed(answer))  # what a stream carries is of an invocation

    async def _over_http(self, link: AsyncLink, request: ApiRequest[_T]) -> _T:
        async with AsyncExitStack() as stack:
            if request.lane == "opening":
                await stack.enter_async_context(link.opening)
            if request.lane != "spare":
                await stack.enter_async_context(link.lasting)
            began_s = time.monotonic()
            try:
                response = await link.http.request(
                    request.method,
                    request.path,
                    params=request.params,
                    headers=request.headers,
                    content=request.content,
                    timeout=httpx.Timeout(ANSWER_S, read=None) if request.patient else ANSWER_S,
                )
            except httpx.TransportError as error:
                self._reached |= was_read(error, time.monotonic() - began_s)
                raise connection_lost(self.server, error, reached=self._reached) from error
        self._reached = True
        return request.answer(response)

    def _judged(self, result: InvocationResult) -> InvocationResult:
        return result.raise_for_failure() if self._raise_failures else result

    def _link(self) -> AsyncLink:
        if self._closed:
            raise RuntimeError("the client is closed")
        return self._opened.get()

    def _open(self) -> AsyncLink:
        bearer, transport, stream = Bearer(self._token), self._transport, None
        if transport is None:
            transport = AsyncConnectionPool(httpx.URL(self.server), self._connections, self._ca, self._cert)
            stream = AsyncCallStream(self.server, bearer, transport.trust, transport.proxy)
        http = httpx.AsyncClient(base_url=self.server, auth=bearer, timeout=ANSWER_S, transport=transport)
        return AsyncLink(http, self._connections, stream)
