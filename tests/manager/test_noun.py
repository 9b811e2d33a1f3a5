"""Nouns: dataclasses with slots, made by name."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from manager.action import noun


@noun
class Coin:
    """A noun of this test."""

    worth: int
    side: str = "head"


def test_a_noun_is_a_dataclass_whose_values_compare() -> None:
    assert [field.name for field in fields(Coin)] == ["worth", "side"]
    assert replace(Coin(worth=1), side="tail") == Coin(worth=1, side="tail") != Coin(worth=1)


def test_a_noun_takes_no_field_that_it_has_not() -> None:
    with pytest.raises(AttributeError):
        Coin(worth=1).sise = "tail"  # type: ignore[attr-defined]
