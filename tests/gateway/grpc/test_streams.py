"""Files and sessions over gRPC on a real socket: whole, in pieces, bounded, refused with their codes, and cut off."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import orjson
import pytest
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.generated.tangram_grpc import GatewayStub
from gateway.grpc.server import PIECE_MAX_BYTES
from gateway.grpc.service import FILE_PIECE_BYTES
from tests.cluster.world import NodeRelay
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, serving, until
from tests.gateway.grpc.peer import framed, head, peer
from tests.gateway.grpc.test_service import channel
from tests.house.source import ROOT

pytestmark = pytest.mark.slow
FILE_METHOD = "/tangram.v1.Gateway/"
SESSION = "/tangram.v1.Gateway/Session"
ECHO = ("sh", "-c", "while read -r line; do echo said $line; done; exit 9")


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    bench = GatewayBench(tmp_path, server={"file_limit": "3Mi", "body_limit": "4Ki"})
    async with serving(bench) as gateway:
        await gateway.http.put("/v1/trajectories/t", json={"function": "shell"})
        yield gateway


@pytest.fixture
async def bounded_stub(running: RunningGateway) -> AsyncIterator[GatewayStub]:
    async with channel(running) as opened:
        yield GatewayStub(opened)


def upload(target: pb.FileTarget, *pieces: bytes) -> list[pb.WriteFileRequest]:
    return [pb.WriteFileRequest(target=target), *(pb.WriteFileRequest(data=piece) for piece in pieces)]


def to(path: str, **given: object) -> pb.FileTarget:
    return pb.FileTarget(**{"trajectory": "t", "path": path, **given})  # type: ignore[arg-type]


def whole(pieces: Sequence[pb.FilePiece]) -> bytes:
    assert all(len(piece.data) <= FILE_PIECE_BYTES for piece in pieces)
    return b"".join(piece.data for piece in pieces)


async def listed(gateway: RunningGateway) -> dict[str, tuple[int, str]]:
    """What lies in the sandbox's working directory: path -> size and mode."""
    answer = await gateway.http.get("/v1/trajectories/t/files?path=.&list=true")
    return {each["path"]: (each["size_bytes"], each["mode"]) for each in answer.json()["files"]}


async def test_a_file_goes_up_and_comes_down_in_pieces(running: RunningGateway, bounded_stub: GatewayStub) -> None:
    data = bytes(range(256)) * 5000  # 1.28 MB, above the bound of any other message
    written = await bounded_stub.WriteFile(
        upload(to("d.bin", mode="750"), data[:7], b"", data[7:700_000], data[700_000:])
    )
    assert (written.path, written.size_bytes) == ("/workspace/d.bin", len(data))
    pieces = await bounded_stub.ReadFile(pb.ReadFileRequest(trajectory="t", path="/workspace/d.bin"))
    assert (pieces[0].size_bytes, pieces[1].HasField("size_bytes")) == (len(data), False)
    assert whole(pieces) == data
    assert await listed(running) == {"/workspace/d.bin": (len(data), "750")}
    assert (await bounded_stub.WriteFile(upload(to("empty")))).size_bytes == 0
    (piece,) = await bounded_stub.ReadFile(pb.ReadFileRequest(trajectory="t", path="empty"))
    assert (piece.data, piece.size_bytes, piece.HasField("size_bytes")) == (b"", 0, True)


async def test_a_refusal_has_the_status_and_the_code_of_the_file_that_http_has(running: RunningGateway) -> None:
    await running.http.put("/v1/trajectories/t/files?path=tree/f", content=b"x")
    for method, messages, status, code in (
        ("ReadFile", [pb.ReadFileRequest(trajectory="t", path="nothing")], Status.NOT_FOUND, "not_found"),
        ("ReadFile", [pb.ReadFileRequest(trajectory="t", path="tree")], Status.FAILED_PRECONDITION, "is_a_directory"),
        ("WriteFile", upload(to("tree"), b"x"), Status.FAILED_PRECONDITION, "is_a_directory"),
    ):
        async with peer(running) as other:
            sent = b"".join(framed(message.SerializeToString()) for message in messages)
            answer = await other.ask(head({":path": FILE_METHOD + method}), sent)
        assert (answer.status, orjson.loads(answer.headers["tangram-errors"])["file_error"]) == (
            str(status.value),
            code,
        ), (method, answer.headers)


async def test_what_is_odd_or_not_there_is_refused(running: RunningGateway, bounded_stub: GatewayStub) -> None:
    for work, status in (
        (bounded_stub.WriteFile(upload(to("f", mode="9"), b"x")), Status.INVALID_ARGUMENT),
        (bounded_stub.WriteFile(upload(to(""), b"x")), Status.INVALID_ARGUMENT),
        (bounded_stub.WriteFile(upload(to("a\0b"), b"x")), Status.INVALID_ARGUMENT),
        (bounded_stub.WriteFile([]), Status.INVALID_ARGUMENT),
        (bounded_stub.WriteFile([pb.WriteFileRequest(data=b"x")]), Status.INVALID_ARGUMENT),
        (bounded_stub.WriteFile([*upload(to("f"), b"x"), *upload(to("g"))]), Status.INVALID_ARGUMENT),
        (bounded_stub.WriteFile(upload(to("f", trajectory="other"), b"x")), Status.NOT_FOUND),
        (bounded_stub.WriteFile(upload(to("f", trajectory="other", living=True), b"x")), Status.FAILED_PRECONDITION),
        (bounded_stub.WriteFile(upload(to("f", user="root"), b"x")), Status.FAILED_PRECONDITION),
        (bounded_stub.ReadFile(pb.ReadFileRequest(trajectory="../t", path="f")), Status.INVALID_ARGUMENT),
    ):
        with pytest.raises(GRPCError) as refused:
            await work
        assert refused.value.status is status, refused.value
    assert await listed(running) == {}, "nothing of what was refused is left"


async def test_a_file_and_each_of_its_pieces_have_their_bounds(
    running: RunningGateway, bounded_stub: GatewayStub
) -> None:
    pieces = [b"x" * PIECE_MAX_BYTES] * 3
    assert (await bounded_stub.WriteFile(upload(to("large"), *pieces))).size_bytes == 3 * PIECE_MAX_BYTES
    for odd in ([*pieces, b"x"], [b"x" * (2 * PIECE_MAX_BYTES)]):
        with pytest.raises(GRPCError) as large:
            await bounded_stub.WriteFile(upload(to("larger"), *odd))
        assert large.value.status is Status.RESOURCE_EXHAUSTED
    assert list(await listed(running)) == ["/workspace/large"]


async def test_an_upload_that_is_cut_off_leaves_nothing_and_nobody_else_notices(running: RunningGateway) -> None:
    async with peer(running) as other:
        sent = b"".join(framed(each.SerializeToString()) for each in upload(to("cut"), b"x" * 1000))
        other.send(head({":path": FILE_METHOD + "WriteFile"}), sent, end=False)
        assert (await other.ask(head(), framed(pb.InvokeRequest(function="echo").SerializeToString()))).status == "0"
    await until(lambda: running.app.connections["grpc"].open == 0)
    assert await listed(running) == {}
    async with channel(running) as opened:
        bounded_stub = GatewayStub(opened)
        assert (await bounded_stub.WriteFile(upload(to("cut"), b"whole"))).size_bytes == 5


async def test_a_refused_upload_gives_its_connection_its_window_back(running: RunningGateway) -> None:
    """What was sent and not read counts against all calls of a connection until it is given back."""
    async with channel(running) as opened:
        bounded_stub = GatewayStub(opened)
        for _ in range(12):  # each half a MiB, of the 4 MiB that a connection has
            with pytest.raises(GRPCError):
                await bounded_stub.WriteFile(upload(to("f", trajectory="other"), b"x" * (PIECE_MAX_BYTES // 2)))
        assert (await bounded_stub.Invoke(pb.InvokeRequest(function="echo"))).state == "succeeded"


async def test_the_example_of_the_page_writes_a_file(bounded_stub: GatewayStub) -> None:
    page = (ROOT / "docs" / "reference" / "grpc.md").read_text(encoding="utf-8")
    (example,) = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def upload" in each]
    scope: dict[str, Any] = {}
    exec(example, scope)

    async def data() -> AsyncIterator[bytes]:
        yield b"he"
        yield b"llo"

    assert (await scope["upload"](bounded_stub, to("f"), data())).size_bytes == 5
    assert whole(await bounded_stub.ReadFile(pb.ReadFileRequest(trajectory="t", path="f"))) == b"hello"


class Caller:
    """One call of `Session`, and what it was told."""

    def __init__(self, stub: GatewayStub, metadata: Mapping[str, str] | None = None) -> None:
        self._opening = stub.Session.open(metadata=metadata)
        self._ended = False
        self.id = ""
        self.said = {"stdout": b"", "stderr": b""}
        #: Where its output stands.
        self.offset = 0
        self.attached: pb.SessionAttached | None = None
        self.fed: list[pb.SessionFed] = []
        self.last: pb.SessionEvent | None = None

    async def __aenter__(self) -> Caller:
        self.stream = await self._opening.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        if error[0] is None and not self._ended:
            await self.stream.cancel()
        await self._opening.__aexit__(*error)  # type: ignore[arg-type]

    async def send(self, **request: object) -> None:
        await self.stream.send_message(pb.SessionRequest(**request))  # type: ignore[arg-type]

    async def type(self, data: bytes, offset: int | None = None, *, end: bool = False) -> None:
        await self.send(input=pb.SessionInput(data=data, offset=offset, end=end))

    async def hear(self) -> bool:
        """Take the next event; return whether there was one."""
        async with asyncio.timeout(DEADLINE_S):
            event = await self.stream.recv_message()
        if event is None:
            return False
        match event.WhichOneof("event"):
            case "accepted":
                self.id = event.accepted.id
            case "attached":
                self.attached = event.attached
            case "output":
                assert event.output.offset == self.offset, "no byte is lost, none comes twice"
                self.said[event.output.stream] += event.output.data
                self.offset += len(event.output.data)
            case "fed":
                self.fed.append(event.fed)
            case "detached" | "ended":
                self.last = event
        return True

    async def until_attached(self) -> pb.SessionAttached:
        while self.attached is None:
            assert await self.hear()
        return self.attached

    async def until_said(self, data: bytes) -> None:
        while data not in self.said["stdout"]:
            assert await self.hear(), self.said

    async def until_fed(self, count: int) -> None:
        while not self.fed or self.fed[-1].input_offset < count:
            assert await self.hear()

    async def end(self) -> pb.SessionEnd:
        """Hear all that comes, and return how it ended."""
        while await self.hear():
            pass
        if self.last is None:
            raise StreamTerminatedError("refused")  # the block is left with the call's status
        await self.stream.end()
        self._ended = True
        return self.last.ended


def opening(*argv: str, terminal: tuple[int, int] | None = None, **given: object) -> pb.OpenSession:
    size = None if terminal is None else pb.SessionTerminal(rows=terminal[0], columns=terminal[1])
    return pb.OpenSession(**{"trajectory": "t1", "argv": argv, "terminal": size, **given})  # type: ignore[arg-type]


@asynccontextmanager
async def call(stub: GatewayStub, request: pb.OpenSession | pb.AttachSession) -> AsyncIterator[Caller]:
    async with Caller(stub) as caller:
        if isinstance(request, pb.OpenSession):
            await caller.send(open=request)
        else:
            caller.id, caller.offset = request.id, request.offset
            await caller.send(attach=request)
        yield caller


@pytest.fixture
async def stub(gateway: RunningGateway) -> AsyncIterator[GatewayStub]:
    async with channel(gateway) as opened:
        yield GatewayStub(opened)


async def refused(stub: GatewayStub, *requests: pb.SessionRequest) -> tuple[Status, str, str]:
    """Return the status, its message and the code of a call that is refused."""
    with pytest.raises(GRPCError) as told:
        async with stub.Session.open() as stream:
            for request in requests[:-1]:
                await stream.send_message(request)
            if requests:
                await stream.send_message(requests[-1], end=True)
            else:
                await stream.send_request()
                await stream.end()
            async with asyncio.timeout(DEADLINE_S):
                while await stream.recv_message() is not None:
                    pass
    assert stream.trailing_metadata is not None
    return told.value.status, told.value.message or "", str(stream.trailing_metadata["tangram-code"])


async def test_what_cannot_be_is_refused_by_the_same_table(gateway: RunningGateway, stub: GatewayStub) -> None:
    size = pb.SessionTerminal(rows=5000)
    invalid = (Status.INVALID_ARGUMENT, "invalid_input")
    for request, expected, told in (
        (pb.SessionRequest(), invalid, "open or attach"),
        (pb.SessionRequest(input=pb.SessionInput(data=b"x")), invalid, "open or attach"),
        (pb.SessionRequest(open=opening("sh", function="echo")), invalid, r"\$.function"),
        (pb.SessionRequest(open=opening("sh", function="nope")), (Status.NOT_FOUND, "not_found"), "nope"),
        (pb.SessionRequest(open=opening()), invalid, r"\$.argv"),
        (pb.SessionRequest(open=opening("sh", terminal=(5000, 1))), invalid, r"\$.terminal.rows"),
        (pb.SessionRequest(open=opening("sh", trajectory="")), invalid, "trajectory"),
        (pb.SessionRequest(open=opening("sh", trajectory="../x")), invalid, "trajectory"),
        (pb.SessionRequest(open=opening("sh", timeout_s=-1)), invalid, "timeout_s"),
        (pb.SessionRequest(open=opening("sh", living=True)), (Status.FAILED_PRECONDITION, "trajectory_ended"), "t1"),
        (
            pb.SessionRequest(attach=pb.AttachSession(id="00000000001-000000000000")),
            (Status.NOT_FOUND, "not_found"),
            "",
        ),
        (pb.SessionRequest(attach=pb.AttachSession(id="x", offset=2**60)), invalid, "offset"),
    ):
        status, message, code = await refused(stub, request)
        assert (status, code) == expected, message
        assert re.search(told, message), message
    assert await refused(stub) == (*invalid[:1], "invalid_input: the request holds no message", invalid[1])
    none = (await gateway.invoke({}, function="echo", headers={"X-Trajectory-Id": "t1"})).json()["id"]
    status, message, _ = await refused(stub, pb.SessionRequest(attach=pb.AttachSession(id=none)))
    assert status is Status.FAILED_PRECONDITION and "no session" in message
    async with call(stub, opening("cat")) as caller:
        await caller.until_attached()
    attach = pb.SessionRequest(attach=pb.AttachSession(id=caller.id))
    conflict = (Status.FAILED_PRECONDITION, "conflict")
    for request, expected, told in (
        (pb.SessionRequest(), invalid, "input, resize or signal"),
        (attach, invalid, "input, resize or signal"),
        (pb.SessionRequest(resize=pb.SessionTerminal()), conflict, "no terminal"),
        (pb.SessionRequest(resize=size), invalid, r"\$.resize.rows"),
        (pb.SessionRequest(signal="SEGV"), invalid, r"\$.signal"),
        (pb.SessionRequest(input=pb.SessionInput(data=b"x", offset=5)), conflict, "input from 5 on"),
    ):
        status, message, code = await refused(stub, attach, request)
        assert (status, code) == expected, message
        assert re.search(told, message), message
    async with call(stub, attach.attach) as caller:
        await caller.type(b"it lives on", end=True)
        assert (await caller.end()).exit_code == 0
    assert caller.said["stdout"] == b"it lives on"


async def test_the_token_and_the_bound_of_a_message_hold_and_the_session_outlives_them(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path, server={"auth": "token", "token": "s3cret", "body_limit": 1000})
    async with serving(bench) as gateway, channel(gateway) as opened:
        stub = GatewayStub(opened)
        with pytest.raises(GRPCError) as stranger:
            async with call(stub, opening("cat")) as caller:
                await caller.end()
        assert stranger.value.status is Status.UNAUTHENTICATED
        metadata = {"authorization": "Bearer s3cret"}
        with pytest.raises(GRPCError) as large:
            async with Caller(stub, metadata) as caller:
                await caller.send(open=opening("cat"))
                await caller.until_attached()
                await caller.type(b"x" * 100_000)
                await caller.end()
        assert large.value.status is Status.RESOURCE_EXHAUSTED
        async with Caller(stub, metadata) as again:
            await again.send(attach=pb.AttachSession(id=caller.id))
            await again.type(b"x" * 1000, end=True)
            await again.end()
        assert again.said["stdout"] == b"x" * 1000
        assert gateway.app.held.bytes == 0


async def test_the_example_of_the_page_goes_on_over_a_cut(gateway: RunningGateway) -> None:
    page = (ROOT / "docs" / "reference" / "grpc.md").read_text(encoding="utf-8")
    (example,) = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def converse" in each]
    scope: dict[str, Any] = {}
    exec(example, scope)
    sessions = gateway.app.api.sessions
    with closing(NodeRelay(f"127.0.0.1:{gateway.app.grpc_port}")) as relay:
        host, port = relay.address.split(":")
        with closing(Channel(host, int(port))) as opened:
            asked = opening("sh", "-c", "cat; exec sleep 1000", idempotency_key="k1")
            conversing = asyncio.create_task(scope["converse"](opened, asked, b"hello"))
            await until(lambda: bool(gateway.app.invocations.living))
            id = gateway.app.invocations.living[0].record.id
            await until(lambda: (session := sessions.get(id)) is not None and session.end == 5)
            await asyncio.to_thread(relay.cut)
            relay.mend()
            answer = await gateway.http.post(f"/v1/invocations/{id}/session/control", json={"signal": "TERM"})
            assert answer.status_code == 204
            async with asyncio.timeout(DEADLINE_S):
                said, ended = await conversing
    assert (said, ended.signal) == (b"hello", 15)


async def test_both_may_be_silent_between_messages_and_not_within_one(tmp_path: Path) -> None:
    bounds = {"body_timeout_s": 0.05, "heartbeat_s": 0.05, "stall_s": 0.05}
    async with serving(GatewayBench(tmp_path, bounds=bounds)) as gateway, channel(gateway) as opened:
        async with call(GatewayStub(opened), opening("cat")) as caller:
            for _ in range(4):
                assert await caller.hear()
            await caller.type(b"still here", end=True)
            assert (await caller.end()).exit_code == 0
        async with peer(gateway) as slow:
            opens = framed(pb.SessionRequest(open=opening("cat")).SerializeToString())
            for sent in (None, opens[:-1], opens + framed(b"xx")[:-1]):
                answer = await slow.answer(slow.send(head({":path": SESSION}), sent, end=False))
                assert answer.headers["tangram-code"] == "too_slow", answer
