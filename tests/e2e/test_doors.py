"""Bad input, reload, restart and gRPC against a real gateway."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tangram import Client, UnsatisfiableError
from tests.e2e.gateway import GatewayProcess, document


@pytest.mark.promise("A configuration is applied all or nothing, and drops nothing that runs.")
def test_a_reload_serves_new_invocations_and_drops_none(gateway: GatewayProcess, client: Client) -> None:
    with client.trajectory("reload", function="shell") as sandbox:
        sandbox.exec("mkfifo go")
        running = client.submit("shell", {"command": "echo up; read word < go; echo $word"}, trajectory="reload")
        next(line for line in client.logs(running.id, follow=True) if line.stream == "stdout")
        added = {"runtime": "exec", "cost": {"cpu": 1}, "timeout": "10s"}
        gateway.add(added=added)
        assert client.apply(dry_run=True).added == ("added",)
        assert "added" not in [each.name for each in client.functions()]
        client.apply()
        assert client.invoke("added", {"command": "echo new"}).result["stdout"] == "new\n"
        assert client.get(running.id).state == "running"
        client.cancel(running.id)
        assert client.wait(running.id).state == "cancelled"


def test_a_bad_reload_changes_nothing_and_names_the_place(gateway: GatewayProcess, client: Client) -> None:
    before = [each.name for each in client.functions()]
    greedy = {"runtime": "exec", "cost": {"cpu": 4096}}
    gateway.add(greedy=greedy)
    with pytest.raises(UnsatisfiableError, match=r"greedy.*largest, local"):
        client.apply()
    assert [each.name for each in client.functions()] == before


@pytest.mark.promise("Accepted asynchronous work survives kill -9, and nothing runs twice by mistake.")
def test_accepted_work_survives_a_kill(tmp_path: Path) -> None:
    process = GatewayProcess(tmp_path, document("process", tmp_path / "state"), fresh=True)
    process.start()
    with Client(process.url) as client:
        # More than two cores can hold: some run, the others wait.
        busy = [client.submit("shell", {"command": "sleep 2"}, trajectory=f"k{n}").id for n in range(2)]
        waiting = [client.submit("double", {"value": n}).id for n in range(4)]
    process.kill()
    process.start()
    try:
        with Client(process.url) as client:
            assert [client.wait(each).result["double"] for each in waiting] == [0, 2, 4, 6]
            ended = [client.wait(each) for each in busy]
            assert {(each.state, each.attempt) for each in ended} == {("succeeded", 1)}
    finally:
        assert process.stop() == 0
    assert not left_behind(tmp_path), "a sandbox that was being made when the gateway was killed lives on"


def left_behind(directory: Path) -> list[str]:
    """Processes that were started with something below the directory."""
    commands = (entry / "cmdline" for entry in Path("/proc").iterdir() if entry.name.isdigit())
    found = []
    for command in commands:
        with contextlib.suppress(OSError):
            found.append(command.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if str(directory) in line]
