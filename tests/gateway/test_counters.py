"""Tallies are what the metrics library would have counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from gateway.metrics import Metrics
from gateway.stats import BUCKETS_S, FUNCTIONS_MAX, OTHER, Spread, Stats


@given(seconds=st.lists(st.one_of(st.sampled_from(BUCKETS_S), st.floats(0, 10_000)), max_size=30))
def test_seconds_fall_into_the_buckets_of_a_prometheus_histogram(seconds: list[float]) -> None:
    registry, spread = CollectorRegistry(), Spread()
    reference = Histogram("name", "about", registry=registry, buckets=BUCKETS_S)
    for one in seconds:
        reference.observe(one)
        spread.observe(one)
    expected = [
        (sample.labels["le"], sample.value)
        for metric in reference.collect()
        for sample in metric.samples
        if sample.name == "name_bucket"
    ]
    assert spread.buckets() == expected
    assert spread.sum_s == sum(seconds)


def test_functions_beyond_the_bound_share_one_tally() -> None:
    stats, metrics = Stats(lambda: 1.0, lambda: 1e9), Metrics()
    metrics.watch_invocations(stats, tuple)
    for number in range(FUNCTIONS_MAX + 2):
        stats.of(f"f{number}").accepted += 1
    accepted = next(each for each in metrics.registry.collect() if each.name == "tangram_invocations_accepted")
    counts = {sample.labels["function"]: sample.value for sample in accepted.samples}
    assert len(counts) == FUNCTIONS_MAX + 1
    assert counts[OTHER] == 2
    assert stats.of("f0") is not stats.of("another")
