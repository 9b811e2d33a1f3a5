"""Metrics: counters, gauges and the ACT breakdown per function, in the Prometheus text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.record import Record
from manager.history import Learned
from manager.outcome import State

#: Upper bounds in seconds: from a no-op to an hour.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1200, 3600)
#: Most functions that get a label of their own; later ones share ``other``.
FUNCTIONS_MAX = 1000
OTHER = "other"


@dataclass(slots=True)
class _Function:
    """The children of one function, looked up once."""

    accepted: Counter
    queued: Gauge
    running: Gauge
    queue: Histogram
    overhead: Histogram
    execution: Histogram


class Metrics:
    """Counts what the invocations report, and asks the other rooms when it is read."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name, registry = ("function",), self.registry
        self._accepted = Counter("tangram_invocations_accepted", "Invocations accepted", name, registry=registry)
        self._ended = Counter(
            "tangram_invocations_ended",
            "Invocations ended, by state and reason",
            ("function", "state", "reason"),
            registry=registry,
        )
        self._queued = Gauge("tangram_invocations_queued", "Invocations that wait", name, registry=registry)
        self._running = Gauge("tangram_invocations_running", "Invocations that run", name, registry=registry)
        parts = {"queue": "waiting", "overhead": "being made ready and cleaned up", "execution": "executing"}
        self._parts = {
            part: Histogram(
                f"tangram_act_{part}_seconds",
                f"The part of the ACT spent {spent}",
                name,
                registry=registry,
                buckets=BUCKETS_S,
            )
            for part, spent in parts.items()
        }
        self._requests = Counter(
            "tangram_requests_refused", "Requests refused at a door, by code", ("door", "code"), registry=self.registry
        )
        self._functions: dict[str, _Function] = {}
        self._living: dict[str, State] = {}

    def accepted(self, record: Record) -> None:
        counts = self._function(record.function)
        counts.accepted.inc()
        self._living[record.id] = record.state
        (counts.queued if record.state is State.QUEUED else counts.running).inc()

    def moved(self, record: Record) -> None:
        """It was started, or waits for another try."""
        before = self._living.get(record.id)
        if before is None or before is record.state:
            return
        counts = self._function(record.function)
        (counts.queued if before is State.QUEUED else counts.running).dec()
        if record.terminal:
            del self._living[record.id]
            return
        self._living[record.id] = record.state
        (counts.queued if record.state is State.QUEUED else counts.running).inc()

    def settled(self, record: Record) -> None:
        self.moved(record)
        counts = self._function(record.function)
        reason = "" if record.reason is None else record.reason.value
        self._ended.labels(self._label(record.function), record.state.value, reason).inc()
        counts.queue.observe(record.queue_s or 0.0)
        counts.overhead.observe(record.overhead_s or 0.0)
        counts.execution.observe(record.execution_s or 0.0)

    def refused(self, door: str, code: str) -> None:
        """A request was refused at a door."""
        self._requests.labels(door, code).inc()

    def watch(self, name: str, about: str, read: Callable[[], float], *, counter: bool = False) -> None:
        """Ask ``read`` for one number whenever the metrics are read."""
        self.registry.register(_Watch(name, about, read, counter))

    def watch_units(self, read: Callable[[], Iterator[tuple[str, str, float]]]) -> None:
        """Ask for (pool, total | free, units) whenever the metrics are read."""
        self.registry.register(_Units(read))

    def watch_prefetches(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Ask how the models that were brought in ahead of their use have fared, by outcome."""
        self.registry.register(_Prefetches(read))

    def watch_learned(self, read: Callable[[], Iterator[tuple[str, Learned]]]) -> None:
        """Ask for (function, what was learned of it) whenever the metrics are read."""
        self.registry.register(_Estimates(read))

    def text(self) -> bytes:
        """The exposition in the text format."""
        return generate_latest(self.registry)

    def _label(self, function: str) -> str:
        return function if function in self._functions or len(self._functions) < FUNCTIONS_MAX else OTHER

    def _function(self, function: str) -> _Function:
        label = self._label(function)
        counts = self._functions.get(label)
        if counts is None:
            counts = self._functions[label] = _Function(
                self._accepted.labels(label),
                self._queued.labels(label),
                self._running.labels(label),
                self._parts["queue"].labels(label),
                self._parts["overhead"].labels(label),
                self._parts["execution"].labels(label),
            )
        return counts


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


class _Prefetches(Collector):
    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        about = "Models restored ahead of their use: begun, used, given up before their use, or not arrived"
        family = CounterMetricFamily("tangram_prefetches", about, labels=("outcome",))
        counts = self._read()
        for outcome in ("started", "hits", "wasted", "failed"):
            family.add_metric((outcome,), counts.get(outcome, 0))
        yield family


class _Estimates(Collector):
    def __init__(self, read: Callable[[], Iterator[tuple[str, Learned]]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        duration, error, serial = (
            GaugeMetricFamily(name, about, labels=("function",))
            for name, about in (
                ("tangram_learned_t_ori_seconds", "Learned duration with one unit"),
                ("tangram_learned_error_ratio", "Typical relative error of the learned duration"),
                ("tangram_learned_serial_fraction", "Learned share of the work that no further unit makes faster"),
            )
        )
        for function, learned in self._read():
            duration.add_metric((function,), learned.t_ori_s or 0.0)
            error.add_metric((function,), learned.error)
            serial.add_metric((function,), learned.serial_fraction)
        yield from (duration, error, serial)
