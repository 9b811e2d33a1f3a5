"""What a revision of a handler runs: its files as they were, whatever becomes of its directory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from manager.errors import InvalidConfig
from manager.function import FunctionSpec, SandboxSpec
from runtimes.node.protocol import HandlerArchives
from runtimes.sandbox.handler import sources
from runtimes.sandbox.handler.runtime import HandlerRuntime, HandlerSettings
from runtimes.sandbox.handler.sources import HandlerCopies
from runtimes.sandbox.provider import ProviderSettings, make_provider
from tests.runtimes.handlers import handler_in
from tests.runtimes.recorder import execution_of

BOX = SandboxSpec(memory_bytes=256 * 2**20)
SOURCE = "import time, word\ndef score(event, context):\n    time.sleep(event.get('held_s', 0))\n    return word.WORD\n"


def handler(directory: Path, revision: str = "1") -> FunctionSpec:
    return FunctionSpec(
        name="reward", runtime="handler", revision=revision, timeout_s=60.0, handler=handler_in(directory)
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "handler.py").write_text(SOURCE)
    (directory / "word.py").write_text("WORD = 'old'")
    return directory


async def test_instances_that_begin_later_have_the_code_of_their_revision(tmp_path: Path, source: Path) -> None:
    provider = make_provider(ProviderSettings(kind="process", state_dir=tmp_path / "state"))
    copies = HandlerCopies(tmp_path / "copies")
    runtime = HandlerRuntime(provider, HandlerSettings(sandbox=BOX, copies=copies))

    async def told(function: FunctionSpec) -> object:
        """Call it while its warm instance is held, so that another one begins."""
        held = asyncio.create_task(runtime.execute(execution_of(function, {"held_s": 60}, id="held")[0]))
        await asyncio.sleep(0)
        value = (await runtime.execute(execution_of(function, {})[0])).value
        assert not held.done() and runtime.instances() == {"reward": 2}
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        return value

    try:
        first = handler(source)
        await runtime.prepare(first)
        (source / "word.py").write_text("WORD = 'new'")
        assert await told(first) == "old"
        second = handler(source, revision="2")
        await runtime.prepare(second)
        assert (await runtime.execute(execution_of(second, {})[0])).value == "new"
        for _ in iter(lambda: runtime.instances()["reward"] == 1, True):
            await asyncio.sleep(0.01)  # those of the first revision end
        assert await told(second) == "new"
        for name in ("handler.py", "word.py"):
            (source / name).unlink()
        assert await told(second) == "new"
        assert not list((tmp_path / "copies").glob(".*")), "nothing half is left"
    finally:
        await runtime.close()
        await provider.close()


async def test_what_could_not_be_imported_is_copied_anew_at_the_next_try(tmp_path: Path, source: Path) -> None:
    provider = make_provider(ProviderSettings(kind="process", state_dir=tmp_path / "state"))
    runtime = HandlerRuntime(provider, HandlerSettings(sandbox=BOX, copies=HandlerCopies(tmp_path / "copies")))
    try:
        (source / "word.py").write_text("raise RuntimeError('half an edit')")
        with pytest.raises(InvalidConfig, match="half an edit"):
            await runtime.prepare(handler(source))
        (source / "word.py").write_text("WORD = 'mended'")
        await runtime.prepare(handler(source))
        assert (await runtime.execute(execution_of(handler(source), {})[0])).value == "mended"
    finally:
        await runtime.close()
        await provider.close()


async def test_a_node_that_joins_later_is_sent_what_the_others_run(tmp_path: Path, source: Path) -> None:
    state = tmp_path / "state"
    copies = HandlerCopies(state / ".handlers", [state])
    archives = HandlerArchives(copies.excluded, copies=copies)
    first = await archives.of_function(handler(source))
    (source / "word.py").write_text("WORD = 'new'")
    assert await archives.of_function(handler(source)) == first
    assert (await archives.of_function(handler(source, revision="2"))).digest != first.digest
    assert (await copies.of(handler(source)) / "word.py").read_text() == "WORD = 'old'"
    assert (await copies.of(handler(source))).stat().st_mode & 0o777 == 0o755
    HandlerCopies(state / ".handlers", [state])
    assert not list((state / ".handlers").glob("*")), "a gateway begins without those of the one before"


async def test_a_directory_that_is_too_large_is_run_as_it_is_and_the_log_says_so(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "SOURCES_MAX", 1)
    with capture_logs() as logs:
        assert await HandlerCopies(tmp_path / "copies").of(handler(source)) == source
    assert [each["function"] for each in logs if "as it is" in str(each["event"])] == ["reward"]
    monkeypatch.undo()
    with pytest.raises(InvalidConfig, match="cannot be copied"):
        await HandlerCopies(tmp_path / "copies").of(handler(tmp_path / "nowhere"))
