"""The former place of the client, for one release: import it from `tangram`, which needs nothing of the server."""

from __future__ import annotations

import warnings

from tangram import (
    AsyncClient,
    AsyncTrajectory,
    BatchCall,
    Client,
    ConnectionFailed,
    FileEntry,
    InvocationFailed,
    InvocationResult,
    LogLine,
    Trajectory,
)

__all__ = [
    "AsyncClient",
    "AsyncTrajectory",
    "BatchCall",
    "Client",
    "ConnectionFailed",
    "FileEntry",
    "InvocationFailed",
    "InvocationResult",
    "LogLine",
    "Trajectory",
]

warnings.warn(
    "gateway.client has moved: write `from tangram import Client`; this module goes with the next release",
    DeprecationWarning,
    stacklevel=2,
)
