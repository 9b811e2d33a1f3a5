"""What a client does about answers that a gateway gives only in trouble."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from tangram import Client, ConnectionFailed, InvalidInputError, QuotaExceededError, Retries, UnreadableAnswerError
from tangram.testing import ScriptedGateway, broken, refusal
from tangram.types import ADMIN, links_dir

QUICK = Retries(max_attempts=3, wait_max_s=5.0)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tangram.client.requests.BACKOFF_S", 0.001)


def test_retries_are_bounded_in_number_and_in_time() -> None:
    gateway = ScriptedGateway()
    gateway.trouble(*[refusal(429, "quota_exceeded", retry_after_s=0.001)] * 3)
    with Client(transport=gateway, retries=QUICK) as client, pytest.raises(QuotaExceededError):
        client.functions()
    assert len(gateway.requests) == 3
    gateway = ScriptedGateway()
    gateway.trouble(refusal(429, "quota_exceeded", retry_after_s=60.0))
    with Client(transport=gateway, retries=QUICK) as client, pytest.raises(QuotaExceededError) as caught:
        client.functions()
    assert (len(gateway.requests), caught.value.retry_after_s) == (1, 60.0)


@pytest.mark.promise("The client sends again only what cannot run twice.")
def test_work_that_may_have_started_is_not_sent_again_without_a_key() -> None:
    gateway = ScriptedGateway({"f": {}})
    gateway.trouble(broken(httpx.ReadError))
    with Client(transport=gateway, retries=QUICK) as client, pytest.raises(ConnectionFailed) as caught:
        client.invoke("f", {})
    assert (len(gateway.requests), caught.value.detail["sent"]) == (1, True)
    gateway.trouble(broken(httpx.ConnectError), broken(httpx.ConnectError))
    with Client(transport=gateway, retries=QUICK) as client:
        assert client.invoke("f", {}).ok
    assert len(gateway.requests) == 4


def test_work_with_a_key_is_sent_again_and_runs_once() -> None:
    gateway = ScriptedGateway({"f": {}})
    gateway.trouble(broken(httpx.ReadError))
    with Client(transport=gateway, retries=QUICK) as client:
        assert client.invoke("f", {}, key="once").id == client.invoke("f", {}, key="once").id
    assert (len(gateway.requests), len(gateway.calls)) == (3, 1)


def test_a_call_gets_a_new_key_by_itself_where_it_asks_for_one() -> None:
    gateway = ScriptedGateway({"f": lambda call: {}})
    with Client(transport=gateway) as client:
        first, second = client.invoke("f", {}, key=True), client.invoke("f", {}, key=True)
        client.invoke("f", {})
    assert first.id != second.id
    keys = [request.headers.get("idempotency-key") for request in gateway.requests]
    assert keys[0] and keys[1] and keys[0] != keys[1] and keys[2] is None


def test_seconds_that_are_a_text_are_refused_with_the_text() -> None:
    refused = pytest.raises(InvalidInputError, match="seconds are a number, not '30s'")
    with Client(transport=ScriptedGateway({"f": lambda call: {}})) as client, refused:
        client.invoke("f", {}, timeout_s="30s")  # type: ignore[arg-type]  # as callers without type checks do


def test_a_submit_that_is_sent_again_carries_the_same_key() -> None:
    gateway = ScriptedGateway({"f": {}})
    gateway.trouble(broken(httpx.ReadError))
    with Client(transport=gateway, retries=QUICK) as client:
        client.submit("f", {})
    first, second = (request.headers["idempotency-key"] for request in gateway.requests)
    assert first == second


@pytest.mark.promise("The client outlasts a restart.")
def test_a_restart_is_outlasted_and_an_outage_that_does_not_end_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PausedClock()
    monkeypatch.setattr("tangram.client.requests.time", clock)
    monkeypatch.setattr("tangram.client.sync.pause", clock.pause)
    monkeypatch.setattr("tangram.client.requests.BACKOFF_S", 0.2)
    gateway = ScriptedGateway({"f": {}})
    down = [broken(httpx.ConnectError)] * 10 + [refusal(503, "storage_unavailable", retry_after_s=1.0)] * 5
    gateway.trouble(refusal(503, "draining", retry_after_s=1.0), broken(httpx.ReadError), *down)
    with Client(transport=gateway) as client:
        assert client.invoke("f", {}, key="once").ok
        assert len(gateway.calls) == 1
        assert 25 < clock.now_s < 60, "more than the five tries of a refusal"
        gateway.trouble(
            *down,
            *[log(broken_off=True)] * 2,
            log({"stream": "eof", "offset": 0, "state": "succeeded", "reason": None}),
        )
        assert list(client.logs("i", follow=True)) == []
        clock.now_s = 0.0
        gateway.trouble(*[broken(httpx.ConnectError)] * 100)
        with pytest.raises(ConnectionFailed):
            client.functions()
        assert 60 <= clock.now_s < 70


@pytest.mark.parametrize(("at_once_s", "outlasted"), [(0.0, True), (60.0, False)])
def test_a_gateway_that_dies_in_the_first_call_is_waited_for_and_one_that_hangs_up_at_once_is_not(
    monkeypatch: pytest.MonkeyPatch, at_once_s: float, outlasted: bool
) -> None:
    monkeypatch.setattr("tangram.client.requests.HANG_UP_S", at_once_s)
    monkeypatch.setattr("tangram.client.requests.BACKOFF_S", 0.001)
    gateway = ScriptedGateway({"f": {}})
    gateway.trouble(broken(httpx.RemoteProtocolError), *[broken(httpx.ConnectError)] * 2)
    with Client(transport=gateway, retries=Retries(refused_s=0.0)) as client:
        if outlasted:
            assert client.invoke("f", {}, key="once").ok
        else:
            with pytest.raises(ConnectionFailed, match="a gateway with TLS is named by https://"):
                client.invoke("f", {}, key="once")


def test_an_address_at_which_nobody_listens_is_waited_for_as_long_as_is_said_until_it_has_answered_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    impatient = Retries(outage_s=60.0, refused_s=0.0)
    with Client(f"http://127.0.0.1:{port}", retries=impatient) as client:
        with pytest.raises(ConnectionFailed) as failure:
            client.functions()
        assert failure.value.detail["refused"]
    with pytest.raises(ConnectionFailed), Client("http://no-such-host.invalid", retries=impatient) as client:
        client.functions()
    refused = ConnectionFailed("refused", detail={"sent": False, "refused": True})
    assert impatient.next_try_s(refused, 1, 1.0, repeatable=True) is not None, "it has answered before: it restarts"
    assert impatient.next_try_s(refused, 1, 1.0, repeatable=True, new=True) is None
    assert Retries().next_try_s(refused, 1, 0.0, repeatable=True, new=True) is not None
    assert Retries().next_try_s(refused, 2, 1.0, repeatable=True, new=True) is None, "it says so in a second"
    patient = Retries(refused_s=None)
    assert patient.next_try_s(refused, 9, 50.0, repeatable=True, new=True) is not None, "a program may start before it"


class PausedClock:
    """A clock that pauses move on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds


def log(*records: dict[str, object], broken_off: bool = False) -> Callable[[httpx.Request], httpx.Response]:
    def chunks() -> Iterator[bytes]:
        for record in records:
            yield msgspec.json.encode(record) + b"\n"
        if broken_off:
            raise httpx.ReadError("broken")

    class Stream(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            return chunks()

    return lambda request: httpx.Response(200, stream=Stream())


def row(offset: int) -> dict[str, object]:
    return {"offset": offset, "time": "2026-01-01T00:00:00.000Z", "stream": "stdout", "data": f"{offset}\n"}


def test_a_followed_log_resumes_where_it_broke_and_repeats_nothing() -> None:
    gateway = ScriptedGateway()
    gateway.trouble(
        log(row(0), {"stream": "heartbeat"}, row(1), broken_off=True),
        log(row(1), row(2)),
        log(row(3), {"stream": "dropped", "next_offset": 4, "data": "too slow"}),
        log(row(4), {"stream": "eof", "offset": 5, "state": "succeeded", "reason": None}),
    )
    with Client(transport=gateway, retries=QUICK) as client:
        assert [line.text for line in client.logs("i", follow=True)] == ["0\n", "1\n", "2\n", "3\n", "4\n"]
    assert [request.url.params["offset"] for request in gateway.requests] == ["0", "2", "3", "4"]


def test_a_followed_log_ends_with_its_invocation_and_not_with_the_gateway() -> None:
    """One that drains ends all streams; the invocation goes on, and the next gateway has the rest of its log."""
    gateway = ScriptedGateway()
    left = {"stream": "eof", "offset": 1, "state": "running", "reason": None}
    over = {"stream": "eof", "offset": 2, "state": "succeeded", "reason": None}
    gateway.trouble(log(row(0), left), log(row(1), over), log(row(0), left))
    with Client(transport=gateway, retries=QUICK) as client:
        assert [line.text for line in client.logs("i", follow=True)] == ["0\n", "1\n"]
        assert [line.text for line in client.logs("i")] == ["0\n"], "what there is so far"


def test_a_log_that_never_comes_back_is_an_error() -> None:
    gateway = ScriptedGateway()
    gateway.trouble(*[log(broken_off=True)] * 3)
    with Client(transport=gateway, retries=QUICK) as client, pytest.raises(ConnectionFailed, match="log of i"):
        list(client.logs("i", follow=True))
    assert len(gateway.requests) == 3


def test_an_answer_that_is_not_ours_is_quoted() -> None:
    gateway = ScriptedGateway()
    gateway.trouble(lambda request: httpx.Response(502, text="<html>bad gateway</html>"))
    with Client(transport=gateway) as client, pytest.raises(UnreadableAnswerError, match="502: <html>bad gateway"):
        client.functions()


def test_an_answer_of_another_kind_is_quoted() -> None:
    gateway = ScriptedGateway()
    gateway.trouble(lambda request: httpx.Response(200, json={"greeting": "hello"}))
    with Client(transport=gateway) as client, pytest.raises(UnreadableAnswerError, match="greeting"):
        client.functions()


def test_what_answers_and_speaks_no_http_is_not_asked_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as peer:
        asked = []

        def answer() -> None:
            connection, _ = peer.accept()
            with connection:
                asked.append(connection.recv(4096))
                connection.sendall(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + bytes(18))

        speaker = threading.Thread(target=answer)
        speaker.start()
        with Client(f"http://127.0.0.1:{peer.getsockname()[1]}") as client, pytest.raises(ConnectionFailed) as caught:
            client.functions()
        speaker.join(30)
    assert len(asked) == 1
    assert "speaks no HTTP" in caught.value.message
    assert "--server or TANGRAM_SERVER names the address" in caught.value.message


@pytest.mark.parametrize("told", [{"task": "é"}, {"key": "a\nb"}, {"trajectory": "\x7f"}])
def test_what_no_header_carries_is_refused_before_it_is_sent(told: dict[str, str]) -> None:
    gateway = ScriptedGateway({"f": {}})
    with Client(transport=gateway) as client, pytest.raises(InvalidInputError, match="no header carries"):
        client.invoke("f", {}, **told)  # type: ignore[arg-type]  # each is text
    assert gateway.requests == []


def test_what_cannot_be_sent_is_refused_in_words() -> None:
    gateway = ScriptedGateway({"shell": {}})
    with Client(transport=gateway) as client:
        with pytest.raises(InvalidInputError, match="no Unicode, a lone surrogate in 'echo"):
            client.invoke("shell", {"command": "echo \ud800"})
        with pytest.raises(InvalidInputError, match="trajectory '' must be 1 to 128 letters"):
            client.end_trajectory("")
        rollout = client.trajectory("t")
        with pytest.raises(InvalidInputError, match="mode: '755' is no number of permission bits"):
            rollout.upload("x", b"", mode="755")  # type: ignore[arg-type]  # as somebody might
    assert gateway.requests == []


def test_who_is_not_trusted_is_not_asked_again() -> None:
    def distrusted(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        try:
            raise ssl.SSLCertVerificationError("certificate verify failed")
        except ssl.SSLError as error:
            raise httpx.ConnectError(str(error)) from error

    asked: list[httpx.Request] = []
    with Client(transport=httpx.MockTransport(distrusted)) as client, pytest.raises(ConnectionFailed) as caught:
        client.functions()
    assert (len(asked), caught.value.detail["tls"]) == (1, True)


def test_where_nobody_answers_the_remedy_is_named_with_the_gateways_that_serve_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "links"))
    with Client("http://127.0.0.1:9", retries=Retries(outage_s=0.0)) as client:
        with pytest.raises(ConnectionFailed, match=r"is `tangram serve` running.*TANGRAM_SERVER"):
            client.functions()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            (tmp_path / "state").mkdir()
            token = tmp_path / "state" / ADMIN
            token.touch(mode=0o600)
            token.write_text("s3cret")
            links_dir().mkdir(parents=True)
            (links_dir() / f"127.0.0.1:{port}").symlink_to(tmp_path / "state")
            (links_dir() / "127.0.0.1:1").symlink_to(tmp_path / "state")
            with pytest.raises(ConnectionFailed, match=rf"; yours serves at http://127\.0\.0\.1:{port} \("):
                client.functions()
