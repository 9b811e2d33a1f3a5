"""Sessions of trajectories on a node: typed to and heard byte by byte, whatever is killed in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from tangram.client.sync import SessionHandle
from tangram.errors import TangramError
from tests.cluster.conftest import MakeNode, StartGateway
from tests.cluster.world import DEADLINE_S, until
from tests.faults.world import HTTP

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]

ECHO = ["sh", "-c", 'echo begun; while read -r line; do echo "said $line"; done; exit 9']


class SessionEar:
    """Somebody who reads a session in a thread of their own."""

    def __init__(self, session: SessionHandle) -> None:
        self.session = session
        self.said = b""
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with suppress(TangramError, RuntimeError):  # its client is closed while it listens
            for piece in self.session.output():
                assert piece.offset == len(self.said), "nothing is doubled or left out"
                self.said += piece.data

    def until(self, data: bytes) -> None:
        until(lambda: data in self.said, f"{data!r} is said")

    def whole(self) -> bytes:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return self.said


@contextmanager
def meanwhile(session: SessionHandle, data: bytes) -> Iterator[None]:
    """Type while the block does what it does; the input has arrived at its end."""
    with ThreadPoolExecutor(1) as pool:
        typing = pool.submit(session.write, data)
        yield
        assert typing.result(DEADLINE_S)


def lines(first: int, end: int) -> bytes:
    return b"".join(b"%d\n" % number for number in range(first, end))


def test_a_session_goes_on_over_the_death_of_daemon_and_gateway_without_a_byte_lost_or_doubled(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway()
    node = make_node(gateway, "n1")
    node.start()
    gateway.until_state("n1", "ready")
    listen, _ = gateway.door
    with gateway.client() as client:
        session = client.trajectory("t", function="there").session(ECHO)
        heard = SessionEar(session)
        assert session.write(lines(0, 100))
        heard.until(b"said 99\n")
        node.kill()
        with meanwhile(session, lines(100, 200)):
            gateway.until_state("n1", "suspect")
            refused = HTTP.post(f"{gateway.url}/v1/invocations/{session.id}/session/control", json={"signal": "USR1"})
            assert (refused.status_code, refused.json()["code"]) == (503, "capacity_exceeded"), refused.text
            assert "n1" in refused.json()["detail"] and refused.headers["retry-after"] == "1", refused.text
            node.start()
        heard.until(b"said 199\n")
    gateway.kill()
    gateway.listen_at(listen)
    gateway.start()
    gateway.until_state("n1", "ready")
    with gateway.client() as client:
        session = client.session(session.id)
        heard = SessionEar(session)
        heard.until(b"said 199\n")
        assert session.write(lines(200, 300))
        session.close_input()
        said = heard.whole()
        assert said == b"begun\n" + b"".join(b"said %d\n" % number for number in range(300))
        assert session.end is not None
        assert (session.end.state, session.end.exit_code, session.missing) == ("succeeded", 9, 0)
        record = gateway.ended(session.id)
        assert (record["node"], record["attempt"]) == ("n1", 1)


def test_a_session_of_a_node_that_is_lost_ends_and_the_next_one_begins_elsewhere(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway(lost_after="6s")
    first = make_node(gateway, "n1")
    first.start()
    gateway.until_state("n1", "ready")
    with gateway.client() as client:
        session = client.trajectory("t", function="there").session(ECHO)
        heard = SessionEar(session)
        session.write("one\n")
        heard.until(b"said one\n")
        first.kill()
        make_node(gateway, "n2", core=0).start()
        assert heard.whole() == b"begun\nsaid one\n"
        assert session.end is not None
        assert (session.end.state, session.end.reason) == ("lost", "node_lost")
        gateway.until_state("n2", "ready")
        anew = client.trajectory("t", function="there").session(["true"]).wait()
        assert (anew.state, anew.exit_code) == ("succeeded", 0)
