"""Builds the connector's halves from vLLM's configuration: settings, layout, identity, client.

Runs at engine start only, and may raise: an engine that Maru cannot serve does not start. A server
that is not there is no such reason: the engine starts, misses, and finds the server when it comes.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from maru_shm.control.client import Client, connect_later
from maru_shm.errors import MaruError
from maru_shm.pool.reading import Verify
from maru_vllm import compat
from maru_vllm.engine_identity import EngineIdentity
from maru_vllm.kv_ops import _resolve_kv_ops
from maru_vllm.layout import ChunkLayout, chunk_layout
from maru_vllm.placement import executor_for
from maru_vllm.scheduler.half import SchedulerHalf
from maru_vllm.scheduler.keys import ChainWhenKnown
from maru_vllm.scheduler.shape import ChunkShape
from maru_vllm.settings import LoadMode, Settings
from maru_vllm.support import check_supported
from maru_vllm.worker import calibration
from maru_vllm.worker.copy_runner import ThreadCopyRunner, default_copy_threads
from maru_vllm.worker.half import WorkerHalf
from maru_vllm.worker.layer_loads import LoadsWithinStep
from maru_vllm.worker.mapping import mapping_for

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

START_WAIT_S = 5.0
"""How long an engine's start waits for the server. An embedded one takes about half a second, so
the first request finds it; an engine without a server is held up once, by this."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What both halves of one engine derive from its configuration, each for itself."""

    settings: Settings
    layout: ChunkLayout


@dataclass(frozen=True, slots=True)
class SchedulerSide:
    """The scheduler half, and what it works with that has to be closed after it."""

    half: SchedulerHalf
    identity: EngineIdentity


def engine_plan(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EnginePlan:
    """Check the settings against the engine.

    Raises SettingsError, NotSupported or LayoutRefused; each says what to change.
    """
    transfer = vllm_config.kv_transfer_config
    settings = Settings.from_extra_config(
        None if transfer is None else transfer.kv_connector_extra_config
    )
    check_supported(vllm_config, settings)
    if len(kv_cache_config.kv_cache_groups) == 1:
        settings.check_block_size(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
    layout = chunk_layout(
        kv_cache_config,
        compat.kv_layout_name(vllm_config, kv_cache_config),
        settings.kv_chunk_tokens,
        vllm_config.parallel_config.tensor_parallel_size,
    )
    return EnginePlan(settings, layout)


def chunk_shape(layout: ChunkLayout) -> ChunkShape:
    """The sizes that the scheduler half reckons with."""
    return ChunkShape(
        chunk_tokens=layout.chunk_tokens,
        block_size=layout.pages.block_size,
        object_bytes=layout.object_bytes,
        num_parts=layout.num_parts,
        num_ranks=layout.num_ranks,
    )


def scheduler_side(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> SchedulerSide:
    """The scheduler half over a socket client. Raises as ``engine_plan`` and the parts do."""
    plan = engine_plan(vllm_config, kv_cache_config)
    identity = EngineIdentity(vllm_config, kv_cache_config, plan.settings, plan.layout)
    half = SchedulerHalf(
        plane=_connect(plan.settings),
        keys=ChainWhenKnown(identity.chain),
        shape=chunk_shape(plan.layout),
        settings=plan.settings,
        clock=time.monotonic,
    )
    return SchedulerSide(half, identity)


def worker_half(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> WorkerHalf:
    """The worker half of this process. Raises as ``engine_plan`` does."""
    plan = engine_plan(vllm_config, kv_cache_config)
    device = torch.device(vllm_config.device_config.device_type)
    return WorkerHalf(
        layout=plan.layout,
        rank=get_tensor_model_parallel_rank(),
        verify=Verify(plan.settings.verify.value),
        runner=ThreadCopyRunner(default_copy_threads()),
        executor=executor_for(
            plan.settings.placement, device, _resolve_kv_ops(), calibration.table_of_device
        ),
        mapping=mapping_for(device),
        job_log_level=logging.INFO if plan.settings.log_timing else logging.DEBUG,
        within_step=loads_within_step(plan.settings),
    )


def loads_within_step(settings: Settings) -> LoadsWithinStep | None:
    """How loads run that the step itself needs; None where they run between steps."""
    match settings.load_mode:
        case LoadMode.BETWEEN_STEPS:
            return None
        case LoadMode.LAYER_BY_LAYER:
            first = settings.overlap_release_after_layers
        case LoadMode.BEFORE_FORWARD:
            first = sys.maxsize
    return LoadsWithinStep(first, _resolve_kv_ops().operations_for)


def _connect(settings: Settings) -> Client:
    client = connect_later(settings.server_url, pool_bytes=settings.pool_size, who="vLLM")
    try:
        connection = client.wait_connected(START_WAIT_S)
        logger.info(
            "Maru: sharing KV through %s (%.1f GiB), server %s",
            connection.pool.path,
            connection.pool.geometry.pool_bytes / (1 << 30),
            client.url,
        )
    except MaruError as error:
        logger.warning(
            "Maru: no server at %s yet (%s). The engine starts without, every request misses "
            "until there is one; `maru doctor` says what is wrong",
            client.url,
            error,
        )
    return client
