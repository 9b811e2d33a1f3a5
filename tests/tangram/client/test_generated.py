"""The synchronous client is generated, and current."""

from __future__ import annotations

import inspect

import pytest

from scripts.make_sync_client import generated, synchronous
from tangram import AsyncClient, AsyncTrajectory, Client, Trajectory
from tangram.adapters import AsyncSandboxProvider, SandboxProvider


def test_the_committed_synchronous_client_is_current() -> None:
    stale = [path.name for path, text in generated() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run: python -m scripts.make_sync_client"


@pytest.mark.parametrize(
    ("waiting", "blocking"),
    [(AsyncClient, Client), (AsyncTrajectory, Trajectory), (AsyncSandboxProvider, SandboxProvider)],
)
def test_the_twins_have_the_same_methods_with_the_same_arguments(waiting: type, blocking: type) -> None:
    def signatures(kind: type) -> dict[str, list[str]]:
        methods = {name: value for name, value in vars(kind).items() if inspect.isfunction(value)}
        public = {name: value for name, value in methods.items() if not name.startswith("_")}
        return {name: list(inspect.signature(value).parameters) for name, value in public.items()}

    assert signatures(waiting) == signatures(blocking)


def test_waiting_is_taken_out_word_by_word() -> None:
    source = 'async def f(c: AsyncClient) -> None:\n    """Text."""\n    async with c as d:\n        await d.aclose()\n'
    assert synchronous(source) == 'def f(c: Client) -> None:\n    """Text."""\n    with c as d:\n        d.close()\n'
