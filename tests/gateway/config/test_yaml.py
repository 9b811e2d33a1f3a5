"""YAML with positions, variables and bounds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.yaml import DEPTH_MAX, NODES_MAX, TEXT_LIMIT_BYTES, YamlDocument, parse, show_path

FILE = Path("x.yaml")


def read(text: str, **env: str) -> YamlDocument:
    return parse(text, FILE, env)


def messages(text: str, **env: str) -> list[str]:
    return [str(problem) for problem in read(text, **env).problems]


def test_every_key_path_knows_its_line() -> None:
    document = read("a: 1\nb:\n  c:\n  - x\n  - {d: 2}\n")
    assert document.values == {"a": 1, "b": {"c": ["x", {"d": 2}]}}
    assert {show_path(path): place.line for path, place in document.positions.items()} == {
        "": 1,
        "a": 1,
        "b": 2,
        "b.c": 3,
        "b.c[0]": 4,
        "b.c[1]": 5,
        "b.c[1].d": 5,
    }


def test_scalars_are_those_of_yaml_1_2() -> None:
    values = read(
        "[on, yes, no, off, true, null, ~, 12, 0x1f, 0o17, 1.5, 1e3, 2024-01-01, 12:30, 'true', \"1\"]"
    ).values
    assert values == [
        *("on", "yes", "no", "off", True, None, None, 12, 31, 15, 1.5, 1000.0),
        *("2024-01-01", "12:30", "true", "1"),
    ]


def test_variables_are_replaced_and_what_they_hold_stays_text() -> None:
    document = read(
        "a: ${X}\nb: 'p${X:-d}q'\nc: ${Y:-8080}\nd: $${X}\ne: ${secret:key}\n${X}: 1\nf: ${E:-d}", X="12", E=""
    )
    assert document.values == {
        "a": "12",
        "b": "p12q",
        "c": "8080",
        "d": "${X}",
        "e": "${secret:key}",
        "${X}": 1,
        "f": "d",
    }
    assert not document.problems


def test_a_variable_that_is_not_defined_is_told_with_its_line() -> None:
    assert messages("a: 1\nb: ${NOPE}") == [
        "x.yaml:2: variable NOPE is not defined: set it, or give a default: ${NOPE:-...}"
    ]
    assert "is no variable" in messages("a: ${1x}")[0]


def test_a_key_that_is_given_twice_is_told_with_both_lines() -> None:
    assert messages("a: 1\nb: 2\na: 3") == ["x.yaml:3: key 'a' is given twice (first on line 1)"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1", "not YAML"),
        ("a: *b", "alias \\*b has no anchor"),
        ("a: &x [*x]", "cycle"),
        ("a: &x {b: {c: *x}}", "cycle"),
        ("a: !!python/object:os.system {}", "tag .* is not supported"),
        ("<<: {a: 1}", "merge keys"),
        ("{[1]: 2}", "a key must be a plain scalar"),
        ("a: &x [1]\n*x : 2", "a key must be a plain scalar"),
        ("a: 1\n---\nb: 2", "one document to a file"),
        ("\x00", "not YAML"),
        ("[" * 500_000, f"nested deeper than {DEPTH_MAX}"),
        ("#" * (TEXT_LIMIT_BYTES + 1), "larger than"),
    ],
)
def test_what_is_no_plain_bounded_document_is_refused(text: str, expected: str) -> None:
    document = read(text)
    assert document.problems
    assert re.search(expected, str(document.problems[0])), document.problems


def test_where_reading_stops_the_entries_before_it_are_kept() -> None:
    document = read("a: {x: 1}\nb: ${NOPE}\nb: 2\nc:\n  d: 1\n  e: [")
    assert document.values == {"a": {"x": 1}, "b": "${NOPE}"}
    assert [problem.position and problem.position.line for problem in document.problems] == [2, 3, 6]
    assert document.positions["a", "x"].line == 1


def test_an_anchor_may_be_given_anew_and_what_is_wrong_in_it_is_told_once() -> None:
    document = read("a: &x {k: 1, k: 2}\nb: [*x, *x]\nc: &x ${NOPE}\nd: *x")
    assert document.values == {"a": {"k": 1}, "b": [{"k": 1}, {"k": 1}], "c": "${NOPE}", "d": "${NOPE}"}
    assert [problem.position and problem.position.line for problem in document.problems] == [1, 3]


@pytest.mark.slow
def test_aliases_are_values_but_a_bomb_of_them_is_not() -> None:
    assert read("a: &x {k: 1}\nb: *x").values == {"a": {"k": 1}, "b": {"k": 1}}
    bomb = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
    )
    assert f"more than {NODES_MAX} values" in messages(bomb)[0]


@pytest.mark.slow
@given(st.text(st.sampled_from("ab:-[]{}&*!|>'\"#%@`,? \n\t${}0.\u2028\ufeff"), max_size=60))
def test_no_text_makes_the_parser_raise(text: str) -> None:
    document = read(text)
    assert document.problems or document.positions or document.values in ({}, None)
