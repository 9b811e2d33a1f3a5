"""Commands that run on while their gateway is dead: the next one takes them over, and they end as they should."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtimes.sandbox.environments import TRAJECTORY
from tangram import Client
from tests.e2e.gateway import GatewayProcess, document
from tests.faults.world import HTTP, at_rest, record, sandboxes, until

LINES = 120
#: Speaks for some three seconds on both streams, in letters of one byte and more, and counts how often it was run.
TALE = (
    'echo run >> runs; i=0; while [ $i -lt {lines} ]; do i=$((i+1)); echo "{name} zwölf $i"; echo fehl $i >&2;'
    " sleep 0.02; done; cat runs; exit 3"
)
SLEEP = "echo begun; exec sleep 1000"
#: Ends when the file ``go`` appears.
GATED = "echo begun; echo run >> runs; until [ -e go ]; do sleep 0.02; done; cat runs"


@pytest.fixture(params=["process", pytest.param("container", marks=pytest.mark.docker)])
def gateway(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway of each kind of sandbox, with commands that need no core each."""
    if request.param == "container":
        request.getfixturevalue("docker")
    seat = {"runtime": "exec", "cost": {"seats": 1}, "timeout": "60s", "log_limit": "4Mi"}
    described = document(
        request.param,
        tmp_path / "state",
        long=seat,
        brief=seat | {"timeout": "2s"},
        forsaken=seat | {"sandbox": {"unattended": "0s"}},
        again=seat | {"idempotent": True},
    )
    described["resources"] = {"seats": {"kind": "concurrency", "limit": 16}}
    described["server"]["drain_grace"] = "200ms"
    made = GatewayProcess(tmp_path, described)
    made.start()
    yield made
    with suppress(Exception), Client(made.url) as client:
        for trajectory in client.trajectories():
            client.end_trajectory(trajectory.trajectory)
    made.stop()


def said(gateway: GatewayProcess, invocation_id: str, stream: str = "stdout") -> str:
    with Client(gateway.url) as client:
        return "".join(line.text for line in client.logs(invocation_id) if line.stream == stream)


def begun(gateway: GatewayProcess, *invocation_ids: str) -> None:
    until(lambda: all(said(gateway, each) for each in invocation_ids), "every command has said something")


def submit(gateway: GatewayProcess, function: str, command: str, trajectory: str | None = None) -> str:
    with Client(gateway.url) as client:
        return client.submit(function, {"command": command}, trajectory=trajectory).id


def shell(gateway: GatewayProcess, command: str, trajectory: str) -> str:
    with Client(gateway.url) as client:
        ended = client.invoke("shell", {"command": command}, trajectory=trajectory)
        assert ended.state == "succeeded", ended
        return str(ended.result["stdout"])


def inside(gateway: GatewayProcess, trajectory: str, *argv: str) -> str:
    """What a program says in the directory of a trajectory's sandbox, without a gateway."""
    box = next(each for each in sandboxes(gateway) if each.labels[TRAJECTORY] == trajectory)
    work = Path(f"/proc/{box.pid}/root{box.spec.workdir}") if box.pid else None  # an image is mounted only there
    if work is None:
        argv = ("docker", "exec", "-u", box.user, "-w", "/workspace", f"tangram-{box.name}", *argv)
    done = subprocess.run(argv, cwd=work, capture_output=True, text=True, check=False)
    return done.stdout


def restarted_by_kill(gateway: GatewayProcess) -> None:
    gateway.kill()
    gateway.start()


def rolled(gateway: GatewayProcess) -> None:
    assert gateway.stop(signal.SIGTERM) == 0
    gateway.start()


def recovered(gateway: GatewayProcess) -> dict[str, int]:
    """What the gateway says of what it found."""
    said = next(line for line in reversed(gateway.log) if '"event":"serving"' in line)
    found: dict[str, int] = json.loads(said)["recovered"]
    return found


def tale(name: str) -> tuple[str, str]:
    """What a tale says on its two streams when it is told once."""
    told = "".join(f"{name} zwölf {number}\n" for number in range(1, LINES + 1)) + "run\n"
    return told, "".join(f"fehl {number}\n" for number in range(1, LINES + 1))


@pytest.mark.promise("A running command of a durable call goes on over a kill and is taken over with its whole output.")
@pytest.mark.parametrize("restart", [restarted_by_kill, rolled])
def test_long_commands_under_load_end_as_they_should(
    gateway: GatewayProcess, restart: Callable[[GatewayProcess], None]
) -> None:
    names = [*(f"t{number}" for number in range(3)), "alone"]
    ids = {
        name: submit(gateway, "long", TALE.format(lines=LINES, name=name), None if name == "alone" else name)
        for name in names
    }
    behind = submit(gateway, "long", "cat runs", "t0")
    begun(gateway, *ids.values())
    restart(gateway)
    assert recovered(gateway) == {"resumed": len(names), "queued": 1, "adopted": len(names) - 1}
    restart(gateway)
    for name, invocation_id in ids.items():
        end = record(gateway, invocation_id)
        told, failed = tale(name)
        assert (end["state"], end["attempt"], end["result"]["exit_code"]) == ("succeeded", 1, 3), end
        assert (end["result"]["stdout"], end["result"]["stderr"]) == (told, failed)
        assert (said(gateway, invocation_id), said(gateway, invocation_id, "stderr")) == (told, failed)
        # All of it, from its real start on; what a gateway needed to join it is told as overhead.
        assert end["act_ms"] >= 1000 * end["result"]["duration_s"] >= 20 * LINES
        assert end["act_ms"] == pytest.approx(end["queue_ms"] + end["overhead_ms"] + end["execution_ms"], abs=0.01)
        assert end["usage"]["cpu_s"] > 0
    assert record(gateway, behind)["result"]["stdout"] == "run\n"
    until(lambda: at_rest(gateway), "the gateway is at rest")


SUITE = """
import pathlib, time, pytest

@pytest.mark.parametrize("number", range(6))
def test_numbers(number):
    with open("runs", "a") as runs:
        runs.write(f"{number} ")
    while number == 3 and not pathlib.Path("go").exists():
        time.sleep(0.02)
    assert number != 5
"""


def test_whatever_ran_when_it_was_killed_ends_as_it_should(gateway: GatewayProcess) -> None:
    shell(gateway, f"cat > test_it.py <<'END'\n{SUITE}\nEND", "suite")
    ids = {
        "ended": submit(gateway, "long", GATED + "; exit 9", "ended"),
        "timed": submit(gateway, "brief", SLEEP, "timed"),
        "again": submit(gateway, "again", GATED, "again"),
        "forsaken": submit(gateway, "forsaken", SLEEP, "forsaken"),
        "cancelled": submit(gateway, "long", SLEEP, "cancelled"),
    }
    with Client(gateway.url) as client:
        suite = client.submit("tests", {"targets": ["test_it.py"], "workers": 1}, trajectory="suite").id
    begun(gateway, *ids.values())
    until(lambda: inside(gateway, "suite", "cat", "runs").startswith("0 1 2 3"), "the suite waits")
    with listening(gateway, SLEEP, "attached"):
        gateway.kill()
    inside(gateway, "ended", "touch", "go")
    gateway.start()
    for trajectory in ("again", "suite"):
        inside(gateway, trajectory, "touch", "go")
    with Client(gateway.url) as client:
        assert client.cancel(ids["cancelled"]).state == "cancelled"
    ends = {name: record(gateway, invocation_id) for name, invocation_id in ids.items()}
    states = {name: (end["state"], end["reason"], end["attempt"]) for name, end in ends.items()}
    assert states == {
        "ended": ("succeeded", None, 1),
        "timed": ("timed_out", "timeout", 1),
        "again": ("succeeded", None, 1),
        "forsaken": ("lost", "gateway_restart", 1),
        "cancelled": ("cancelled", "cancelled", 1),
    }
    assert (ends["ended"]["result"]["exit_code"], said(gateway, ids["ended"])) == (9, "begun\nrun\n")
    assert ends["ended"]["result"]["stdout"] == ends["again"]["result"]["stdout"] == "begun\nrun\n"
    assert ends["timed"]["result"]["stdout"] == "begun\n"
    # What the next gateway needs to join a command is told as overhead (docs/DECISIONS.md).
    assert ends["timed"]["overhead_ms"] + ends["timed"]["execution_ms"] > 1900
    for trajectory in ("timed", "forsaken", "cancelled", "attached"):
        assert shell(gateway, "ps -e | grep -c sleep || true", trajectory) == "0\n"
    verdicts_are_whole(gateway, record(gateway, suite))
    until(lambda: at_rest(gateway), "the gateway is at rest")


def verdicts_are_whole(gateway: GatewayProcess, end: dict[str, Any]) -> None:
    verdicts = [end["result"]["tests"][f"test_it.py::test_numbers[{number}]"] for number in range(6)]
    assert (end["state"], end["attempt"], verdicts) == ("succeeded", 1, ["passed"] * 5 + ["failed"]), end
    assert shell(gateway, "cat runs", "suite").split() == list("012345")


@contextmanager
def listening(gateway: GatewayProcess, command: str, trajectory: str) -> Iterator[None]:
    """While a caller reads the stream of a command that has begun."""
    url, headers = f"{gateway.url}/v1/functions/long/invocations", {"X-Trajectory-Id": trajectory}
    call = HTTP.stream("POST", url, params={"mode": "stream"}, json={"command": command}, headers=headers)
    with suppress(httpx.TransportError), call as lines:
        next(line for line in lines.iter_lines() if "begun" in line)
        yield


@pytest.mark.parametrize("gateway", ["process"], indirect=True)
def test_where_nothing_may_run_unattended_a_rolling_restart_ends_it(gateway: GatewayProcess) -> None:
    accepted = submit(gateway, "forsaken", SLEEP, "t")
    queued = submit(gateway, "forsaken", "ps -e | grep -c sleep || true", "t")
    begun(gateway, accepted)
    rolled(gateway)
    end = record(gateway, accepted)
    assert (end["state"], end["reason"]) == ("lost", "gateway_restart"), end
    assert record(gateway, queued)["result"]["stdout"] == "0\n"


def test_a_session_is_typed_to_across_a_kill_of_its_gateway(gateway: GatewayProcess) -> None:
    with Client(gateway.url) as client:
        trajectory = client.trajectory("typed").open()
        session = trajectory.session('echo begun; while read -r line; do echo "said $line"; done; exit 9')
        session.write("one\n")
        output = session.output()
        said = b""
        while b"said one" not in said:
            said += next(output).data
        gateway.kill()
    gateway.start()
    with Client(gateway.url) as client:
        again = client.session(session.id)
        output, said = again.output(), b""
        while b"said one" not in said:
            said += next(output).data
        again.write("two\n")
        again.close_input()
        said += b"".join(piece.data for piece in output)
        assert said == b"begun\nsaid one\nsaid two\n"
        assert again.end is not None
        assert (again.end.exit_code, again.missing) == (9, 0)
