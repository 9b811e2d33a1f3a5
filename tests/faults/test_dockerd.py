"""dockerd killed and stopped under a gateway: its sandboxes live on or are told lost, and nobody waits for ever."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.private_docker import PrivateDocker
from tangram import Client
from tests.e2e.gateway import GatewayProcess, document
from tests.faults.world import HTTP, Deeds, at_rest, balanced, record, series, until

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("private-docker")]
SILENCE_S = 1.0
#: Nothing that does not need the engine may take longer while it is silent (two cores, shared with other tests).
RESPONSIVE_S = 30.0


@pytest.fixture
def gateway(tmp_path: Path, engine: PrivateDocker, deeds: Deeds) -> Iterator[GatewayProcess]:
    request = {"method": "GET", "url": deeds.url + "/do?name={name}"}
    named = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
    described = document("container", tmp_path / "state", deed={"runtime": "api", "request": request, "input": named})
    described["functions"] = {name: described["functions"][name] for name in ("shell", "deed")}  # no warm instances
    described["sandbox"]["engine_silence"] = f"{SILENCE_S}s"
    made = GatewayProcess(tmp_path, described, engine.environment)
    made.start()
    yield made
    made.stop()


class Agents:
    """Trajectories that act without end, each in its own sandbox."""

    def __init__(self, gateway: GatewayProcess, count: int) -> None:
        self._gateway = gateway
        self._over = threading.Event()
        self._names = [f"agent-{number}" for number in range(count)]
        self._threads = [threading.Thread(target=self._live, args=(name,), daemon=True) for name in self._names]
        self._acts: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()

    def __enter__(self) -> Agents:
        for thread in self._threads:
            thread.start()
        self.go_on()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), "an action never ended"

    def go_on(self) -> None:
        """Wait until each has acted some more."""
        goals = {name: self._acts[name] + 3 for name in self._names}
        until(lambda: all(self._acts[name] >= goal for name, goal in goals.items()), "the agents act")

    def _live(self, trajectory: str) -> None:
        with Client(self._gateway.url) as client:
            while not self._over.is_set():
                ended = client.invoke("shell", {"command": "echo x >> file"}, trajectory=trajectory)
                self.ends[str(ended.reason or ended.state)] += 1
                self._acts[trajectory] += 1
            client.end_trajectory(trajectory)


def untraceable(engine: PrivateDocker) -> bool:
    """Nothing of any sandbox is left on the machine."""
    groups = [group for group in engine.cgroups() if len(group.name) == 64]
    return not (engine.containers() or engine.processes() or groups)


def shut(gateway: GatewayProcess, engine: PrivateDocker) -> None:
    """Wait until the gateway has noticed, and says what mends it."""

    def told() -> bool:
        warnings = HTTP.get(f"{gateway.url}/readyz").json()["warnings"]
        return any(engine.host in each and "systemctl restart docker" in each for each in warnings)

    until(told, "/readyz tells it")


def at_peace(gateway: GatewayProcess, engine: PrivateDocker) -> None:
    until(lambda: at_rest(gateway), "the gateway is at rest")
    until(lambda: untraceable(engine), "no container, process or control group is left")


@pytest.mark.promise("A killed engine disturbs no living sandbox.")
def test_a_killed_engine_disturbs_no_living_sandbox_and_is_found_again(
    gateway: GatewayProcess, engine: PrivateDocker
) -> None:
    with Client(gateway.url) as client, Agents(gateway, 3) as agents:
        engine.kill()
        shut(gateway, engine)
        agents.go_on()
        fresh = [client.submit("shell", {"command": "true"}, trajectory=name) for name in (None, "fresh")]
        assert all(record(gateway, each.id, wait_s=0)["state"] == "queued" for each in fresh), "nothing has begun"
        agents.go_on()
        assert balanced(series(gateway))
        engine.start()
        assert {record(gateway, each.id)["state"] for each in fresh} == {"succeeded"}, "it goes on by itself"
        client.end_trajectory("fresh")
        agents.go_on()
    assert set(agents.ends) == {"succeeded"}
    at_peace(gateway, engine)


def test_containers_that_end_with_their_engine_are_told_once(gateway: GatewayProcess, engine: PrivateDocker) -> None:
    engine.kill()
    engine.live_restore = False
    engine.start()
    with Client(gateway.url) as client:
        until(lambda: client.invoke("shell", {"command": "true"}).state == "succeeded", "new sandboxes are made")
        accepted = client.submit("shell", {"command": "echo begun; exec sleep 1000"}, trajectory="t")
        lines = client.logs(accepted.id, follow=True)
        assert next(line.text for line in lines if line.stream == "stdout").strip() == "begun"
        engine.kill()
        engine.start()
        end = record(gateway, accepted.id)
        assert (end["state"], end["reason"]) == ("failed", "environment_lost"), end
        assert client.invoke("shell", {"command": "echo anew"}, trajectory="t").result["stdout"] == "anew\n"
        client.end_trajectory("t")
    at_peace(gateway, engine)


def test_a_stopped_engine_is_a_typed_reason_in_time_to_what_it_had_begun_and_new_work_waits(
    gateway: GatewayProcess, engine: PrivateDocker
) -> None:
    with Client(gateway.url) as client, ThreadPoolExecutor(4) as pool, Agents(gateway, 2) as agents:
        client.invoke("shell", {"command": "sleep 1000 &"}, trajectory="leaves")
        engine.signal(signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            makings = [pool.submit(client.invoke, "shell", {"command": "true"}) for _ in range(3)]
            leaving = pool.submit(client.end_trajectory, "leaves")
            agents.go_on()
            for name in ("one", "other"):
                asked_s = time.monotonic()
                assert client.invoke("deed", {"name": name}).state == "succeeded"
                assert HTTP.get(f"{gateway.url}/healthz").status_code == 200
                assert time.monotonic() - asked_s < RESPONSIVE_S
            leaving.result()
            assert time.monotonic() - began_s < SILENCE_S + 2 * RESPONSIVE_S
            shut(gateway, engine)
            fresh = client.submit("shell", {"command": "echo made"})
            agents.go_on()
            assert record(gateway, fresh.id, wait_s=0)["state"] == "queued", "nothing of it has begun"
            assert balanced(series(gateway))
        finally:
            engine.signal(signal.SIGCONT)
        assert record(gateway, fresh.id)["result"]["stdout"] == "made\n", "it goes on by itself"
        ends = [each.result() for each in makings]
        begun = [end for end in ends if end.state != "succeeded"]
        assert {(end.state, end.reason) for end in begun} <= {("failed", "environment_lost")}
        assert all("does not answer" in end.message for end in begun), begun
    assert set(agents.ends) == {"succeeded"}
    at_peace(gateway, engine)
