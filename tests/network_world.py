"""A world of one's own: two network namespaces, a machine and all that is outside it, with no way to any real address.

The machine has a public address, services on every address, and a link to the outside, which answers on a public
address, as a metadata service, as private neighbours, and as a name server. What is tested runs in the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.private_docker import PrivateDocker

PORT = 7000
MACHINE, MACHINE_V6 = "5.6.7.8", "2600:1::8"
ON_LINK, ON_LINK_V6 = "5.6.7.1", "2600:1::1"
PUBLIC, PUBLIC_V6 = "1.2.3.4", "2600:2::4"
METADATA, METADATA_V6 = "169.254.169.254", "fd00:ec2::254"
NEIGHBOUR, NEIGHBOUR_V6, CARRIER = "10.9.9.9", "fd09::9", "100.64.0.9"
NAME_SERVER = "10.9.9.53"
#: Outside the machine. All of it answers at `PORT`.
OUTSIDE = (PUBLIC, PUBLIC_V6, METADATA, METADATA_V6, NEIGHBOUR, NEIGHBOUR_V6, CARRIER, NAME_SERVER)
#: The engine's bridge on the machine: neighbours there have public IPv6 addresses.
BRIDGE, BRIDGE_V6 = "172.30.0.1", "2600:3::1"
DEADLINE_S = 60

#: Answers on every address of its namespace; says when it does. A question for a name is answered with `PUBLIC`.
SERVE = f"""
import select, socket, sys
tcp = socket.create_server(("::", {PORT}), family=socket.AF_INET6, dualstack_ipv6=True)
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind((sys.argv[1], 53))
print("up", flush=True)
while True:
    for ready in select.select([tcp, udp], [], [])[0]:
        if ready is tcp:
            tcp.accept()[0].close()
            continue
        asked, who = udp.recvfrom(512)
        question = asked[12:asked.index(0, 12) + 5]
        answer = bytes.fromhex("c00c 0001 0001 0000003c 0004") + socket.inet_aton("{PUBLIC}")
        a_record = question[-3] == 1
        head = asked[:2] + bytes.fromhex("8180 0001") + (b"\\0\\1" if a_record else b"\\0\\0") + bytes(4)
        udp.sendto(head + question + (answer if a_record else b""), who)
"""


class NetworkWorld:
    """Made by `network_world`."""

    def __init__(self, machine: int, outside: int) -> None:
        self.machine, self.outside = machine, outside

    def configure(self) -> None:
        def ip(pid: int, text: str) -> None:
            for line in text.strip().splitlines():
                run_in(pid, "ip", *line.split())

        ip(self.machine, f"link set lo up\nlink add out0 type veth peer name in0 netns {self.outside}")
        ip(self.machine, f"addr add {MACHINE}/24 dev out0\n-6 addr add {MACHINE_V6}/64 dev out0 nodad")
        ip(self.machine, "link set out0 up")
        ip(self.outside, f"link set lo up\naddr add {ON_LINK}/24 dev in0\n-6 addr add {ON_LINK_V6}/64 dev in0 nodad")
        ip(self.outside, "link set in0 up")
        ip(self.outside, "\n".join(f"addr add {address} dev lo" for address in OUTSIDE))
        ip(self.machine, f"route add default via {ON_LINK}\n-6 route add default via {ON_LINK_V6}")
        ip(self.outside, f"route add default via {MACHINE}\n-6 route add default via {MACHINE_V6}")
        for family in ("ipv4.ip_forward", "ipv6.conf.all.forwarding"):
            run_in(self.machine, "sh", "-c", f"echo 1 > /proc/sys/net/{family.replace('.', '/')}")

    def python(self, *words: str) -> dict[str, object]:
        """Run a module in the machine; return what it says on its last line."""
        said = run_in(self.machine, sys.executable, *words)
        told = json.loads(said.splitlines()[-1])
        assert isinstance(told, dict)
        return told


class WorldDocker(PrivateDocker):
    """An engine of that machine, with a bridge."""

    def __init__(self, world: NetworkWorld) -> None:
        super().__init__()
        self._world = world

    def _command(self) -> list[str]:
        options = super()._command()
        options = [
            word for word in options[2:] if word not in ("--bridge=none", "--iptables=false", "--ip6tables=false")
        ]
        bridge = (f"--bip={BRIDGE}/24", "--ipv6", f"--fixed-cidr-v6={BRIDGE_V6.removesuffix('1')}/64")
        return ["nsenter", f"--net=/proc/{self._world.machine}/ns/net", *options, *bridge]


@contextmanager
def network_world() -> Iterator[NetworkWorld]:
    """Yield a world; its namespaces end with the block."""
    services: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(2):  # a holder that says when it is there
            holder = [
                "unshare",
                "--net",
                sys.executable,
                "-c",
                "print('up', flush=True); import signal; signal.pause()",
            ]
            services.append(_started(holder))
        world = NetworkWorld(services[0].pid, services[1].pid)
        world.configure()
        for pid, names in ((world.machine, "127.0.0.1"), (world.outside, NAME_SERVER)):
            services.append(_started(["nsenter", f"--net=/proc/{pid}/ns/net", sys.executable, "-c", SERVE, names]))
        yield world
    finally:
        for service in reversed(services):
            service.kill()
            service.wait(DEADLINE_S)
            if service.stdout is not None:
                service.stdout.close()


def run_in(pid: int, *command: str) -> str:
    """Run a command in the network namespace of a process; return what it says."""
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", *command],
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE_S,
        check=False,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 0, f"{command}: {done.stderr[-3000:]}"
    return done.stdout


def processes_in(pid: int, program: str) -> list[int]:
    """Return the processes of a program in the network namespace of a process."""
    home = Path(f"/proc/{pid}/ns/net").readlink()
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if (place / "comm").read_text().strip() == program and (place / "ns/net").readlink() == home:
                found.append(int(place.name))
        except OSError:
            continue
    return found


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    return process
