"""Heartbeats: sent for as long as somebody refers to an opened handle, by every process that does."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator

import pytest

from tangram import Client, InvalidInputError, Trajectory
from tangram.client import heartbeats
from tangram.testing import ScriptedGateway
from tests.tangram.sockets import DEADLINE_S, ScriptedServer, served

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    monkeypatch.setattr(heartbeats, "GATHER_S", 0.0)
    with served(ScriptedGateway({"shell": {}})) as server:
        yield server


def until(condition: Callable[[], bool], what: str) -> None:
    gate = threading.Event()
    for _ in range(int(DEADLINE_S / 0.01)):
        if condition():
            return
        gate.wait(0.01)
    raise AssertionError(f"not within {DEADLINE_S} s: {what}")


def beating() -> bool:
    return any(thread.name == "tangram-heartbeats" for thread in threading.enumerate())


def test_an_opened_handle_is_held_until_it_is_closed(server: ScriptedServer) -> None:
    told = server.gateway.heartbeats
    with Client(server.address, lease_s=1.0) as client:
        with client.trajectory("open"):
            until(lambda: told["open"] >= 3, "it is held again and again")
        client.trajectory("never opened").exec("true")
        until(lambda: not beating(), "nothing is left to hold")
    assert set(told) == {"open"}


def test_a_handle_that_nobody_refers_to_is_held_no_more(server: ScriptedServer) -> None:
    with Client(server.address, lease_s=1.0) as client:
        handle = client.trajectory("dropped").open()
        until(lambda: server.gateway.heartbeats["dropped"] > 0, "it is held")
        del handle
        until(lambda: not beating(), "it is held no more")


def test_failures_are_outlasted(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = threading.Event()
    renew = server.gateway._renew

    def refuse(request: object) -> object:
        failing.set()
        raise ConnectionError("as the test wants it")

    monkeypatch.setattr(server.gateway, "_renew", refuse)
    with Client(server.address, lease_s=1.0) as client, client.trajectory("open"):
        assert failing.wait(DEADLINE_S)
        monkeypatch.setattr(server.gateway, "_renew", renew)
        until(lambda: server.gateway.heartbeats["open"] > 0, "it is held after all")


def test_a_copy_sends_its_own_once_it_is_used(server: ScriptedServer) -> None:
    with Client(server.address, lease_s=1.0) as client, client.trajectory("open") as handle:
        copied: tuple[Client, Trajectory] = pickle.loads(pickle.dumps((client, handle)))
        client.heartbeats.close()
        until(lambda: not beating(), "the first falls silent")
        seen = server.gateway.heartbeats["open"]
        with copied[0]:
            copied[1].exec("true")
            until(lambda: server.gateway.heartbeats["open"] > seen, "the copy speaks for it")


def test_a_child_by_fork_sends_its_own(server: ScriptedServer) -> None:
    with Client(server.address, lease_s=1.0) as client, client.trajectory("open") as handle:
        until(lambda: server.gateway.heartbeats["open"] > 0, "the parent speaks for it")
        child = os.fork()
        if child == 0:
            handle.exec("true")
            os._exit(0 if beating() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_none_are_sent_where_none_are_wanted(server: ScriptedServer) -> None:
    until(lambda: not beating(), "those of other tests have ended")
    with Client(server.address, lease_s=None) as client, client.trajectory("open"):
        assert not beating()
    with pytest.raises(InvalidInputError, match="lease_s must be from 1 to 86400, not 0"):
        Client(server.address, lease_s=0.0)
