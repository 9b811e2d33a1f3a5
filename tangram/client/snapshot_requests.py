"""The requests that speak of snapshots of trajectories, and of forks that begin with them."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from tangram.client.answers import reader
from tangram.client.requests import JSON_BODY, ApiRequest, get
from tangram.errors import InvalidInputError
from tangram.types import ForkAnswer, ForkRequest, SnapshotInfo, SnapshotList


def take_snapshot(trajectory: str) -> ApiRequest[SnapshotInfo]:
    """Return the request that keeps the files of a trajectory's sandbox; sent twice it would keep them twice."""
    return ApiRequest(
        method="POST",
        path=f"/v1/trajectories/{quote(trajectory, safe='')}/snapshots",
        read=reader(SnapshotInfo),
        repeatable=False,
        patient=True,
    )


def fork(
    trajectory: str,
    function: str,
    to: Sequence[str],
    task: str | None,
    step: int | None = None,
    lease_s: float | None = None,
) -> ApiRequest[ForkAnswer]:
    """Return the request that opens trajectories with the files of another; raises InvalidInputError for one text."""
    if isinstance(to, str) or not to:
        raise InvalidInputError("name the trajectories to open in a list, at least one")
    return ApiRequest(
        method="POST",
        path=f"/v1/trajectories/{quote(trajectory, safe='')}/fork",
        read=reader(ForkAnswer),
        headers=JSON_BODY,
        content=msgspec.json.encode(
            ForkRequest(function=function, to=tuple(to), task=task, step=step, lease_s=lease_s)
        ),
        repeatable=False,
        patient=True,
    )


def list_snapshots() -> ApiRequest[SnapshotList]:
    return get("/v1/snapshots", SnapshotList)


def remove_snapshot(id: str) -> ApiRequest[None]:
    return ApiRequest(method="DELETE", path=f"/v1/snapshots/{quote(id, safe='')}", read=lambda response: None)
