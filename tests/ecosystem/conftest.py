"""Rows of the ecosystem: a real client from the registry, and a gateway with the door that it needs."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from bench.facades.client_environments import ClientEnvironment, ClientFailed, client_environment


@pytest.fixture(scope="session")
def client() -> Callable[[str], ClientEnvironment]:
    """Return a client's environment; the test is skipped without a registry, and fails where ``CI=true``."""

    def find(name: str) -> ClientEnvironment:
        try:
            return client_environment(name)
        except ClientFailed as error:
            if os.environ.get("CI") == "true":
                pytest.fail(str(error))
            pytest.skip(str(error))

    return find
