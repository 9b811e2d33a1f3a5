"""Stands where SWE-ReX's own tests have a conftest.py: their server is the gateway's facade."""

import os
from dataclasses import dataclass, field

import pytest
from swerex.runtime.abstract import BashAction, CloseBashSessionRequest, Command, CreateBashSessionRequest
from swerex.runtime.remote import RemoteRuntime

TEST_API_KEY = os.environ["SWEREX_KEY"]


@dataclass
class RemoteServer:
    port: int
    headers: dict = field(default_factory=lambda: {"X-API-Key": TEST_API_KEY})


@pytest.fixture(scope="session")
def remote_server():
    return RemoteServer(int(os.environ["SWEREX_PORT"]))


@pytest.fixture
async def remote_runtime(remote_server):
    runtime = RemoteRuntime(port=remote_server.port, auth_token=TEST_API_KEY)
    yield runtime
    await runtime.close()


@pytest.fixture
async def runtime_with_default_session(remote_runtime):
    await remote_runtime.create_session(CreateBashSessionRequest())
    yield remote_runtime
    await remote_runtime.close_session(CloseBashSessionRequest())


class _Action(BashAction):
    timeout: float | None = 5


class _Command(Command):
    timeout: float | None = 5
