"""Patterns in words."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import tangram.types
from tangram import types
from tangram.types import CallHeaders, InvocationQuery, SandboxChoice, SandboxPath


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


def test_what_is_no_mismatch_of_a_pattern_is_told_as_it_is() -> None:
    assert types.explained(error_of({"a": ["x"]}, dict[str, list[int]])) == ("Expected `int`, got `str`", "[...][0]")


def test_each_pattern_of_the_wire_is_declared_with_its_words() -> None:
    room = Path(tangram.types.__file__).parent
    bare = [str(each) for each in room.rglob("*.py") if "Meta(pattern" in each.read_text(encoding="utf-8")]
    assert [Path(each).name for each in bare] == ["types.py"]
