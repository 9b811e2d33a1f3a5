"""Every program ends, and what is recorded of its end holds; a judge that cannot read an assert says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.attacks.recorded import CASES, NOT_OURS, RECORDED, UNREADABLE, complaint, failures_of
from manager.function import SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.sandbox import Provider
from tests.runtimes.sandbox.conftest import unique

ENDED = SimpleNamespace(
    stdout="2\n", stderr="", exit_code=0, timing=SimpleNamespace(execute_ms=1.0), pieces=[], elapsed_s=0.1
)


@pytest.mark.parametrize("user", ["", "root"])
async def test_cases_end_as_they_say(provider: Provider, spec: SandboxSpec, user: str) -> None:
    await assert_cases_hold(CASES, provider, spec, user)


@pytest.mark.slow
async def test_recorded_cases_hold_by_intent(
    real: Callable[[str], Path], provider: Provider, spec: SandboxSpec
) -> None:
    await assert_cases_hold(recorded(real), provider, spec)


def test_the_judges_exceptions_are_all_needed(real: Callable[[str], Path]) -> None:
    cases = recorded(real)
    texts = {text for case in cases for text in case["asserts"]}
    assert texts >= UNREADABLE
    assert all(any(word in case["test"] for case in cases) for words in NOT_OURS.values() for word in words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("result.stdout == '2\\n'", ""),
        ("result.exit_code == 1", "does not hold"),
        ("nobody_knows > 1", "NameError"),
        ("result.nothing", "AttributeError"),
        ("lines[3] == ''", "IndexError"),
        ("result.stdout ==", "SyntaxError"),
        ("f'{i}' in result.stdout", ""),
        ("f'x{i}' in result.stdout", "does not hold"),
    ],
)
def test_the_judge_passes_nothing_that_it_cannot_read(text: str, said: str) -> None:
    found = complaint(text, ENDED)
    assert said in found and bool(said) == bool(found)


def recorded(real: Callable[[str], Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in real(RECORDED).read_text(encoding="utf-8").splitlines()]


async def assert_cases_hold(cases: list[dict[str, Any]], provider: Provider, spec: SandboxSpec, user: str = "") -> None:
    sandbox = await provider.create(replace(spec, pids=512), name=unique("cases"), labels={}, mounts={})
    failed = {test: why for test, why in (await failures_of(cases, sandbox, user)).items() if why}
    assert failed == {}
    assert (await sandbox.run(Command(shell="echo well"))).stdout == b"well\n"
    await sandbox.close()
