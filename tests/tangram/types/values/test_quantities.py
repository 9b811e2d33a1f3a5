"""Durations, sizes, names and keys as every door reads them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.types import (
    DURATION_PATTERN,
    DURATION_UNITS,
    WAIT_PATTERN,
    duration_s,
    is_key,
    is_name,
    show_duration,
    show_size,
    size_bytes,
    wait_s,
    write_duration,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("30s", 30.0), ("2m", 120.0), ("1h30m", 5400.0), ("1.5s", 1.5), ("7d", 604800)],
)
def test_a_duration_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "30", 30, True, None, "s", "-1s", "1 s", "1S", "٣s", "1e3s", "1s "])
def test_a_duration_without_a_proper_unit_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(ValueError, match="30s"):
        duration_s(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [("512Mi", 512 * 2**20), ("16Gi", 16 * 2**30), ("1K", 1000), ("1.5Ki", 1536), ("7B", 7), (4096, 4096)],
)
def test_a_size_is_read_in_decimal_and_binary_units(text: object, count: int) -> None:
    assert size_bytes(text) == count


@pytest.mark.parametrize("text", ["", "512", "512MiB", "-1Mi", True, None, -1, 2**63, 1.5, "1Mi2Ki"])
def test_what_is_no_size_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(ValueError, match="512Mi"):
        size_bytes(text)


@given(st.integers(1, 10**6), st.sampled_from(sorted(DURATION_UNITS)))
def test_a_written_duration_reads_back_as_itself(number: int, unit: str) -> None:
    seconds = number * DURATION_UNITS[unit]
    assert duration_s(write_duration(seconds)) == pytest.approx(seconds)


def test_people_see_few_figures() -> None:
    assert [show_duration(s) for s in (0, 0.0123, 4.5, 125, 12000)] == ["0s", "12.3ms", "4.5s", "2m05s", "3h20m"]
    assert [show_duration(s) for s in (0.99999, 59.97, 3599.7, 187_200)] == ["1s", "1m00s", "1h00m", "2d04h"]
    assert [show_size(n) for n in (7, 512 * 2**20, 1.5 * 2**30)] == ["7B", "512Mi", "1.5Gi"]


@pytest.mark.parametrize(("text", "seconds"), [("30", 30.0), ("0.5", 0.5), ("1h30m", 5400.0), ("500ms", 0.5)])
def test_a_request_may_also_give_a_bare_number_of_seconds(text: str, seconds: float) -> None:
    assert wait_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "-1", "٣", "1e3", "1S", "30 s", "30\n"])
def test_a_request_that_gives_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="30s"):
        wait_s(text)


@given(st.from_regex(DURATION_PATTERN, fullmatch=True))
def test_whatever_fits_the_pattern_of_durations_is_read_the_same_everywhere(text: str) -> None:
    if text.isascii():
        assert re.fullmatch(WAIT_PATTERN, text)
        assert duration_s(text) == wait_s(text)


def test_names_and_keys_are_told_from_what_is_none() -> None:
    assert all(is_name(text) for text in ("a", "rollout-7:2@x.y_z", "0" * 128))
    assert not any(is_name(text) for text in ("", "-a", "a b", "a/b", "a\n", "ä", "0" * 129))
    assert all(is_key(text) for text in ("!", "~" * 255))
    assert not any(is_key(text) for text in ("", "a b", "a\n", "ä", "~" * 256))
