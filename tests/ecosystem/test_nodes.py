"""Clients of the doors whose trajectories live on a node that joined, not on the gateway's machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.facades.client_environments import ClientEnvironment
from tests.cluster.world import ClusterGateway, DaemonProcess, document, stopped
from tests.ecosystem.test_swerex import better, own_server, plain

pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="module", params=["process", pytest.param("container", marks=pytest.mark.docker)])
def elsewhere(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterGateway]:
    """A gateway whose function `there` has its sandboxes on a node; nothing lives on either at the end."""
    kind = str(request.param)
    if kind == "container":
        request.getfixturevalue("docker")
    directory = tmp_path_factory.mktemp(f"nodes-{kind}")
    described = document(directory / "gateway" / "state", kind)
    described["functions"]["there"] |= {"output_limit": "16Mi", "sandbox": {"background": "run"}}
    described["server"] |= {"body_limit": "128Mi", "auth": "none", "facades": {"swerex": {"function": "there"}}}
    described["server"]["facades"]["docker"] = {"socket": str(directory / "docker.sock"), "function": "there"}
    gateway = ClusterGateway(directory / "gateway", described)
    node = DaemonProcess(directory / "n1", gateway, "n1", kind)
    gateway.start()
    try:
        node.start()
        gateway.until_state("n1", "ready")
        yield gateway
        with gateway.client() as client:
            assert [each.trajectory for each in client.trajectories()] == []
            assert {each.node for each in client.list(function="there")} == {"n1"}, "nothing ran anywhere else"
    finally:
        stopped(node)
        status = gateway.stop()
    assert status == 0, "\n".join(gateway.log[-30:])


async def test_swe_rex_is_answered_as_by_its_own_server(
    elsewhere: ClusterGateway, client: Callable[[str], ClientEnvironment], tmp_path: Path
) -> None:
    environment, place = client("swerex"), tmp_path / "place"
    place.mkdir()
    async with own_server(environment, tmp_path) as port:
        own, ours = await asyncio.gather(
            environment.run("swerex_runtime", "http://127.0.0.1", str(port), "k", str(place)),
            environment.run("swerex_runtime", f"{elsewhere.url}/swerex/there/swerex", "-", "any", "/workspace"),
        )
    del own["wrong key"], ours["wrong key"]
    assert own.keys() == ours.keys()
    odd = {name: (own[name], ours[name]) for name in own if plain(own[name]) != ours[name] and not better(name, ours)}
    assert not odd, odd


async def test_mini_swe_agents_own_docker_environment_works_to_its_submission(
    elsewhere: ClusterGateway, client: Callable[[str], ClientEnvironment]
) -> None:
    host = f"unix://{elsewhere.directory.parent / 'docker.sock'}"
    told = await client("mini_swe").run("mini_swe_docker", "tangram-base:bookworm", "1", DOCKER_HOST=host)
    assert told["end"] == ["Submitted", "1\n"]
    assert told["codes"] == [0, 7, 137]
    assert told["late"] == ["begun\n", -1, "TimeoutExpired"]
    assert told["after"] == "/tmp\n"
