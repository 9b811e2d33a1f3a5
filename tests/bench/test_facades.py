"""The bench of the doors: what counts as agreement of two servers, and what its yardstick of programs does."""

from __future__ import annotations

import json
import math

import httpx

from bench.facades.__main__ import RUNNER
from bench.facades.teachers import first_keys, largest_difference
from bench.gateway import process

ROW = [7, 3, 99]


def test_a_first_key_that_is_another_token_is_as_far_off_as_can_be() -> None:
    listed = [None, {"3": {"logprob": -1.5}, "5": {"logprob": -0.5}}, {"99": {"logprob": -2.0}}]
    assert largest_difference([first_keys(listed, ROW)], [[-1.5, -2.25]]) == 0.25
    turned = [None, {"5": {"logprob": -0.5}, "3": {"logprob": -1.5}}, {"99": {"logprob": -2.0}}]
    assert largest_difference([first_keys(turned, ROW)], [[-0.5, -2.0]]) == math.inf


def test_a_number_that_is_missing_is_no_agreement() -> None:
    assert largest_difference([[-1.5]], [[-1.5, -2.0]]) == math.inf
    assert largest_difference([first_keys([None, {}, None], ROW)], [[0.0, 0.0]]) == math.inf


async def test_the_yardstick_tells_the_end_of_a_program_as_sandboxfusion_does() -> None:
    async def ran(code: str, timeout_s: float = 10.0) -> tuple[str, str, int | None]:
        body = {"code": code, "stdin": "2\n", "run_timeout": timeout_s, "memory_limit_MB": 1024}
        told = (await client.post("/run_code", content=json.dumps(body))).json()
        return told["status"], told["run_result"]["stdout"], told["run_result"]["return_code"]

    async with process(RUNNER) as runner, httpx.AsyncClient(base_url=f"http://127.0.0.1:{runner['http']}") as client:
        assert await ran("print(int(input()) + 1)") == ("Success", "3\n", 0)
        assert await ran("assert False") == ("Failed", "", 1)
        assert await ran("while True: pass", 0.2) == ("Failed", "", None)
