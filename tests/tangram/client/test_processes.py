"""Clients and handles in other processes: pickled, inherited by fork, in worker pools that are forked or spawned."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Iterator
from multiprocessing.pool import Pool

import pytest

from tangram import AsyncClient, Client, InvocationFailed, NotFoundError, Retries, Trajectory
from tangram.testing import ScriptedCall, ScriptedFailure, ScriptedGateway
from tests.tangram.sockets import DEADLINE_S, ScriptedServer, served

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


def square(client: Client, number: int) -> int:
    """In a worker: what the gateway answers, through a client that came with the job."""
    return int(client.invoke("shell", {"n": number * number}).result["n"])


def fail(client: Client) -> None:
    client.invoke("shell", {"fail": True}).raise_for_failure()


def miss(client: Client) -> None:
    client.invoke("nobody", {})


def act(trajectory: Trajectory) -> bytes:
    trajectory.upload("from-worker", "hello")
    return trajectory.download("from-parent")


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


def test_a_handle_acts_in_the_same_trajectory_in_a_worker(server: ScriptedServer, pool: Pool) -> None:
    with Client(server.address) as client, client.trajectory("t") as trajectory:
        trajectory.upload("from-parent", "hi")
        assert pool.apply_async(act, (trajectory,)).get(DEADLINE_S) == b"hi"
        assert trajectory.download("from-worker") == b"hello"


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


def test_a_child_that_closes_the_client_leaves_the_parents_connection_alone(server: ScriptedServer) -> None:
    def close() -> bool:
        client.functions()
        client.close()
        return True

    with Client(server.address) as client:
        client.functions()
        assert succeeded(in_child(close))
        assert client.invoke("shell", {"n": 1}).ok
        assert server.opened == 2


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
