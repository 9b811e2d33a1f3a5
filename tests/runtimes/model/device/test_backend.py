"""The backends: bytes arrive in order and are there when they were waited for, on the host and on (a fake) CUDA."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.model

import torch

from runtimes.model.checkpoint import CopyRange
from runtimes.model.weights import GENTLE_PARTS, Cuda, DeviceBackend, Dropped, Host, Transfer
from tests.runtimes.model.fake_cuda import FakeCuda

PART = 1024
SIZE = 64 * PART


@pytest.fixture(params=["host", "cuda"])
def backend(request: pytest.FixtureRequest) -> Iterator[DeviceBackend]:
    made: DeviceBackend = Host(PART, threads=3) if request.param == "host" else Cuda("cpu", PART, FakeCuda())
    yield made
    made.close()


def image() -> torch.Tensor:
    return torch.arange(1, SIZE + 1, dtype=torch.int64).to(torch.uint8)


def copied(backend: DeviceBackend, source: torch.Tensor, *, gentle: bool = False) -> tuple[torch.Tensor, Transfer]:
    """Two ranges of the image, one behind the other."""
    target = backend.allocate(SIZE).fill_(0)
    half = SIZE // 2
    copies = [CopyRange(source=half, target=0, size_bytes=half), CopyRange(source=0, target=half, size_bytes=half)]
    return target, backend.copy(source, target, copies, gentle=gentle)


@pytest.mark.parametrize("gentle", [False, True])
def test_what_was_waited_for_has_arrived(backend: DeviceBackend, gentle: bool) -> None:
    source = image()
    target, transfer = copied(backend, source, gentle=gentle)
    for end in (1, PART, 5 * PART + 7, SIZE // 2 + 1):
        transfer.wait(end)
        assert torch.equal(target[:end], source.roll(-SIZE // 2)[:end])
    transfer.finish()
    assert torch.equal(target, source.roll(-SIZE // 2))


def test_a_dropped_copy_never_disturbs_the_next_one_in_its_place(backend: DeviceBackend) -> None:
    target = backend.allocate(SIZE)
    for _ in range(50):
        first, second = torch.full((SIZE,), 1, dtype=torch.uint8), torch.full((SIZE,), 2, dtype=torch.uint8)
        whole = [CopyRange(source=0, target=0, size_bytes=SIZE)]
        backend.copy(first, target, whole, gentle=True).drop()
        transfer = backend.copy(second, target, whole, gentle=False)
        transfer.wait(SIZE)
        transfer.finish()
        assert torch.equal(target, second)


def test_whoever_waits_for_a_dropped_copy_is_told() -> None:
    host = Host(PART, threads=1)
    hold = threading.Event()
    host._copiers.submit(hold.wait)  # nobody carries anything
    _, transfer = copied(host, image())
    transfer.drop()
    for wait in (transfer.finish, lambda: transfer.wait(SIZE)):
        with pytest.raises(Dropped):
            wait()
    hold.set()
    host.close()


def test_whoever_waits_on_the_host_lends_a_hand() -> None:
    host = Host(PART, threads=1)
    hold = threading.Event()
    host._copiers.submit(hold.wait)  # the copier has other things to do
    source = image()
    target, transfer = copied(host, source)
    transfer.wait(SIZE)
    assert torch.equal(target, source.roll(-SIZE // 2))
    hold.set()
    host.close()


# -- CUDA


def test_a_wait_on_cuda_orders_the_computation_and_brings_no_more_than_it_needs() -> None:
    cuda = FakeCuda()
    backend = Cuda("cpu", PART, cuda)
    target, transfer = copied(backend, image())
    assert not target.any(), "the fake copies when it is waited for"
    transfer.wait(3 * PART)
    assert torch.equal(target[: 3 * PART], image().roll(-SIZE // 2)[: 3 * PART])
    assert not target[3 * PART :].any()
    backend.close()


def test_a_gentle_copy_keeps_few_parts_on_the_stream() -> None:
    cuda = FakeCuda()
    backend = Cuda("cpu", PART, cuda)
    copied(backend, image(), gentle=True)[1].finish()
    # Each part is a copy and its event.
    assert cuda.streams[0].ahead_max <= 2 * GENTLE_PARTS
    assert cuda.entered["feeder_0"] == "cpu", "the thread that feeds says which device is its"
    backend.close()


def test_a_copy_that_fails_is_told_to_whoever_waits() -> None:
    backend = Cuda("cpu", PART, FakeCuda())
    target = backend.allocate(SIZE)
    transfer = backend.copy(
        torch.zeros(PART, dtype=torch.uint8), target, [CopyRange(source=0, target=0, size_bytes=SIZE)], gentle=False
    )
    with pytest.raises(RuntimeError, match="size of tensor"):
        transfer.finish()
    backend.close()


def test_pinning_names_the_bytes_and_a_refusal_is_an_error() -> None:
    cuda = FakeCuda()
    backend = Cuda("cpu", PART, cuda)
    data = torch.zeros(PART, dtype=torch.float32)
    backend.pin(data)
    assert cuda.runtime.registered == {data.data_ptr(): 4 * PART}
    backend.unpin(data)
    assert not cuda.runtime.registered
    cuda.runtime.code = 1
    with pytest.raises(RuntimeError, match="CUDA refused to pin an image: story of 1"):
        backend.pin(data)
    backend.close()


def test_a_cuda_error_condemns_the_process_and_a_host_error_does_not() -> None:
    cuda, host = Cuda("cpu", PART, FakeCuda()), Host(PART, threads=1)
    assert not cuda.survives(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert cuda.survives(ValueError("ours"))
    assert host.survives(RuntimeError("shapes differ"))
    cuda.close()
    host.close()
