"""What bubblewrap shows a process sandbox: the host's system read-only, and its own work, /tmp and /dev."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from manager.function import SandboxSpec
from runtimes.sandbox.capabilities import capabilities_of
from runtimes.sandbox.process.means import Means
from runtimes.sandbox.runner.protocol import INSIDE, RUNNER

#: Host files that programs need and that tell nothing.
ETC = (
    "nsswitch.conf", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime",
    "ssl", "mime.types", "services", "protocols", "python3", "python3.11", "java", "profile", "bash.bashrc",
)  # fmt: skip


def box_of(means: Means, directory: Path, spec: SandboxSpec, mounts: Mapping[str, str], path: str) -> list[str]:
    """Return bubblewrap's options."""
    options = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--as-pid-1", "--new-session"]
    options += ["--unshare-net", "--hostname", "sandbox", "--cap-drop", "ALL"]
    if means.root:
        options += [word for name in capabilities_of(spec) for word in ("--cap-add", f"CAP_{name}")]
    else:
        options.append("--unshare-user")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        place = Path("/", name)
        if place.is_symlink():
            options += ["--symlink", str(place.readlink()), str(place)]
        elif place.exists():
            options += ["--ro-bind", str(place), str(place)]
    options += ["--ro-bind", "/usr", "/usr"]
    # Before what is bound below it: the gateway's own Python may live in /tmp.
    options += ["--perms", "1777", "--size", str(spec.disk_bytes), "--tmpfs", "/tmp"]
    shown = _shown(path)
    for parent in _parents([*mounts.values(), spec.workdir, *shown, "/etc/passwd"]):
        options += ["--perms", "0755", "--dir", parent]
    options += ["--perms", "0700" if means.ids is None else "0711", "--dir", INSIDE]
    for name in ETC:
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for prefix in shown:
        options += ["--ro-bind-try", prefix, prefix]
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        options += ["--ro-bind", str(directory / name), f"/etc/{name}"]
    options += ["--proc", "/proc", "--dev", "/dev"]
    if means.root:  # else the kernel lets nobody inside write there
        options += ["--ro-bind", "/proc/sys", "/proc/sys"]
    options += ["--perms", "1777", "--size", str(spec.shm_bytes), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    options += ["--bind", str(directory / "work"), spec.workdir]
    for source, target in mounts.items():
        options += ["--ro-bind", source, target]
    options += ["--ro-bind", str(RUNNER), f"{INSIDE}/runner.py", "--bind", str(directory / "run"), f"{INSIDE}/run"]
    return [*options, "--remount-ro", "/", "--chdir", "/", "--"]


def _parents(places: Sequence[str]) -> list[str]:
    """Return the directories above, outermost first: bubblewrap would make them unreadable for all but root."""
    found = {str(parent) for place in places for parent in Path(place).parents}
    return sorted(found - {"/", "/usr", *(f"/usr/{name}" for name in ("local", "bin", "lib"))})


def _shown(path: str) -> list[str]:
    """Return the host's directories, beside the system's own, that hold the programs of a PATH and the runner's Python.

    Of a virtual environment that is itself and what its Python really is.
    """
    found = [sys.base_prefix]
    for directory in path.split(":"):
        python = Path(directory, "python3")
        places = (python.parent, python.resolve().parent)
        found += [str(place.parent if place.name == "bin" else place) for place in places]
    system = ("/usr", "/bin", "/sbin", "/lib")
    return [each for each in dict.fromkeys(found) if each != "/" and not each.startswith(system)]
