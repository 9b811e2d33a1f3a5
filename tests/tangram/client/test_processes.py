"""Clients, handles and their heartbeats in this process and in others: pickled, inherited by fork, in worker pools."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from multiprocessing.pool import Pool

import pytest

from tangram import AsyncClient, Client, InvalidInputError, InvocationFailed, NotFoundError, Retries, Trajectory
from tangram.client import heartbeats
from tangram.testing import ScriptedCall, ScriptedFailure, ScriptedGateway
from tests.faults.world import until
from tests.gateway.conftest import DEADLINE_S
from tests.tangram.sockets import ScriptedServer, served
from tests.tangram.workers import fail, miss, square

# Forking beside the server's thread is what is tested here: a trainer has threads, too.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def behave(call: ScriptedCall) -> object:
    if call.input.get("fail"):
        raise ScriptedFailure("handler_error", "as asked", {"partial": 1})
    return dict(call.input)


@pytest.fixture(scope="module", params=("fork", "spawn", "forkserver"))
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with multiprocessing.get_context(request.param).Pool(2) as pool:
        yield pool


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with served(ScriptedGateway({"shell": behave})) as server:
        yield server


def test_a_client_survives_a_pickle_with_its_settings(server: ScriptedServer) -> None:
    retries = Retries(max_attempts=2)
    with Client(server.address, token="sesame", retries=retries, raise_failures=True) as client:
        client.functions()
        again = pickle.loads(pickle.dumps(client))
    # The original is closed by now; the copy opens connections of its own.
    with again, pytest.raises(InvocationFailed):
        again.invoke("shell", {"fail": True})
    assert server.gateway.requests[-1].headers["authorization"] == "Bearer sesame"
    assert again._retries == retries


async def test_an_asynchronous_client_survives_a_pickle(server: ScriptedServer) -> None:
    async with AsyncClient(server.address) as client:
        async with client.trajectory("t") as trajectory:
            await trajectory.upload("x", "1")
            copy = pickle.loads(pickle.dumps(trajectory))
            assert await copy.download("x") == b"1"
            await copy._client.close()
        async with pickle.loads(pickle.dumps(client)) as again:
            assert [each.name for each in await again.functions()] == ["shell"]


def test_workers_use_the_client_that_they_are_given(server: ScriptedServer, pool: Pool) -> None:
    with Client(server.address) as client:
        client.functions()  # its connection must not be shared with the workers
        squares = pool.starmap_async(square, [(client, n) for n in range(10)], chunksize=1)
        assert squares.get(DEADLINE_S) == [n * n for n in range(10)]
        assert client.invoke("shell", {"n": 1}).ok


def test_a_failure_comes_out_of_a_pool_of_workers(server: ScriptedServer, pool: Pool) -> None:
    """An exception that cannot be rebuilt kills the thread that reads results, and the pool waits for ever."""
    with Client(server.address) as client:
        with pytest.raises(InvocationFailed, match="as asked") as failed:
            pool.apply_async(fail, (client,)).get(DEADLINE_S)
        assert failed.value.invocation.result == {"partial": 1}
        with pytest.raises(NotFoundError, match="nobody"):
            pool.apply_async(miss, (client,)).get(DEADLINE_S)


def test_a_client_that_was_inherited_by_fork_opens_its_own_connections(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        assert client.invoke("shell", {"n": 0}).ok
        assert server.opened == 1
        children = [in_child(lambda n=n: square(client, n) == n * n) for n in range(3)]
        assert [succeeded(child) for child in children] == [True] * 3
        assert client.invoke("shell", {"n": 1}).ok
        assert server.opened == 4, "three of the children; the parent went on with its own"


def in_child(do: object) -> int:
    """Fork; the child's exit status says whether ``do()`` was true. Returns the child."""
    assert callable(do)
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        status = 0 if do() else 1
    finally:
        sys.stderr.flush()
        os._exit(status)


def succeeded(child: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def beating_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    monkeypatch.setattr(heartbeats, "GATHER_S", 0.0)
    with served(ScriptedGateway({"shell": {}})) as beating_server:
        yield beating_server


def beating() -> bool:
    return any(thread.name == "tangram-heartbeats" for thread in threading.enumerate())


def test_an_opened_handle_is_held_until_it_is_closed(beating_server: ScriptedServer) -> None:
    told = beating_server.gateway.heartbeats
    with Client(beating_server.address, lease_s=1.0) as client:
        with client.trajectory("open"):
            until(lambda: told["open"] >= 3, "it is held again and again")
        client.trajectory("never opened").exec("true")
        until(lambda: not beating(), "nothing is left to hold")
    assert set(told) == {"open"}


def test_a_handle_that_nobody_refers_to_is_held_no_more(beating_server: ScriptedServer) -> None:
    with Client(beating_server.address, lease_s=1.0) as client:
        handle = client.trajectory("dropped").open()
        until(lambda: beating_server.gateway.heartbeats["dropped"] > 0, "it is held")
        del handle
        until(lambda: not beating(), "it is held no more")


def test_failures_are_outlasted(beating_server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = threading.Event()
    renew = beating_server.gateway._renew

    def refuse(request: object) -> object:
        failing.set()
        raise ConnectionError("as the test wants it")

    monkeypatch.setattr(beating_server.gateway, "_renew", refuse)
    with Client(beating_server.address, lease_s=1.0) as client, client.trajectory("open"):
        assert failing.wait(DEADLINE_S)
        monkeypatch.setattr(beating_server.gateway, "_renew", renew)
        until(lambda: beating_server.gateway.heartbeats["open"] > 0, "it is held after all")


def test_a_copy_sends_its_own_once_it_is_used(beating_server: ScriptedServer) -> None:
    with Client(beating_server.address, lease_s=1.0) as client, client.trajectory("open") as handle:
        copied: tuple[Client, Trajectory] = pickle.loads(pickle.dumps((client, handle)))
        client.heartbeats.close()
        until(lambda: not beating(), "the first falls silent")
        seen = beating_server.gateway.heartbeats["open"]
        with copied[0]:
            copied[1].exec("true")
            until(lambda: beating_server.gateway.heartbeats["open"] > seen, "the copy speaks for it")


def test_none_are_sent_where_none_are_wanted(beating_server: ScriptedServer) -> None:
    until(lambda: not beating(), "those of other tests have ended")
    with Client(beating_server.address, lease_s=None) as client, client.trajectory("open"):
        assert not beating()
    with pytest.raises(InvalidInputError, match="lease_s must be from 1 to 86400, not 0"):
        Client(beating_server.address, lease_s=0.0)
