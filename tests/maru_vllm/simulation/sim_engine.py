"""One simulated engine: vLLM's own scheduler, our two halves, and a model runner that is a rule.

Only the model, the copy thread and the clock are made up. The scheduler, its block pool, the
connector's halves, the copy plans, the pool and the server's logic are the real ones.
"""

from __future__ import annotations

import atexit
import copy
import functools
import json
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import cast

import torch
from copies import Pace, ScriptedCopies
from model_runner import Device, ModelRunner, PagedCache, layer_name
from oracle import BLOCK_SIZE, CHUNK_TOKENS, HEADS, LAYERS, PART_BYTES, Oracle
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from maru_kv_ops import torch_ops
from maru_kv_ops.executors import CopyMemory, CopyPath
from maru_kv_ops.plan import CopyPlan, TransferDirection
from maru_kv_ops.torch_executor import TorchExecutor
from maru_shm.control.plane import ControlPlane
from maru_shm.pool.pool import open_pool
from maru_shm.pool.reading import Verify
from maru_shm.types import Generation, Namespace
from maru_vllm.assembly import chunk_shape
from maru_vllm.connector import MaruKVConnector
from maru_vllm.identity import ChunkChain
from maru_vllm.kv_ops import CopyOperations
from maru_vllm.layout import ChunkLayout, chunk_layout
from maru_vllm.metadata import MaruConnectorMetadata, PoolRef
from maru_vllm.scheduler.half import SchedulerHalf
from maru_vllm.scheduler.keys import ChainWhenKnown
from maru_vllm.settings import LoadMode
from maru_vllm.stats import Counter, MaruStats
from maru_vllm.worker.half import WorkerHalf
from maru_vllm.worker.layer_loads import LoadsWithinStep
from maru_vllm.worker.mapping import MappedPool, PoolMapping

NAMESPACE = Namespace(b"simulated model, simulated bytes")
MAX_MODEL_LEN = 256


@dataclass
class Settings:
    """What the scheduler half reads of the operator's settings."""

    load_mode: LoadMode = LoadMode.BETWEEN_STEPS
    store_decode: bool = True
    lookup_timeout_ms: float = 20.0
    log_timing: bool = False


class MaruSimConnector(MaruKVConnector):
    """Our connector, with halves that the simulation made."""

    next_scheduler_half: SchedulerHalf
    next_worker_half: WorkerHalf

    def _make_scheduler_half(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> SchedulerHalf:
        return MaruSimConnector.next_scheduler_half

    def _make_worker_half(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> WorkerHalf:
        return MaruSimConnector.next_worker_half


@functools.cache
def _vllm_config(async_scheduling: bool) -> VllmConfig:
    folder = Path(tempfile.mkdtemp(prefix="maru-sim-model-"))
    atexit.register(shutil.rmtree, folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "vocab_size": 100,
        "max_position_embeddings": MAX_MODEL_LEN,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            tokenizer=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=async_scheduling,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        kv_transfer_config=KVTransferConfig(
            kv_connector="MaruSimConnector",
            kv_connector_module_path="sim_engine",
            kv_role="kv_both",
        ),
        device_config=DeviceConfig("cpu"),
    )


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is set up."""

    num_blocks: int = 64
    tokens_per_step: int = 64
    prefix_caching: bool = True
    async_scheduling: bool = False
    load_failure_policy: str = "recompute"
    verify: Verify = Verify.HEADER
    store_decode: bool = True
    num_ranks: int = 1
    load_mode: LoadMode = LoadMode.BETWEEN_STEPS


@dataclass(frozen=True)
class _Executed:
    """A step that was launched and whose output the scheduler has not seen."""

    output: SchedulerOutput
    result: ModelRunnerOutput
    places: list[int]
    """Where its forward ends in each rank's device queue."""
    invalid_block_ids: set[int]


class NoLock:
    """Stands for the session's lock: in here the script says who lives."""

    def close(self) -> None:
        return


def _map_pool(ref: PoolRef) -> MappedPool:
    return MappedPool(open_pool(ref.path, ref.medium, expect_uuid=ref.uuid), NoLock())


class ScriptedExecutor(TorchExecutor):
    """Whose copies out of objects fail when the script says so."""

    def __init__(self) -> None:
        super().__init__()
        self.loads_fail: Callable[[], bool] = lambda: False

    def run(self, plan: CopyPlan, memory: CopyMemory) -> CopyPath:
        if plan.direction is TransferDirection.H2D and self.loads_fail():
            raise OSError("the script lets this copy fail")
        return super().run(plan, memory)


NOT_A_TOKEN = 1
"""What a model that reads wrong KV says; the oracle never does."""

RELEASE_AFTER = {LoadMode.LAYER_BY_LAYER: 1, LoadMode.BEFORE_FORWARD: LAYERS}


def _within_step(mode: LoadMode) -> LoadsWithinStep | None:
    if mode is LoadMode.BETWEEN_STEPS:
        return None
    operations = cast(CopyOperations, torch_ops)
    return LoadsWithinStep(RELEASE_AFTER[mode], lambda _: operations)


class SimWorker:
    """One rank: its cache, its copies, its model, and a connector in the worker's role."""

    def __init__(
        self,
        rank: int,
        layout: ChunkLayout,
        options: EngineOptions,
        oracle: Oracle,
        clock: Callable[[], float],
    ) -> None:
        self.copies = ScriptedCopies()
        self.executor = ScriptedExecutor()
        self.device = Device()
        self.cache = PagedCache(layout.num_blocks)
        self.runner = ModelRunner(oracle, self.cache, self.device, rank)
        self.half = WorkerHalf(
            layout,
            rank=rank,
            verify=options.verify,
            runner=self.copies,
            executor=self.executor,
            mapping=PoolMapping(_map_pool, clock),
            within_step=_within_step(options.load_mode),
        )

    def fail_loads_within_step(self, every: int) -> None:
        """From now on every n-th copy of a layer fails; 0: none. Others fail by ``copies``."""
        if self.half._within_step is None:
            return
        calls = count(1)
        self.executor.loads_fail = lambda: every > 0 and next(calls) % every == 0

    def connect(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        """Make the connector and register the cache, as vLLM's worker does."""
        MaruSimConnector.next_worker_half = self.half
        self.connector = MaruSimConnector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
        self.connector.register_kv_caches(self.cache.tensors())
        self.half._order = self.device

    def execute(
        self, output: SchedulerOutput, forward: Callable[[ModelRunner], dict[str, list[int]]]
    ) -> ModelRunnerOutput:
        """One step, its hooks in the order of vLLM's model runner."""
        metadata = output.kv_connector_metadata
        assert metadata is not None
        connector = self.connector
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        if output.has_sync_kv_loads:
            connector.start_load_kv(None)  # type: ignore[arg-type]
        for layer in range(LAYERS):
            connector.wait_for_layer_load(layer_name(layer))
        sampled = forward(self.runner)
        if not output.has_sync_kv_loads:
            connector.start_load_kv(None)  # type: ignore[arg-type]
        for request_id in self.runner.doubted & sampled.keys():
            sampled[request_id] = [NOT_A_TOKEN] * len(sampled[request_id])
        connector.wait_for_save()
        self.copies.end_of_step()
        results = connector.get_transfer_results(output.finished_req_ids)
        connector_output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        ids = list(sampled)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[sampled[request_id] for request_id in ids],
            kv_connector_output=connector_output,
        )


class SimEngine:
    """One engine, stepped by hand."""

    def __init__(
        self,
        name: str,
        plane: ControlPlane,
        oracle: Oracle,
        clock: Callable[[], float],
        options: EngineOptions,
    ) -> None:
        self.name = name
        self.options = options
        self.late_forward = False
        """Whether forwards run as late as the engine allows: when their tokens are needed."""
        self.answers: dict[str, list[int]] = {}
        """Tokens that were delivered, by request."""
        self.finish_reasons: dict[str, str] = {}
        self.hits: dict[str, int] = {}
        """Tokens that were loaded from the pool for a request when it was last admitted."""
        self.counts = MaruStats()
        """What the connector counted, as vLLM carried it to its loggers."""
        self.preemptions = 0
        self.aborted_in_step: str | None = None
        """Its client goes away while the next step runs."""
        self.written_to: set[Generation] = set()
        """Space that a worker was told to write to."""
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_size=2, dtype=torch.float32
        )
        kv_cache_config = KVCacheConfig(
            num_blocks=options.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([layer_name(i) for i in range(LAYERS)], spec)],
            kv_cache_layout="LBHNC",
        )
        layout = chunk_layout(kv_cache_config, "LBHNC", CHUNK_TOKENS, options.num_ranks)
        assert layout.part_bytes == PART_BYTES
        chain = ChunkChain(NAMESPACE, CHUNK_TOKENS)
        self.half = SchedulerHalf(
            plane,
            ChainWhenKnown(lambda: chain),
            chunk_shape(layout),
            Settings(store_decode=options.store_decode, load_mode=options.load_mode),
            clock,
        )
        self.workers = [
            SimWorker(rank, layout, options, oracle, clock) for rank in range(options.num_ranks)
        ]
        self.scheduler = self._connect(kv_cache_config)
        self._aggregator = KVOutputAggregator(options.num_ranks)
        self._in_flight: deque[_Executed] = deque()
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)

    def _connect(self, kv_cache_config: KVCacheConfig) -> Scheduler:
        options = self.options
        config = copy.copy(_vllm_config(options.async_scheduling))
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.max_num_batched_tokens = options.tokens_per_step
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.num_gpu_blocks = options.num_blocks
        config.cache_config.enable_prefix_caching = options.prefix_caching
        assert config.kv_transfer_config is not None
        config.kv_transfer_config = copy.copy(config.kv_transfer_config)
        config.kv_transfer_config.kv_load_failure_policy = options.load_failure_policy  # type: ignore[assignment]
        for worker in self.workers:
            worker.connect(config, kv_cache_config)
        init_none_hash(sha256)
        MaruSimConnector.next_scheduler_half = self.half
        kind = AsyncScheduler if options.async_scheduling else Scheduler
        return kind(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )

    @property
    def copies(self) -> ScriptedCopies:
        """The first rank's copies."""
        return self.workers[0].copies

    def set_pace(self, pace: Pace) -> None:
        """The same pace for all ranks."""
        for worker in self.workers:
            worker.copies.pace = pace

    # ------------------------------------------------------------------ requests

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> None:
        """A request arrives."""
        request = Request(
            request_id,
            list(prompt),
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            block_hasher=self._hasher,
        )
        self.answers[request_id] = []
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        """The client is gone."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def status(self, request_id: str) -> RequestStatus | None:
        """None once vLLM has forgotten the request."""
        request = self.scheduler.requests.get(request_id)
        return None if request is None else request.status

    # ------------------------------------------------------------------ steps

    @property
    def has_work(self) -> bool:
        """Whether vLLM would go on stepping."""
        return self.scheduler.has_requests() or bool(self._in_flight)

    def step(self) -> None:
        """One step as the engine core does it: schedule, execute, take in what is finished."""
        output = self.scheduler.schedule()
        self._in_flight.append(self._execute(output))
        if self.aborted_in_step is not None:
            self.abort(self.aborted_in_step)
            self.aborted_in_step = None
        depth = 2 if self.options.async_scheduling else 1
        while self._in_flight and (
            len(self._in_flight) >= depth or not output.total_num_scheduled_tokens
        ):
            self._update(self._in_flight.popleft())

    def drain(self) -> None:
        """Take in the outputs of all steps that were executed."""
        while self._in_flight:
            self._update(self._in_flight.popleft())

    def _execute(self, output: SchedulerOutput) -> _Executed:
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, MaruConnectorMetadata)
        for job in metadata.loads:
            self.hits[job.request_id] = BLOCK_SIZE * sum(len(c.block_ids) for c in job.chunks)
        self.preemptions += len(output.preempted_req_ids or ())
        self.written_to.update(job.chunk.extent.generation for job in metadata.stores)
        results = [worker.execute(output, self._forward(output, worker)) for worker in self.workers]
        result = self._aggregator.aggregate(list(results))
        assert result is not None
        reported = result.kv_connector_output
        invalid = set() if reported is None else set(reported.invalid_block_ids)
        for worker in self.workers:
            worker.runner.settle(invalid)
        places = [len(worker.device.queue) for worker in self.workers]
        return _Executed(output, result, places, invalid)

    def _forward(
        self, output: SchedulerOutput, worker: SimWorker
    ) -> Callable[[ModelRunner], dict[str, list[int]]]:
        manager = self.scheduler.kv_cache_manager

        def forward(runner: ModelRunner) -> dict[str, list[int]]:
            sampled = runner.forward(
                output,
                self.scheduler.requests,
                lambda request_id: list(manager.get_block_ids(request_id)[0]),
            )
            if not self.late_forward:
                worker.device.synchronize()
            return sampled

        return forward

    def _update(self, step: _Executed) -> None:
        for worker, place in zip(self.workers, step.places, strict=True):
            worker.device.run_to(place)  # its tokens are known, so its forward is over
            worker.runner.settle(step.invalid_block_ids)
        for outputs in self.scheduler.update_from_output(step.output, step.result).values():
            if (stats := outputs.scheduler_stats) is not None:
                self.counts.aggregate(MaruStats(data=stats.kv_connector_stats or {}))
            for answer in outputs.outputs:
                self.answers[answer.request_id] += answer.new_token_ids
                if answer.finish_reason is not None:
                    self.finish_reasons[answer.request_id] = str(answer.finish_reason)

    # ------------------------------------------------------------------ ends

    def check_empty(self) -> None:
        """Nothing is left in the scheduler, in its block pool, or in our halves."""
        scheduler = self.scheduler
        assert not scheduler.requests, f"{self.name}: requests left: {list(scheduler.requests)}"
        assert not scheduler.running
        assert scheduler.get_request_counts() == (0, 0)
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == self.options.num_blocks - 1, f"{self.name}: {free} blocks free"
        assert not self.half.has_pending_work()
        assert not self.half._requests
        assert not self.half._lookups._lookups
        assert not self.half._stores._wanted
        assert all(worker.half._book.idle for worker in self.workers)
        assert not any(worker.half._awaited for worker in self.workers)
        self.counts.aggregate(self.half.take_stats() or MaruStats())
        errors = self.counts.value(Counter.INTERNAL_ERRORS)
        assert errors == 0, f"{self.name}: {errors} internal errors"
