"""What keeper and gateway say to each other, one JSON object a line, as the gateway declares it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from msgspec import Struct


class KeeperMessage(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Anything that a keeper says."""


class RayConnected(KeeperMessage, frozen=True, kw_only=True, tag="connected"):
    """It holds a connection to the cluster."""

    pid: int
    version: str


class RayUnreachable(KeeperMessage, frozen=True, kw_only=True, tag="unreachable"):
    """The cluster does not answer, in Ray's own words."""

    why: str


class KeeperPong(KeeperMessage, frozen=True, kw_only=True, tag="pong"):
    """The keeper lives; so long ago it last saw the cluster, and why it did not at its last look, if so."""

    looked_ago_s: float
    why: str


class RayNodeAlive(KeeperMessage, frozen=True, kw_only=True, tag="alive"):
    """A machine that is wanted is there."""

    node: str
    address: str
    labels: Mapping[str, str]


class RayNodeDead(KeeperMessage, frozen=True, kw_only=True, tag="dead"):
    """Ray counts it as dead. By itself this ends nothing: its daemon's own link says more."""

    node: str
    why: str


class RayNodeDraining(KeeperMessage, frozen=True, kw_only=True, tag="draining"):
    """It is to be gone by an instant, in milliseconds since 1970."""

    node: str
    deadline_ms: float


class ReservationWaiting(KeeperMessage, frozen=True, kw_only=True, tag="waiting"):
    """What is to be reserved there is held by somebody else."""

    node: str
    cpus: float
    gpus: float
    waited_s: float
    #: What nobody holds there, by Ray's names; empty if Ray does not tell.
    free: Mapping[str, float]

    def text(self) -> str:
        """In words, for logs and warnings."""
        asked = {"CPU": self.cpus, "GPU": self.gpus}
        parts = []
        for name, wanted in asked.items():
            if wanted:
                free = f", {self.free[name]:g} free" if name in self.free else ", none free" if self.free else ""
                parts.append(f"{wanted:g} {name}s asked{free}")
        told = "; ".join(parts) or "nothing asked, and Ray makes no actor there"
        return f"Ray node {self.node[:12]} waits for its reservation since {self.waited_s:g} s: {told}"


class StewardReady(KeeperMessage, frozen=True, kw_only=True, tag="steward"):
    """A steward holds its reservation; a daemon is started by it."""

    node: str
    gpu_ids: tuple[str, ...]
    daemon: int
    deaths: int
    pid: int


class StewardFailed(KeeperMessage, frozen=True, kw_only=True, tag="steward_failed"):
    """A steward could not be made, or died; the keeper makes it again by itself."""

    node: str
    why: str
    again_in_s: float


class DaemonStarted(KeeperMessage, frozen=True, kw_only=True, tag="started"):
    """A steward was told to start its daemon; ``daemon`` is its pid, 0 if it did not come up."""

    node: str
    gpu_ids: tuple[str, ...]
    daemon: int
    deaths: int
    pid: int
    #: What kept it from being started, if the steward knows.
    why: str = ""


class DaemonReleased(KeeperMessage, frozen=True, kw_only=True, tag="released"):
    """A steward has given back what it held; whether its daemon has gone."""

    node: str
    gone: bool


class KeeperRefused(KeeperMessage, frozen=True, kw_only=True, tag="refused"):
    """A command that cannot be carried out now."""

    node: str
    why: str


AnyKeeperMessage: TypeAlias = (
    RayConnected
    | RayUnreachable
    | KeeperPong
    | RayNodeAlive
    | RayNodeDead
    | RayNodeDraining
    | ReservationWaiting
    | StewardReady
    | StewardFailed
    | DaemonStarted
    | DaemonReleased
    | KeeperRefused
)
