"""Admission, retries, the token and the wire: the small pure parts of the doors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest
from msgspec import Raw

from gateway import serialization
from gateway.invocations.invocations import Admission, next_try_s
from manager.action import Outcome, State
from manager.errors import CANCEL_ASKED, NOT_BEGUN, CapacityExceeded, Draining, InvalidInput, QuotaExceeded, Reason
from manager.function import FunctionSpec, RetrySpec
from tangram import types
from tangram.types import BatchItem, FileEntry, FileList


def function(**given: object) -> FunctionSpec:
    return FunctionSpec(name="f", runtime="handler", **given)  # type: ignore[arg-type]


def failed(
    reason: Reason, retry_after_s: float | None = None, detail: Mapping[str, object] = MappingProxyType({})
) -> Outcome:
    return Outcome(state=State.FAILED, reason=reason, retry_after_s=retry_after_s, detail=detail)


def test_each_bound_refuses_with_its_own_error_and_frees_its_place() -> None:
    admission = Admission(lambda: 0.0, total_max=3, task_max=lambda task: 2)
    narrow = function(max_queued=1)
    admission.enter("f", "a")
    with pytest.raises(QuotaExceeded, match="function 'f'"):
        admission.check(narrow, "b")
    admission.enter("g", "a")
    with pytest.raises(QuotaExceeded, match="task 'a'"):
        admission.check(function(), "a")
    admission.enter("g", "b")
    with pytest.raises(CapacityExceeded):
        admission.check(function(), "c")
    admission.leave("f", "a")
    admission.check(narrow, "a")
    admission.draining = True
    with pytest.raises(Draining):
        admission.check(function(), "c")


def test_retry_after_follows_the_pace_at_which_places_become_free() -> None:
    now_s = 0.0
    admission = Admission(lambda: now_s, total_max=20, task_max=lambda task: 20)
    for _ in range(20):
        admission.enter("f", "a")
    for _ in range(10):
        now_s += 5.0
        admission.leave("f", "a")
        admission.enter("f", "a")
    with pytest.raises(CapacityExceeded) as refused:
        admission.check(function(), "a")
    assert refused.value.retry_after_s == pytest.approx(5.0)


def test_a_try_is_repeated_only_for_its_reasons_and_within_its_count() -> None:
    spec = function(retry=RetrySpec(max_attempts=3, backoff_s=2.0, backoff_max_s=5.0, on=(Reason.UPSTREAM,)))
    assert next_try_s(spec, 1, failed(Reason.UPSTREAM), 0.5) == 1.0
    assert next_try_s(spec, 2, failed(Reason.UPSTREAM), 0.5) == 2.0
    assert next_try_s(spec, 2, failed(Reason.UPSTREAM, retry_after_s=30.0), 0.5) == 30.0
    assert next_try_s(spec, 2, failed(Reason.UPSTREAM, retry_after_s=1e9), 0.5) is None, "nobody waits for ever"
    assert next_try_s(spec, 2, failed(Reason.UPSTREAM, retry_after_s=30.0), 0.5, left_s=20.0) is None
    assert next_try_s(spec, 2, failed(Reason.UPSTREAM, retry_after_s=7200.0), 0.5, left_s=86400.0) == 7200.0
    assert next_try_s(spec, 3, failed(Reason.UPSTREAM), 0.5) is None
    assert next_try_s(spec, 1, failed(Reason.HANDLER_ERROR), 0.5) is None
    assert next_try_s(spec, 1, failed(Reason.ENVIRONMENT_LOST), 0.5) is None


def test_the_machinery_s_faults_are_retried_for_idempotent_functions_only() -> None:
    assert next_try_s(function(idempotent=True), 1, failed(Reason.NODE_LOST), 0.0) == 0.0
    assert next_try_s(function(idempotent=True), 3, failed(Reason.NODE_LOST), 0.0) is None
    unwanted = Outcome(state=State.LOST, reason=Reason.NODE_LOST, detail={CANCEL_ASKED: True})
    assert next_try_s(function(idempotent=True), 1, unwanted, 0.0) is None, "it was to end"
    assert next_try_s(function(idempotent=True), 1, failed(Reason.CANCELLED), 0.0) is None
    assert next_try_s(function(idempotent=True), 1, Outcome(state=State.SUCCEEDED), 0.0) is None


def test_what_has_not_begun_is_tried_as_long_as_it_may_wait_whatever_it_is() -> None:
    short = failed(Reason.ENVIRONMENT_LOST, retry_after_s=5.0, detail={NOT_BEGUN: True})
    assert next_try_s(function(), 1, short, 0.0, patience_s=600.0) == 5.0
    assert next_try_s(function(), 40, short, 0.0, patience_s=600.0, alone=False) == 5.0
    assert next_try_s(function(), 1, short, 0.0, patience_s=4.0) is None
    assert next_try_s(function(), 1, short, 0.0) is None, "a caller who waits is told"
    assert next_try_s(function(), 1, failed(Reason.ENVIRONMENT_LOST, retry_after_s=5.0), 0.0, patience_s=600.0) is None


def test_durations_and_names_are_read_strictly() -> None:
    assert [serialization.duration_s(text, "t") for text in ("500ms", "30s", "2m", "1.5h", "7")] == [
        0.5,
        30,
        120,
        5400,
        7,
    ]
    for odd in ("", "-1s", "1e3", "s", "1 s", "nan", "9" * 20):
        with pytest.raises(InvalidInput):
            serialization.duration_s(odd, "t")
    for odd in ("", ".x", "a/b", "a b", "a\n", "ä", "x" * 129):
        with pytest.raises(InvalidInput):
            serialization.name(odd, "name")


def test_a_duration_means_the_same_in_a_request_as_in_a_file() -> None:
    for text in ("1h30m", "2m5s", "1d12h", "1s500ms"):
        assert serialization.duration_s(text, "X-Timeout") == types.duration_s(text)


def test_what_json_cannot_hold_is_repaired_and_encoded_json_is_not_parsed_again() -> None:
    assert serialization.dumps({"a": 1, 1: {2}}) == b'{"a":1,"1":"{2}"}'
    assert serialization.dumps({"c": "\ud800"}) == b'{"c":"?"}'
    lost = FileEntry(path="/a\udcff", size_bytes=1, directory=False, mode="644")
    assert serialization.encode(lost) == b'{"path":"/a?","size_bytes":1,"directory":false,"mode":"644"}'
    whole = {"a": Raw(b'{"b": 1}'), "c": ["\ud800", FileList(files=(lost,))], "d": None}
    told = b'{"a":{"b": 1},"c":["?",{"files":[{"path":"/a?","size_bytes":1,"directory":false,"mode":"644"}]}],"d":null}'
    assert serialization.encode(whole) == told


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"colour": "red", "function": "f"}, "$.calls[3].colour"),
        ({}, "$.calls[3].function"),
        ({"function": "f", "task": "a b"}, "$.calls[3].task"),
        (7, "$.calls[3]"),
    ],
)
def test_what_does_not_fit_a_type_is_refused_with_its_path(value: object, path: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        serialization.read(value, BatchItem, "$.calls[3]")
    assert refused.value.detail == {"path": path}
    assert refused.value.message.startswith(path)
