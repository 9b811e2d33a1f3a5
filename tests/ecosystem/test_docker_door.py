"""mini-swe-agent's default environment, as it is on the registry, works over the door that speaks Docker's API."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.facades.client_environments import ClientEnvironment
from tests.e2e.gateway import GatewayProcess

pytestmark = [pytest.mark.network, pytest.mark.slow]


async def test_mini_swe_agents_own_docker_environment_works_to_its_submission(
    boxes: GatewayProcess, client: Callable[[str], ClientEnvironment]
) -> None:
    host = f"unix://{boxes.directory / 'docker.sock'}"
    told = await client("mini_swe").run("mini_swe_docker", "tangram-base:bookworm", "1", DOCKER_HOST=host)
    assert told["end"] == ["Submitted", "1\n"]
    assert told["outputs"][0] in ("cat\nerr\n", "err\ncat\n"), (
        "two pipes of the docker CLI, in the order that it reads them"
    )
    assert told["codes"] == [0, 7, 137]
    assert told["late"] == ["begun\n", -1, "TimeoutExpired"]
    assert told["after"] == "/tmp\n"
