"""Plugs of other frameworks, all thin over `SandboxProvider`: docs/CONNECT.md.

Each is a module of its own that imports its framework when it is imported; this package needs httpx and msgspec alone.
"""

from tangram.adapters.aio import AsyncSandboxProvider
from tangram.adapters.provider import CommandEnd, CommandTimedOut, GradeReport, InfrastructureFailed
from tangram.adapters.sync import SandboxProvider

__all__ = [
    "AsyncSandboxProvider",
    "CommandEnd",
    "CommandTimedOut",
    "GradeReport",
    "InfrastructureFailed",
    "SandboxProvider",
]
