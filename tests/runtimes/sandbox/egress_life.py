"""What sandboxes reach, told as JSON by a gateway's life in `tests.network_world`. usage: KIND STATE_DIR DOCKER_HOST"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import select
import sys
from dataclasses import replace
from pathlib import Path

from manager.function import Network, SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.provider import DockerSettings, ProviderSettings, make_provider
from runtimes.sandbox.sandbox import Sandbox
from tests import network_world as world

#: Says which of (address, port) take a connection, and which names resolve.
PROBE = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def reached(address):
    try:
        socket.create_connection((address, PORT), 3).close()
        return True
    except OSError:
        return False
def known(name):
    try:
        return [info[4][0] for info in socket.getaddrinfo(name, 80, type=socket.SOCK_STREAM)]
    except OSError:
        return []
asked = json.loads(sys.argv[1])
with ThreadPoolExecutor(16) as pool:
    print(json.dumps([[a for a, r in zip(asked, pool.map(reached, asked)) if r], known("mirror.example")]))
""".replace("PORT", str(world.PORT))
#: What root would have to do to change anything: each is refused.
MEDDLE = """
import socket, struct, fcntl
tried = {
    "packets": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "raw": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1),
    "link": lambda: fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 0)),
    "rules": lambda: socket.socket().getsockopt(0, 64, 84),
}
for name, attempt in tried.items():
    try:
        attempt()
        print(name, "done")
    except OSError:
        pass
"""
#: A service in a sandbox, for its neighbour.
SERVICE = f"""
import socket
s = socket.create_server(("::", {world.PORT}), family=socket.AF_INET6, dualstack_ipv6=True)
lines = open("/proc/net/fib_trie").read().split("Local:")[1].splitlines()
own = {{a.split()[-1] for a, b in zip(lines, lines[1:]) if "host LOCAL" in b}}
with open("/proc/net/if_inet6") as file:
    own |= {{socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])) for line in file}}
print("\\n".join(a for a in own if not a.startswith(("127.", "::1", "fe80"))), flush=True)
while True:
    s.accept()[0].close()
"""
WORLD = (*world.OUTSIDE, world.MACHINE, world.MACHINE_V6, world.ON_LINK, world.ON_LINK_V6)
#: The ways that slirp4netns and the engine's bridge have to the machine.
WAYS = ("127.0.0.1", "::1", "198.18.255.2", "198.18.255.3", "fd00::2", "fd00::3", world.BRIDGE, world.BRIDGE_V6)


async def reached(sandbox: Sandbox, *more: str, user: str = "") -> list[list[str]]:
    """Return the addresses that can be reached, and those of a name."""
    asked = json.dumps([*WORLD, *WAYS, *more])
    result = await sandbox.run(Command(argv=("python3", "-c", PROBE, asked), user=user, timeout_s=60))
    assert result.exit_code == 0, result.stderr.decode()
    found: list[list[str]] = json.loads(result.stdout)
    return found


async def settled(sandbox: Sandbox) -> Sandbox:
    """Return it once it has its IPv6 address, which its router tells it a moment after the start."""
    wait = Command(shell="until grep -qv -e ' lo$' -e '^fe80' /proc/net/if_inet6; do sleep 0.05; done", timeout_s=60)
    assert (await sandbox.run(wait)).exit_code == 0
    return sandbox


async def live(kind: str, state_dir: Path, host: str) -> dict[str, object]:
    docker = DockerSettings(host=host)
    settings = ProviderSettings(
        kind=kind,  # type: ignore[arg-type]
        state_dir=state_dir,
        docker=docker,
        name_servers=(world.NAME_SERVER,),
    )
    provider = make_provider(settings)
    told: dict[str, object] = {"promised": provider.info.limits["egress"]}
    spec = SandboxSpec(image="tangram-base:bookworm", memory_bytes=256 * 2**20, network=Network.EGRESS, users=("root",))

    async def create(spec: SandboxSpec) -> Sandbox:
        return await settled(await provider.create(spec, name=secrets.token_hex(4), labels={}, mounts={}))

    neighbour = await create(spec)
    addresses: list[str] = []
    up = asyncio.Event()

    def heard(_: str, data: bytes) -> None:
        addresses.extend(data.decode().split())
        up.set()

    serving = asyncio.create_task(neighbour.run(Command(argv=("python3", "-c", SERVICE), timeout_s=300), heard))
    await asyncio.wait((serving, asyncio.create_task(up.wait())), return_when=asyncio.FIRST_COMPLETED)
    sandbox = await create(spec)
    others = addresses if kind == "container" else []  # each has the same addresses in a network of its own
    told["neighbours"] = len(others)
    told["user"] = await reached(sandbox, *others)
    told["root"] = await reached(sandbox, *others, user="root")
    told["meddled"] = (await sandbox.run(Command(argv=("python3", "-c", MEDDLE), user="root"))).stdout.decode()
    named = (f"{world.NEIGHBOUR}:{world.PORT}", f"[{world.NEIGHBOUR_V6}]:{world.PORT}", f"{world.METADATA}:80")
    closed = await create(replace(spec, allow=(*named, world.MACHINE)))
    told["named"] = await reached(closed)
    await closed.close()
    opened = await create(replace(spec, allow=(f"{world.NEIGHBOUR}:{world.PORT}", "0.0.0.0/0", "10.9.0.0/8:1")))
    told["world"] = await reached(opened)
    await opened.close()
    serving.cancel()
    await asyncio.wait((serving,))
    await neighbour.close()
    told["uplinks"] = len(world.processes_in(os.getpid(), "slirp4netns"))
    await sandbox.release()
    provider = make_provider(settings)
    [(sandbox, _)] = await provider.adopt()
    told["adopted"] = await reached(sandbox)
    if kind == "process":
        # Its first process dies and no gateway looks after it: the uplink ends by itself.
        [running] = world.processes_in(os.getpid(), "slirp4netns")
        ended = os.pidfd_open(running)
        [record] = (state_dir / "sandboxes").glob("*/record.json")
        os.kill(json.loads(record.read_text())["pid"], 9)
        assert await asyncio.to_thread(select.select, [ended], [], [], world.DEADLINE_S) != ([], [], [])
        os.close(ended)
    await sandbox.close()
    told["left"] = len(world.processes_in(os.getpid(), "slirp4netns"))
    await provider.reap(())
    await provider.close()
    return told


if __name__ == "__main__":
    print(json.dumps(asyncio.run(live(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))))
