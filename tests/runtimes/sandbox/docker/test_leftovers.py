"""What a killed engine forgets of a container is found by its id and taken away, and nothing beside it is touched."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from runtimes.sandbox.docker.engine import LOOKS_MAX, LeftoverCleaner
from runtimes.sandbox.linux import Cgroup, Hierarchy


@contextmanager
def sleeping(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its end, under the name and with the arguments of ``argv``."""
    name, *rest = argv
    # It says when it runs: for an instant after its start the kernel has no arguments to show.
    script = "import signal; print(flush=True); signal.pause()"
    process = subprocess.Popen([name, "-c", script, *rest], executable=sys.executable, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def places() -> Iterator[tuple[Hierarchy, str]]:
    """The machine's hierarchies, and a group of our own in each of them."""
    hierarchy = Hierarchy.discover()
    if hierarchy is None or os.geteuid() != 0:
        pytest.skip("needs root and control groups")
    parent = f"tangram-test-{secrets.token_hex(4)}"
    yield hierarchy, parent
    for root in hierarchy.roots:
        for group in sorted(root.glob(f"{parent}/*"), reverse=True):
            with suppress(OSError):
                group.rmdir()
        with suppress(OSError):
            (root / parent).rmdir()


def make(hierarchy: Hierarchy, parent: str, container: str, pid: int) -> None:
    """A container's groups, as an engine makes them, with a process in those that govern it."""
    for root in hierarchy.roots:
        group = root / parent / container
        group.mkdir(parents=True)
        if root in [hierarchy.mounts[name] for name in ("cpu", "freezer", "pids")]:
            (group / "cgroup.procs").write_text(str(pid))


def groups(hierarchy: Hierarchy, parent: str, container: str) -> list[Path]:
    return [root / parent / container for root in hierarchy.roots if (root / parent / container).is_dir()]


def test_processes_shims_and_groups_of_a_forgotten_container_go(places: tuple[Hierarchy, str], tmp_path: Path) -> None:
    hierarchy, parent = places
    forgotten, living = secrets.token_hex(32), secrets.token_hex(32)
    shim = ("containerd-shim-runc-v2", "-namespace", "moby", "-id")
    with ExitStack() as stack:
        started = {
            (what, of): stack.enter_context(sleeping(*argv))
            for of in (forgotten, living)
            for what, argv in (("shim", (*shim, of)), ("init", ("init",)))
        }
        for container in (forgotten, living):
            make(hierarchy, parent, container, started["init", container].pid)
        cleaner = LeftoverCleaner(hierarchy, tmp_path, grace_s=0.0)
        cleaner.learn(living, started["init", living].pid)
        cleaner.watch(forgotten)
        assert cleaner.sweep() == 1
        assert [started[what, forgotten].wait(10) for what in ("shim", "init")] == [-signal.SIGKILL] * 2
        cleaner.sweep()
        assert groups(hierarchy, parent, forgotten) == []
        assert cleaner.sweep() == 0, "it is over"
        assert len(groups(hierarchy, parent, living)) == len(hierarchy.roots)
        assert [started[what, living].poll() for what in ("shim", "init")] == [None, None]


def fake(tmp_path: Path) -> tuple[Hierarchy, Path]:
    """Two hierarchies of plain directories, and a process table in which process 1 is container ``one``."""
    roots = tmp_path / "cpu", tmp_path / "devices"
    membership = tmp_path / "proc/1/cgroup"
    membership.parent.mkdir(parents=True)
    membership.write_text("2:cpu:/system.slice/docker-one.scope\n1:devices:/system.slice/docker-one.scope\n")
    for root in roots:
        (root / "system.slice/docker-two.scope").mkdir(parents=True)
    return Hierarchy(1, {"cpu": roots[0]}, roots), tmp_path / "proc"


def test_a_shim_without_groups_goes_as_well(tmp_path: Path) -> None:
    hierarchy, proc = fake(tmp_path)
    cleaner = LeftoverCleaner(hierarchy, tmp_path / "removed", proc=proc, grace_s=0.0)
    cleaner.learn("one", 1)
    with sleeping("containerd-shim-runc-v2", "-id", "three") as shim:
        place = proc / str(shim.pid)
        place.mkdir()
        (place / "cmdline").write_bytes(Path(f"/proc/{shim.pid}/cmdline").read_bytes())
        cleaner.watch("three")
        assert cleaner.sweep() == 1
        assert shim.wait(10) == -signal.SIGKILL
        (place / "cmdline").unlink()
        assert cleaner.sweep() == 0


def test_an_engine_that_lives_is_left_the_time_to_clean_up(tmp_path: Path) -> None:
    hierarchy, proc = fake(tmp_path)
    cleaner = LeftoverCleaner(hierarchy, tmp_path / "removed", proc=proc)
    cleaner.learn("one", 1)
    cleaner.watch("two")
    assert cleaner.sweep() == 0
    assert (tmp_path / "cpu/system.slice/docker-two.scope").is_dir()


def test_every_hierarchy_is_looked_into_under_whatever_name_the_engine_gives(tmp_path: Path) -> None:
    hierarchy, proc = fake(tmp_path)
    cleaner = LeftoverCleaner(hierarchy, tmp_path / "removed", proc=proc, grace_s=0.0)
    cleaner.watch("two")
    assert cleaner.sweep() == 0, "where to look is not known yet"
    cleaner.learn("one", 1)
    cleaner.learn("one", 404)  # gone meanwhile
    assert cleaner.sweep() == 1
    assert list(tmp_path.glob("*/system.slice/*")) == []


def test_what_cannot_be_removed_is_given_up_after_some_looks(tmp_path: Path) -> None:
    hierarchy, proc = fake(tmp_path)
    (tmp_path / "cpu/system.slice/docker-two.scope/child").mkdir()
    cleaner = LeftoverCleaner(hierarchy, tmp_path / "removed", proc=proc, grace_s=0.0)
    cleaner.learn("one", 1)
    cleaner.watch("two")
    assert [cleaner.sweep() for _ in range(LOOKS_MAX + 2)] == [1] * LOOKS_MAX + [0, 0]


def test_a_full_disk_does_not_keep_a_container_from_being_looked_after(tmp_path: Path) -> None:
    hierarchy, proc = fake(tmp_path)
    cleaner = LeftoverCleaner(hierarchy, tmp_path / "removed", proc=proc, grace_s=0.0)
    (tmp_path / "removed").rmdir()  # nothing can be written there
    cleaner.learn("one", 1)
    cleaner.watch("two")
    assert cleaner.sweep() == 1


def test_groups_that_are_not_ours_to_write_end_no_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Cgroup) -> None:
        raise PermissionError("cgroup.kill")

    monkeypatch.setattr(Cgroup, "kill", denied)
    hierarchy, proc = fake(tmp_path)
    mounts = {"cpu": tmp_path / "cpu", "freezer": tmp_path / "cpu"}
    cleaner = LeftoverCleaner(Hierarchy(1, mounts, hierarchy.roots), tmp_path / "removed", proc=proc, grace_s=0.0)
    cleaner.learn("one", 1)
    cleaner.watch("two")
    assert cleaner.sweep() == 1


def test_without_control_groups_in_sight_there_is_nothing_to_look_after(tmp_path: Path) -> None:
    cleaner = LeftoverCleaner(None, tmp_path / "removed", grace_s=0.0)
    cleaner.learn("one", os.getpid())
    cleaner.watch("one")
    assert cleaner.sweep() == 0


def test_the_next_gateway_goes_on_looking_and_forgets_what_is_gone(tmp_path: Path) -> None:
    hierarchy, proc = fake(tmp_path)
    killed = LeftoverCleaner(hierarchy, tmp_path / "removed", proc=proc, grace_s=0.0)
    killed.watch("two")
    following = LeftoverCleaner(hierarchy, tmp_path / "removed", proc=proc, grace_s=0.0)
    following.learn("one", 1)
    assert [following.sweep(), following.sweep()] == [1, 0]
    assert list((tmp_path / "removed").iterdir()) == []
