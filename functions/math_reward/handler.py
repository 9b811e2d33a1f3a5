"""A verifier of mathematics answers: finds the final answer in a text and compares it with the reference by value.

Standard library only. ``{"answer": text, "reference": text}`` -> ``{"reward", "correct", "extracted", "found"}``.
"""

from __future__ import annotations

import ast
import hashlib
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

Number = Fraction | float

#: Points at which expressions with variables are compared; below zero their values are.
_POINTS = (1, -2, 3)
_TEXT_MAX_CHARS = 200_000
_EXPRESSION_MAX_CHARS = 1000
_EXPONENT_MAX = 200
_BITS_MAX = 20_000
_RELATIVE_ERROR = 1e-9


def score(event: Mapping[str, Any], context: Any) -> dict[str, object]:
    """The reward of an answer: 1.0 when it equals the reference, else 0.0."""
    answer, reference = str(event["answer"])[-_TEXT_MAX_CHARS:], str(event["reference"])
    extracted, found = extract(answer)
    expected, _ = extract(reference) if "\\boxed" in reference or "####" in reference else (reference, "")
    correct = extracted is not None and expected is not None and equal(extracted, expected)
    context.log("graded", correct=correct, extracted=extracted, reference=expected, found=found)
    return {"reward": 1.0 if correct else 0.0, "correct": correct, "extracted": extracted, "found": found}


# --- finding the answer


_SAID = re.compile(r"(?:final\s+)?answer\s*(?:is|:|=)\s*(?::\s*)?(?P<answer>[^\n]+)", re.IGNORECASE)
_NUMBER = re.compile(r"(?:-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+)(?:\s*/\s*\d+)?(?:\s*\\?%)?")


def extract(text: str) -> tuple[str | None, str]:
    """The final answer and how it was found: the last ``\\boxed{}``, ``####``, "answer is", or the last number."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed, "boxed"
    if "####" in text:
        return text.rpartition("####")[2].strip().split("\n")[0], "marked"
    said = list(_SAID.finditer(text))
    if said:
        return _unwrapped(said[-1]["answer"]), "said"
    numbers = _NUMBER.findall(text)
    return (numbers[-1].strip(), "last number") if numbers else (None, "nothing")


def _last_boxed(text: str) -> str | None:
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at]
    return None


def _unwrapped(text: str) -> str:
    """Without the sentence around it: "$5$." and "**5**" are 5."""
    text = text.strip().rstrip(".").strip().strip("*").strip()
    inside = re.match(r"\$([^$]+)\$", text) or re.match(r"\\\((.+?)\\\)", text)
    return inside[1] if inside else text


# --- comparing


def equal(left: str, right: str) -> bool:
    """Whether two answers mean the same: the same text, value, expression, or the same in each part."""
    left, right = plain(left), plain(right)
    if left == right:
        return True
    parts = _parts(left), _parts(right)
    if parts[0] is not None and parts[1] is not None:
        return _equal_parts(parts[0], parts[1])
    return _equal_values(left, right)


_REPLACED = (
    (r"\\(?:left|right|displaystyle|limits|mathrm|operatorname|[!,;: ])", ""),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\(?:text|mbox|textbf)\{([^{}]*)\}", r"\1"),
    (r"\^\{?\\circ\}?|\\degree|°", ""),
    (r"\\(?:cdot|times|ast)|[×·]", "*"),
    (r"\\div|÷", "/"),
    (r"\\pi|π", "(pi)"),
    (r"\\infty|∞|infinity", "(inf)"),
    (r"\\[%$]", lambda found: found[0][1]),
    (r"[−–]", "-"),
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),
    (r"\$|\\[()\[\]]", ""),
    (r"\s+", ""),
)


def plain(text: str) -> str:
    """One spelling for the many of LaTeX and of prose."""
    text = text.strip()[:_EXPRESSION_MAX_CHARS]
    for pattern, replacement in _REPLACED:
        text = re.sub(pattern, replacement, text)
    text = text.rstrip(".").replace("\\{", "{").replace("\\}", "}")
    left, equals, right = text.rpartition("=")
    if equals and re.fullmatch(r"[A-Za-z]\w*(?:\([A-Za-z]\))?", left):
        text = right
    return text.lower() if text.isalpha() else text


_CLOSING = {"(": ")", "[": "]", "{": "}"}


def _parts(text: str) -> tuple[str, list[str]] | None:
    """The brackets and the parts of a point, an interval or a set; a bare list counts as a set."""
    for opening in _CLOSING:
        closing = next((mark for mark in (*_CLOSING.values(),) if text.endswith(mark)), None)
        if text.startswith(opening) and closing is not None and (opening == "{") == (closing == "}"):
            inside = _split(text[len(opening) : -len(closing)])
            if inside is not None and (len(inside) > 1 or opening == "{"):
                return opening + closing, inside
    bare = _split(text)
    return ("{}", bare) if bare is not None and len(bare) > 1 else None


def _split(text: str) -> list[str] | None:
    """At the commas outside brackets; None where the brackets do not match."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts if depth == 0 else None


def _equal_parts(left: tuple[str, list[str]], right: tuple[str, list[str]]) -> bool:
    if left[0] != right[0] or len(left[1]) != len(right[1]):
        return False
    if left[0] != "{}":
        return all(equal(a, b) for a, b in zip(left[1], right[1], strict=True))
    left_over = list(right[1])
    for part in left[1]:
        match = next((other for other in left_over if equal(part, other)), None)
        if match is None:
            return False
        left_over.remove(match)
    return True


def _equal_values(left: str, right: str) -> bool:
    """By value. ``50%`` equals one half and, as answers are written, also a bare 50."""
    if right.endswith("%"):
        left, right = right, left
    mixed = left.endswith("%") and not right.endswith("%")
    try:
        one, other = expression(left.rstrip("%")), expression(right.rstrip("%"))
        scales = (Fraction(1), Fraction(1, 100)) if mixed else (Fraction(1),)
        return any(all(_close(one(x) * scale, other(x)) for x in _POINTS) for scale in scales)
    except (ValueError, ArithmeticError, SyntaxError, RecursionError, MemoryError, TypeError):
        return False


def _close(left: Number, right: Number) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    return math.isclose(left, right, rel_tol=_RELATIVE_ERROR, abs_tol=1e-12)


# --- values

_FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    "sqrt": math.sqrt,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "log": math.log,
    "ln": math.log,
    "exp": math.exp,
}
_CONSTANTS: Mapping[str, float] = {"pi": math.pi, "e": math.e, "inf": math.inf}
_WORDS = "|".join((*_FUNCTIONS, *_CONSTANTS))


def expression(text: str) -> Callable[[int], Number]:
    """The text as a function of a point; ValueError or SyntaxError when it is no expression."""
    tree = ast.parse(_python(text), mode="eval")
    return lambda point: _value(tree.body, point)


def _letter(name: str, point: int) -> Fraction:
    """The value of a variable at a point: no sum or product of others' values is one."""
    digits = int.from_bytes(hashlib.sha256(f"{point} {name}".encode()).digest()[:4], "big")
    value = Fraction(2**18 + digits % 2**20, 2**18 + 3)
    return -value if point < 0 else value


def _python(text: str) -> str:
    text = re.sub(r"(?<=\d)(?=\\frac)", "+", text) if re.fullmatch(r"-?\d+\\frac.*", text) else text
    text = text.replace("-", "-1*", 1) if re.match(r"-\d+\+\\frac", text) else text
    text = re.sub(r"^-1\*(\d+\+.*)$", r"-(\1)", text)
    for _ in range(20):
        text, frac = re.subn(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
        text, bare = re.subn(r"\\frac(\d)(\d)", r"((\1)/(\2))", text)
        text, root = re.subn(r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)", text)
        text, power = re.subn(r"\^\{([^{}]*)\}", r"**(\1)", text)
        if not frac + bare + root + power:
            break
    text = re.sub(r"\\sqrt(\d)", r"sqrt(\1)", text).replace("^", "**").replace("\\", "")
    # Multiplication that is written by standing side by side.
    text = re.sub(rf"(?<=[\d)])(?=(?:{_WORDS})\b|[A-Za-z(])", "*", text)
    text = re.sub(rf"\b(?!(?:{_WORDS})\b)([A-Za-z])(?=\()", r"\1*", text)
    return re.sub(r"\)(?=\d)", ")*", text)


def _value(node: ast.expr, point: int) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Name(id=name) if len(name) == 1:
            return _letter(name, point)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, point)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, point)
        case ast.BinOp(left=left, op=operator, right=right):
            return _combined(operator, _value(left, point), _value(right, point))
        case ast.Call(func=ast.Name(id=name), args=[argument]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](float(_value(argument, point)))
    raise ValueError(f"no number: {ast.dump(node)[:80]}")


def _combined(operator: ast.operator, left: Number, right: Number) -> Number:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return _bounded(left * right)
        case ast.Div():
            return _bounded(left / right)
        case ast.Pow() if -_EXPONENT_MAX <= right <= _EXPONENT_MAX:
            power = left ** (int(right) if right == int(right) else float(right))
            if isinstance(power, complex):
                raise ValueError("no real number")
            return _bounded(power)
    raise ValueError("no such operation")


def _bounded(number: Number) -> Number:
    """A number that an answer may hold; towers of powers are none."""
    if isinstance(number, Fraction) and number.numerator.bit_length() + number.denominator.bit_length() > _BITS_MAX:
        raise ValueError("too large a number")
    return number
