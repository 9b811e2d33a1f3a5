"""A gateway that nobody has configured: who started it needs nothing, and who did not gets nothing."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tangram import Client, ForbiddenError, UnauthorizedError
from tangram.types import ADMIN, INVOKE
from tests.e2e.gateway import ROOT, GatewayProcess, document
from tests.faults.world import until


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    directory: Path = tmp_path_factory.mktemp("tokens")
    (directory / "state").mkdir()
    (directory / "state").chmod(0o755)  # as it was made by hand
    process = GatewayProcess(directory, document("process", directory / "state"), fresh=True)
    process.start()
    yield process
    assert process.stop() == 0


def tangram(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.promise("The first start writes the tokens, for its own user alone.")
def test_what_the_first_start_writes_is_its_users_alone(gateway: GatewayProcess) -> None:
    state = gateway.directory / "state"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    for name in (ADMIN, INVOKE):
        assert stat.S_IMODE((state / name).stat().st_mode) == 0o600
        if os.geteuid() == 0:
            theirs = subprocess.run(["cat", state / name], user=65534, capture_output=True, timeout=60, check=False)
            assert (theirs.returncode != 0, theirs.stdout) == (True, b"")
    assert any("was open to others" in line for line in gateway.log)


@pytest.mark.promise("The client and the command line of the same user need nothing.")
def test_the_client_and_the_command_line_need_nothing(gateway: GatewayProcess) -> None:
    with Client(gateway.url) as client:
        assert client.invoke("shell", {"command": "echo hello"}).result["stdout"] == "hello\n"
    done = tangram("invoke", "shell", '{"command": "echo hello"}', "--server", gateway.url)
    assert (done.returncode, '"hello\\n"' in done.stdout) == (0, True), done.stderr


@pytest.mark.promise("Without a token only health is answered, on loopback too.")
def test_who_is_not_its_user_needs_a_token(gateway: GatewayProcess, tmp_path: Path) -> None:
    stranger = {"XDG_STATE_HOME": str(tmp_path), "TANGRAM_SERVER": gateway.url}
    refused = tangram("ps", **stranger)
    assert (refused.returncode, "tangram token" in refused.stderr) == (77, True)
    assert tangram("token", **stranger).returncode == 77
    token = tangram("token", TANGRAM_SERVER=gateway.url).stdout.strip()
    assert tangram("ps", TANGRAM_TOKEN=token, **stranger).returncode == 0
    with Client(gateway.url, token=token) as client, pytest.raises(ForbiddenError):
        client.apply(dry_run=True)
    with Client(gateway.url, token=tangram("token", "--admin", TANGRAM_SERVER=gateway.url).stdout.strip()) as client:
        assert client.apply(dry_run=True).empty
    with Client(gateway.url, token="") as client, pytest.raises(UnauthorizedError):
        client.functions()


def test_the_address_that_serve_prints_opens_the_page(gateway: GatewayProcess) -> None:
    said = gateway.directory / "stdout"  # the line follows the one that says it serves
    until(lambda: said.read_text().endswith("\n"), "the address is printed")
    address = said.read_text().removeprefix("page: ").strip()
    assert address.startswith(f"{gateway.url}/?key=")
    with httpx.Client(follow_redirects=True) as browser:
        page = browser.get(address)
        assert (page.status_code, str(page.url)) == (200, f"{gateway.url}/ui/now")
        assert browser.get(f"{gateway.url}/v1/functions").status_code == 200
    assert not any("key=" in line for line in gateway.log)
