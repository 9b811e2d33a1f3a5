"""The client: `Client` and `AsyncClient`, their handles of trajectories, and what their calls give back."""

from tangram.client.aio.client import AsyncClient
from tangram.client.aio.trajectory import AsyncTrajectoryHandle
from tangram.client.bulk import MapProgress
from tangram.client.requests import BatchCall
from tangram.client.results import InvocationResult
from tangram.client.retries import Retries
from tangram.client.sync.client import Client
from tangram.client.sync.trajectory import TrajectoryHandle

__all__ = [
    "AsyncClient",
    "AsyncTrajectoryHandle",
    "BatchCall",
    "Client",
    "InvocationResult",
    "MapProgress",
    "Retries",
    "TrajectoryHandle",
]
