"""The mathematics verifier: what is an answer, and which answers are equal."""

from __future__ import annotations

from typing import Any

import pytest

from functions.math_reward.handler import equal, extract, score


class StubContext:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def log(self, message: str, **fields: Any) -> None:
        self.records.append({"message": message, **fields})


@pytest.mark.parametrize(
    ("text", "answer", "found"),
    [
        (r"First \boxed{1}, but finally \boxed{\frac{1}{2}}.", r"\frac{1}{2}", "boxed"),
        ("Long reasoning\n#### 1,234", "1,234", "marked"),
        ("So the answer is $x=5$.\nDone", "x=5", "said"),
        ("**Final answer:** 42", "42", "said"),
        ("There are 3 cats and 12.5 dogs", "12.5", "last number"),
        ("It rises by 25% of 1,200 to 3/4", "3/4", "last number"),
        ("I do not know", None, "nothing"),
        (r"an open \boxed{1", "1", "last number"),
    ],
)
def test_the_final_answer_is_found(text: str, answer: str | None, found: str) -> None:
    assert extract(text) == (answer, found)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("1/2", "0.5"),
        (r"\frac{1}{2}", "50%"),
        (r"\dfrac12", ".5"),
        ("50", r"50\%"),
        ("1,234", "1234.0"),
        (r"1\frac{1}{2}", "3/2"),
        (r"-1\frac{1}{2}", "-1.5"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
        (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
        ("2x+3", "3+2x"),
        ("(x+1)^2", "x^2+2x+1"),
        (r"x(x-1)", "x^2-x"),
        ("(a+b)^2", "a^2+2a*b+b^2"),
        ("x=5", "5"),
        ("(1, 2)", r"\left(1,\ 2\right)"),
        ("{3, 1}", "1,3"),
        (r"\{1,\frac12\}", "{0.5, 1}"),
        ("[0, 1)", "[0,1)"),
        (r"(-\infty, 2]", r"(-\infty,2]"),
        (r"90^\circ", "90"),
        (r"\text{Yes}", "yes"),
        (r"3\pi", r"\pi\cdot 3"),
        ("10^{-2}", "0.01"),
        ("$7.00", "7"),
    ],
)
def test_answers_that_mean_the_same_are_equal(left: str, right: str) -> None:
    assert equal(left, right) and equal(right, left)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("1/3", "0.333"),
        ("1/2", "2"),
        ("5%", "50%"),
        ("(1,2)", "(2,1)"),
        ("[0,1)", "(0,1)"),
        ("x+1", "x-1"),
        ("a", "b"),
        ("x+y", "x+z"),
        ("g", "a+b"),
        ("2a", "j"),
        ("ab", "cd"),
        ("1,2", "1,2,3"),
        ("yes", "no"),
        ("", "0"),
        ("9**9**9**9", "1"),
        ("__import__('os').getpid()", "1"),
        ("1/0", "1"),
    ],
)
def test_answers_that_differ_are_not_equal(left: str, right: str) -> None:
    assert not equal(left, right) and not equal(right, left)


def test_the_reward_says_what_was_compared() -> None:
    context = StubContext()
    result = score({"answer": r"Thus \boxed{0.75}", "reference": r"... \boxed{\frac{3}{4}}"}, context)
    assert result == {"reward": 1.0, "correct": True, "extracted": "0.75", "found": "boxed"}
    assert context.records == [
        {"message": "graded", "correct": True, "extracted": "0.75", "reference": r"\frac{3}{4}", "found": "boxed"}
    ]
    assert score({"answer": "no idea", "reference": "4"}, context)["reward"] == 0.0
