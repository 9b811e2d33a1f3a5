"""The docker client: which engine it speaks to, over which way, and whether that one is this machine's."""

from __future__ import annotations

import math
import os
import secrets
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
import docker.transport
import docker.types
import docker.utils
import requests.exceptions

from manager.errors import Unsupported
from runtimes.sandbox.docker.address import EngineAddress
from runtimes.sandbox.docker.ssh_forward import SshForward

COMPONENT = "sandbox.container"
DEFAULT_HOST = "unix:///var/run/docker.sock"
#: The scheme under which docker asks requests for a socket on this machine.
SCHEME = "http+docker://"
#: What is raised if an engine is not reached.
AWAY = (requests.exceptions.RequestException, docker.errors.DockerException, OSError)


class DockerClient(docker.APIClient):
    """Checks the engine's certificate by its own settings, not by the variables for the web."""

    def merge_environment_settings(
        self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any
    ) -> Any:  # as `requests.Session` declares it
        return super().merge_environment_settings(url, proxies, stream, self.verify if verify is None else verify, cert)


class OnePool(docker.transport.UnixHTTPAdapter):
    """One pool of connections for all requests.

    docker keeps one for each address asked, and most have an id in them: a new connection for nearly every request,
    and several times as many open ones as threads.
    """

    @classmethod
    def replace(cls, api: docker.APIClient, connections: int) -> None:
        """Give ``api`` one pool if it speaks to a socket of this machine."""
        given = api.adapters.get(SCHEME)
        if isinstance(given, docker.transport.UnixHTTPAdapter):
            api.mount(SCHEME, cls(given.socket_path, given.timeout, pool_connections=1, max_pool_size=connections))
            given.close()

    def drop(self) -> None:
        """Close what is not in use: the engine is away, and will not know these connections when it comes back."""
        self.pools.clear()

    def get_connection(self, url: Any, proxies: Any = None) -> Any:
        return super().get_connection(SCHEME, proxies)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConnection:
    """A client, the address that it speaks to, and what must stand for it to be reached. Its methods block."""

    api: docker.APIClient
    address: EngineAddress
    info: Mapping[str, Any]
    forward: SshForward | None = None

    @classmethod
    def open(cls, host: str, *, state_dir: Path, timeout_s: float, workers: int) -> EngineConnection:
        """Connect to the engine that ``host`` or else the environment names; raises Unsupported if none answers.

        An engine behind ssh has a socket in ``state_dir``.
        """
        environment = {**os.environ, "DOCKER_HOST": host} if host else dict(os.environ)
        forward: SshForward | None = None
        try:
            options = docker.utils.kwargs_from_env(environment)
            if options.get("base_url", "").startswith("ssh://"):
                forward = SshForward(options["base_url"], state_dir)
                forward.ensure()
                options = {"base_url": forward.url}
            address = EngineAddress.of(options.get("base_url") or DEFAULT_HOST, _tls(options.get("tls")))
            api = DockerClient(version="auto", timeout=math.ceil(timeout_s), num_pools=workers, **options)
            OnePool.replace(api, workers)
            return cls(api=api, address=address, info=api.info(), forward=forward)
        except (*AWAY, ValueError) as error:
            if forward is not None:
                forward.close()
            remedy = (
                f"is one at {host}?"
                if host
                else "start it (systemctl restart docker), install one (Debian: apt-get install docker.io), or name "
                "one in DOCKER_HOST"
            )
            raise Unsupported(f"no Docker engine answers ({error}); {remedy}", component=COMPONENT) from None

    def ensure(self) -> None:
        """Open the way to it if it is closed; raises OSError."""
        if self.forward is not None:
            self.forward.ensure()

    def drop(self) -> None:
        """Let go of connections to an engine that did not answer."""
        adapter = self.api.adapters.get(SCHEME)
        if isinstance(adapter, OnePool):
            adapter.drop()

    def answers(self, within_s: float) -> bool:
        """Return whether it answers a ping now."""
        try:
            self.ensure()
            self.api.get(f"{self.api.base_url}/_ping", timeout=within_s)
        except AWAY:
            self.drop()
            return False
        return True

    def shares(self, directory: Path) -> bool:
        """Return whether the engine runs on this kernel and sees this directory: then a socket in it joins both.

        It is asked to mount a directory with a name that no other machine has into a container of an image that there
        is not, and complains of the first of the two that is wrong.
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
        if self.forward is not None:
            self.forward.close()


def _tls(config: Any) -> ssl.SSLContext | None:
    """Return docker's own settings of TLS for a connection of ours."""
    if not config:
        return None
    context = ssl.create_default_context(cafile=config.ca_cert if config.verify else None)
    if not config.verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if config.cert:
        context.load_cert_chain(*config.cert)
    return context
