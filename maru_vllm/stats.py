"""What the connector counts, in the form that vLLM carries, merges, logs and exports.

A ``MaruStats`` holds increments since it was last taken, as a flat dictionary of numbers, so that
it travels in vLLM's own messages and the increments of ranks and steps add up. Nothing is ever
subtracted: the Prometheus counters made of it only grow.
"""

from __future__ import annotations

from enum import Enum, unique
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from maru_kv_ops.executors import CopyPath


@unique
class Counter(Enum):
    """Everything that is counted; the values are the keys in the dictionary and, behind
    ``vllm:maru_``, the names of the Prometheus counters."""

    LOOKUPS = "lookups"
    LOOKUP_CHUNKS = "lookup_chunks"
    FOUND_CHUNKS = "found_chunks"
    LOOKUPS_LATE = "lookups_late"
    LOOKUPS_FAILED = "lookups_failed"
    LOOKUP_SECONDS = "lookup_seconds"
    LOADED_TOKENS = "loaded_tokens"
    LOADED_BYTES = "loaded_bytes"
    LOAD_SECONDS = "load_seconds"
    LOADS_FAILED = "loads_failed"
    LOADS_SUSPECT = "loads_suspect"
    LOADS_STALE = "loads_stale"
    STORED_CHUNKS = "stored_chunks"
    STORED_BYTES = "stored_bytes"
    STORE_SECONDS = "store_seconds"
    STORES_FAILED = "stores_failed"
    STORES_DISCARDED = "stores_discarded"
    STORES_LOST = "stores_lost"
    STORES_NO_SPACE = "stores_no_space"
    INTERNAL_ERRORS = "internal_errors"
    LOADS_BY_HOST = "loads_by_host"
    LOADS_BY_KERNEL = "loads_by_kernel"
    LOADS_BY_COPY_ENGINE = "loads_by_copy_engine"
    LOADS_BY_TORCH = "loads_by_torch"
    STORES_BY_HOST = "stores_by_host"
    STORES_BY_KERNEL = "stores_by_kernel"
    STORES_BY_COPY_ENGINE = "stores_by_copy_engine"
    STORES_BY_TORCH = "stores_by_torch"


LOADS_BY: dict[CopyPath, Counter] = {path: Counter(f"loads_by_{path}") for path in CopyPath}
"""Where a load is counted, by what copied it; one count for each rank."""
STORES_BY: dict[CopyPath, Counter] = {path: Counter(f"stores_by_{path}") for path in CopyPath}

DOCUMENTATION: dict[Counter, str] = {
    Counter.LOOKUPS: "Answered lookups of a request's chunks in the Maru pool.",
    Counter.LOOKUP_CHUNKS: "Chunks that those lookups asked for.",
    Counter.FOUND_CHUNKS: "Chunks of them that were found in the pool.",
    Counter.LOOKUPS_LATE: "Times the scheduler went on without an answer that came too late.",
    Counter.LOOKUPS_FAILED: "Lookups without a usable answer, e.g. while no server is there.",
    Counter.LOOKUP_SECONDS: "Seconds from asking to using the answer, summed over lookups.",
    Counter.LOADED_TOKENS: "Tokens whose KV was loaded from the Maru pool.",
    Counter.LOADED_BYTES: "Bytes loaded from the Maru pool, all ranks together.",
    Counter.LOAD_SECONDS: "Seconds from allocation to the last rank's report, summed over loads.",
    Counter.LOADS_FAILED: "Loads whose copy could not be made; the requests were recomputed.",
    Counter.LOADS_SUSPECT: "Loads that found a wrong header or checksum; recomputed.",
    Counter.LOADS_STALE: "Loads whose object was evicted before; recomputed.",
    Counter.STORED_CHUNKS: "Chunks made visible in the Maru pool.",
    Counter.STORED_BYTES: "Bytes written to the Maru pool, all ranks together.",
    Counter.STORE_SECONDS: "Seconds from a store's step to the last rank's report, summed.",
    Counter.STORES_FAILED: "Stores whose copy could not be made.",
    Counter.STORES_DISCARDED: "Stores dropped because their blocks turned out to be invalid.",
    Counter.STORES_LOST: "Stores whose reservation no longer stood, e.g. after a server restart.",
    Counter.STORES_NO_SPACE: "Chunks that found no space in the pool.",
    Counter.INTERNAL_ERRORS: "Errors inside the connector that were turned into misses.",
    Counter.LOADS_BY_HOST: "Ranks' loads by the native host executor.",
    Counter.LOADS_BY_KERNEL: "Ranks' loads by the copy kernel.",
    Counter.LOADS_BY_COPY_ENGINE: "Ranks' loads by the device's copy engine.",
    Counter.LOADS_BY_TORCH: "Ranks' loads by the torch fallback.",
    Counter.STORES_BY_HOST: "Ranks' stores by the native host executor.",
    Counter.STORES_BY_KERNEL: "Ranks' stores by the copy kernel.",
    Counter.STORES_BY_COPY_ENGINE: "Ranks' stores by the device's copy engine.",
    Counter.STORES_BY_TORCH: "Ranks' stores by the torch fallback.",
}

_GIB = 1 << 30


class MaruStats(KVConnectorStats):
    """Increments of ``Counter``; absent means zero."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget the increments."""
        self.data = {}

    def count(self, counter: Counter, increment: int = 1) -> None:
        """Add a whole number; negative ones are a mistake of the caller."""
        self._add(counter, increment)

    def add_seconds(self, counter: Counter, seconds: float) -> None:
        """Add a duration; a clock that went back counts as nothing."""
        self._add(counter, max(seconds, 0.0))

    def _add(self, counter: Counter, increment: float) -> None:
        if increment < 0:
            raise ValueError(f"{counter.value} cannot go down by {-increment}")
        if increment:
            self.data[counter.value] = self.data.get(counter.value, 0) + increment

    def value(self, counter: Counter) -> float:
        """What was added since the last reset."""
        value: float = self.data.get(counter.value, 0)
        return value

    def take(self) -> MaruStats:
        """Everything so far as an object of its own; this one starts anew."""
        taken = MaruStats(data=self.data)
        self.data = {}
        return taken

    def aggregate(self, other: KVConnectorStats) -> MaruStats:
        """Add the increments of another rank, step or connector to these."""
        for name, increment in other.data.items():
            self.data[name] = self.data.get(name, 0) + increment
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line's worth for vLLM's periodic log: what was moved and how fast, then failures."""
        line: dict[str, int | float] = {
            "Maru lookups": self.data.get(Counter.LOOKUPS.value, 0),
            "Maru found chunks": self.data.get(Counter.FOUND_CHUNKS.value, 0),
            "Maru loaded tokens": self.data.get(Counter.LOADED_TOKENS.value, 0),
            "Maru load GiB/s": self._rate(Counter.LOADED_BYTES, Counter.LOAD_SECONDS),
            "Maru stored chunks": self.data.get(Counter.STORED_CHUNKS.value, 0),
            "Maru store GiB/s": self._rate(Counter.STORED_BYTES, Counter.STORE_SECONDS),
        }
        for counter in _TROUBLE:
            if counter.value in self.data:
                line[f"Maru {counter.value.replace('_', ' ')}"] = self.data[counter.value]
        return line

    def _rate(self, amount: Counter, seconds: Counter) -> float:
        spent = self.value(seconds)
        return round(self.value(amount) / spent / _GIB, 3) if spent > 0 else 0.0

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


_TROUBLE = (
    Counter.LOOKUPS_LATE,
    Counter.LOOKUPS_FAILED,
    Counter.LOADS_FAILED,
    Counter.LOADS_SUSPECT,
    Counter.LOADS_STALE,
    Counter.STORES_FAILED,
    Counter.STORES_DISCARDED,
    Counter.STORES_LOST,
    Counter.STORES_NO_SPACE,
    Counter.INTERNAL_ERRORS,
)


class MaruPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter per ``Counter``, labelled by engine, named ``vllm:maru_<value>``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for counter in Counter:
            metric: Any = self._counter_cls(
                name=f"vllm:maru_{counter.value}",
                documentation=DOCUMENTATION[counter],
                labelnames=labelnames,
            )
            self._counters[counter.value] = {
                engine: metric.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's increments; names that another version counts are passed over."""
        for name, increment in transfer_stats_data.items():
            engines = self._counters.get(name)
            if engines is not None and increment > 0:
                engines[engine_idx].inc(increment)
