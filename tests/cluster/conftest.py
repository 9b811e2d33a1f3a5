"""A gateway that takes nodes, and daemons that join it, in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster.world import ClusterGateway, DaemonProcess, NodeRelay, document, stopped

StartGateway = Callable[..., ClusterGateway]
MakeNode = Callable[..., DaemonProcess]
MakeRelay = Callable[[ClusterGateway], NodeRelay]


@pytest.fixture(params=[pytest.param("container", marks=pytest.mark.docker)])
def provider(request: pytest.FixtureRequest) -> str:
    """The kind of sandboxes on every machine."""
    if request.param == "container":
        request.getfixturevalue("docker")
    return str(request.param)


@pytest.fixture
def start_gateway(tmp_path: Path, provider: str) -> Iterator[StartGateway]:
    """Starts the gateway, with what its section cluster says besides."""
    made: list[ClusterGateway] = []

    def start(**cluster: object) -> ClusterGateway:
        gateway = ClusterGateway(tmp_path / "gateway", document(tmp_path / "gateway" / "state", provider, **cluster))
        made.append(gateway)
        gateway.start()
        return gateway

    yield start
    for gateway in [each for each in made if each.running]:
        with suppress(Exception), gateway.client() as client:
            for trajectory in client.trajectories():
                client.end_trajectory(trajectory.trajectory)
        gateway.stop()


@pytest.fixture
def make_node(tmp_path: Path, provider: str, start_gateway: StartGateway) -> Iterator[MakeNode]:
    """Makes a node of a gateway, not yet started; all are stopped before the gateway is."""
    made: list[DaemonProcess] = []

    def make(gateway: ClusterGateway, name: str, core: int = 1) -> DaemonProcess:
        made.append(DaemonProcess(tmp_path / name, gateway, name, provider, core))
        return made[-1]

    yield make
    stopped(*made)


@pytest.fixture
def make_relay() -> Iterator[MakeRelay]:
    """Makes a relay to a gateway; all are closed at the end."""
    made: list[NodeRelay] = []

    def make(gateway: ClusterGateway) -> NodeRelay:
        made.append(NodeRelay(gateway.door[0]))
        return made[-1]

    yield make
    for relay in made:
        relay.close()
