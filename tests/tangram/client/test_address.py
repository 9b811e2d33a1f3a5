"""The address and the token of a client: from its arguments or the environment, understood or refused by name."""

from __future__ import annotations

import pytest

from tangram import AsyncClient, Client, InvalidConfigError
from tangram.client.requests import server_of
from tangram.testing import ScriptedGateway


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
