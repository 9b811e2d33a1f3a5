"""A gateway that is not root: its process sandboxes are still made of namespaces."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
NOBODY = 65534
TIMEOUT_S = 120
#: env executes as nobody; setpriv itself still executes with root's rights.
AS_NOBODY = (
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all",
    "env",
)  # fmt: skip

#: A gateway's life with sandboxes, told as JSON.
LIFE = """
import asyncio, json, os, sys
from pathlib import Path
from manager.errors import ActionFailed
from manager.function import Background, SandboxSpec
from runtimes.sandbox.provider import ProviderSettings, make_provider
from runtimes.sandbox.command import Command

async def live(state_dir):
    told = {"uid": os.getuid()}
    settings = ProviderSettings(kind="process", state_dir=state_dir)
    provider = make_provider(settings)
    told["engine"], told["limits"] = provider.info.engine, dict(provider.info.limits)
    sandbox = await provider.create(SandboxSpec(), name="one", labels={"a": "b"}, mounts={str(state_dir): "/seen"})

    async def sh(text, **options):
        return (await sandbox.run(Command(shell=text, kill_grace_s=0.1, **options)))

    told["said"] = (await sh("cat; pwd; echo err >&2", stdin=b"in ")).stdout.decode()
    await sandbox.write_file("deep/file", b"data")
    told["file"] = (await sandbox.read_file("deep/file", limit_bytes=4)).decode()
    told["host"] = (await sh("ls -A /home /root /var 2>/dev/null; ls /seen/state-id && touch /seen/x")).exit_code
    told["net"] = (await sh("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '")).stdout.decode().split()
    told["timed_out"] = (await sh("(setsid sleep 12321 &); sleep 1000", timeout_s=0.3)).timed_out
    told["left"] = (await sh("grep -l '1232[1]' /proc/[0-9]*/cmdline 2>/dev/null | wc -l")).stdout.decode().strip()
    told["caps"] = (await sh("grep -E '^(CapEff|NoNewPrivs)' /proc/self/status")).stdout.decode().split()
    await sh("sleep 1000 >/dev/null 2>&1 &")
    await sandbox.quiesce(Background.FREEZE)
    await sandbox.release()
    provider = make_provider(settings)
    [(sandbox, labels)] = await provider.adopt()
    told["adopted"] = [labels, (await sandbox.run(Command(shell="cat deep/file"))).stdout.decode()]
    await sandbox.close()
    told["leaked"] = [path.name for path in (state_dir / "sandboxes").iterdir()]
    await provider.close()
    return told

state_dir = Path(sys.argv[1])
(state_dir / "state-id").touch()
print(json.dumps(asyncio.run(live(state_dir))))
"""


def as_nobody(*words: str) -> subprocess.CompletedProcess[str]:
    packages = os.pathsep.join([str(ROOT), *site.getsitepackages()])
    return subprocess.run(
        [*AS_NOBODY, *words],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def python() -> str:
    """An interpreter that nobody may run, where nobody may make user namespaces."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become nobody")
    if shutil.which("bwrap") is None or as_nobody("bwrap", "--unshare-all", "--ro-bind", "/", "/", "true").returncode:
        pytest.skip("unprivileged user namespaces are off, or bubblewrap is not installed")
    for candidate in (sys.executable, "/usr/bin/python3"):
        if as_nobody(candidate, "-c", "import runtimes.sandbox.provider").returncode == 0:
            return candidate
    message = f"nobody may run {sys.executable}: it lies where only root may go"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def test_bubblewrap_holds_for_a_gateway_that_is_not_root(python: str) -> None:
    state_dir = Path(f"/var/tmp/tangram-nobody-{os.getpid()}")
    state_dir.mkdir(mode=0o700)
    os.chown(state_dir, NOBODY, NOBODY)
    try:
        lived = as_nobody(python, "-c", LIFE, str(state_dir))
    finally:
        shutil.rmtree(state_dir)
    assert lived.returncode == 0, lived.stderr[-3000:]
    told = json.loads(lived.stdout.splitlines()[-1])
    assert (told["uid"], told["engine"]) == (NOBODY, "bubblewrap")
    promised = {"filesystem", "network", "processes_hidden", "cores", "freeze", "disk", "seccomp", "snapshot"}
    assert {name for name, kept in told["limits"].items() if kept} == promised
    assert told["said"] == "in /workspace\n"
    assert told["file"] == "data"
    assert told["host"] != 0
    assert told["net"] == ["lo"]
    assert (told["timed_out"], told["left"]) == (True, "0")
    assert told["caps"] == ["CapEff:", "0000000000000000", "NoNewPrivs:", "1"]
    assert told["adopted"] == [{"a": "b"}, "data"]
    assert told["leaked"] == []
