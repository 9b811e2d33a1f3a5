"""Which kind of sandbox a gateway makes: never a weaker one by itself."""

from __future__ import annotations

import os
import socketserver
import sys
import threading
from pathlib import Path

import pytest

import runtimes.sandbox.provider as choice
from manager.errors import InvalidConfig, Unsupported
from manager.function import SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.process import Means, ProcessProvider
from runtimes.sandbox.provider import DockerSettings, ProviderSettings, make_provider
from runtimes.sandbox.sandbox import CreationGate
from runtimes.sandbox.spec import SandboxRecord
from tests.runtimes.sandbox.conftest import unique


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of our own, with nothing of Docker on this machine."""
    found = tmp_path / "programs"
    found.mkdir()
    for name in ("unshare", "cat", "sh"):
        (found / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(found))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(choice, "DOCKER_SOCKET", tmp_path / "docker.sock")
    monkeypatch.setattr(choice, "RETRY_S", 0.01)
    return found


def bubblewrap(programs: Path, script: str) -> None:
    (programs / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (programs / "bwrap").chmod(0o755)


def settings(tmp_path: Path, **more: object) -> ProviderSettings:
    return ProviderSettings(state_dir=tmp_path / "state", **more)  # type: ignore[arg-type]


def test_without_docker_auto_is_bubblewrap(programs: Path, tmp_path: Path) -> None:
    (programs / "bwrap").symlink_to("/usr/bin/bwrap")
    provider = make_provider(settings(tmp_path))
    assert (provider.info.kind, provider.info.engine) == ("process", "bubblewrap")


def test_without_either_it_does_not_start(programs: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"bubblewrap is not installed; .*sandbox\.provider: plain"):
        make_provider(settings(tmp_path, start_wait_s=1000.0))


def test_a_bubblewrap_that_fails_once_decides_nothing(programs: Path, tmp_path: Path) -> None:
    count = tmp_path / "count"
    bubblewrap(programs, f'echo >> {count}\n[ -s {count} ] && [ "$(cat {count} | /usr/bin/wc -l)" -gt 2 ]')
    assert make_provider(settings(tmp_path)).info.kind == "process"


def test_a_bubblewrap_that_goes_on_failing_is_told_with_its_reason(programs: Path, tmp_path: Path) -> None:
    bubblewrap(programs, "echo No permissions to create new namespace >&2; exit 1")
    with pytest.raises(Unsupported, match=r"No permissions to create new namespace.*tried for 0\.05 s"):
        make_provider(settings(tmp_path, start_wait_s=0.05))


def test_docker_that_is_installed_but_does_not_answer_is_no_reason_for_less(programs: Path, tmp_path: Path) -> None:
    (programs / "bwrap").symlink_to("/usr/bin/bwrap")
    mute = DockerSettings(host=f"unix://{tmp_path}/mute")
    with socketserver.UnixStreamServer(f"{tmp_path}/mute", socketserver.BaseRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        with pytest.raises(Unsupported, match=r"no Docker engine answers.*sandbox\.provider: process"):
            make_provider(settings(tmp_path, docker=mute, start_wait_s=0.05))
        server.shutdown()
        serving.join()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:2375", "ssh://machine", "docker.sock", "unix://"])
def test_an_engine_of_another_machine_is_refused_with_the_remedy_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", address)
    with pytest.raises(InvalidConfig, match=r"joins as a node"):
        make_provider(settings(tmp_path, start_wait_s=1000.0))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs the second word")
def test_plain_processes_as_root_need_a_second_word(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"sandbox\.plain_as_root"):
        make_provider(settings(tmp_path, kind="plain"))


def test_plain_processes_say_what_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = make_provider(settings(tmp_path, kind="plain", plain_as_root=True)).info
    assert any("commands see the host's files" in weakening for weakening in info.weakenings)
    warned = [line for line in capsys.readouterr().out.splitlines() if "weaker than they could be" in line]
    assert len(warned) == len(info.weakenings) and all("warning" in line for line in warned)


def test_less_than_was_served_needs_the_flag(tmp_path: Path) -> None:
    make_provider(settings(tmp_path, kind="process"))
    weak = settings(tmp_path, kind="plain", plain_as_root=True)
    with pytest.raises(InvalidConfig, match=r"processes in bubblewrap.*--weaker-isolation"):
        make_provider(weak)
    told = make_provider(settings(tmp_path, kind="plain", plain_as_root=True, weaker=True)).info.weakenings
    assert "processes in bubblewrap were served before (--weaker-isolation)" in told
    assert make_provider(weak).info.kind == "plain"


def _own_status(pid: int) -> str:
    """What the kernel says of a child of ours, which may have ended."""
    try:
        return Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return ""


async def test_no_kind_takes_over_what_another_made(tmp_path: Path) -> None:
    """A plain sandbox's paths are the host's: it is ended. A container's directory is not ours to remove."""
    means = Means(bubblewrap=None, root=os.geteuid() == 0, cgroup=None)
    plain = ProcessProvider(state_dir=tmp_path / "state", gate=CreationGate(1), shared_cores=(0,), means=means)
    sandbox = await plain.create(SandboxSpec(), name=unique("plain"), labels={}, mounts={})
    [record] = [SandboxRecord.read(path) for path in (tmp_path / "state" / "sandboxes").iterdir()]
    assert record is not None and record.provider == "plain" and record.base.endswith("/work")
    await sandbox.release()
    container = tmp_path / "state" / "sandboxes" / "container"
    container.mkdir()
    SandboxRecord(name="container", token="t", spec=SandboxSpec(), labels={}, provider="container").write(container)

    wrapped = make_provider(settings(tmp_path, kind="process"))
    assert await wrapped.adopt() == []
    await wrapped.reap(())
    assert [path.name for path in (tmp_path / "state" / "sandboxes").iterdir()] == ["container"]
    assert not _own_status(record.pid) or "State:\tZ" in _own_status(record.pid), "it has ended"
    await wrapped.close()
    await plain.close()


async def test_python_is_the_hosts_unless_a_path_is_named(tmp_path: Path) -> None:
    show = Command(argv=("python3", "-c", "import sys; print(sys.prefix)"))
    for path, prefix in (("", "/usr"), (f"{sys.prefix}/bin:/usr/bin", sys.prefix)):
        state = tmp_path / (path and "named")
        provider = make_provider(settings(state, kind="process", **({"path": path} if path else {})))
        sandbox = await provider.create(SandboxSpec(), name=unique("python"), labels={}, mounts={})
        done = await sandbox.run(show)
        assert done.stdout.decode().strip().startswith(prefix), done.stderr
        if not path:
            gone = await sandbox.run(Command(argv=("ls", f"{sys.prefix}/bin")))
            assert gone.exit_code != 0, "the gateway's environment is not even shown"
        await sandbox.close()
        await provider.close()
