"""Errors: one class for each code of the gateway, and every one survives a pickle."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest

import tangram
from gateway.errors import FACES
from tangram import InvocationFailed, MapFailed, NotFoundError, TangramError, errors, testing
from tangram.client.requests import result_of
from tangram.testing import ScriptedFailure
from tangram.types import Problem


def failed() -> InvocationFailed:
    call = testing.ScriptedCall(
        function="f", input={}, record=testing.queued(0, "f", {}, mode="sync", task="t", trajectory=None)
    )
    call.end(None, ScriptedFailure("timeout", "too long", {"partial": [1]}))
    return InvocationFailed(result_of(call.record))


def every_error() -> list[TangramError]:
    own: list[TangramError] = [failed(), MapFailed([failed().invocation, NotFoundError("no f")])]
    plain: list[type[TangramError]] = [
        TangramError,
        *(kind for kind in kinds() if kind not in (InvocationFailed, MapFailed)),
    ]
    more: dict[str, Any] = {"component": "admission", "invocation_id": "i", "retry_after_s": 1.5, "detail": {"n": 1}}
    return own + [kind("why", **more) for kind in plain]


def kinds() -> list[type[TangramError]]:
    """Every class of errors but their base."""
    types = [value for value in vars(errors).values() if isinstance(value, type)]
    return [each for each in types if issubclass(each, TangramError) and each is not TangramError]


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_survives_a_pickle_whole(error: TangramError, protocol: int) -> None:
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is type(error)
    assert (str(again), again.args) == (str(error), error.args)
    assert {**vars(again), "results": None} == {**vars(error), "results": None}


def test_what_a_failed_map_holds_survives_a_pickle() -> None:
    error = MapFailed([failed().invocation, NotFoundError("no f")])
    again = pickle.loads(pickle.dumps(error))
    assert again.results[0] == error.results[0]
    assert [type(each) for each in again.failures.values()] == [NotFoundError]
    assert str(again) == "1 of 2 calls failed, the first with not_found: no f"


def test_a_failed_invocation_keeps_its_record_through_a_pickle() -> None:
    again = pickle.loads(pickle.dumps(failed()))
    assert (again.reason, again.invocation.result, again.invocation.ok) == ("timeout", {"partial": [1]}, False)
    assert "timed_out (timeout): too long" in str(again)


def test_every_code_of_the_gateway_has_its_class() -> None:
    unknown = FACES.keys() - errors.BY_CODE.keys()
    # The codes of the base class, and of an invocation's end, which is no refusal.
    assert unknown == {"internal", "action_failed"}


@pytest.mark.parametrize("code", sorted(errors.BY_CODE))
def test_a_problem_becomes_the_class_of_its_code(code: str) -> None:
    error = errors.from_problem(problem(code, retry_after_s=2.0, errors={"path": "$"}))
    assert (type(error), error.code, error.message) == (errors.BY_CODE[code], code, "why")
    assert (error.component, error.retry_after_s, error.detail) == ("admission", 2.0, {"path": "$"})


def test_a_code_of_a_newer_gateway_is_a_plain_error() -> None:
    error = errors.from_problem(problem("unheard_of"), retry_after_s=3.0)
    assert (type(error), error.message, error.retry_after_s) == (TangramError, "why", 3.0)


def test_every_error_can_be_imported_from_the_top() -> None:
    assert [kind.__name__ for kind in kinds() if getattr(tangram, kind.__name__, None) is not kind] == []


def problem(code: str, **more: object) -> Problem:
    body = {"type": "t", "title": "T", "status": 409, "code": code, "detail": "why", "component": "admission"}
    return msgspec.convert(body | more, Problem)
