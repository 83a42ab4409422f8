"""``MaruKVConnector``: what vLLM loads. Nothing but delegation.

vLLM makes one in its scheduler and one in every worker, tells each its role, and calls the hooks
of that role only. The scheduler's goes to a ``SchedulerHalf``, a worker's to a ``WorkerHalf``;
``assembly.py`` builds them from vLLM's configuration.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from maru_vllm import assembly, compat, logs
from maru_vllm.kv_ops import _resolve_kv_ops
from maru_vllm.metadata import MaruConnectorMetadata
from maru_vllm.scheduler.half import SchedulerHalf
from maru_vllm.settings import LoadMode, Settings
from maru_vllm.stats import MaruPromMetrics, MaruStats
from maru_vllm.worker.half import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logs.follow_vllm()
_resolve_kv_ops()  # now, so that what is missing is said before the first request, and once


class MaruKVConnector(KVConnectorBase_V1, SupportsHMA):
    """KV connector to a pool of memory that vLLM instances share."""

    _cache_hit_source = compat.host_hit_source()

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        """Raises SettingsError, NotSupported or LayoutRefused: the engine must not start."""
        super().__init__(vllm_config, role, kv_cache_config)
        logs.follow_vllm()
        self._scheduler_half: SchedulerHalf | None = None
        self._worker_half: WorkerHalf | None = None
        self._on_shutdown = ExitStack()
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_half = self._make_scheduler_half(vllm_config, kv_cache_config)
        else:
            self._worker_half = self._make_worker_half(vllm_config, kv_cache_config)

    # Seams: a simulation brings halves over its own plane and its own copy runner.

    def _make_scheduler_half(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> SchedulerHalf:
        side = assembly.scheduler_side(vllm_config, kv_cache_config)
        self._on_shutdown.callback(side.identity.close)
        return side.half

    def _make_worker_half(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> WorkerHalf:
        return assembly.worker_half(vllm_config, kv_cache_config)

    @property
    def _scheduler(self) -> SchedulerHalf:
        if self._scheduler_half is None:
            raise RuntimeError("a scheduler-side hook was called on a worker's connector")
        return self._scheduler_half

    @property
    def _worker(self) -> WorkerHalf:
        if self._worker_half is None:
            raise RuntimeError("a worker-side hook was called on the scheduler's connector")
        return self._worker_half

    def _metadata(self) -> MaruConnectorMetadata:
        metadata = self._connector_metadata
        if isinstance(metadata, MaruConnectorMetadata):
            return metadata
        return MaruConnectorMetadata()

    # ------------------------------------------------------------------ what vLLM asks first

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped is a miss later, nothing worse."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True exactly where the layer hooks do work, which a full CUDA graph would skip (B20)."""
        return Settings.from_extra_config(extra_config).load_mode is LoadMode.LAYER_BY_LAYER

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Our kind of statistics, empty or from what another process sent."""
        return MaruStats() if data is None else MaruStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Our Prometheus metrics."""
        return MaruPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ------------------------------------------------------------------ scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Learn where to read a request's block ids."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind_block_table(
            lambda request_id: kv_cache_manager.get_block_ids(request_id)[0],
            kv_cache_manager.evict_blocks,
        )

    def on_new_request(self, request: Request) -> None:
        """See SchedulerHalf."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See SchedulerHalf.matched_tokens."""
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """See SchedulerHalf.blocks_allocated."""
        self._scheduler.blocks_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See SchedulerHalf.build_step_metadata."""
        return self._scheduler.build_step_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See SchedulerHalf.take_worker_output."""
        self._scheduler.take_worker_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See SchedulerHalf.finished."""
        return self._scheduler.finished(request, block_ids), None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same with a list per KV cache group; there is one group."""
        return self._scheduler.finished(request, block_ids[0]), None

    def has_pending_push_work(self) -> bool:
        """See SchedulerHalf.has_pending_work."""
        return self._scheduler.has_pending_work()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """See SchedulerHalf."""
        return self._scheduler.take_events()

    def reset_cache(self) -> bool | None:
        """See SchedulerHalf."""
        return self._scheduler.reset_cache()

    # ------------------------------------------------------------------ worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises LayoutRefused: the engine must not start."""
        self._worker.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Comes before the metadata is bound."""
        if isinstance(kv_connector_metadata, MaruConnectorMetadata):
            self._worker.handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Also in steps without a forward."""
        self._worker.start_load_kv(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Waits where loads run ahead of each layer; otherwise there is nothing to wait for."""
        self._worker.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Nothing: stores run behind the step."""

    def wait_for_save(self) -> None:
        """Submits this step's stores; waits for nothing."""
        self._worker.wait_for_save(self._metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What finished since the last step."""
        reports = self._worker.transfer_results()
        return KVConnectorTransferResults(
            finished_sending=set(reports.finished_sending),
            finished_recving=set(reports.finished_recving),
            failed_recving=set(reports.failed_recving),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that this step counted on and that were not loaded; there is one group."""
        return self._worker.invalid_block_ids()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The job reports of this step."""
        return self._worker.worker_meta()

    # ------------------------------------------------------------------ both sides

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """The scheduler's increments since the last call; workers count nothing of their own."""
        if self._scheduler_half is None:
            return None
        return self._scheduler_half.take_stats()

    def shutdown(self) -> None:
        """Bounded, idempotent."""
        if self._worker_half is not None:
            self._worker_half.shutdown()
        if self._scheduler_half is not None:
            self._scheduler_half.shutdown()
        self._on_shutdown.close()
