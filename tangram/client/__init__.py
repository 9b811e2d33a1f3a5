"""The client: `Client` and `AsyncClient`, their handles of trajectories, and what their calls give back."""

from tangram.client.aio import AsyncClient, AsyncPort, AsyncTrajectory
from tangram.client.requests import BatchCall, InvocationResult, MapProgress, Retries
from tangram.client.sync import Client, Port, Trajectory

__all__ = [
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
]
