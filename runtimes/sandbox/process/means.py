"""What this machine lends a process sandbox, looked for at the start: nothing that fails once is taken for missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from manager.errors import CapacityExceeded, Unsupported
from runtimes.sandbox.cgroup import Cgroup, Hierarchy
from runtimes.sandbox.process.ids import IdBlocks

COMPONENT = "sandbox.process"
PROBE_S = 10.0


@dataclass(frozen=True, slots=True)
class Means:
    """What this machine lends a process sandbox."""

    bubblewrap: str | None
    root: bool
    #: The group under which each sandbox gets one of its own; None if none can be written.
    cgroup: Cgroup | None
    #: The blocks of user ids, one for each sandbox's own namespace; None where there can be no such.
    ids: IdBlocks | None = None
    #: Why not.
    no_ids: str = ""

    @classmethod
    def discover(cls, ids: IdBlocks, *, plain: bool = False) -> Means:
        """Return what there is; raises Unsupported, with the reason, if bubblewrap is wanted and does not work now."""
        hierarchy = Hierarchy.discover()
        own = None if hierarchy is None else hierarchy.of_process("self")
        cgroup, root = own if _can_divide(own) else None, os.geteuid() == 0
        if plain:
            return cls(None, root, cgroup)
        bubblewrap = _working_bubblewrap()
        if not root:
            return cls(bubblewrap, root, cgroup, no_ids="the gateway is not root")
        why = _why_no_namespaces(ids)
        return cls(bubblewrap, root, cgroup, None if why else ids, why)


class NotInstalled(Unsupported):
    """What sandboxes are to be made with is not on this machine: trying again is of no use."""


def _working_bubblewrap() -> str:
    """Return bwrap; raises NotInstalled, or Unsupported if it is there but cannot make namespaces now."""
    found = shutil.which("bwrap")
    if found is None:
        raise NotInstalled("bubblewrap is not installed", component=COMPONENT)
    options = ["--unshare-all", "--ro-bind", "/usr", "/usr"] + ([] if os.geteuid() == 0 else ["--unshare-user"])
    for name in ("lib", "lib64"):
        options += ["--ro-bind-try", f"/{name}", f"/{name}"]
    try:
        done = subprocess.run(
            [found, *options, "/usr/bin/true"], capture_output=True, timeout=PROBE_S, check=False, text=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unsupported(f"bubblewrap does not work: {error}", component=COMPONENT) from None
    if done.returncode:
        raise Unsupported(f"bubblewrap does not work: {done.stderr.strip()[-500:]}", component=COMPONENT)
    return found


def _why_no_namespaces(ids: IdBlocks) -> str:
    """Return why sandboxes can have no user namespaces with ids of their own; empty if they can."""
    try:
        ids.claim().close()
    except CapacityExceeded:  # then there are as many that work
        return ""
    except OSError as error:
        return str(error)
    return ""


def _can_divide(group: Cgroup | None) -> bool:
    """Return whether groups with bounds can be made below this one."""
    if group is None:
        return False
    probe = Cgroup(group.version, {key: place / f"tangram-probe-{os.getpid()}" for key, place in group.places.items()})
    try:
        probe.make(memory_bytes=64 * 2**20, pids=16)
        return True
    except OSError:
        return False
    finally:
        probe.remove()
