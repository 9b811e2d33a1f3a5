"""Handlers in process sandboxes, and wheels that they may require."""

from __future__ import annotations

import textwrap
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from manager.function import FunctionSpec, HandlerSpec, SandboxSpec
from runtimes.sandbox.handler.runtime import HandlerRuntime, HandlerSettings
from runtimes.sandbox.provider import ProviderSettings, make_provider
from runtimes.sandbox.sandbox import Provider
from tests.runtimes.recorder import execution_of

DEADLINE_S = 60.0
SCALE: dict[str, object] = {"per_instance": 1, "instances_min": 0, "instances_max": 8, "idle_s": 300.0}
SETTINGS = HandlerSettings(sandbox=SandboxSpec(memory_bytes=256 * 2**20), start_timeout_s=DEADLINE_S, kill_grace_s=0.2)

Function = Callable[..., FunctionSpec]


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[Provider]:
    provider = make_provider(ProviderSettings(kind="process", state_dir=tmp_path / "state"))
    yield provider
    assert not [path.name for path in (tmp_path / "state" / "sandboxes").glob("*")], "a sandbox was leaked"
    await provider.close()


@pytest.fixture
async def runtime(provider: Provider) -> AsyncIterator[HandlerRuntime]:
    runtime = HandlerRuntime(provider, SETTINGS)
    yield runtime
    await runtime.close()


@pytest.fixture
def function(tmp_path: Path) -> Function:
    """Makes a function of a handler's source."""
    tmp_path.chmod(0o755)

    def make(source: str, *, callable: str = "score", **options: int | float | str) -> FunctionSpec:
        directory = tmp_path / "function"
        directory.mkdir(exist_ok=True)
        revision = str(options.pop("revision", "1"))
        (directory / f"handler{revision}.py").write_text(textwrap.dedent(source), encoding="utf-8")
        output_limit_bytes = int(options.pop("output_limit_bytes", 2**20))
        return FunctionSpec(
            name="reward",
            runtime="handler",
            revision=revision,
            timeout_s=DEADLINE_S,
            output_limit_bytes=output_limit_bytes,
            handler=HandlerSpec(module=f"handler{revision}", callable=callable, directory=directory, **SCALE | options),  # type: ignore[arg-type]  # a test's keywords
        )

    return make


async def call(runtime: HandlerRuntime, function: FunctionSpec, id: str = "a1", **input: object) -> object:
    execution, _ = execution_of(function, input, id=id)
    return (await runtime.execute(execution)).value


def wheel(directory: Path, name: str, version: str, source: str, requires: tuple[str, ...] = ()) -> Path:
    """Write a wheel of one module of that name, and return its file."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    files = {
        f"{name}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{info}/RECORD"
    files[record] = "".join(f"{each},,\n" for each in (*files, record))
    made = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    made.chmod(0o644)
    return made
