"""Counters of the gateway and their Prometheus form."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.invocations.record import Record
from gateway.stats import Spread, Stats
from manager.action import State
from manager.learning import History

PARTS = {"queue": "waiting", "overhead": "being made ready and cleaned up", "execution": "executing"}


class Metrics:
    """What is measured of the gateway: its parts are asked when the metrics are read."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "tangram_requests_refused",
            "Requests refused by a server, by code",
            ("server", "code"),
            registry=self.registry,
        )

    def refused(self, server: str, code: str) -> None:
        """A server refused a request."""
        self._requests.labels(server, code).inc()

    def watch(self, name: str, about: str, read: Callable[[], float], *, counter: bool = False) -> None:
        """Show one number."""
        kind = CounterMetricFamily if counter else GaugeMetricFamily
        self.register(lambda: [kind(name, about, value=read())])

    def register(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Show what ``read`` returns."""
        self.registry.register(_Families(read))

    def text(self) -> bytes:
        """The exposition in the text format."""
        return generate_latest(self.registry)


class _Families(Collector):
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


def invocation_families(stats: Stats, living: Iterable[Record]) -> Iterator[Metric]:
    """Yield what the invocations came to, and which have not ended."""
    accepted = CounterMetricFamily("tangram_invocations_accepted", "Invocations accepted", labels=("function",))
    queued = GaugeMetricFamily("tangram_invocations_queued", "Invocations that wait", labels=("function",))
    running = GaugeMetricFamily("tangram_invocations_running", "Invocations that run", labels=("function",))
    about = "Invocations ended, by state and reason"
    ended = CounterMetricFamily("tangram_invocations_ended", about, labels=("function", "state", "reason"))
    # By the counters of their functions: those beyond the bound share one.
    waiting, executing = Tally[int](), Tally[int]()
    for record in living:
        if not record.terminal:
            (waiting if record.state is State.QUEUED else executing)[id(stats.of(record.function))] += 1
    for name, counters in stats.counters.items():
        accepted.add_metric((name,), counters.accepted)
        queued.add_metric((name,), waiting[id(counters)])
        running.add_metric((name,), executing[id(counters)])
        for (state, reason), count in counters.ended.items():
            ended.add_metric((name, state, reason), count)
    yield from (accepted, ended, queued, running)
    for part, spent in PARTS.items():
        about = f"The part of the ACT spent {spent}, of what was completed"
        family = HistogramMetricFamily(f"tangram_act_{part}_seconds", about, labels=("function",))
        for name, counters in stats.counters.items():
            spread: Spread = getattr(counters, part)
            family.add_metric((name,), spread.buckets(), spread.sum_s)
        yield family


def unit_families(resources: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the units of each pool of what `manager.engine.Engine.resources` tells. Any: it is JSON."""
    family = GaugeMetricFamily("tangram_units", "Units of each pool", labels=("pool", "state"))
    for name, pool in resources["pools"].items():
        for state in ("total", "free"):
            if state in pool:
                family.add_metric((name, state), float(pool[state]))
    yield family


def node_families(counts: Iterable[tuple[str, str, float]]) -> Iterator[Metric]:
    """Yield what is counted of each node: (node, what, number)."""
    abouts = {
        "up": "1 while the node serves or drains, 0 while it joins or is not heard; none once it has drained",
        "running": "Actions that run on the node",
        "trajectories": "Trajectories, and actions of none, that hold memory on the node",
        "losses": "Losses of the node of late",
        "devices": "Model devices of the node",
        "resident_models": "Copies of model services that are resident on the node's devices",
    }
    families = {
        what: GaugeMetricFamily(f"tangram_node_{what}", about, labels=("node",)) for what, about in abouts.items()
    }
    for node, what, number in counts:
        families[what].add_metric((node,), number)
    yield from families.values()


def replica_families(counts: Mapping[str, int]) -> Iterator[Metric]:
    """Yield how the copies of models have fared, by outcome."""
    about = "Copies of models in free memory: begun, used, given up before their use, or not arrived"
    family = CounterMetricFamily("tangram_prefetches", about, labels=("outcome",))
    for outcome in ("started", "hits", "wasted", "failed"):
        family.add_metric((outcome,), counts.get(outcome, 0))
    yield family


def learned_families(functions: Iterable[str], history: History) -> Iterator[Metric]:
    """Yield what was learned of each function."""
    learned = {name: each for name in functions if (each := history.learned(name)).t_ori_s is not None}
    for name, about, field in (
        ("t_ori_seconds", "Learned duration with one unit", "t_ori_s"),
        ("error_ratio", "Typical relative error of the learned duration", "error"),
        ("serial_fraction", "Learned share of the work that no further unit makes faster", "serial_fraction"),
        ("batch_marginal", "Learned share of its work that a further member adds to a batch", "batch_marginal"),
    ):
        family = GaugeMetricFamily(f"tangram_learned_{name}", about, labels=("function",))
        for function, each in learned.items():
            family.add_metric((function,), getattr(each, field))
        yield family
