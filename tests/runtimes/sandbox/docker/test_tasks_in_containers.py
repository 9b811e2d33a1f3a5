"""Handlers and suites in real containers of the base image, whose pytest is the distribution's."""

from __future__ import annotations

from pathlib import Path

import pytest

from manager.errors import ActionFailed, Reason
from manager.function import FunctionSpec, SandboxSpec
from runtimes.sandbox.environments import Environments, EnvironmentSettings
from runtimes.sandbox.handler.runtime import HandlerRuntime, HandlerSettings
from runtimes.sandbox.sandbox import Provider
from tests.runtimes.handlers import handler_in
from tests.runtimes.recorder import execution_of
from tests.runtimes.sandbox.pytest.conftest import SuiteBench
from tests.runtimes.sandbox.pytest.test_runtime import CALC, CRASH, LISTS, SUITE

pytestmark = pytest.mark.docker


async def test_a_handler_serves_from_a_container_and_is_replaced(containers: Provider, tmp_path: Path) -> None:
    directory = tmp_path / "function"
    directory.mkdir()
    (directory / "handler.py").write_text(
        "import os\ndef score(event, context):\n    print('graded')\n    return event['n'] or os._exit(3)\n"
    )
    settings = HandlerSettings(sandbox=SandboxSpec(image="tangram-base:bookworm", memory_bytes=256 * 2**20))
    spec = handler_in(directory, instances_max=1)
    # A sandbox section without an image takes the default one.
    function = FunctionSpec(name="f", runtime="handler", sandbox=SandboxSpec(), handler=spec)
    runtime = HandlerRuntime(containers, settings)
    try:
        await runtime.prepare(function)
        for n in (1, 2):
            execution, log = execution_of(function, {"n": n})
            assert ((await runtime.execute(execution)).value, log.text("stdout")) == (n, "graded\n")
        with pytest.raises(ActionFailed, match="exit code 3") as failure:
            await runtime.execute(execution_of(function, {"n": 0})[0])
        assert failure.value.reason is Reason.HANDLER_ERROR
        assert (await runtime.execute(execution_of(function, {"n": 3})[0])).value == 3
    finally:
        await runtime.close()


async def test_a_suite_is_judged_in_a_container(containers: Provider) -> None:
    default = SandboxSpec(image="tangram-base:bookworm", memory_bytes=512 * 2**20)
    environments = Environments(containers, EnvironmentSettings(default=default))
    bench = SuiteBench(environments)
    try:
        assert (await bench.run(SUITE, **LISTS))["reward"] == 0.0
        fixed = await bench.run({"calc.py": CALC.format(sign="+")}, cores=(0, 1), **LISTS)
        assert (fixed["reward"], fixed["workers"], fixed["note"]) == (1.0, 2, "")
        crashed = await bench.run(CRASH, targets=["test_crash.py"])
        assert crashed["counts"] == {"error": 2, "passed": 3}
    finally:
        await environments.close()
