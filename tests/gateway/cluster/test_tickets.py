"""Tickets: each admits one name, once, soon, and under one start of one gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.cluster.store import SIGNING_KEY, JoinTickets, check_name, signing_key
from manager.errors import CapacityExceeded, InvalidInput, StorageUnavailable, Unauthorized

KEY = b"k" * 32


class Hours:
    """The time of day, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def office(hours: Hours, *, key: bytes = KEY, generation: int = 1, used_max: int = 100) -> JoinTickets:
    return JoinTickets(key, generation, 120.0, wall=hours, used_max=used_max)


def test_a_ticket_admits_its_name_once() -> None:
    made = office(Hours())
    ticket = made.issue("n1")
    made.take(ticket, "n1")
    with pytest.raises(Unauthorized, match="used already"):
        made.take(ticket, "n1")


def test_a_stolen_ticket_admits_no_other_name() -> None:
    made = office(Hours())
    ticket = made.issue("n1")
    with pytest.raises(Unauthorized, match="admits n1, not n2"):
        made.take(ticket, "n2")
    made.take(ticket, "n1")


def test_a_ticket_expires() -> None:
    hours = Hours()
    made = office(hours)
    ticket = made.issue("n1")
    hours.now_s += 120.0
    with pytest.raises(Unauthorized, match="expired"):
        made.take(ticket, "n1")


@pytest.mark.parametrize("other", [{"generation": 2}, {"key": b"o" * 32}])
def test_a_ticket_of_another_gateway_or_of_an_earlier_start_is_worth_nothing(other: dict[str, object]) -> None:
    hours = Hours()
    ticket = office(hours).issue("n1")
    with pytest.raises(Unauthorized, match="no gateway's"):
        JoinTickets(
            other.get("key", KEY),  # type: ignore[arg-type]  # as the parameters say
            other.get("generation", 1),  # type: ignore[arg-type]
            120.0,
            wall=hours,
        ).take(ticket, "n1")


@pytest.mark.parametrize(
    "text", ["", "a.b.c", "a.b.c.d", "bjE.99999999999999999.x.y", "ü.1.2.3", "\0" * 40, "." * 3000]
)
def test_what_is_no_ticket_is_refused(text: str) -> None:
    with pytest.raises(Unauthorized):
        office(Hours()).take(text, "n1")


def test_a_ticket_of_which_one_sign_was_changed_is_refused() -> None:
    made = office(Hours())
    ticket = made.issue("n1")
    for place in range(len(ticket)):
        changed = ticket[:place] + ("x" if ticket[place] != "x" else "y") + ticket[place + 1 :]
        with pytest.raises(Unauthorized):
            made.take(changed, "n1")


def test_used_tickets_are_remembered_up_to_a_bound_and_forgotten_when_they_expire() -> None:
    hours = Hours()
    made = office(hours, used_max=2)
    for name in ("n1", "n2"):
        made.take(made.issue(name), name)
    with pytest.raises(CapacityExceeded):
        made.take(made.issue("n3"), "n3")
    hours.now_s += 121.0
    made.take(made.issue("n3"), "n3")


@pytest.mark.parametrize("name", ["", "a b", "../x", "n" * 129, "n\n"])
def test_what_is_no_name_gets_no_ticket(name: str) -> None:
    with pytest.raises(InvalidInput):
        check_name(name)


def test_the_signing_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    key = signing_key(tmp_path)
    assert signing_key(tmp_path) == key and len(key) == 32
    assert (tmp_path / SIGNING_KEY).stat().st_mode & 0o777 == 0o600
    (tmp_path / SIGNING_KEY).write_bytes(b"short")
    with pytest.raises(StorageUnavailable, match="remove it"):
        signing_key(tmp_path)
