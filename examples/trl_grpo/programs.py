"""What is learned: small programs, the words that they are written in, and the tests that judge them."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

#: What a prompt asks for, and a program that does it. Two domains, each with a teacher of its own.
TASKS = {
    "sum": "a + b",
    "difference": "a - b",
    "product": "a * b",
    "twice": "a + a",
    "square": "a * a",
    "larger": "max ( a , b )",
    "smaller": "min ( a , b )",
    "distance": "abs ( a - b )",
}
DOMAINS = {"numbers": ("sum", "difference", "product", "twice", "square"), "order": ("larger", "smaller", "distance")}
ATOMS, OPERATORS, FUNCTIONS = ("a", "b"), ("+", "-", "*"), ("max", "min")
WORDS = (*ATOMS, *OPERATORS, *FUNCTIONS, "abs", "(", ")", ",", "task", ":", *TASKS)
PAD, BEGIN, END = "<pad>", "<s>", "</s>"
#: Pairs of arguments of the tests.
CASES = ((2, 3), (7, 4), (-5, 1), (0, 6))


def prompt_of(task: str) -> str:
    return f"task {task} :"


def any_program(draw: random.Random) -> str:
    """Draw a program of the grammar: an operation, a call, or the absolute value of an operation."""
    left, right = draw.choice(ATOMS), draw.choice(ATOMS)
    shape = draw.randrange(3)
    if shape == 0:
        return f"{left} {draw.choice(OPERATORS)} {right}"
    if shape == 1:
        return f"{draw.choice(FUNCTIONS)} ( {left} , {right} )"
    return f"abs ( {left} {draw.choice(OPERATORS)} {right} )"


def source_of(program: str) -> str:
    """Return the file that a completion stands for."""
    return f"def f(a, b):\n    return {program}\n"


def suite_of(task: str) -> str:
    """Return the tests of a task, for pytest."""
    cases = "\n".join(f"    ({a}, {b}, {eval(TASKS[task], {'a': a, 'b': b})})," for a, b in CASES)  # of the table above
    return (
        "from program import f\n\n\n"
        f"CASES = [\n{cases}\n]\n\n\n"
        "def test_it():\n    assert [f(a, b) for a, b, _ in CASES] == [wanted for _, _, wanted in CASES]\n"
    )


def does(program: str, task: str) -> bool:
    """Whether a program passes the tests of a task: of the grammar's words alone, so it is evaluated here."""
    try:
        code = compile(program, "program", "eval")
        return all(eval(code, {"a": a, "b": b}) == eval(TASKS[task], {"a": a, "b": b}) for a, b in CASES)
    except (SyntaxError, TypeError, NameError, ValueError):
        return False


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words."""
    vocabulary = {word: index for index, word in enumerate((PAD, BEGIN, END, "<unk>", *WORDS))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=PAD, bos_token=BEGIN, eos_token=END, unk_token="<unk>", padding_side="left"
    )


def write_checkpoint(model: object, directory: Path) -> Path:
    """Save a model as Hugging Face does, with its tokenizer."""
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory
