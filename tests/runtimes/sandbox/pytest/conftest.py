"""A project in a process sandbox, on which suites are run."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.inputs import OWN_PATH, unplugged
from manager.errors import ActionFailed
from manager.function import FunctionSpec, PytestSpec, SandboxSpec
from runtimes.runtime import Result
from runtimes.sandbox.environments import Environments, EnvironmentSettings
from runtimes.sandbox.provider import ProviderSettings, make_provider
from runtimes.sandbox.pytest.runtime import PytestRuntime
from tests.runtimes.recorder import RecordingLog, assert_as_declared, execution_of

SPEC = SandboxSpec(memory_bytes=512 * 2**20)
#: Without plugins that these suites do not need: to load them takes many times as long as to run the suites.
ARGS = ("-p", "no:cacheprovider", *unplugged())
FUNCTION = FunctionSpec(name="unit_tests", runtime="pytest", timeout_s=60.0, pytest=PytestSpec(args=ARGS))


class SuiteBench:
    """A trajectory with a project in its sandbox, on which suites are run."""

    def __init__(self, environments: Environments) -> None:
        self.environments = environments
        self.runtime = PytestRuntime(environments)
        self.log = RecordingLog()

    async def write(self, files: Mapping[str, str]) -> None:
        sandbox = await self.environments.ensure("t1", SPEC)
        for path, text in files.items():
            await sandbox.write_file(path, textwrap.dedent(text).encode())

    async def run(
        self,
        files: Mapping[str, str] | None = None,
        *,
        cores: tuple[int, ...] = (0,),
        function: FunctionSpec = FUNCTION,
        **input: object,
    ) -> dict[str, Any]:
        await self.write(files or {})
        execution, self.log = execution_of(function, input, trajectory="t1", cores=cores)
        result: Result = await self.runtime.execute(execution)
        assert_as_declared(function, result.value)
        assert isinstance(result.value, dict)
        assert result.usage["workers"] == result.value["workers"]
        return result.value

    async def failure(self, **arguments: Any) -> ActionFailed:
        with pytest.raises(ActionFailed) as failure:
            await self.run(**arguments)
        return failure.value


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[SuiteBench]:
    provider = make_provider(ProviderSettings(kind="process", state_dir=tmp_path, path=OWN_PATH))
    environments = Environments(provider, EnvironmentSettings(default=SPEC))
    yield SuiteBench(environments)
    await environments.close()
    await provider.close()
