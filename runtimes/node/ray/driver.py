"""The driver: a child process that holds Ray, for a gateway that must not.

It finds the machines of a cluster, puts an actor on each that is wanted, with what is to be reserved there, and says
what it sees. It keeps nothing that matters and may be killed at any moment: actors and daemons live on, and the next
driver finds them. It imports nothing of ours, so that an interpreter with the cluster's own Ray can run this file.

JSON lines: commands on standard input, messages on standard output. ``ray.nodes()`` is the word about who is there,
asked every second (3.5 ms for 500 nodes); Ray publishes neither drains nor what it holds back.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMESPACE = "tangram"
#: Seconds between two looks at the cluster; until a reservation that waits is told of; and until it is told again.
LOOK_S, WAITING_S, WAITING_AGAIN_S = 1.0, 30.0, 300.0
#: First and longest wait after an actor could not be made or did not answer.
BACKOFF_S, BACKOFF_MAX_S = 2.0, 60.0
#: Seconds that a call of Ray's may take before it counts as unanswered.
CALL_S = 10.0


@dataclass(frozen=True)
class RayNode:
    """A machine as Ray tells it."""

    id: str
    alive: bool
    address: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    why: str = ""

    @property
    def head(self) -> bool:
        return "node:__internal_head__" in self.resources


@dataclass(frozen=True)
class Reservation:
    """What an actor holds on its machine, in Ray's units; None for all that the machine has."""

    cpus: float | None = 0.0
    gpus: float | None = 0.0

    def on(self, node: RayNode) -> tuple[float, float]:
        """Return CPUs and GPUs for one machine."""
        cpus = node.resources.get("CPU", 0.0) if self.cpus is None else self.cpus
        gpus = node.resources.get("GPU", 0.0) if self.gpus is None else self.gpus
        return cpus, gpus


@dataclass(frozen=True)
class Act:
    """Something to be done: ``make`` or ``forget`` an actor, or a message to ``emit``."""

    kind: str
    node: str
    message: Mapping[str, object] = field(default_factory=dict)


@dataclass
class KnownNode:
    """What is known of one machine."""

    node: RayNode
    #: absent, asked (of Ray, may wait for its reservation) or ready.
    actor: str = "absent"
    asked_s: float = 0.0
    reported_s: float | None = None
    failures: int = 0
    again_s: float = 0.0
    draining_ms: float | None = None


class RayMembers:
    """Decides, from what Ray says and without calling it. Time is passed in."""

    def __init__(
        self,
        wanted: Mapping[str, str],
        *,
        head: bool,
        reservation: Reservation,
        waiting_s: float = WAITING_S,
        most: int | None = None,
    ) -> None:
        """``wanted`` are labels that a machine must have, ``*`` for any value; ``head``: whether the head counts.

        A reservation that waits is told of after ``waiting_s``. At most ``most`` machines are taken at once.
        """
        self._most = most
        self._waiting_s = waiting_s
        self._wanted = wanted
        self._head = head
        self._reservation = reservation
        self.known: dict[str, KnownNode] = {}

    def wants(self, node: RayNode) -> bool:
        """Return whether an actor belongs there."""
        if node.head and not self._head:
            return False
        return all(
            node.labels.get(key) is not None and value in ("*", node.labels[key]) for key, value in self._wanted.items()
        )

    def look(self, nodes: Iterable[RayNode], draining: Mapping[str, float], now_s: float) -> list[Act]:
        """Take what Ray says now: all nodes, and the deadlines of those that drain."""
        acts: list[Act] = []
        seen = {node.id: node for node in nodes}
        for id, node in seen.items():
            acts += self._alive(node, now_s) if node.alive else self._gone(id, node.why)
        for id in [id for id in self.known if id not in seen]:
            acts += self._gone(id, "Ray does not know it any more: its head may have lost its memory")
        for id, known in self.known.items():
            if known.draining_ms is None and id in draining:
                known.draining_ms = draining[id]
                acts.append(Act("emit", id, {"kind": "draining", "node": id, "deadline_ms": draining[id]}))
            acts += self._due(known, now_s)
        return acts

    def _alive(self, node: RayNode, now_s: float) -> list[Act]:
        if node.id in self.known:
            self.known[node.id].node = node
            return []
        if not self.wants(node) or (self._most is not None and len(self.known) >= self._most):
            return []
        self.known[node.id] = KnownNode(node, again_s=now_s)
        message = {"kind": "alive", "node": node.id, "address": node.address, "labels": dict(node.labels)}
        return [Act("emit", node.id, message)]

    def _gone(self, id: str, why: str) -> list[Act]:
        if self.known.pop(id, None) is None:
            return []
        return [Act("forget", id), Act("emit", id, {"kind": "dead", "node": id, "why": why})]

    def _due(self, known: KnownNode, now_s: float) -> list[Act]:
        """An actor that is to be made, or that has waited for its reservation for long."""
        id = known.node.id
        if known.actor == "absent" and known.draining_ms is None and now_s >= known.again_s:
            known.actor, known.asked_s, known.reported_s = "asked", now_s, None
            return [Act("make", id)]
        last_s = known.asked_s + self._waiting_s if known.reported_s is None else known.reported_s + WAITING_AGAIN_S
        if known.actor == "asked" and now_s >= last_s:
            known.reported_s = now_s
            cpus, gpus = self._reservation.on(known.node)
            waited_s = round(now_s - known.asked_s)
            return [Act("emit", id, {"kind": "waiting", "node": id, "cpus": cpus, "gpus": gpus, "waited_s": waited_s})]
        return []

    def reservation(self, id: str) -> tuple[float, float]:
        """Return CPUs and GPUs that the actor of a known machine holds."""
        return self._reservation.on(self.known[id].node)

    def answered(self, id: str, facts: Mapping[str, object]) -> list[Act]:
        """An actor has answered: its reservation is held."""
        known = self.known.get(id)
        if known is None:
            return []
        fresh = known.actor != "ready"
        known.actor, known.failures = "ready", 0
        return [Act("emit", id, {"kind": "actor", "node": id, **facts})] if fresh else []

    def failed(self, id: str, why: str, now_s: float) -> list[Act]:
        """An actor could not be made, or has died: it is made again, later each time."""
        known = self.known.get(id)
        if known is None:
            return []
        wait_s = min(BACKOFF_MAX_S, BACKOFF_S * 2.0**known.failures)
        known.actor, known.failures, known.again_s = "absent", min(known.failures + 1, 30), now_s + wait_s
        message = {"kind": "actor_failed", "node": id, "why": why[:1000], "again_in_s": wait_s}
        return [Act("forget", id), Act("emit", id, message)]


class RayCluster:
    """Ray itself, by the few calls that are needed of it; every one of them may block or raise."""

    def __init__(self, address: str) -> None:
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray

        self.ray = ray
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        self._actor = _actor_class(ray)
        self._gcs: Any = None

    def nodes(self) -> list[RayNode]:
        """Every machine that the cluster has had."""
        return [
            RayNode(
                id=str(each["NodeID"]),
                alive=bool(each["Alive"]),
                address=str(each["NodeManagerAddress"]),
                labels=dict(each.get("Labels") or {}),
                resources=dict(each.get("Resources") or {}),
                why=str(each.get("DeathReasonMessage") or "Ray counts it as dead"),
            )
            for each in self.ray.nodes()
        ]

    def draining(self) -> dict[str, float]:
        """Deadlines of the machines that drain, in milliseconds since 1970 (a private interface: Serve's)."""
        if self._gcs is None:
            from ray._raylet import GcsClient

            self._gcs = GcsClient(address=self.ray.get_runtime_context().gcs_address)
        return {str(id): float(deadline) for id, deadline in self._gcs.get_draining_nodes(timeout=5).items()}

    def available(self) -> dict[str, dict[str, float]]:
        """What nobody holds, by machine (a private interface: `ray status`'s); empty if it is gone."""
        try:
            from ray._private.state import available_resources_per_node
        except ImportError:
            return {}
        return {str(id): dict(resources) for id, resources in available_resources_per_node().items()}

    def actor(self, node: str, cpus: float, gpus: float) -> Any:
        """The actor of a machine, the same one for every driver; it waits for its reservation by itself."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return self._actor.options(
            name=f"tangram-node:{node}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote()

    def ready(self, references: list[Any]) -> list[Any]:
        """Those of them whose answer, or failure, is there."""
        return list(self.ray.wait(references, num_returns=len(references), timeout=0)[0]) if references else []


def _actor_class(ray: Any) -> Any:
    """The actor as an actor class that travels by value, as no machine of the cluster has our modules."""
    spec = importlib.util.spec_from_file_location("tangram_actor", Path(__file__).with_name("actor.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tangram_actor"] = module
    spec.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)
    return ray.remote(module.NodeActor)


class RayDriver:
    """Carries out what `RayMembers` decides, and what the gateway asks."""

    def __init__(self, cluster: RayCluster, members: RayMembers, emit: Callable[[Mapping[str, object]], None]) -> None:
        self._cluster = cluster
        self._members = members
        self._emit = emit
        self.actors: dict[str, Any] = {}
        #: Answers that are awaited: which machine, what was asked, and since when.
        self._awaited: dict[Any, tuple[str, str, float]] = {}

    def look(self) -> None:
        """One look at the cluster; raises what Ray raises if it cannot be reached."""
        nodes, draining = self._cluster.nodes(), self._cluster.draining()
        now_s = time.monotonic()
        self._carry_out(self._members.look(nodes, draining, now_s))
        self._take_answers()

    def command(self, given: Mapping[str, Any]) -> None:
        """``start``: the daemon of a machine; ``release``: end it and give back what is reserved."""
        node = str(given["node"])
        actor = self.actors.get(node)
        if actor is None:
            self._emit({"kind": "refused", "node": node, "why": f"no actor is ready on {node}"})
        elif given["kind"] == "start":
            request = actor.start.remote(given["command"], given["environment"], given["state_dir"])
            self._awaited[request] = (node, "start", time.monotonic())
        else:
            self._awaited[actor.stop.remote(bool(given.get("kill")))] = (node, "release", time.monotonic())

    def _carry_out(self, acts: Iterable[Act]) -> None:
        for act in acts:
            match act.kind:
                case "make":
                    self._make(act.node)
                case "forget":
                    self.actors.pop(act.node, None)
                    self._awaited = {ref: request for ref, request in self._awaited.items() if request[0] != act.node}
                case _ if act.message.get("kind") == "waiting":
                    self._emit({**act.message, "free": self._free(act.node)})
                case _:
                    self._emit(act.message)

    def _free(self, node: str) -> dict[str, float]:
        with contextlib.suppress(Exception):
            return {
                name: held for name, held in self._cluster.available().get(node, {}).items() if name in ("CPU", "GPU")
            }
        return {}

    def _make(self, node: str) -> None:
        try:
            actor = self._cluster.actor(node, *self._members.reservation(node))
            self._awaited[actor.facts.remote()] = (node, "facts", time.monotonic())
            self.actors[node] = actor
        except Exception as error:  # noqa: BLE001  # Ray's own, of many kinds
            self._carry_out(self._members.failed(node, f"{type(error).__name__}: {error}", time.monotonic()))

    def _take_answers(self) -> None:
        for reference in self._cluster.ready(list(self._awaited)):
            node, request, _ = self._awaited.pop(reference, ("", "", 0.0))
            if not node:
                continue
            try:
                answer = self._cluster.ray.get(reference, timeout=CALL_S)
            except Exception as error:  # noqa: BLE001  # the actor's, or of what became of it
                self._carry_out(self._members.failed(node, f"{type(error).__name__}: {error}", time.monotonic()))
                continue
            self._answered(node, request, answer)
        self._ask_again()

    def _answered(self, node: str, request: str, answer: Any) -> None:
        match request:
            case "facts":
                self._carry_out(self._members.answered(node, answer))
            case "start":
                self._emit({"kind": "started", "node": node, **answer})
            case _:
                with contextlib.suppress(Exception):
                    self._cluster.ray.kill(self.actors.pop(node))
                self._emit({"kind": "released", "node": node, "gone": bool(answer)})

    def _ask_again(self) -> None:
        """Ask each ready actor how it is: one that was killed answers with an error."""
        pending = {node for node, _, _ in self._awaited.values()}
        for node, actor in self.actors.items():
            known = self._members.known.get(node)
            if known is not None and known.actor == "ready" and node not in pending:
                self._awaited[actor.facts.remote()] = (node, "facts", time.monotonic())


@dataclass
class Sight:
    """When the cluster was last seen, and why not since; shared by the two threads."""

    looked_s: float
    why: str = "not connected yet"


def main() -> int:
    """Keep until standard input ends. The first line is the configuration."""
    # Whatever a library prints is no message of ours.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    wall = threading.Lock()

    def emit(message: Mapping[str, object]) -> None:
        with wall:
            out.write(json.dumps(message) + "\n")

    settings = json.loads(sys.stdin.readline())
    commands: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
    sight = Sight(time.monotonic())
    threading.Thread(target=_read, args=(commands, emit, sight), daemon=True).start()
    reservation = Reservation(cpus=settings["cpus"], gpus=settings["gpus"])
    members = RayMembers(
        settings["labels"],
        head=settings["head"],
        reservation=reservation,
        waiting_s=settings["waiting_s"],
        most=settings["most"],
    )
    try:
        driver = RayDriver(RayCluster(settings["address"]), members, emit)
    except Exception as error:  # noqa: BLE001  # a wrong token, another version, nobody there
        emit({"kind": "unreachable", "why": f"{type(error).__name__}: {error}"[:1000]})
        return 1
    emit({"kind": "connected", "pid": os.getpid(), "version": driver._cluster.ray.__version__})
    _keep(driver, commands, emit, sight)
    return 0


def _keep(
    driver: RayDriver,
    commands: queue.Queue[Mapping[str, Any] | None],
    emit: Callable[[Mapping[str, object]], None],
    sight: Sight,
) -> None:
    while True:
        try:
            driver.look()
            sight.looked_s, sight.why = time.monotonic(), ""
        except Exception as error:  # noqa: BLE001  # the head is away: it may come back, or Ray ends this process
            sight.why = f"{type(error).__name__}: {error}"[:1000]
            emit({"kind": "unreachable", "why": sight.why})
        deadline_s = time.monotonic() + LOOK_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                command = commands.get(timeout=left_s)
            except queue.Empty:
                break
            if command is None:
                return
            driver.command(command)


def _read(
    commands: queue.Queue[Mapping[str, Any] | None],
    emit: Callable[[Mapping[str, object]], None],
    sight: Sight,
) -> None:
    """Read commands; pings are answered here, as a look may block for long when the head is away."""
    for line in sys.stdin:
        command = json.loads(line)
        if command["kind"] == "ping":
            emit({"kind": "pong", "looked_ago_s": time.monotonic() - sight.looked_s, "why": sight.why})
        else:
            commands.put(command)
    commands.put(None)
    # Ray may hold the other thread in a call for tens of seconds; who has closed our settings waits for nothing of it.
    time.sleep(LOOK_S)
    os._exit(0)


if __name__ == "__main__":
    # What lies beside this file is no module of the cluster's interpreter.
    sys.path[:] = [place for place in sys.path if place != str(Path(__file__).parent)]
    raise SystemExit(main())
