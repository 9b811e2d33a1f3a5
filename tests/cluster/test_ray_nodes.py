"""`cluster.ray` with a real gateway, actors and daemons; Ray itself is a script (`make ray` has a real one)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import warm
from tests.cluster.conftest import StartGateway
from tests.cluster.test_nodes import succeeded
from tests.cluster.world import STOP_S, TALE, TOLD, ClusterGateway, begun, until
from tests.e2e.gateway import ROOT
from tests.faults.world import HTTP

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]
#: As runs a machine our command from this tree, wherever it is started.
OURS = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "gateway"]


class RayMachines:
    """What Ray knows, in a file that the scripted driver reads, and where the daemons of its machines are."""

    def __init__(self, directory: Path, provider: str) -> None:
        self._directory = directory
        directory.mkdir()
        self._known: dict[str, dict[str, Any]] = {}
        self._write()
        configured = {"sandbox": {"provider": provider, "image": "tangram-base:bookworm", "memory": "128Mi"}}
        (directory / "node.yaml").write_text(yaml.safe_dump({**configured, "node": {"memory": "1Gi"}}))
        script = Path(__file__).with_name("scripted_driver.py")
        python = directory / "python"
        python.write_text(f"#!/bin/sh\nexec {sys.executable} {script} {directory}\n")
        python.chmod(0o755)

    def section(self, **settings: object) -> dict[str, object]:
        """The section `cluster.ray` of a gateway."""
        return {
            "python": str(self._directory / "python"),
            "name": "ray-{id}",
            "state_dir": str(self._directory / "{name}"),
            "command": OURS,
            "join": ["--config", str(self._directory / "node.yaml"), "--cores", str(1 % (os.cpu_count() or 1))],
            **settings,
        }

    def know(self, id: str, **facts: object) -> None:
        self._known[id] = {"labels": {"pool": "there"}, **facts}
        self._write()

    def _write(self) -> None:
        part = self._directory / "machines.part"
        part.write_text(json.dumps(self._known))
        part.replace(self._directory / "machines.json")

    @property
    def driver(self) -> int:
        with suppress(OSError, ValueError):
            return int((self._directory / "driver.pid").read_text())
        return 0

    def daemon(self, name: str) -> int:
        """The pid of a node's daemon; 0 if none lives."""
        with suppress(OSError, ValueError):
            pid = int((self._directory / name / "pid").read_text())
            if name in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
        return 0

    def processes(self, name: str) -> int:
        """How many daemons there are for a node."""
        found = 0
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                words = each.read_text().split("\0")
                found += "join" in words and str(self._directory / name) in words
        return found

    def end(self) -> None:
        """End what is left, with what it has."""
        for place in self._directory.glob("ray-*"):
            if pid := self.daemon(place.name):
                os.kill(pid, signal.SIGINT)
                until(lambda name=place.name: not self.daemon(name), f"{place.name} has ended")  # type: ignore[misc]
            warm.run(["clean", "--yes", str(place)], timeout_s=STOP_S)
        shutil.rmtree(self._directory)


@pytest.fixture
def machines(tmp_path: Path, provider: str, start_gateway: StartGateway) -> Iterator[RayMachines]:
    made = RayMachines(tmp_path / "ray", provider)
    yield made
    made.end()


def ray_states(gateway: ClusterGateway) -> dict[str, tuple[str, str]]:
    """How far each machine of Ray's is, and why."""
    told = HTTP.get(f"{gateway.url}/v1/nodes").json()["ray"]
    return {each["node"]: (each["state"], each["why"]) for each in told}


def killed(pid: int, next_pid: Callable[[], int]) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: next_pid() not in (0, pid), "there is another one")


def test_machines_join_by_themselves_and_their_daemons_outlive_driver_and_gateway(
    start_gateway: StartGateway, machines: RayMachines
) -> None:
    for id in ("m1", "m2"):
        machines.know(id)
    gateway = start_gateway(ray=machines.section())
    for name in ("ray-m1", "ray-m2"):
        gateway.until_state(name, "ready")
    until(lambda: {state for state, _ in ray_states(gateway).values()} == {"serving"}, "both are known to serve")
    daemons = {name: machines.daemon(name) for name in ("ray-m1", "ray-m2")}
    assert all(daemons.values())
    mine = gateway.submit("there", TALE, trajectory="t")
    begun(gateway, mine)
    killed(machines.driver, lambda: machines.driver)
    listen = gateway.door[0]
    gateway.kill()
    gateway.listen_at(listen)
    gateway.start()
    succeeded(gateway, mine, TOLD)
    succeeded(gateway, gateway.submit("there", "cat runs", trajectory="t"), "run\n")
    until(lambda: {state for state, _ in ray_states(gateway).values()} == {"serving"}, "both serve again")
    for name, daemon in daemons.items():
        gateway.until_state(name, "ready")
        assert machines.daemon(name) == daemon and machines.processes(name) == 1
    killed(daemons["ray-m2"], lambda: machines.daemon("ray-m2"))
    gateway.until_state("ray-m2", "ready")


def test_a_reservation_that_waits_is_told_and_a_machine_that_drains_is_given_back(
    start_gateway: StartGateway, machines: RayMachines
) -> None:
    machines.know("m1")
    machines.know("m2", waiting=True)
    gateway = start_gateway(ray=machines.section(at_end="release"))
    gateway.until_state("ray-m1", "ready")
    until(lambda: ray_states(gateway).get("ray-m2", ("", ""))[0] == "waiting", "it is told that one waits")
    assert "4 CPUs asked, 1 free" in ray_states(gateway)["ray-m2"][1]
    ready = HTTP.get(f"{gateway.url}/readyz").json()
    assert [warning for warning in ready["warnings"] if warning.startswith("ray-m2: ")], ready
    machines.know("m1", draining=True)
    gateway.until_state("ray-m1", "drained")
    until(lambda: not machines.daemon("ray-m1"), "its daemon has gone")
    until(lambda: ray_states(gateway)["ray-m1"][0] == "released", "it is given back")
    machines.know("m2")
    gateway.until_state("ray-m2", "ready")
    assert machines.daemon("ray-m2")
    gateway.stop()
    assert not machines.daemon("ray-m2"), "the end of the gateway has ended it"
