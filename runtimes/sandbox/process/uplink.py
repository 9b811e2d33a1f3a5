"""The way out of a process sandbox: slirp4netns, a network stack in user space, on a tap in the sandbox's namespace.

It ends with the sandbox, not with the gateway: the sandbox's processes hold one end of a pipe, and it ends when nobody
does any more. What it may carry, the rules in the namespace say (`runtimes.sandbox.egress`); its own doors to the
machine (loopback, the name server) are shut. It keeps no privileges and sees no files but /etc and /run.
"""

from __future__ import annotations

import asyncio
import os
import resource
import select
import shutil
import signal
from contextlib import suppress
from pathlib import Path

from manager.errors import CodedError

COMPONENT = "sandbox.network"
PROGRAM = "slirp4netns"
TUN = Path("/dev/net/tun")
START_S = 10.0
#: Its own addresses: of the block for measurements, which is nobody's network.
CIDR = "198.18.255.0/24"
MTU = "65520"
#: Its bounds, as it works on the machine's account: a connection of the sandbox takes a descriptor and two buffers.
BOUNDS = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_AS: 512 * 2**20}
LOG_TAIL_BYTES = 1000


def missing_uplink() -> str:
    """Return why there can be none; empty if there can."""
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM} is not installed (Debian: apt-get install {PROGRAM})"
    return "" if TUN.exists() else f"there is no {TUN} (modprobe tun)"


class Uplink:
    """One sandbox's. ``held`` is to be inherited by the sandbox's first process."""

    def __init__(self) -> None:
        self._ends, self.held = os.pipe()
        #: Its process, once started.
        self.pid = 0

    async def start(self, sandbox_pid: int, log: Path) -> None:
        """Start it in the network namespace of a process, and return when packets pass; raises CodedError."""
        ready, told = os.pipe()
        try:
            self.pid = self._spawn(f"/proc/{sandbox_pid}/ns/net", told, log)
            os.close(told)
            told = -1
            for kind, bound in BOUNDS.items():
                resource.prlimit(self.pid, kind, (bound, bound))
            seen, _, _ = await asyncio.to_thread(select.select, [ready], [], [], START_S)
            if seen and os.read(ready, 1):
                return
            said = await asyncio.to_thread(log.read_bytes)
            tail = said[-LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
            raise CodedError(f"{PROGRAM} does not start: {tail}", component=COMPONENT)
        finally:
            os.close(ready)
            if told >= 0:
                os.close(told)

    def close(self) -> None:
        """Let go of the pipe: from here on its end is that of the sandbox."""
        for end in (self._ends, self.held):
            os.close(end)

    def _spawn(self, namespace: str, ready: int, log: Path) -> int:
        options = ["--configure", f"--mtu={MTU}", f"--cidr={CIDR}", "--disable-host-loopback", "--disable-dns"]
        options += ["--enable-sandbox", "--enable-seccomp", f"--exit-fd={self._ends}", f"--ready-fd={ready}"]
        if _routes_v6():
            options.append("--enable-ipv6")
        program = shutil.which(PROGRAM) or PROGRAM
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            return os.posix_spawn(
                program,
                [program, *options, "--netns-type=path", namespace, "tap0"],
                {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, output, 1),
                    (os.POSIX_SPAWN_DUP2, output, 2),
                    (os.POSIX_SPAWN_DUP2, self._ends, self._ends),  # inherited under its own number
                    (os.POSIX_SPAWN_DUP2, ready, ready),
                ],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGINT],
            )
        finally:
            os.close(output)


def _routes_v6() -> bool:
    """Return whether this machine has a way to the world over IPv6: else programs would try it in vain."""
    with suppress(OSError):
        lines = [line.split() for line in Path("/proc/net/ipv6_route").read_text(encoding="ascii").splitlines()]
        return any(words[1] == "00" and words[9] != "lo" for words in lines)
    return False
