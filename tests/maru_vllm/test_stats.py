"""Counters: they add up over steps and ranks, and what Prometheus sees only grows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as PromCounter

from maru_vllm.stats import DOCUMENTATION, Counter, MaruPromMetrics, MaruStats

increments = st.lists(st.tuples(st.sampled_from(list(Counter)), st.integers(0, 1000)), max_size=20)


@given(increments, increments)
def test_merging_two_is_counting_in_one(left, right):
    one, two, both = MaruStats(), MaruStats(), MaruStats()
    for stats, batch in ((one, left), (two, right)):
        for counter, increment in batch:
            stats.count(counter, increment)
            both.count(counter, increment)
    assert one.aggregate(two).data == both.data


def test_taking_leaves_nothing_behind_to_be_counted_twice():
    stats = MaruStats()
    stats.count(Counter.LOOKUPS, 3)
    assert stats.take().value(Counter.LOOKUPS) == 3
    assert stats.is_empty()


def test_a_negative_increment_is_refused():
    with pytest.raises(ValueError, match="cannot go down"):
        MaruStats().count(Counter.LOOKUPS, -1)


def test_every_counter_is_documented():
    assert set(DOCUMENTATION) == set(Counter)


def test_the_log_line_names_rates_and_only_the_troubles_that_happened():
    stats = MaruStats()
    stats.count(Counter.LOADED_BYTES, 2 << 30)
    stats.add_seconds(Counter.LOAD_SECONDS, 1.0)
    stats.count(Counter.LOADS_SUSPECT)
    line = stats.reduce()
    assert line["Maru load GiB/s"] == 2.0
    assert line["Maru loads suspect"] == 1
    assert "Maru stores failed" not in line


def test_prometheus_counters_grow_by_the_increments_of_their_engine():
    registry = CollectorRegistry()

    def counter(**arguments):
        return PromCounter(registry=registry, **arguments)

    metrics = MaruPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {PromCounter: counter, Gauge: Gauge, Histogram: Histogram},
        ["engine"],
        {0: ["0"], 1: ["1"]},
    )
    for _ in range(2):
        stats = MaruStats()
        stats.count(Counter.LOADED_TOKENS, 256)
        metrics.observe(stats.to_dict(), engine_idx=1)
    metrics.observe({"a_counter_of_another_version": 5}, engine_idx=0)
    name = "vllm:maru_loaded_tokens_total"
    assert registry.get_sample_value(name, {"engine": "1"}) == 512
    assert registry.get_sample_value(name, {"engine": "0"}) == 0
