"""Metrics: counters, gauges and the ACT breakdown per function, in the Prometheus text format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.counters import Counters, FunctionCounters
from gateway.invocations.record import Record
from manager.action import State
from manager.learning import History


class Metrics:
    """Counts what the invocations report, and asks the other rooms when it is read."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._tallies = Counters()
        self.registry.register(self._tallies)
        self._requests = Counter(
            "tangram_requests_refused", "Requests refused at a door, by code", ("door", "code"), registry=self.registry
        )
        self._living: dict[str, State] = {}

    def accepted(self, record: Record) -> None:
        tally = self._tallies.of(record.function)
        tally.accepted += 1
        self._living[record.id] = record.state
        _count(tally, record.state, 1)

    def moved(self, record: Record) -> None:
        """It was started, or waits for another try."""
        before = self._living.get(record.id)
        if before is None or before is record.state:
            return
        tally = self._tallies.of(record.function)
        _count(tally, before, -1)
        if record.terminal:
            del self._living[record.id]
            return
        self._living[record.id] = record.state
        _count(tally, record.state, 1)

    def settled(self, record: Record) -> None:
        self.moved(record)
        tally = self._tallies.of(record.function)
        tally.ended[record.state.value, "" if record.reason is None else record.reason.value] += 1
        if not record.completed:
            return
        tally.queue.observe(record.queue_s or 0.0)
        tally.overhead.observe(record.overhead_s or 0.0)
        tally.execution.observe(record.execution_s or 0.0)

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


def _count(tally: FunctionCounters, state: State, more: int) -> None:
    if state is State.QUEUED:
        tally.queued += more
    else:
        tally.running += more


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
