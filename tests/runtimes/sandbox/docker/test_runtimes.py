"""What an engine runs containers with: another runtime than its own, asked for by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.private_docker import PrivateDocker, private_docker
from manager.errors import InvalidConfig
from manager.function import Background, SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.provider import DockerSettings
from runtimes.sandbox.sandbox import Provider
from tests.runtimes.sandbox.conftest import provided, unique

pytestmark = [
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.xdist_group("private-engine"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a second engine"),
]
CRUN = shutil.which("crun")


#: crun refuses to work where controllers of version 2 are mounted beside those of version 1.
WRAPPER = """#!/bin/sh
exec unshare --mount sh -c 'umount /sys/fs/cgroup/unified 2>/dev/null; exec crun "$@"' crun "$@"
"""


@pytest.fixture(scope="module")
def engine(docker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateDocker]:
    """An engine with crun, once as itself and once under a name of which nobody knows what kernel it has."""
    if CRUN is None:
        if os.environ.get("CI") == "true":
            pytest.fail("crun is not installed (scripts/setup --with crun)")
        pytest.skip("crun is not installed (Debian: apt-get install crun)")
    wrapper = tmp_path_factory.mktemp("runtime") / "crun"
    wrapper.write_text(WRAPPER, encoding="ascii")
    wrapper.chmod(0o755)
    with private_docker(docker, options=[f"--add-runtime=crun={wrapper}", f"--add-runtime=apart={wrapper}"]) as made:
        yield made


@pytest.fixture
async def provider(engine: PrivateDocker, tmp_path: Path) -> AsyncIterator[Provider]:
    async with provided(tmp_path / "state", "container", docker=DockerSettings(host=engine.host)) as made:
        yield made


@pytest.mark.parametrize("runtime", ["crun", "apart"])
async def test_a_runtime_is_the_engines_and_works_whatever_its_kernel(
    engine: PrivateDocker, provider: Provider, spec: SandboxSpec, runtime: str
) -> None:
    sandbox = await provider.create(replace(spec, runtime=runtime), name=unique(runtime), labels={}, mounts={})
    assert engine.docker("inspect", "--format", "{{.HostConfig.Runtime}}", f"tangram-{sandbox.id}") == runtime
    # A mounted socket joins nobody who has a kernel of their own.
    binds = engine.docker("inspect", "--format", "{{.HostConfig.Binds}}", f"tangram-{sandbox.id}")
    assert (binds == "[]") == (runtime == "apart")
    await sandbox.set_cores(sorted(os.sched_getaffinity(0))[-1:])
    await sandbox.write_file("file", b"kept")
    await sandbox.quiesce(Background.FREEZE)
    assert (await sandbox.run(Command(shell="cat file; nproc"))).stdout == b"kept1\n"
    await sandbox.close()


async def test_an_unknown_runtime_is_refused_with_those_that_there_are(provider: Provider, spec: SandboxSpec) -> None:
    assert {"apart", "crun", "runc"} <= set(provider.info.runtimes)
    assert provider.info.runtime == "runc"
    with pytest.raises(InvalidConfig, match=r"no 'kata'; it has .*crun.*daemon\.json"):
        await provider.check(replace(spec, runtime="kata"))


def remaps() -> bool:
    """Whether the user to whom an engine maps root is there, or may be made."""
    return os.environ.get("CI") == "true" or "dockremap" in Path("/etc/subuid").read_text(encoding="ascii")


@pytest.mark.skipif(not remaps(), reason="no user dockremap: an engine with userns-remap would make one")
async def test_where_the_engine_remaps_users_root_inside_is_nobody_outside(
    docker: str, spec: SandboxSpec, tmp_path: Path
) -> None:
    with private_docker(docker, options=["--userns-remap=default"]) as engine:
        async with provided(tmp_path / "state", "container", docker=DockerSettings(host=engine.host)) as provider:
            assert provider.info.limits["root_separate"]
            sandbox = await provider.create(spec, name=unique("mapped"), labels={}, mounts={})
            shown = "id -u; read inside outside _ </proc/self/uid_map; echo $inside; [ $outside -gt 0 ] && echo apart"
            assert (await sandbox.run(Command(shell=shown, user="root"))).stdout == b"0\n0\napart\n"
            assert 10_000 <= int((await sandbox.run(Command(shell="touch mine && id -u"))).stdout) < 65_536
