"""The Python client: `Client` and `AsyncClient`, typed results and errors, logs, and trajectories."""

from __future__ import annotations

from gateway.client.aio import AsyncClient, AsyncTrajectory
from gateway.client.problems import ConnectionFailed
from gateway.client.requests import BatchCall
from gateway.client.results import FileEntry, InvocationFailed, InvocationResult, LogLine
from gateway.client.sync import Client, Trajectory

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
