"""Counters of the gateway and their Prometheus form."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.invocations.record import Record
from gateway.stats import Spread, Stats
from manager.action import State
from manager.learning import History

PARTS = {"queue": "waiting", "overhead": "being made ready and cleaned up", "execution": "executing"}


class Metrics:
    """What is measured of the gateway: the parts are asked when it is read."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "tangram_requests_refused", "Requests refused at a door, by code", ("door", "code"), registry=self.registry
        )

    def watch_invocations(self, stats: Stats, living: Callable[[], Iterable[Record]]) -> None:
        """Ask what the invocations came to, and which have not ended, whenever the metrics are read."""
        self.registry.register(_Invocations(stats, living))

    def refused(self, door: str, code: str) -> None:
        """A request was refused at a door."""
        self._requests.labels(door, code).inc()

    def watch(self, name: str, about: str, read: Callable[[], float], *, counter: bool = False) -> None:
        """Ask ``read`` for one number whenever the metrics are read."""
        self.registry.register(_Watch(name, about, read, counter))

    def watch_units(self, read: Callable[[], Iterator[tuple[str, str, float]]]) -> None:
        """Ask for (pool, total | free, units) whenever the metrics are read."""
        self.registry.register(_Units(read))

    def watch_nodes(self, read: Callable[[], Iterator[tuple[str, str, float]]]) -> None:
        """Ask for (node, what, number) whenever the metrics are read."""
        self.registry.register(_Machines(read))

    def watch_replicas(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Ask how the copies of models have fared, by outcome."""
        self.registry.register(_Replicas(read))

    def watch_learned(self, functions: Callable[[], Iterable[str]], history: History) -> None:
        """Ask what was learned of each function whenever the metrics are read."""
        self.registry.register(_Estimates(functions, history))

    def text(self) -> bytes:
        """The exposition in the text format."""
        return generate_latest(self.registry)


class _Invocations(Collector):
    def __init__(self, stats: Stats, living: Callable[[], Iterable[Record]]) -> None:
        self._stats, self._living = stats, living

    def collect(self) -> Iterator[Metric]:
        accepted = CounterMetricFamily("tangram_invocations_accepted", "Invocations accepted", labels=("function",))
        queued = GaugeMetricFamily("tangram_invocations_queued", "Invocations that wait", labels=("function",))
        running = GaugeMetricFamily("tangram_invocations_running", "Invocations that run", labels=("function",))
        ended = CounterMetricFamily(
            "tangram_invocations_ended",
            "Invocations ended, by state and reason",
            labels=("function", "state", "reason"),
        )
        waiting, executing = self._count_living()
        for name, counters in self._stats.counters.items():
            accepted.add_metric((name,), counters.accepted)
            queued.add_metric((name,), waiting[id(counters)])
            running.add_metric((name,), executing[id(counters)])
            for (state, reason), count in counters.ended.items():
                ended.add_metric((name, state, reason), count)
        yield from (accepted, ended, queued, running)
        for part, spent in PARTS.items():
            family = HistogramMetricFamily(
                f"tangram_act_{part}_seconds",
                f"The part of the ACT spent {spent}, of what was completed",
                labels=("function",),
            )
            for name, counters in self._stats.counters.items():
                spread: Spread = getattr(counters, part)
                family.add_metric((name,), spread.buckets(), spread.sum_s)
            yield family

    def _count_living(self) -> tuple[Tally[int], Tally[int]]:
        """Return how many wait, and how many run, by the counters that they are of."""
        waiting, executing = Tally[int](), Tally[int]()
        for record in self._living():
            if not record.terminal:
                (waiting if record.state is State.QUEUED else executing)[id(self._stats.of(record.function))] += 1
        return waiting, executing


class _Watch(Collector):
    def __init__(self, name: str, about: str, read: Callable[[], float], counter: bool) -> None:
        self._name, self._about, self._read, self._counter = name, about, read, counter

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily if self._counter else GaugeMetricFamily
        yield family(self._name, self._about, value=self._read())


class _Units(Collector):
    def __init__(self, read: Callable[[], Iterator[tuple[str, str, float]]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("tangram_units", "Units of each pool", labels=("pool", "state"))
        for pool, state, units in self._read():
            family.add_metric((pool, state), units)
        yield family


class _Machines(Collector):
    _ABOUT: Mapping[str, str] = {
        "up": "1 while the node serves or drains, 0 while it joins or is not heard; none once it has drained",
        "running": "Actions that run on the node",
        "trajectories": "Trajectories, and actions of none, that hold memory on the node",
        "losses": "Losses of the node of late",
        "devices": "Model devices of the node",
        "resident_models": "Copies of model services that are resident on the node's devices",
    }

    def __init__(self, read: Callable[[], Iterator[tuple[str, str, float]]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        families = {
            what: GaugeMetricFamily(f"tangram_node_{what}", about, labels=("node",))
            for what, about in self._ABOUT.items()
        }
        for node, what, number in self._read():
            families[what].add_metric((node,), number)
        yield from families.values()


class _Replicas(Collector):
    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        about = "Copies of models in free memory: begun, used, given up before their use, or not arrived"
        family = CounterMetricFamily("tangram_prefetches", about, labels=("outcome",))
        counts = self._read()
        for outcome in ("started", "hits", "wasted", "failed"):
            family.add_metric((outcome,), counts.get(outcome, 0))
        yield family


class _Estimates(Collector):
    def __init__(self, functions: Callable[[], Iterable[str]], history: History) -> None:
        self._functions, self._history = functions, history

    def collect(self) -> Iterator[Metric]:
        duration, error, serial, marginal = (
            GaugeMetricFamily(name, about, labels=("function",))
            for name, about in (
                ("tangram_learned_t_ori_seconds", "Learned duration with one unit"),
                ("tangram_learned_error_ratio", "Typical relative error of the learned duration"),
                ("tangram_learned_serial_fraction", "Learned share of the work that no further unit makes faster"),
                ("tangram_learned_batch_marginal", "Learned share of its work that a further member adds to a batch"),
            )
        )
        for function in self._functions():
            learned = self._history.learned(function)
            if learned.t_ori_s is None:
                continue
            duration.add_metric((function,), learned.t_ori_s)
            error.add_metric((function,), learned.error)
            serial.add_metric((function,), learned.serial_fraction)
            marginal.add_metric((function,), learned.batch_marginal)
        yield from (duration, error, serial, marginal)


def reference(registry: CollectorRegistry) -> str:
    """The table of docs/reference/metrics.md: every metric of a gateway that has counted one of each."""
    rows = []
    for family in registry.collect():
        labels = {name: None for sample in family.samples for name in sample.labels if name != "le"}
        names = list(labels) or list(getattr(family, "_labelnames", ()))
        shown = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(f"| `{shown}` | {family.type} | {', '.join(names)} | {family.documentation} |\n")
    return "| metric | kind | labels | meaning |\n|---|---|---|---|\n" + "".join(sorted(rows))


def pool_units(resources: Mapping[str, object]) -> Iterator[tuple[str, str, float]]:
    """Yield (pool, state, units) of what `manager.engine.Engine.resources` tells."""
    pools = resources["pools"]
    assert isinstance(pools, dict)
    for name, pool in pools.items():
        for state in ("total", "free"):
            if state in pool:
                yield name, state, float(pool[state])
