"""What root in a sandbox may do, as capabilities of the kernel."""

from __future__ import annotations

from manager.errors import Unsupported
from manager.function import Capabilities, SandboxSpec

#: The runner's own capabilities; a command that runs as another user than root has none of them.
MINIMAL = ("CHOWN", "KILL", "SETGID", "SETUID")
#: What container engines give root, less raw sockets and device files.
DEFAULT = (
    *MINIMAL, "AUDIT_WRITE", "DAC_OVERRIDE", "FOWNER", "FSETID", "NET_BIND_SERVICE", "SETFCAP", "SETPCAP", "SYS_CHROOT",
)  # fmt: skip


def capabilities_of(spec: SandboxSpec) -> tuple[str, ...]:
    """Return the capabilities of root in such a sandbox, without their prefix."""
    return MINIMAL if spec.capabilities is Capabilities.MINIMAL else DEFAULT


def require_minimal(spec: SandboxSpec, why: str) -> None:
    """Raise Unsupported for more than a process sandbox can have that has no user namespace; ``why`` it has none."""
    if why and spec.capabilities is not Capabilities.MINIMAL:
        raise Unsupported(
            "sandbox.capabilities: default are those of a root inside, whom a process sandbox has only in a user "
            f"namespace of its own ({why}); use containers for it",
            component="sandbox.process",
        )
