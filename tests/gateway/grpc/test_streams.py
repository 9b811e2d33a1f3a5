"""Files over gRPC on a real socket: whole, in pieces, bounded, refused with their codes, and cut off."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.generated.tangram_grpc import GatewayStub
from gateway.grpc.server import PIECE_MAX_BYTES
from gateway.grpc.service import FILE_PIECE_BYTES
from tests.gateway.conftest import GatewayBench, RunningGateway, serving
from tests.gateway.grpc.peer import framed, head, peer
from tests.gateway.grpc.test_service import channel
from tests.house.source import ROOT

pytestmark = pytest.mark.slow
FILE_METHOD = "/tangram.v1.Gateway/"


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
