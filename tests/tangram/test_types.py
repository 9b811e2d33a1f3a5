"""The wire types against a gateway that serves, and durations, sizes, names and patterns as each API reads them."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tangram.types
from gateway.invocations.record import Mode as RecordMode
from manager.action import State as ManagerState
from manager.errors import Reason as ManagerReason
from tangram import types
from tangram.types import (
    DURATION_PATTERN,
    DURATION_UNITS,
    WAIT_PATTERN,
    CallHeaders,
    InvocationQuery,
    SandboxChoice,
    SandboxPath,
    backoff_s,
    duration_s,
    is_key,
    is_name,
    show_duration,
    show_size,
    size_bytes,
    wait_s,
    write_duration,
)
from tests.gateway.conftest import RunningGateway


def test_states_reasons_and_modes_are_those_of_the_server() -> None:
    assert get_args(types.State) == tuple(state.value for state in ManagerState)
    assert get_args(types.Reason) == tuple(reason.value for reason in ManagerReason)
    assert get_args(types.Mode) == tuple(mode.value for mode in RecordMode)


def test_a_reason_that_a_newer_server_gives_and_a_field_that_it_adds_are_read() -> None:
    body = b'{"stream": "eof", "offset": 3, "state": "paused", "reason": "moon", "phase": 1}'
    end = types.read_log_record(body)
    assert isinstance(end, types.LogEnd)
    assert (end.state, end.reason) == ("paused", "moon")


async def test_an_invocation_knows_its_end_and_its_times_and_survives_a_pickle(gateway: RunningGateway) -> None:
    for input in ({}, {"reason": "handler_error"}):
        answer = await gateway.invoke(input)
        invocation = msgspec.json.decode(answer.content, type=types.Invocation)
        assert (invocation.ended, invocation.ok) == (True, input == {}) and invocation.act_ms is not None
        assert invocation.act_s == pytest.approx(invocation.act_ms / 1000, abs=0.01)
        assert pickle.loads(pickle.dumps(invocation)) == invocation


async def test_records_of_a_log_are_told_apart(gateway: RunningGateway) -> None:
    response = await gateway.invoke({"log": "hello"}, mode="stream")
    accepted, said, result = [types.read_log_record(line) for line in response.content.splitlines()]
    assert isinstance(accepted, types.LogAccepted) and isinstance(result, types.LogResult)
    assert isinstance(said, types.LogLine) and said.text == "hello"
    log = await gateway.http.get(f"/v1/invocations/{accepted.invocation.id}/logs")
    assert isinstance(types.read_log_record(log.content.splitlines()[-1]), types.LogEnd)
    assert types.read_log_record('{"stream": "heartbeat"}') == types.LogHeartbeat(stream="heartbeat")
    lag = types.read_log_record(b'{"stream": "dropped", "next_offset": 7, "data": "too slow"}')
    assert lag == types.LogLag(stream="dropped", next_offset=7, data="too slow")


def test_the_wait_doubles_with_each_try_up_to_its_bound() -> None:
    assert [backoff_s(attempt, 0.5, 3.0) for attempt in (1, 2, 3, 4, 100_000)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert [backoff_s(9, 0.5, 3.0, chance) for chance in (0.0, 0.5)] == [0.0, 1.5], "it spreads who failed together"


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


def error_of(given: object, kind: object) -> msgspec.ValidationError:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(given, kind)
    return caught.value


@pytest.mark.parametrize(
    ("given", "kind", "said", "place"),
    [
        ({"X-Timeout": "0s"}, CallHeaders, "must be a duration above zero", ".X-Timeout"),
        ({"X-Trajectory-Id": "../x"}, CallHeaders, "must be 1 to 128 letters", ".X-Trajectory-Id"),
        ({"since": "yesterday"}, InvocationQuery, "an instant with its zone", ".since"),
        ({"image": ""}, SandboxChoice, "must be the name of an image", ".image"),
        ("", SandboxPath, "must be a path of at most 4095 bytes without NUL", ""),
    ],
)
def test_a_text_that_does_not_fit_is_told_in_words(given: object, kind: object, said: str, place: str) -> None:
    told, at = types.explained(error_of(given, kind))
    assert said in told
    assert at == place
    assert "regex" not in told


def test_each_pattern_of_the_wire_is_declared_with_its_words() -> None:
    room = Path(tangram.types.__file__).parent
    bare = [str(each) for each in room.rglob("*.py") if "Meta(pattern" in each.read_text(encoding="utf-8")]
    assert [Path(each).name for each in bare] == ["types.py"]
