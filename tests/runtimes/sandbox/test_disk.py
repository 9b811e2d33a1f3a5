"""The disk of a sandbox: four ways past a bound that are closed, with each provider, by an image and by the walk."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from manager.errors import ActionFailed, CapacityExceeded, Unsupported
from manager.function import SandboxSpec
from runtimes.sandbox.command import Command, CommandResult
from runtimes.sandbox.disk import DiskSettings, ImageBound, choose_bound, files_max, probe
from runtimes.sandbox.docker.provider import ContainerProvider
from runtimes.sandbox.process import ProcessProvider
from runtimes.sandbox.provider import ProviderSettings, make_provider
from runtimes.sandbox.sandbox import Provider, Sandbox
from tests.runtimes.sandbox.conftest import unique
from tests.runtimes.sandbox.runner.test_runner import until

MIB = 2**20
DISK_BYTES = 24 * MIB
DEEP = """
import os
data = bytes(1 << 20)
name = "d" * 200
for _ in range(30):  # 6,000 bytes of path
    os.mkdir(name)
    os.chdir(name)
for number in range(64):
    with open(str(number), "wb") as file:
        file.write(data)
"""
DELETED = """
import os, signal
held = []
for number in range(64):
    held.append(open("gone", "wb", buffering=0))
    os.unlink("gone")
    held[-1].write(bytes(1 << 20))
"""
MANY = """
import os
for number in range(200_000):
    os.close(os.open(f"f{number}", os.O_CREAT | os.O_WRONLY))
"""
RUN = """
for name in "ab":
    with open(f"/.tangram/run/{name}", "wb") as file:
        file.write(bytes(16 << 20))
"""

#: Each kind of sandbox, with each bound.
KINDS = [
    "process-image",
    "process-walk",
    pytest.param("container-image", marks=pytest.mark.docker),
    pytest.param("container-walk", marks=pytest.mark.docker),
]


def settings(kind: str, state_dir: Path, **disk: object) -> ProviderSettings:
    provider, _, bound = kind.partition("-")
    return ProviderSettings(kind=provider, state_dir=state_dir, disk_bound=DiskSettings(by=bound, **disk))  # type: ignore[arg-type]  # the tests' own words


@pytest.fixture(params=KINDS)
async def provider(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Provider]:
    kind: str = request.param
    if kind.startswith("container"):
        request.getfixturevalue("docker")
    why_not = probe(tmp_path) if kind.endswith("image") else ""
    if why_not:
        pytest.skip(why_not)
    made = make_provider(settings(kind, tmp_path / "state"))
    if made.info.kind == "process" and not made.info.limits["filesystem"]:
        pytest.skip("without bubblewrap nothing holds a process")
    yield made
    await made.reap(())
    await made.close()
    assert not mounts_below(tmp_path)


@pytest.fixture
def small(spec: SandboxSpec) -> SandboxSpec:
    return replace(spec, disk_bytes=DISK_BYTES)


async def python(sandbox: Sandbox, text: str, *, user: str = "", wait: bool = True) -> CommandResult | None:
    """Run it to its end, or leave it behind with what it holds."""
    if wait:
        return await sandbox.run(Command(argv=("python3", "-c", text), user=user, timeout_s=60))
    held = f"{text}\nprint('held', flush=True)\nsignal.pause()"
    process = await sandbox.spawn(Command(argv=("python3", "-c", held), user=user, timeout_s=60))
    said = b""
    async for _, data in process.chunks():
        said += data
        if b"held" in said or b"No space" in said:
            break
    return None


async def held_back(provider: Provider, sandbox: Sandbox) -> None:
    """What was written is within the bound, or the watch's next look ends the sandbox and says why."""
    assert isinstance(provider, ContainerProvider | ProcessProvider)
    await provider._disk.check()
    if provider.info.disk == "walk":
        assert not sandbox.alive
        with pytest.raises(ActionFailed, match=r"disk bound|nested deeper"):
            await sandbox.run(Command(shell="true"))
    else:
        assert sandbox.alive
        root = await sandbox.run(Command(shell="df -k --output=size . | tail -1"))
        assert int(root.stdout) * 1024 < DISK_BYTES * 1.2


def mounts_below(directory: Path) -> list[str]:
    """The mounts that are left below a directory."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.split(" ")[4].startswith(f"{directory}/")]


def backing_files(directory: Path) -> list[str]:
    """The loop devices whose file was made in a directory."""
    found = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            found.append(file.read_text(encoding="utf-8"))
        except OSError:
            continue
    return [text for text in found if text.startswith(f"{directory}/")]


async def images_are(directory: Path, count: int) -> None:
    """An image goes with the last process that has it mounted: a moment after that was ended."""
    await until(lambda: len(backing_files(directory)) == count)


@pytest.mark.promise("The bytes and files that a sandbox writes are bounded.")
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(DEEP, id="beyond any path"),
        pytest.param(DELETED, id="deleted but open", marks=pytest.mark.slow),
        pytest.param(MANY, id="empty files"),
    ],
)
async def test_no_way_past_the_bound(provider: Provider, small: SandboxSpec, text: str) -> None:
    sandbox = await provider.create(small, name=unique("disk"), labels={}, mounts={})
    try:
        await python(sandbox, text, wait=text is not DELETED)
    except ActionFailed as failure:  # the watch was faster than we are
        assert provider.info.disk == "walk", failure
    await held_back(provider, sandbox)
    await sandbox.close()


async def test_the_runners_directory_is_no_way_out_for_root(provider: Provider, small: SandboxSpec) -> None:
    sandbox = await provider.create(small, name=unique("disk"), labels={}, mounts={})
    written = None
    with suppress(ActionFailed):  # the watch may see it before it has ended
        written = await python(sandbox, RUN, user="root")
    assert isinstance(provider, ContainerProvider | ProcessProvider)
    await provider._disk.check()
    assert not sandbox.alive or (written is not None and written.exit_code != 0), "32 MiB lie where nobody looks"
    await sandbox.close()


async def test_a_sandbox_may_write_what_it_was_promised(provider: Provider, small: SandboxSpec) -> None:
    sandbox = await provider.create(small, name=unique("disk"), labels={}, mounts={})
    size = DISK_BYTES - MIB
    result = await sandbox.run(Command(shell=f"ls -A; head -c {size} /dev/zero > file && stat -c %s file"))
    assert int(result.stdout) == size, f"it begins empty, and ends with what was written: {result}"
    assert isinstance(provider, ContainerProvider | ProcessProvider)
    await provider._disk.check()
    assert sandbox.alive
    await sandbox.close()


async def test_an_image_goes_with_its_sandbox_and_with_a_killed_gateway(
    provider: Provider, small: SandboxSpec, tmp_path: Path
) -> None:
    if provider.info.disk != "image":
        pytest.skip("no images")
    kept, left = [await provider.create(small, name=unique("disk"), labels={}, mounts={}) for _ in range(2)]
    assert len(backing_files(tmp_path)) == 2
    if provider.info.kind == "process":
        assert mounts_below(tmp_path) == [], "the sandboxes have the only mounts"
    await kept.write_file("deed", b"done")
    # What kill -9 leaves: a mount without a record, and a sandbox that nobody has said goodbye to.
    (left._directory / "record.json").unlink()
    await kept.release()
    assert isinstance(provider, ContainerProvider | ProcessProvider)
    assert isinstance(provider._bound, ImageBound)
    for image in provider._bound._attached.values():
        os.close(image)
    provider._bound._attached.clear()
    again = make_provider(settings(f"{provider.info.kind}-image", tmp_path / "state"))
    [(adopted, _)] = await again.adopt()
    assert await adopted.read_file("deed", limit_bytes=100) == b"done"
    await images_are(tmp_path, 1)
    await adopted.close()
    await images_are(tmp_path, 0)
    assert mounts_below(tmp_path) == []
    await again.close()


async def test_images_have_a_bound_and_a_place_of_theirs_is_free_again(small: SandboxSpec, tmp_path: Path) -> None:
    why_not = probe(tmp_path)
    if why_not:
        pytest.skip(why_not)
    provider = make_provider(settings("process-image", tmp_path / "state", images_max=1))
    first = await provider.create(small, name=unique("disk"), labels={}, mounts={})
    with pytest.raises(CapacityExceeded, match=r"disk images are in use"):
        await provider.create(small, name=unique("disk"), labels={}, mounts={})
    await first.close()
    second = await provider.create(small, name=unique("disk"), labels={}, mounts={})
    inodes = await second.run(Command(shell="df --output=itotal . | tail -1"))
    assert int(inodes.stdout) <= files_max(DISK_BYTES) * 1.1
    await second.close()
    await provider.close()


def test_images_that_are_asked_for_by_name_are_never_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Unsupported, match=r"sandbox\.disk_bound\.by: image cannot be had"):
        choose_bound(DiskSettings(by="image"), tmp_path)
    assert choose_bound(DiskSettings(), tmp_path).name == "walk"
