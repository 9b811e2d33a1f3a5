"""Layers of requirements, built by the real pip from wheels on disk, in process sandboxes."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from manager.errors import InvalidConfig, Unsupported
from manager.function import FunctionSpec, SandboxSpec
from runtimes.sandbox.handler.runtime import HandlerRuntime, HandlerSettings
from runtimes.sandbox.handler.sources import RequirementSettings
from runtimes.sandbox.provider import ProviderSettings, make_provider
from runtimes.sandbox.sandbox import Provider
from tests.runtimes.handlers import handler_in
from tests.runtimes.recorder import execution_of
from tests.runtimes.sandbox.handler.conftest import wheel

pytestmark = pytest.mark.slow
DEADLINE_S = 120.0
SOURCE = """
import os, tiny
def score(event, context):
    return {"value": tiny.VALUE, "place": tiny.__file__, "writable": os.access(tiny.__file__, os.W_OK)}
"""

Function = Callable[..., FunctionSpec]
Runtime = Callable[..., HandlerRuntime]


@pytest.fixture
async def runtime(provider: Provider, tmp_path: Path) -> AsyncIterator[Runtime]:
    made: list[HandlerRuntime] = []

    def make(**said: object) -> HandlerRuntime:
        chosen: dict[str, object] = {"find_links": tmp_path / "wheels", "timeout_s": DEADLINE_S, **said}
        settings = HandlerSettings(
            sandbox=SandboxSpec(memory_bytes=256 * 2**20),
            start_timeout_s=DEADLINE_S,
            requirements=RequirementSettings(**chosen),  # type: ignore[arg-type]  # a test's keywords
            layers_dir=tmp_path / "layers",
        )
        made.append(HandlerRuntime(provider, settings))
        return made[-1]

    yield make
    for each in made:
        await each.close()


@pytest.fixture
def function(tmp_path: Path) -> Function:
    tmp_path.chmod(0o755)

    def make(*requirements: str, name: str = "reward", source: str = SOURCE) -> FunctionSpec:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "handler.py").write_text(source)
        spec = handler_in(directory, instances_max=2, requirements=requirements)
        return FunctionSpec(
            name=name,
            runtime="handler",
            revision=" ".join(requirements),
            timeout_s=DEADLINE_S,
            output_limit_bytes=2**20,
            handler=spec,
        )

    return make


def layers(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "layers").iterdir() if (path / "size").is_file())


async def test_a_handler_imports_what_it_requires_and_two_that_require_the_same_share_it(
    runtime: Runtime, function: Function, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path / "wheels", "other", "2.0", "VALUE = 'of another'")
    wheel(tmp_path / "wheels", "tiny", "1.0", "import other\nVALUE = other.VALUE", requires=("other>=2",))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    handlers, said = runtime(), list[str]()
    handlers.on_progress = lambda name, told: said.append(f"{name}: {told}")
    twins = [function("tiny==1.0", name=name) for name in ("one", "two")]
    await asyncio.gather(*(handlers.prepare(each) for each in twins))
    for each in twins:
        value = (await handlers.execute(execution_of(each, {})[0])).value
        assert value == {"value": "of another", "place": "/requirements/tiny.py", "writable": False}
    (layer,) = layers(tmp_path)
    assert {path.name for path in (layer / "files").glob("*.py")} == {"tiny.py", "other.py"}
    assert len([line for line in said if "Successfully installed" in line]) == 1
    assert not list((tmp_path / "layers").glob(".*")) and handlers.sandboxes
    assert all(path.stat().st_mode & 0o055 for path in layer.rglob("*"))
    # The next gateway finds it, also without the wheels.
    for file in (tmp_path / "wheels").iterdir():
        file.unlink()
    await runtime().prepare(twins[0])


async def test_what_pip_says_is_why_it_is_unavailable(runtime: Runtime, function: Function, tmp_path: Path) -> None:
    made = wheel(tmp_path / "wheels", "tiny", "1.0", "VALUE = 1")
    handlers = runtime()
    with pytest.raises(InvalidConfig, match=r"cannot be installed: .*No matching distribution found for tiny==3"):
        await handlers.prepare(function("tiny==3"))
    wrong, right = hashlib.sha256(b"").hexdigest(), hashlib.sha256(made.read_bytes()).hexdigest()
    with pytest.raises(InvalidConfig, match="THESE PACKAGES DO NOT MATCH THE HASHES"):
        await handlers.prepare(function(f"tiny==1.0 --hash=sha256:{wrong}"))
    assert not list((tmp_path / "layers").glob("*"))
    await handlers.prepare(function(f"tiny==1.0 --hash=sha256:{right}"))
    with pytest.raises(InvalidConfig, match=r"longer than 0.001 s \(sandbox.requirements.timeout\)"):
        await runtime(timeout_s=0.001).prepare(function("tiny"))
    with pytest.raises(InvalidConfig, match=r"sandbox.requirements.layer_max"):
        await runtime(layer_max_bytes=100).prepare(function("tiny>0"))


async def test_without_a_place_to_take_them_from_requirements_are_refused(
    runtime: Runtime, function: Function, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match=r"name a package index \(sandbox.requirements.index_url\)"):
        await runtime(find_links=None).prepare(function("tiny"))
    with pytest.raises(InvalidConfig, match=r"find_links: .* is no directory"):
        await runtime(find_links=tmp_path / "none").prepare(function("tiny"))


async def test_source_packages_are_not_built_unless_they_may_be_and_never_in_a_plain_process(
    runtime: Runtime, function: Function, tmp_path: Path
) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "tiny-1.0.tar.gz").write_bytes(b"no archive: whoever opens it fails otherwise")
    with pytest.raises(InvalidConfig, match="No matching distribution found"):
        await runtime().prepare(function("tiny"))
    plain = make_provider(ProviderSettings(kind="plain", state_dir=tmp_path / "plain", plain_as_root=True))
    settings = HandlerSettings(
        requirements=RequirementSettings(find_links=tmp_path / "wheels", only_binary=False),
        layers_dir=tmp_path / "layers",
    )
    handlers = HandlerRuntime(plain, settings)
    with pytest.raises(Unsupported, match="plain processes do not confine"):
        await handlers.prepare(function("tiny"))
    await handlers.close()
    await plain.close()


async def test_layers_used_least_recently_make_room_but_none_that_is_served(
    runtime: Runtime, function: Function, tmp_path: Path
) -> None:
    for name in ("tiny", "second", "third"):
        wheel(tmp_path / "wheels", name, "1.0", "VALUE = 1")
    first = runtime()
    plain = "def score(event, context): return 1"
    for age, name in enumerate(("second", "tiny")):
        await first.prepare(function(name, name=name, source=plain))
        newest = max(layers(tmp_path), key=lambda each: each.stat().st_mtime)
        os.utime(newest, (1000.0 + age, 1000.0 + age))
    oldest = min(layers(tmp_path), key=lambda each: each.stat().st_mtime)
    await first.prepare(function("second", name="again", source=plain))  # is used now, and is not the oldest any more
    assert oldest.stat().st_mtime > 2000
    later = runtime(max_bytes=1)  # of another gateway's functions none is served here
    served = function("tiny", name="tiny", source=plain)
    await later.prepare(served)
    await later.prepare(function("third", name="third", source=plain))
    assert {path.name for each in layers(tmp_path) for path in (each / "files").glob("*.py")} == {"tiny.py", "third.py"}
    assert (await later.execute(execution_of(served, {})[0])).value == 1
