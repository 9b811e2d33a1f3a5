"""The client: `Client` and `AsyncClient`, their handles of trajectories, and what their calls give back."""

from tangram.client.aio import AsyncClient, AsyncTrajectory
from tangram.client.requests import BatchCall, InvocationResult, MapProgress, Retries
from tangram.client.sync import Client, Trajectory

__all__ = [
    "AsyncClient",
    "AsyncTrajectory",
    "BatchCall",
    "Client",
    "InvocationResult",
    "MapProgress",
    "Retries",
    "Trajectory",
]
