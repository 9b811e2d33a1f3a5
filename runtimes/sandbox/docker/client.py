"""The docker client: which engine of this machine it speaks to, and whether that one sees our files."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
import docker.transport
import docker.types
import requests.exceptions

from manager.errors import InvalidConfig, Unsupported

COMPONENT = "sandbox.container"
DEFAULT_HOST = "unix:///var/run/docker.sock"
#: The scheme under which docker asks requests for a socket on this machine.
SCHEME = "http+docker://"
#: What is raised if an engine is not reached.
AWAY = (requests.exceptions.RequestException, docker.errors.DockerException, OSError)


class OnePool(docker.transport.UnixHTTPAdapter):
    """One pool of connections for all requests.

    docker keeps one for each address asked, and most have an id in them: a new connection for nearly every request,
    and several times as many open ones as threads.
    """

    @classmethod
    def replace(cls, api: docker.APIClient, socket: str, connections: int) -> OnePool:
        """Give ``api`` one pool in place of its own."""
        api.adapters[SCHEME].close()
        pool = cls(socket, api.timeout, pool_connections=1, max_pool_size=connections)
        api.mount(SCHEME, pool)
        return pool

    def drop(self) -> None:
        """Close what is not in use: the engine is away, and will not know these connections when it comes back."""
        self.pools.clear()

    def get_connection(self, url: Any, proxies: Any = None) -> Any:
        return super().get_connection(SCHEME, proxies)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConnection:
    """A client, and the socket that it speaks to. Its methods block."""

    api: docker.APIClient
    pool: OnePool
    socket: str
    info: Mapping[str, Any]

    @classmethod
    def open(cls, host: str, *, timeout_s: float, workers: int) -> EngineConnection:
        """Connect to the engine that ``host`` or else the environment names.

        Raises InvalidConfig if that is none of this machine, Unsupported if none answers.
        """
        socket = socket_of(host or os.environ.get("DOCKER_HOST") or DEFAULT_HOST)
        try:
            api = docker.APIClient(f"unix://{socket}", "auto", timeout=math.ceil(timeout_s), num_pools=workers)
            pool = OnePool.replace(api, socket, workers)
            return cls(api=api, pool=pool, socket=socket, info=api.info())
        except AWAY as error:
            remedy = (
                f"is one at {host}?"
                if host
                else "start it (systemctl restart docker), install one (Debian: apt-get install docker.io), or name "
                "one in DOCKER_HOST"
            )
            raise Unsupported(f"no Docker engine answers ({error}); {remedy}", component=COMPONENT) from None

    def answers(self, within_s: float) -> bool:
        """Return whether it answers a ping now."""
        try:
            self.api.get(f"{self.api.base_url}/_ping", timeout=within_s)
        except AWAY:
            self.pool.drop()
            return False
        return True

    def shares(self, directory: Path) -> bool:
        """Return whether the engine runs on this kernel and sees this directory: then a socket in it joins both.

        Not if the gateway is in a container, or the engine in a virtual machine. It is asked to mount a directory with
        a name that nobody else has into a container of an image that there is not, and complains of the first of the
        two that is wrong.
        """
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if (self.info.get("KernelVersion"), self.info.get("MemTotal")) != (os.uname().release, memory_bytes):
            return False
        nonce = f"tangram-probe-{secrets.token_hex(8)}"
        probe = directory.absolute() / nonce
        probe.mkdir()
        try:
            mount = docker.types.Mount(f"/{nonce}", str(probe), type="bind", read_only=True)
            self.api.create_container(f"{nonce}:none", host_config=self.api.create_host_config(mounts=[mount]))
        except docker.errors.NotFound as error:
            return "image" in str(error.explanation).lower()
        except AWAY:
            return False
        finally:
            probe.rmdir()
        return False

    def close(self) -> None:
        self.api.close()


def socket_of(url: str) -> str:
    """Return the path of the socket that an engine's address names; raises InvalidConfig for anything else."""
    scheme, _, path = url.partition("://")
    if scheme != "unix" or not path:
        raise InvalidConfig(
            f"{url!r} is no Docker engine of this machine (unix:///path, in sandbox.docker.host or DOCKER_HOST): "
            "a machine with an engine of its own joins as a node (docs/CLUSTER.md)",
            component=COMPONENT,
        )
    return f"/{path.lstrip('/')}"
