"""The runner as one file that starts fast, on every Python."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pwd
import py_compile
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from manager.function import SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.runner import client as packing
from runtimes.sandbox.runner.client import ISOLATED, SocketStream, StreamClient, compiled, packed_beside, packed_runner
from runtimes.sandbox.spec import SandboxRecord

START_S = 60.0


@asynccontextmanager
async def started(python: str, packed: Path, directory: Path) -> AsyncIterator[StreamClient]:
    (directory / "run").mkdir()
    runner = await asyncio.create_subprocess_exec(python, *ISOLATED, str(packed), str(directory / "run"))
    spec = SandboxSpec(workdir=str(directory), user=pwd.getpwuid(os.getuid()).pw_name)
    record = SandboxRecord(name="one", token="t" * 32, spec=spec, labels={}, provider="process")
    try:
        stream = SocketStream(directory / "run", peer_pid=runner.pid)
        client = await StreamClient.open(stream, record.greeting(own_cgroup=False, root=True), within_s=START_S)
        yield client
        client.close()
    finally:
        with suppress(ProcessLookupError):
            runner.kill()
        await runner.wait()


def runs(python: str) -> bool:
    """Return whether it is more than a name on the path."""
    return subprocess.run([python, "-c", "pass"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("reads_bytecode", [True, False])
async def test_a_packed_runner_serves_whether_or_not_its_bytecode_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads_bytecode: bool
) -> None:
    if not reads_bytecode:
        monkeypatch.setattr(packing, "compiled", lambda source, name: b"another version's, which this cannot load")
    packed = packed_beside(tmp_path / "state")
    async with started(sys.executable, packed, tmp_path) as client:
        assert (await client.run(Command(argv=("echo", "served")))).stdout == b"served\n"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.12", "3.13", "3.14"])
async def test_a_packed_runner_serves_on_other_pythons(tmp_path: Path, version: str) -> None:
    python = shutil.which(f"python{version}")
    if python is None or not runs(python):
        pytest.skip(f"there is no python{version}")
    async with started(python, packed_beside(tmp_path / "state"), tmp_path) as client:
        assert (await client.run(Command(argv=("echo", "served")))).stdout == b"served\n"


def test_the_packed_runner_of_another_version_is_replaced_and_a_mounted_one_stays(tmp_path: Path) -> None:
    place = tmp_path / "runner.py"
    place.write_bytes(b"earlier")
    with place.open("rb") as mounted:
        assert packed_beside(tmp_path).read_bytes() == packed_runner()
        assert mounted.read() == b"earlier"
    kept = place.stat().st_ino
    packed_beside(tmp_path)
    assert (place.stat().st_ino, [path.name for path in tmp_path.iterdir()]) == (kept, ["runner.py"])


def test_compiled_modules_are_taken_whatever_their_sources_time_is(tmp_path: Path) -> None:
    bytecode = compiled("VALUE = 'compiled'\n", "module_of_packing")
    assert bytecode.startswith(importlib.util.MAGIC_NUMBER)
    source = tmp_path / "module_of_packing.py"
    source.write_text("VALUE = 'source'\n")
    place = Path(importlib.util.cache_from_source(str(source)))
    place.parent.mkdir()
    place.write_bytes(bytecode)
    spec = importlib.util.spec_from_file_location("module_of_packing", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.VALUE == "compiled"
    with pytest.raises(py_compile.PyCompileError):
        compiled("what is no Python", "broken")
