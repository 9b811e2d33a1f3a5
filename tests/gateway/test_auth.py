"""Roles, tokens in the state directory, and addresses that would be open too wide."""

from __future__ import annotations

import hmac
import os
import socket
import stat
from pathlib import Path

import pytest

from gateway import auth
from gateway.auth import BearerTokens, Guard, PageSessions, Role, announced, check_listeners, make_private, open_tokens
from gateway.config.schema import ServerConfig
from manager.errors import Forbidden, InvalidConfig, StorageUnavailable, Unauthorized
from tangram import AsyncClient, UnauthorizedError
from tangram.types import ADMIN, INVOKE, find_token, links_dir
from tests.gateway.conftest import GatewayBench, serving
from tests.virtual_clock import VirtualClock

TOKENS = BearerTokens(admin="s3cret", invoke="less")


def test_the_guard_takes_its_tokens_and_nothing_like_them() -> None:
    guard = Guard(TOKENS)
    assert [guard.role(b"Bearer s3cret"), guard.role(b"bearer less")] == [Role.ADMIN, Role.INVOKE]
    for odd in (None, b"", b"s3cret", b"Bearer s3cret ", b"Basic s3cret", b"Bearer", b"Bearer \xff", b"Bearer s3cre"):
        with pytest.raises(Unauthorized, match="tangram token"):
            guard.role(odd)
    for value, told in ((None, "a bearer token is needed"), (b"Bearer wrong", "the token that was sent is wrong")):
        with pytest.raises(Unauthorized, match=told):
            guard.role(value)
    assert Guard(None).role(None) is Role.ADMIN
    with pytest.raises(Forbidden, match="admin token"):
        Role.INVOKE.require(Role.ADMIN)


def test_every_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[object, object]] = []
    real = hmac.compare_digest

    def digest(given: bytes, expected: bytes) -> bool:
        compared.append((given, expected))
        return real(given, expected)

    monkeypatch.setattr(hmac, "compare_digest", digest)
    for value in (b"Bearer s3cret", b"Bearer wrong"):
        compared.clear()
        try:
            Guard(TOKENS).role(value)
        except Unauthorized:
            assert value == b"Bearer wrong"
        assert [each[1] for each in compared] == [b"s3cret", b"less"]


def test_a_key_of_the_page_opens_once_and_in_time() -> None:
    clock = VirtualClock()
    pages = PageSessions(clock.now)
    assert pages.open("") is None
    assert pages.open("wrong") is None
    key, other = pages.issue(), pages.issue()
    cookie = pages.open(key)
    assert cookie is not None
    assert pages.knows(cookie.encode())
    assert not pages.knows(key.encode())
    assert pages.open(key) is None
    second = pages.open(other)
    assert second is not None and pages.knows(second.encode()) and pages.knows(cookie.encode())
    late = pages.issue()
    clock.advance_to(clock.now() + auth.KEY_LIFE_S)
    assert pages.open(late) is None


def test_keys_and_cookies_of_the_page_are_bounded() -> None:
    pages = PageSessions(VirtualClock().now)
    keys = [pages.issue() for _ in range(auth.PAGE_SESSIONS_MAX + 1)]
    assert pages.open(keys[0]) is None
    cookies = [pages.open(key) for key in [*keys[1:], pages.issue()]]
    assert [pages.knows((each or "").encode()) for each in cookies] == [False, *[True] * auth.PAGE_SESSIONS_MAX]


@pytest.mark.promise("Beyond loopback, tokens in clear text must be configured.")
def test_without_tokens_or_in_clear_text_only_this_machine_is_served() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        check_listeners(ServerConfig(host=host))
        check_listeners(ServerConfig(host=host, auth="none"))
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        check_listeners(ServerConfig(host=host, clear_text=True))
        with pytest.raises(InvalidConfig, match=r"server\.clear_text"):
            check_listeners(ServerConfig(host=host, token="token"))
        with pytest.raises(InvalidConfig, match=r"server\.auth"):
            check_listeners(ServerConfig(host=host, auth="none", clear_text=True))
    with pytest.raises(InvalidConfig, match="drop one"):
        check_listeners(ServerConfig(auth="none", token="token"))


def test_the_first_start_writes_tokens_that_the_next_takes(tmp_path: Path) -> None:
    make_private(tmp_path / "state")
    first = open_tokens(tmp_path / "state", "")
    assert first.admin != first.invoke
    assert open_tokens(tmp_path / "state", "") == first
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    for name, token in ((ADMIN, first.admin), (INVOKE, first.invoke)):
        file = tmp_path / "state" / name
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.read_text().strip() == token
    assert open_tokens(tmp_path / "state", "configured") == BearerTokens(admin="configured", invoke=first.invoke)
    assert not (tmp_path / "state" / ADMIN).exists()


@pytest.mark.parametrize("spoil", ["open", "empty", "link"])
def test_a_token_that_others_know_is_replaced(tmp_path: Path, spoil: str) -> None:
    token = open_tokens(tmp_path, "").admin
    file = tmp_path / ADMIN
    if spoil == "open":
        file.chmod(0o640)
    elif spoil == "empty":
        file.write_text("")
    else:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    fresh = open_tokens(tmp_path, "").admin
    assert len(fresh) == len(token)
    assert fresh != token
    assert stat.S_IMODE(file.lstat().st_mode) == 0o600
    assert not file.is_symlink()


@pytest.mark.parametrize("name", [ADMIN, INVOKE])
def test_a_token_file_that_is_too_short_is_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    kept = open_tokens(tmp_path, "")
    file = tmp_path / name
    file.write_text("fifteen-letters\n")
    with pytest.raises(InvalidConfig, match=rf"{name}: .*this one has 15: openssl .*without the file"):
        open_tokens(tmp_path, "")
    assert file.read_text() == "fifteen-letters\n", "it is its owner's to mend"
    file.write_text("sixteen-letters!\n")
    found = open_tokens(tmp_path, "")
    assert "sixteen-letters!" in (found.admin, found.invoke)
    file.unlink()
    assert open_tokens(tmp_path, "") != kept


def test_who_works_below_may_go_through_and_no_more(tmp_path: Path) -> None:
    make_private(tmp_path / "state", entered=True)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o711
    make_private(tmp_path / "state")
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_a_state_directory_is_narrowed_or_refused(tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir(mode=0o755)
    (tmp_path / "wide").chmod(0o777)
    make_private(tmp_path / "wide")
    assert stat.S_IMODE((tmp_path / "wide").stat().st_mode) == 0o700
    if os.geteuid() == 0:
        (tmp_path / "theirs").mkdir()
        os.chown(tmp_path / "theirs", 12345, 12345)
        with pytest.raises(StorageUnavailable, match="belongs to user 12345"):
            make_private(tmp_path / "theirs")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_its_users_clients_find_the_token_by_the_address_while_it_serves(tmp_path: Path, home: Path) -> None:
    tokens = open_tokens(tmp_path, "")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert find_token("127.0.0.1", port) is None
        with announced(tmp_path, "127.0.0.1", port):
            assert find_token("127.0.0.1", port) == find_token("localhost", port) == tokens.admin
            assert find_token("127.0.0.1", port, (INVOKE,)) == tokens.invoke
            for host, other in (("127.0.0.1", port + 1), ("gateway.example", port), ("10.0.0.1", port)):
                assert find_token(host, other) is None
        assert find_token("127.0.0.1", port) is None
        assert list(links_dir().iterdir()) == []


@pytest.mark.promise("The client sends no token to a stranger on the port of a killed gateway.")
def test_a_token_is_not_sent_to_whoever_took_the_port_of_a_killed_gateway(tmp_path: Path, home: Path) -> None:
    tokens = open_tokens(tmp_path, "")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with announced(tmp_path, "127.0.0.1", port):
            if os.geteuid() == 0:
                os.fchown(listener.fileno(), 12345, 12345)  # now it is another user's, as the kernel tells it
                assert find_token("127.0.0.1", port) is None
                os.fchown(listener.fileno(), 0, 0)
            assert find_token("127.0.0.1", port) == tokens.admin
            listener.close()
            assert find_token("127.0.0.1", port) is None


@pytest.mark.parametrize("spoil", ["open", "theirs", "their link", "fifo"])
def test_only_what_is_this_users_alone_is_believed(tmp_path: Path, home: Path, spoil: str) -> None:
    open_tokens(tmp_path, "")
    file = tmp_path / ADMIN
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with announced(tmp_path, "127.0.0.1", port):
            if spoil == "open":
                file.chmod(0o644)
            elif spoil == "fifo":
                file.unlink()
                os.mkfifo(file, 0o600)
            elif os.geteuid() != 0:
                pytest.skip("only root can give files away")
            elif spoil == "theirs":
                os.chown(file, 12345, 12345)
            else:
                os.lchown(links_dir() / f"127.0.0.1:{port}", 12345, 12345)
            assert find_token("127.0.0.1", port, (ADMIN,)) is None


async def test_clients_tell_that_the_state_directory_is_gone(tmp_path: Path, home: Path) -> None:
    async with serving(GatewayBench(tmp_path / "gateway", server={"auth": "token"})) as running:
        state = running.app.config.server.state_dir
        state.rename(tmp_path / "moved")
        try:
            for token, told in ((None, f"no token was sent: .* {state}, which was removed"), ("x", "is wrong")):
                async with AsyncClient(f"http://127.0.0.1:{running.app.http_port}", token=token) as client:
                    with pytest.raises(UnauthorizedError, match=told):
                        await client.functions()
        finally:
            (tmp_path / "moved").rename(state)


def test_a_home_that_cannot_be_written_is_no_reason_not_to_serve(tmp_path: Path, home: Path) -> None:
    home.write_text("a file")
    with announced(tmp_path, "127.0.0.1", 2):
        assert find_token("127.0.0.1", 2) is None
