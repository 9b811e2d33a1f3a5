"""Tangram for those who call it: `Client` and `AsyncClient`, typed results and errors; nothing of the server.

A module is loaded when a name of it is first asked for: the server needs the types alone, and httpx takes a tenth of a
second. ``__init__.pyi`` says the same to type checkers.
"""

from importlib import import_module

_HOMES = {
    "tangram.client": (
        "AsyncClient",
        "AsyncPort",
        "AsyncTrajectory",
        "BatchCall",
        "Client",
        "InvocationResult",
        "MapProgress",
        "Port",
        "Retries",
        "Trajectory",
    ),
    "tangram.client.handlers": ("handler",),
    "tangram.errors": (
        "CapacityExceededError",
        "ConflictError",
        "ConnectionFailed",
        "DrainingError",
        "ForbiddenError",
        "FunctionUnavailableError",
        "InvalidConfigError",
        "InvalidInputError",
        "InvocationFailed",
        "KeyReusedError",
        "MapFailed",
        "MethodNotAllowedError",
        "NotFoundError",
        "PortFailedError",
        "QuotaExceededError",
        "SnapshotLostError",
        "StorageUnavailableError",
        "TangramError",
        "TooLargeError",
        "TooSlowError",
        "TrajectoryEndedError",
        "UnauthorizedError",
        "UnreadableAnswerError",
        "UnsatisfiableError",
        "UnsupportedError",
    ),
    "tangram.types": (
        "FileEntry",
        "Invocation",
        "LogLine",
        "Problem",
        "SandboxChoice",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
