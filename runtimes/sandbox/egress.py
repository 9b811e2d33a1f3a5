"""Egress: the public world and what ``allow`` names, held by rules in the sandbox's own network namespace.

They are set from outside before anything of the user's runs, and last as long as the namespace does, through any number
of gateways. Nobody inside can change them, root neither: that takes CAP_NET_ADMIN over the namespace, which no sandbox
has. What is refused is refused at once (a connection reads ECONNREFUSED) instead of after a timeout.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from manager.errors import CodedError, InvalidConfig, Unsupported
from manager.function import Network, SandboxSpec

COMPONENT = "sandbox.network"
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
TOOLS = {4: "iptables", 6: "ip6tables"}
#: Seconds that one change of the rules may take.
RULES_S = 10.0
DNS_PORT, PORT_MAX = 53, 65535
#: Private in the sense of RFC 1918, 6598 (carriers' NAT) and 4193: a name in ``allow`` may have an address there.
PRIVATE = ("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
#: What is not the public world (IANA's registries of special-purpose addresses). Of IPv6 only 2000::/3 is, less what
#: carries an IPv4 address inside (6to4, Teredo) and examples: a translator would lead from there to anywhere.
NOT_PUBLIC: tuple[IpNetwork, ...] = tuple(
    ipaddress.ip_network(block)
    for block in (
        *PRIVATE, "0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24",
        "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3",
        "::/3", "4000::/2", "8000::/1", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",
    )
)  # fmt: skip
#: A route that is wider leads to the world, not to neighbours on the link.
LINK_PREFIX_MIN = {4: 8, 6: 32}
#: Of /proc/net/ipv6_route: through a router, refused, an address of this machine.
ROUTE_GATEWAY, ROUTE_REJECT, ROUTE_LOCAL = 0x2, 0x200, 0x80000000
#: Without these four IPv6 finds no router and no neighbour; only the kernel can send them.
NEIGHBOUR_DISCOVERY = (133, 134, 135, 136)
RESOLV_CONF = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))


@dataclass(frozen=True, slots=True)
class Target:
    """A block of addresses, at one port or at any (0)."""

    network: IpNetwork
    port: int = 0

    def within(self, blocks: Sequence[IpNetwork]) -> bool:
        """Return whether one of the blocks holds all of it."""
        return any(_holds(block, self.network) for block in blocks)

    def accepted(self) -> list[str]:
        """Return the rules that let it pass."""
        ports = [f"-p {kind} --dport {self.port} " for kind in ("tcp", "udp")] if self.port else [""]
        return [f"-A OUTPUT -d {self.network} {port}-j ACCEPT" for port in ports]


@dataclass(frozen=True, slots=True)
class Egress:
    """What one sandbox may reach, with names fixed at its start where there is no name service to leak through."""

    named: tuple[Target, ...] = ()
    #: Whether that is all; else the public world is open too.
    closed: bool = False
    name_servers: tuple[str, ...] = ()
    hosts: Mapping[str, str] = field(default_factory=dict)

    def rules(self, version: int, neighbours: Sequence[IpNetwork]) -> str:
        """Return what iptables-restore sets for IPv4 or IPv6. Nothing may be begun from outside.

        A named block opens what is not public only if it lies in there as a whole: 0.0.0.0/0 is the public world.
        """
        barred = [block for block in (*NOT_PUBLIC, *neighbours) if block.version == version]
        named = [target for target in self.named if target.network.version == version]
        servers = [Target(ipaddress.ip_network(server), DNS_PORT) for server in self.name_servers]
        lines = ["*filter", *(f":{chain} DROP [0:0]" for chain in ("INPUT", "FORWARD", "OUTPUT"))]
        lines += ["-A INPUT -i lo -j ACCEPT", "-A INPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT"]
        if version == 6:
            kinds = [f"-p ipv6-icmp --icmpv6-type {kind} -j ACCEPT" for kind in NEIGHBOUR_DISCOVERY]
            lines += [f"-A {chain} {kind}" for chain in ("INPUT", "OUTPUT") for kind in kinds]
        lines += ["-A OUTPUT -o lo -j ACCEPT"]
        for target in (*servers, *(target for target in named if target.within(barred))):
            lines += target.accepted() if target.network.version == version else []
        lines += [f"-A OUTPUT -d {block} -j REJECT" for block in ipaddress.collapse_addresses(barred)]  # type: ignore[type-var]  # of one version
        for target in named:
            lines += [] if target.within(barred) else target.accepted()
        lines += ["-A OUTPUT -j REJECT" if self.closed else "-A OUTPUT -j ACCEPT", "COMMIT"]
        return "\n".join(lines) + "\n"


class EgressGuard:
    """Sets the rules of a provider's sandboxes, if this machine lets it."""

    def __init__(self, name_servers: Sequence[str] = ()) -> None:
        """Let names be asked for from these servers; by default from the machine's own. Blocks for the probe."""
        self._name_servers = tuple(name_servers)
        self._versions = tuple(version for version in TOOLS if version == 4 or Path("/proc/net/if_inet6").exists())
        #: Why no rules can be set; empty if they can.
        self.obstacle = self._probe()

    async def check(self, spec: SandboxSpec) -> None:
        """Raise InvalidConfig or Unsupported if the spec's egress can never be granted."""
        if spec.network is not Network.EGRESS:
            if spec.allow and Network.EGRESS not in spec.trajectory.networks:
                raise InvalidConfig("sandbox.allow needs network: egress", component=COMPONENT)
            return
        for entry in spec.allow:
            parsed(entry)
        if self.obstacle:
            self.obstacle = await asyncio.to_thread(self._probe)
        if self.obstacle:
            raise Unsupported(
                f"network: egress needs rules in the sandbox's network namespace, and {self.obstacle}",
                component=COMPONENT,
            )
        if _asks_names(spec) and not self.name_servers():
            raise Unsupported(
                "network: egress has no name server to ask: those of /etc/resolv.conf answer on this machine only; "
                "name others in sandbox.name_servers",
                component=COMPONENT,
            )

    async def resolve(self, spec: SandboxSpec) -> Egress | None:
        """Return what a spec grants, None without egress; raises InvalidConfig for a name that may not be used."""
        if spec.network is not Network.EGRESS:
            return None
        targets: list[Target] = []
        hosts: dict[str, str] = {}
        for entry in spec.allow:
            place, port = parsed(entry)
            if isinstance(place, str):
                addresses = await _addresses(place)
                hosts[place] = addresses[0]
                targets += [Target(ipaddress.ip_network(address), port) for address in addresses]
            else:
                targets.append(Target(place, port))
        return Egress(
            named=tuple(targets),
            closed=bool(spec.allow),
            name_servers=self.name_servers() if _asks_names(spec) else (),
            hosts=hosts,
        )

    async def enforce(self, egress: Egress, pid: int) -> None:
        """Set the rules in the network namespace of a process; raises CodedError if they cannot be set."""
        if not pid:
            raise Unsupported(
                "network: egress needs to see the sandbox's processes: the gateway has another /proc than its engine",
                component=COMPONENT,
            )
        if _ours(pid):
            raise CodedError("the sandbox has no network namespace of its own", component=COMPONENT)
        neighbours = [network for network, _ in attached(1, os.getpid(), pid)]
        for version in self._versions:
            await _inside(pid, f"{TOOLS[version]}-restore", text=egress.rules(version, neighbours))

    async def holds(self, pid: int) -> bool:
        """Return whether a process has a network namespace of its own with rules of ours."""
        if _ours(pid):
            return False
        try:
            output = [await _inside(pid, TOOLS[version], "-S", "OUTPUT") for version in self._versions]
        except CodedError:
            return False
        return all(one.startswith("-P OUTPUT DROP") for one in output)

    def name_servers(self) -> tuple[str, ...]:
        """Return the addresses of the name servers: as set, else the machine's, of which a loopback serves nobody."""
        if self._name_servers:
            return self._name_servers
        for path in RESOLV_CONF:
            with suppress(OSError):
                lines = [line.split() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
                matches = [words[1] for words in lines if len(words) > 1 and words[0] == "nameserver"]
                if usable := tuple(server for server in matches if _usable(server)):
                    return usable
        return ()

    def _probe(self) -> str:
        """Set rules in a namespace of nobody's, and return why that cannot be done."""
        if os.geteuid() != 0:
            return "only a gateway that is root can set them"
        tools = ("nsenter", "unshare", *(f"{TOOLS[version]}-restore" for version in self._versions))
        if missing := [tool for tool in tools if shutil.which(tool) is None]:
            return f"there is no {', '.join(missing)} here (Debian: apt-get install iptables util-linux)"
        for version in self._versions:
            command = ["unshare", "--net", f"{TOOLS[version]}-restore"]
            try:
                subprocess.run(
                    command,
                    input=Egress().rules(version, ()).encode(),
                    capture_output=True,
                    check=True,
                    timeout=RULES_S,
                )
            except (OSError, subprocess.SubprocessError) as error:
                output = getattr(error, "stderr", b"") or str(error).encode()
                return f"the kernel takes none ({' '.join(command)}: {output.decode('utf-8', 'replace').strip()})"
        return ""


def parsed(entry: str) -> tuple[IpNetwork | str, int]:
    """Return the block or the host that an entry of ``allow`` names, and its port (0: any); raises InvalidConfig."""
    place, port = entry, ""
    if entry.startswith("["):
        place, _, port = entry[1:].partition("]")
        port = port.removeprefix(":")
    elif entry.count(":") == 1:
        place, _, port = entry.partition(":")
    if port and not (port.isdecimal() and 0 < int(port) <= PORT_MAX):
        raise InvalidConfig(f"sandbox.allow: {entry!r} has no port between 1 and {PORT_MAX}", component=COMPONENT)
    try:
        return ipaddress.ip_network(place, strict=False), int(port or 0)
    except ValueError:
        if ":" in place or "/" in place or place[-1:].isdecimal():
            raise InvalidConfig(f"sandbox.allow: {entry!r} is no address", component=COMPONENT) from None
        if place.lower().rstrip(".").split(".")[-1] == "localhost":
            message = f"sandbox.allow: {entry!r} is this machine, which no name may allow: give one of its addresses"
            raise InvalidConfig(message, component=COMPONENT) from None
        return place, int(port or 0)


def attached(*pids: int) -> list[tuple[IpNetwork, bool]]:
    """Return the addresses of the network namespaces of some processes (True), and the networks on their links."""
    matches: dict[tuple[IpNetwork, bool], None] = {}
    for pid in pids:
        with suppress(OSError):
            matches |= dict.fromkeys(_attached_v4(Path(f"/proc/{pid}/net/fib_trie").read_text(encoding="ascii")))
            matches |= dict.fromkeys(_attached_v6(Path(f"/proc/{pid}/net/ipv6_route").read_text(encoding="ascii")))
    return [(network, own) for network, own in matches if own or network.prefixlen >= LINK_PREFIX_MIN[network.version]]


def _attached_v4(trie: str) -> Iterator[tuple[IpNetwork, bool]]:
    address = ""
    for line in trie.splitlines():
        words = line.split()
        if words[0] == "|--":
            address = words[1]
        elif words[1:] in (["host", "LOCAL"], ["link", "UNICAST"]):
            yield ipaddress.ip_network(address + words[0]), words[1] == "host"


def _attached_v6(routes: str) -> Iterator[tuple[IpNetwork, bool]]:
    for line in routes.splitlines():
        words = line.split()
        flags = int(words[8], 16)
        if not flags & (ROUTE_GATEWAY | ROUTE_REJECT):
            yield ipaddress.IPv6Network((int(words[0], 16), int(words[1], 16))), bool(flags & ROUTE_LOCAL)


async def _addresses(name: str) -> list[str]:
    """Return the addresses of a host; its owner may not lead to this machine, nor to what only addresses may name."""
    try:
        entry = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidConfig(f"sandbox.allow: {name!r} does not resolve: {error}", component=COMPONENT) from None
    addresses = list(dict.fromkeys(str(item[4][0]).partition("%")[0] for item in entry))
    private = [ipaddress.ip_network(block) for block in PRIVATE]
    own = [network for network, is_own in attached(1, os.getpid()) if is_own]
    for target in (Target(ipaddress.ip_network(address)) for address in addresses):
        if target.within(own) or (target.within(NOT_PUBLIC) and not target.within(private)):
            raise InvalidConfig(
                f"sandbox.allow: {name!r} is {target.network.network_address}, which only an address may allow",
                component=COMPONENT,
            )
    return addresses


def _asks_names(spec: SandboxSpec) -> bool:
    """Return whether a sandbox may ask for names: if the whole world is open, of IPv4 or IPv6."""
    places = [parsed(entry) for entry in spec.allow]
    return not places or any(not isinstance(place, str) and place.prefixlen == 0 and not port for place, port in places)


def _holds(block: IpNetwork, other: IpNetwork) -> bool:
    return block.version == other.version and block.prefixlen <= other.prefixlen and other.network_address in block


def _ours(pid: int) -> bool:
    """Return whether a process is in the gateway's own network namespace, whose rules are not ours to set."""
    try:
        return Path(f"/proc/{pid}/ns/net").samefile("/proc/self/ns/net")
    except OSError:
        return False  # it is gone, and whatever is done there fails


def _usable(server: str) -> bool:
    """Return whether a sandbox can ask a name server: a loopback is its own, and a zone has no meaning there."""
    try:
        return not ipaddress.ip_address(server).is_loopback and "%" not in server
    except ValueError:
        return False


async def _inside(pid: int, *command: str, text: str = "") -> str:
    """Run a command in the network namespace of a process; return what it says. Raises CodedError."""
    process = await asyncio.create_subprocess_exec(
        *("nsenter", f"--net=/proc/{pid}/ns/net", *command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, complaint = await asyncio.wait_for(process.communicate(text.encode()), RULES_S)
    except TimeoutError:
        raise CodedError(f"{' '.join(command)} takes more than {RULES_S:g} s", component=COMPONENT) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise CodedError(f"{' '.join(command)}: {complaint.decode('utf-8', 'replace').strip()}", component=COMPONENT)
    return output.decode("utf-8", "replace")
