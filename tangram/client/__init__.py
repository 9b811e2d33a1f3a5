"""The client: `Client` and `AsyncClient`, their handles of trajectories, and what their calls give back."""

from tangram.client.aio.client import AsyncClient
from tangram.client.aio.trajectory import AsyncTrajectory
from tangram.client.bulk import MapProgress
from tangram.client.requests import BatchCall
from tangram.client.results import InvocationResult
from tangram.client.retries import Retries
from tangram.client.sync.client import Client
from tangram.client.sync.trajectory import Trajectory

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
