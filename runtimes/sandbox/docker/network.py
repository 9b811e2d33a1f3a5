"""Egress with an allow list: rules in the sandbox's own network namespace, which nobody inside may change."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from manager.errors import CodedError, InvalidConfig, Unsupported
from manager.function import SandboxSpec

COMPONENT = "sandbox.network"


@dataclass(frozen=True, slots=True)
class Egress:
    """What a sandbox may reach: networks, and names fixed at its start (there is no name service to leak through)."""

    networks: tuple[str, ...]
    hosts: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def check() -> None:
        """Raise Unsupported if the rules cannot be set."""
        missing = [tool for tool in ("nsenter", "iptables", "ip6tables") if shutil.which(tool) is None]
        if missing or os.geteuid() != 0:
            raise Unsupported(
                "network: egress with an allow list needs root and " + (", ".join(missing) or "a local engine"),
                component=COMPONENT,
            )

    @classmethod
    async def resolve(cls, spec: SandboxSpec) -> Egress:
        """Return the spec's allow list as networks; raises InvalidConfig for a name that does not resolve."""
        networks: list[str] = []
        hosts: dict[str, str] = {}
        for entry in spec.allow:
            try:
                networks.append(str(ipaddress.ip_network(entry, strict=False)))
                continue
            except ValueError:
                pass
            try:
                found = await asyncio.get_running_loop().getaddrinfo(entry, None, type=socket.SOCK_STREAM)
            except OSError as error:
                raise InvalidConfig(
                    f"sandbox.allow: {entry!r} does not resolve: {error}", component=COMPONENT
                ) from None
            addresses = list(dict.fromkeys(str(item[4][0]) for item in found))
            networks += addresses
            hosts[entry] = addresses[0]
        return cls(tuple(networks), hosts)

    def rules(self) -> list[list[str]]:
        """Return the commands that leave only the allowed ways open."""
        made = []
        for tool, version in (("iptables", 4), ("ip6tables", 6)):
            made += [
                [tool, "-w", "-A", "OUTPUT", "-o", "lo", "-j", "ACCEPT"],
                *(
                    [tool, "-w", "-A", "OUTPUT", "-d", network, "-j", "ACCEPT"]
                    for network in self.networks
                    if ipaddress.ip_network(network).version == version
                ),
                [tool, "-w", "-P", "OUTPUT", "DROP"],
            ]
        return made

    async def enforce(self, pid: int) -> None:
        """Set the rules in the network namespace of a process; raises CodedError if one cannot be set."""
        for rule in self.rules():
            process = await asyncio.create_subprocess_exec(
                "nsenter",
                f"--net=/proc/{pid}/ns/net",
                *rule,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
            _, complaint = await process.communicate()
            if process.returncode != 0:
                raise CodedError(
                    f"{' '.join(rule)}: {complaint.decode('utf-8', 'replace').strip()}", component=COMPONENT
                )
