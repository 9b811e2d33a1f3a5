"""Requests: the address and the token, bodies that can be sent, and the rule for sending again."""

from __future__ import annotations

import itertools
import logging
import random
from typing import Any

import httpx
import pytest

from tangram import AsyncClient, Client, InvalidConfigError
from tangram.client.requests import FailureStreak, Retries, connection_lost, json_body, server_of
from tangram.errors import ConnectionFailed, FunctionUnavailableError, InvalidInputError
from tangram.testing import ScriptedGateway
from tangram.types import BatchItem


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        ("localhost:8080", "http://localhost:8080"),
        ("10.0.0.1", "http://10.0.0.1"),
        ("gateway.cluster", "http://gateway.cluster"),
        ("[::1]:8080", "http://[::1]:8080"),
        ("http://127.0.0.1:8080/", "http://127.0.0.1:8080"),
        ("HTTPS://gateway", "https://gateway"),
        ("my_gateway:80", "http://my_gateway:80"),
    ],
)
def test_an_address_is_understood_with_and_without_a_scheme(given: str, understood: str) -> None:
    assert server_of(given) == understood


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("ftp://gateway", "begins with ftp:"),
        ("grpc://gateway:8081", "speaks http and https only"),
        ("http://gateway/v1", "has the path '/v1'"),
        ("gateway:8080/v1/functions", "has the path"),
        ("http://gate way", "white space"),
        ("localhost:8080\n", "white space"),
        ("", "is empty"),
        ("http://", "names no host"),
        (":8080", "names no host"),
        ("localhost:http", "is no address"),
        ("localhost:99999", "is no address"),
        ("::1", "is written in \\[\\]"),
        ("http://gateway?x=1", "a query"),
        ("http://user:secret@gateway", "TANGRAM_TOKEN"),
    ],
)
def test_a_wrong_address_is_refused_by_name_with_the_remedy(given: str, why: str) -> None:
    with pytest.raises(InvalidConfigError, match=why) as caught:
        Client(given)
    assert caught.value.message.startswith(f"server: {given!r}")
    assert "write http://HOST:PORT" in caught.value.message


def test_the_environment_is_used_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_SERVER", "gateway:8000")
    monkeypatch.setenv("TANGRAM_TOKEN", "sesame")
    gateway = ScriptedGateway()
    for client in (Client(transport=gateway), Client("other:81", token="mine", transport=gateway)):
        with client:
            client.functions()
    with Client(token="", transport=gateway) as client:
        client.functions()
    sent = [(str(each.url), each.headers.get("authorization")) for each in gateway.requests]
    assert sent == [
        ("http://gateway:8000/v1/functions", "Bearer sesame"),
        ("http://other:81/v1/functions", "Bearer mine"),
        ("http://gateway:8000/v1/functions", None),
    ]


def test_without_any_the_gateways_own_default_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANGRAM_SERVER", raising=False)
    assert (Client().server, AsyncClient().server) == ("http://127.0.0.1:8080",) * 2
    monkeypatch.setenv("TANGRAM_SERVER", "")
    assert Client().server == "http://127.0.0.1:8080"


def test_a_wrong_environment_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_SERVER", "ftp://gateway")
    with pytest.raises(InvalidConfigError, match="TANGRAM_SERVER: 'ftp://gateway'"):
        AsyncClient()
    monkeypatch.delenv("TANGRAM_SERVER")
    monkeypatch.setenv("TANGRAM_TOKEN", "sesame\n")
    with pytest.raises(InvalidConfigError, match="TANGRAM_TOKEN") as caught:
        Client()
    assert "sesame" not in caught.value.message


def test_the_token_is_not_shown() -> None:
    assert repr(Client("gateway:8000", token="sesame")) == "Client('http://gateway:8000')"


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"v": NAN}, "$.v is nan"),
        ({"a": [1, {"b": (None, -INFINITY)}]}, "$.a[1].b[1] is -inf"),
        ([BatchItem(function="f", input={"score": INFINITY})], "$[0].input.score is inf"),
    ],
)
def test_a_number_that_is_none_is_refused_with_its_place(value: object, place: str) -> None:
    with pytest.raises(InvalidInputError, match="JSON does not have") as refused:
        json_body(value)
    assert place in str(refused.value)


def test_an_object_of_another_library_is_refused_with_the_remedy() -> None:
    numpy: Any = pytest.importorskip("numpy")
    for value in (numpy.float32(0.5), numpy.zeros(2)):
        with pytest.raises(InvalidInputError, match=r"\.item\(\) or \.tolist\(\)"):
            json_body({"v": value})


def test_a_trainer_that_is_seeded_draws_the_same_numbers_whatever_is_tried_again() -> None:
    random.seed(7)
    expected = [random.random() for _ in range(3)]
    random.seed(7)
    drawn = []
    for attempt in range(3):
        lost = ConnectionFailed("gone", detail={"sent": False})
        assert Retries().next_try_s(lost, attempt, 0.0, repeatable=True)
        drawn.append(random.random())
    assert drawn == expected


@pytest.mark.parametrize(("new", "most_s"), [(True, 1.0), (False, 60.0)])
def test_who_hangs_up_on_a_client_that_nobody_has_answered_is_soon_named(new: bool, most_s: float) -> None:
    for address in ("http://far.example", "https://far.example"):
        for failure in (httpx.ReadError(""), httpx.RemoteProtocolError("Server disconnected")):
            error, failing_s = connection_lost(address, failure), 0.0
            for attempt in itertools.count(1):
                wait_s = Retries().next_try_s(error, attempt, failing_s, repeatable=True, new=new)
                if wait_s is None:
                    break
                failing_s += wait_s
            assert failing_s == pytest.approx(most_s), address


def test_why_a_function_is_unavailable_is_told_once_while_it_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    unavailable = FunctionUnavailableError("function f is unavailable: no image", retry_after_s=7.0)
    streak = FailureStreak(Retries())
    assert [streak.again_s(unavailable) for _ in range(6)] == [7.0, 7.0, 7.0, 7.0, None, None]
    assert [record.message for record in caplog.records] == [f"{unavailable}; asking again in 7 s"]


def test_an_outage_that_fails_many_calls_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    gone = ConnectionFailed("cannot reach http://many.example: refused", detail={"sent": False})
    for _ in range(50):
        assert FailureStreak(Retries()).again_s(gone) is not None
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "cannot reach http://many.example: refused; trying again for 60 s"
    ]
