"""The reader of a session: what was seen is not shown again, what is missing is counted, and the end is the end."""

from __future__ import annotations

import pytest

from tangram.client.followers import SessionFollower
from tangram.client.requests import Retries
from tangram.errors import ConflictError, UnreadableAnswerError


def follower(input_offset: int | None = None) -> SessionFollower:
    return SessionFollower("s1", Retries(), input_offset=input_offset)


def test_output_that_was_seen_is_passed_over_after_a_cut() -> None:
    one = follower()
    first = one.feed('{"stream": "stdout", "offset": 0, "data": "YWJj"}')
    assert first is not None
    assert (first.data, one.offset) == (b"abc", 3)
    assert one.feed('{"stream": "stdout", "offset": 0, "data": "YWJj"}') is None
    rest = one.feed('{"stream": "stderr", "offset": 1, "data": "YmNkZQ=="}')
    assert rest is not None
    assert (rest.stream, rest.offset, rest.data, one.missing) == ("stderr", 3, b"de", 0)


def test_bytes_that_are_no_longer_kept_are_counted() -> None:
    one = follower()
    one.feed('{"stream": "stdout", "offset": 7, "data": "YQ=="}')
    assert (one.missing, one.offset) == (7, 8)


def test_where_the_input_stands_is_taken_from_the_gateway_only_if_it_is_unknown() -> None:
    unknown, known = follower(), follower(input_offset=5)
    for one in (unknown, known):
        assert one.feed('{"stream": "attached", "offset": 0, "input_offset": 9}') is None
    assert (unknown.input_offset, known.input_offset) == (9, 5)


def test_its_end_a_silence_and_another_caller_are_told_apart() -> None:
    one = follower()
    assert one.feed("") is None
    assert one.feed('{"stream": "heartbeat"}') is None
    one.feed(
        '{"stream": "eof", "offset": 3, "state": "succeeded", "reason": null, "message": "", "exit_code": 4,'
        ' "signal": null}'
    )
    assert one.end is not None
    assert one.end.exit_code == 4
    with pytest.raises(ConflictError, match="another caller"):
        one.feed('{"stream": "detached"}')
    with pytest.raises(UnreadableAnswerError):
        one.feed('{"stream": "stdout"}')
