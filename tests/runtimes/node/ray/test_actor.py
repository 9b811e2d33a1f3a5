"""The actor, with real daemons: orphans that it starts, finds, and starts again."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from runtimes.node.ray.actor import NodeActor
from tests.faults.world import until

pytestmark = pytest.mark.slow
DEADLINE_S = 60.0
#: Writes its pid, and lives until it is asked to end.
DAEMON = "import os, signal, pathlib; pathlib.Path('pid').write_text(str(os.getpid())); signal.pause()"


def command(place: Path, program: str = DAEMON) -> list[str]:
    return [sys.executable, "-c", program, str(place), "{gpus}"]


def pid_of(place: Path) -> int:
    """The pid that a daemon has written; 0 if none has."""
    with suppress(OSError, ValueError):
        return int((place / "pid").read_text())
    return 0


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    if pid := pid_of(tmp_path / "state"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def actor() -> Iterator[NodeActor]:
    made = NodeActor(["3", "5"])
    yield made
    made.stop(kill=True)
    assert made._stopped.is_set()


def test_a_daemon_is_no_child_of_its_actor_and_has_its_devices(actor: NodeActor, place: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as Ray does in its workers
    facts = actor.start(command(place), {"OWN": "yes"}, str(place))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    pid = pid_of(place)
    assert facts == {"gpu_ids": ["3", "5"], "daemon": pid, "deaths": 0, "pid": os.getpid()}
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert int(stat[1]) != os.getpid() and int(stat[3]) != os.getsid(0)
    assert Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[4] == b"3,5"
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=3,5" in environment and b"OWN=yes" in environment
    assert "SigBlk:\t0000000000000000" in Path(f"/proc/{pid}/status").read_text()
    assert place.stat().st_mode & 0o777 == 0o700


def test_nothing_of_rays_reaches_it(actor: NodeActor, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_JOB_ID", "TANGRAM_TOKEN", "LD_PRELOAD", "PYTHONPATH"):
        monkeypatch.setenv(name, "secret")
    actor.start(command(place), {}, str(place))
    assert b"secret" not in Path(f"/proc/{pid_of(place)}/environ").read_bytes()


def test_a_daemon_that_lives_is_found_and_not_started_twice(actor: NodeActor, place: Path) -> None:
    actor.start(command(place), {}, str(place))
    pid = pid_of(place)
    another = NodeActor([])
    another._stopped.set()
    assert another.start(command(place), {}, str(place))["daemon"] == pid
    assert actor.start(command(place), {}, str(place))["daemon"] == pid


def test_a_daemon_that_was_killed_is_started_again_and_counted(actor: NodeActor, place: Path) -> None:
    actor.start(command(place), {}, str(place))
    first = pid_of(place)
    os.kill(first, signal.SIGKILL)
    until(lambda: pid_of(place) not in (0, first) and actor.facts()["daemon"] == pid_of(place))
    assert actor.facts()["deaths"] == 1


def test_what_is_stopped_is_not_started_again(actor: NodeActor, place: Path) -> None:
    actor.start(command(place), {}, str(place))
    pid = pid_of(place)
    assert actor.stop()
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()
    actor._watcher.join(DEADLINE_S)
    assert not actor._watcher.is_alive() and actor.facts()["daemon"] == 0


def test_a_pid_that_another_program_has_by_now_is_no_daemon(actor: NodeActor, place: Path) -> None:
    place.mkdir()
    (place / "pid").write_text(str(os.getpid()))
    facts = actor.start(command(place), {}, str(place))
    assert facts["daemon"] == pid_of(place) != os.getpid()


@pytest.mark.parametrize("text", ["", "no number", "99999999", "-1"])
def test_a_pid_file_that_says_nothing_is_no_daemon(place: Path, text: str) -> None:
    place.mkdir()
    (place / "pid").write_text(text)
    actor = NodeActor([])
    actor._stopped.set()  # else it would end this process once nobody has asked it for minutes
    actor._state_dir = str(place)
    assert actor.facts()["daemon"] == 0
    (place / "pid").unlink()


def test_a_actor_that_was_told_of_no_daemon_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pid").write_text(str(os.getpid()))  # of somebody else, where Ray began its worker
    monkeypatch.chdir(tmp_path)
    actor = NodeActor([])
    actor._stopped.set()
    assert actor.facts()["daemon"] == 0


def test_a_daemon_that_cannot_be_started_is_told_and_fails_nothing_else(actor: NodeActor, place: Path) -> None:
    place.write_text("a file")
    told = actor.start(command(place), {}, str(place / "below"))
    assert told["daemon"] == 0 and "NotADirectoryError" in str(told["why"])
    place.unlink()
    assert actor.start(command(place), {}, str(place))["daemon"] == pid_of(place)


def test_a_actor_that_nobody_asks_any_more_gives_its_machine_back_once_the_daemon_is_gone(place: Path) -> None:
    left = threading.Event()
    actor = NodeActor([], unasked_s=0.0, leave=left.set)
    actor.start(command(place), {}, str(place))
    pid = pid_of(place)
    assert actor._watcher.is_alive() and not left.is_set()
    os.kill(pid, signal.SIGKILL)
    assert left.wait(DEADLINE_S) and pid_of(place) == pid


def test_a_daemon_that_waits_for_what_runs_is_asked_to_drain_and_then_to_end(
    actor: NodeActor, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtimes.node.ray.actor.DRAIN_S", 2.0)
    patient = "import os, signal, pathlib\nasked = {signal.SIGTERM, signal.SIGINT}\n"
    patient += "signal.pthread_sigmask(signal.SIG_BLOCK, asked)\n"
    patient += "pathlib.Path('pid').write_text(str(os.getpid()))\n"
    patient += "told = [signal.sigwait(asked).name for _ in range(2)]\n"
    patient += f"pathlib.Path({str(place / 'told')!r}).write_text(' '.join(told))"
    actor.start(command(place, patient), {}, str(place))
    assert actor.stop()
    assert (place / "told").read_text() == "SIGTERM SIGINT"
