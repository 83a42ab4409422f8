"""Loads that the forward pass waits for, layer by layer.

With ``maru_overlap_load_with_compute`` (or without ``maru_async_load``) vLLM counts a hit as
computed in the same step, so its KV must be there when the attention of each layer reads it:

    begin        before the forward: check the objects, start copying layer after layer into staging
                 tensors in a thread; place the first ``release_after`` layers
    wait_for     in front of a layer's attention: wait for that layer, place it
    finish       behind the forward: check the objects again; what became of every job

A staging tensor is placed with one call, on the engine's own thread and stream, so nothing else
writes to the cache. At most ``STAGED_AHEAD`` layers lie staged and not placed.

Whatever goes wrong, the forward goes on, and the job's blocks are reported as invalid in the same
step: vLLM throws the step's output for that request away and computes the blocks. Nothing waits
longer than ``DEADLINE_S``. All methods: the worker's thread; the copies run in one of our own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from maru_kv_ops.errors import ViewError
from maru_kv_ops.executors import CopyMemory, CopyPath
from maru_kv_ops.formats import EngineKVFormat
from maru_kv_ops.plan import TransferDirection
from maru_kv_ops.staging import LayerRows, LayerStager, StagedBlocks, layer_rows
from maru_kv_ops.views import PagedView
from maru_vllm.kv_ops import CopyOperations
from maru_vllm.layout import LayoutRefused
from maru_vllm.metadata import JobOutcome, LoadJob
from maru_vllm.once import OncePerKind
from maru_vllm.worker.device_order import DeviceOrder, Mark
from maru_vllm.worker.loads import CopyContext, check_after, check_before, worst
from maru_vllm.worker.mapping import MappedPool

logger = logging.getLogger(__name__)

DEADLINE_S = 30.0
"""A layer of the largest request takes well under a second; after this long a thread hangs."""

STAGED_AHEAD = 2
"""One layer is copied while the one before it waits for its forward. More would only take memory:
the copies run one after the other anyway."""


@dataclass(frozen=True, slots=True)
class LoadsWithinStep:
    """How the loads of a worker are made that its own step needs."""

    release_after_layers: int
    """Layers that must be in place before the forward starts; more than there are: all."""
    operations_for: Callable[[torch.device], CopyOperations]


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """One layer, and how it is staged and placed."""

    name: str
    view: PagedView
    rows: LayerRows
    cache: torch.Tensor
    """What the placing call takes: the engine's tensor, or its pages as opaque rows."""


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """What became of one job."""

    job: LoadJob
    outcome: JobOutcome
    suspect_generations: tuple[int, ...] = ()
    path: CopyPath | None = None

    def block_ids(self) -> frozenset[int]:
        """Every block that the job was to fill."""
        return frozenset(id for chunk in self.job.chunks for id in chunk.block_ids if id >= 0)


def layer_places(context: CopyContext) -> tuple[LayerPlace, ...]:
    """How each layer of the registered caches is placed, in the order of the stored layers.

    Raises LayoutRefused: an engine whose layers cannot be placed one by one does not start so.
    """
    places = []
    for page, view, tensor in zip(
        context.layout.pages.layers, context.caches.views, context.caches.tensors, strict=True
    ):
        latent = EngineKVFormat.NL_X_NB_BS_HS
        fused = latent if page.heads == 1 else EngineKVFormat.NL_X_NB_BS_NH_CS
        try:
            rows = layer_rows(view, fused)
        except ViewError as error:
            raise LayoutRefused(
                f"layer {page.name}: loading layer by layer needs each block of a layer in one "
                f"piece, which memory order {context.layout.pages.layout.value} does not have "
                f"({error}). Leave maru_overlap_load_with_compute false and maru_async_load true"
            ) from error
        cache = tensor
        if rows.opaque_pages:
            cache = _pages_as_rows(context.caches.regions[view.region], view)
        places.append(LayerPlace(page.name, view, rows, cache))
    return tuple(places)


def _pages_as_rows(region: torch.Tensor, view: PagedView) -> torch.Tensor:
    """The layer's blocks as ``[blocks, 1, page bytes]``, uint8."""
    return region.as_strided(
        (view.num_blocks, 1, view.page_bytes),
        (view.block_stride, view.page_bytes, 1),
        view.base_offset,
    )


@dataclass(slots=True)
class _Step:
    """The loads of one engine step."""

    jobs: list[LoadJob]
    mapped: MappedPool
    mark: Mark
    blocks: list[StagedBlocks]
    block_ids: list[int]
    deadline: float
    room: threading.Semaphore
    cancelled: threading.Event
    staged: deque[Future[torch.Tensor]]
    """Of the layers that are not placed, in order; a result holds its staging tensor."""
    checked: Future[list[list[JobOutcome]]] | None = None
    placed: int = 0
    failed: bool = False
    path: CopyPath | None = None
    spare: deque[torch.Tensor] = field(default_factory=deque)
    """Staging tensors in host memory that have been placed."""
    slots: dict[int, torch.Tensor] = field(default_factory=dict)
    """By rows per block; the same for all layers that are alike."""


class LayerLoads:
    """See the module."""

    def __init__(
        self,
        context: CopyContext,
        order: DeviceOrder,
        places: Sequence[LayerPlace],
        operations: CopyOperations,
        release_after: int,
    ) -> None:
        """``release_after``: layers that must be in place before the forward starts."""
        self._context = context
        self._order = order
        self._places = places
        self._operations = operations
        self._release_after = min(release_after, len(places))
        self._number = {place.name: number for number, place in enumerate(places)}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="maru-layer")
        self._step: _Step | None = None
        self._ended: list[LoadedJob] = []
        self._left: list[_Step] = []
        """Failed steps whose thread may still read the mapping."""
        self._once = OncePerKind(logger)

    # ------------------------------------------------------------------ the worker's hooks

    def begin(self, jobs: Sequence[LoadJob], mapped: MappedPool | None) -> None:
        """Start this step's loads; returns when the first layers are in place."""
        good = []
        for job in jobs:
            found = (
                [JobOutcome.FAILED]
                if mapped is None
                else [check_before(mapped.pool, chunk, self._context) for chunk in job.chunks]
            )
            if worst(found) is JobOutcome.DONE:
                good.append(job)
            else:
                self._ended.append(_ended(job, found))
        if not good or mapped is None:
            return
        self._give_up_unfinished("its step never ended")
        step = self._step = self._new_step(good, mapped)
        mapped.begin_job()
        step.staged.extend(
            self._thread.submit(self._stage, step, number) for number in range(len(self._places))
        )
        step.checked = self._thread.submit(self._check, step)
        self._place_up_to(step, self._release_after)

    def wait_for(self, layer_name: str) -> None:
        """Return when the layer is in place, or its jobs have failed."""
        number = self._number.get(layer_name)
        if self._step is not None and number is not None:
            self._place_up_to(self._step, number + 1)

    def finish(self) -> list[LoadedJob]:
        """Behind the forward: what became of the jobs of this step. Each is reported once."""
        step, self._step = self._step, None
        if step is not None:
            if step.placed < len(self._places) and not step.failed:
                self._fail(step, f"{len(self._places) - step.placed} layers were never asked for")
            self._ended += self._results(step)
        ended, self._ended = self._ended, []
        self._close_left()
        return ended

    def close(self, deadline_s: float) -> None:
        """Cancel what runs and wait for it, at most ``deadline_s`` seconds. Idempotent."""
        self._give_up_unfinished("the engine shuts down")
        futures.wait([f for step in self._left for f in _futures(step)], deadline_s)
        self._close_left()
        self._thread.shutdown(wait=False)

    def _give_up_unfinished(self, why: str) -> None:
        if self._step is not None:
            self._fail(self._step, why)
            self._left.append(self._step)
            self._step = None

    # ------------------------------------------------------------------ staging: our thread

    def _new_step(self, jobs: list[LoadJob], mapped: MappedPool) -> _Step:
        blocks: list[StagedBlocks] = []
        block_ids: list[int] = []
        for job in jobs:
            for chunk in job.chunks:
                offset = self._context.part_offset(chunk)
                count = len(chunk.block_ids)
                blocks.append(StagedBlocks(offset, chunk.first_block, count, len(block_ids)))
                block_ids += chunk.block_ids
        return _Step(
            jobs=jobs,
            mapped=mapped,
            mark=self._order.mark(),
            blocks=blocks,
            block_ids=block_ids,
            deadline=time.monotonic() + DEADLINE_S,
            room=threading.Semaphore(STAGED_AHEAD),
            cancelled=threading.Event(),
            staged=deque(),
        )

    def _stage(self, step: _Step, number: int) -> torch.Tensor:
        """Copy one layer out of all objects; flat uint8 on the cache's device."""
        # Bounded, so that an engine that dies in its forward leaves no thread that never ends.
        has_room = step.room.acquire(timeout=max(0.0, step.deadline - time.monotonic()))
        if step.cancelled.is_set() or not has_room:
            raise _Cancelled
        place, caches = self._places[number], self._context.caches
        stager = LayerStager(
            place.view, caches.part_layout, number, place.rows, len(step.block_ids)
        )
        with step.mark.behind():
            staging = self._staging_tensor(step, stager.num_bytes)
            step.path = self._context.executor.run(
                stager.plan(step.blocks), CopyMemory((staging,), step.mapped.objects)
            )
        return staging

    def _staging_tensor(self, step: _Step, num_bytes: int) -> torch.Tensor:
        """Flat uint8. Host memory that was placed is used again: new pages cost more than a copy
        into them. A device's allocator keeps its memory, and knows when it has been read."""
        while step.spare:
            spare = step.spare.popleft()
            if spare.numel() >= num_bytes:
                return spare[:num_bytes]
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._context.caches.device)

    def _check(self, step: _Step) -> list[list[JobOutcome]]:
        """After the last copy: were the objects what they were before the first?"""
        if step.cancelled.is_set():
            raise _Cancelled
        return [
            [check_after(step.mapped.pool, chunk, self._context) for chunk in job.chunks]
            for job in step.jobs
        ]

    # ------------------------------------------------------------------ placing: worker's thread

    def _place_up_to(self, step: _Step, layers: int) -> None:
        while step.placed < layers and not step.failed:
            try:
                left = max(0.0, step.deadline - time.monotonic())
                staging = step.staged[0].result(left)
                self._place(step, self._places[step.placed], staging)
                step.staged.popleft()
            except Exception as error:  # whatever a copy, a device or a deadline raises: a miss
                self._fail(step, f"{type(error).__name__}: {error}")
                return
            step.placed += 1
            if staging.device.type == "cpu":
                step.spare.append(staging)
            step.room.release()

    def _place(self, step: _Step, place: LayerPlace, staging: torch.Tensor) -> None:
        """One call for the whole layer."""
        rows = place.rows
        width = rows.row_bytes // place.cache.element_size()
        tensor = staging.view(place.cache.dtype)
        tensor = tensor.view(2, -1, width) if rows.planes == 2 else tensor.view(-1, width)
        slots = step.slots.get(rows.rows_per_block)
        if slots is None:
            slots = torch.tensor(rows.slots_of(step.block_ids), device=place.cache.device)
            step.slots[rows.rows_per_block] = slots
        if staging.is_cuda:
            # The allocator must not give it out again before this stream has read it.
            staging.record_stream(torch.cuda.current_stream(staging.device))
        self._operations.single_layer_kv_transfer(
            tensor, place.cache, slots, TransferDirection.H2D, rows.format
        )

    def _fail(self, step: _Step, why: str) -> None:
        step.failed = True
        step.cancelled.set()
        step.room.release(len(self._places))  # nothing stays waiting for room
        self._once.warn(
            "layer load",
            "Maru: a load ahead of its forward failed after %d of %d layers (%s); its requests are "
            "recomputed. Later ones of this kind are not logged",
            step.placed,
            len(self._places),
            why,
        )

    def _results(self, step: _Step) -> list[LoadedJob]:
        found: list[list[JobOutcome]] | None = None
        if not step.failed and step.checked is not None:
            try:
                found = step.checked.result(max(0.0, step.deadline - time.monotonic()))
            except Exception as error:  # as above: what cannot be checked is not served
                self._fail(step, f"{type(error).__name__}: {error}")
        if found is None:
            self._left.append(step)
            return [LoadedJob(job, JobOutcome.FAILED, path=step.path) for job in step.jobs]
        step.mapped.end_job()
        return [
            _ended(job, outcomes, step.path) for job, outcomes in zip(step.jobs, found, strict=True)
        ]

    def _close_left(self) -> None:
        for step in list(self._left):
            if all(future.done() for future in _futures(step)):
                self._left.remove(step)
                step.mapped.end_job()


def _futures(step: _Step) -> list[Future[Any]]:
    return [*step.staged, *([] if step.checked is None else [step.checked])]


class _Cancelled(Exception):
    """The step has failed; its remaining copies are not made."""


def _ended(job: LoadJob, found: Sequence[JobOutcome], path: CopyPath | None = None) -> LoadedJob:
    suspects = tuple(
        int(chunk.extent.generation)
        for chunk, outcome in zip(job.chunks, found, strict=False)
        if outcome is JobOutcome.SUSPECT
    )
    return LoadedJob(job, worst(found), suspects, path)
