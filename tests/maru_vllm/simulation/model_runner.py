"""A model runner whose forward writes what the oracle says, and checks what it reads.

It keeps its own copy of each request's tokens, as a worker does: with async scheduling it knows
sampled tokens before the scheduler does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from oracle import BLOCK_SIZE, HEADS, LAYERS, WORDS, Oracle, Words, WrongBytes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


class PagedCache:
    """``[layer, block, head, token, word]`` in one piece of memory; layers outermost (LBHNC)."""

    def __init__(self, num_blocks: int) -> None:
        self.words: Words = np.full(
            (LAYERS, num_blocks, HEADS, BLOCK_SIZE, WORDS), 0xDEAD, dtype=np.uint64
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """As vLLM registers them: ``[block, head, token, content]`` by layer name."""
        floats = torch.from_numpy(self.words.view(np.float32))
        return {layer_name(layer): floats[layer] for layer in range(LAYERS)}

    def write(self, table: list[int], position: int, kv: Words) -> None:
        """Put ``[layer, head, word]`` of one position into its slot."""
        block = table[position // BLOCK_SIZE]
        self.words[:, block, :, position % BLOCK_SIZE] = kv

    def read(self, table: list[int], num_tokens: int) -> Words:
        """``[layer, head, token, word]`` of the first ``num_tokens`` positions."""
        blocks = self.words[:, table[: -(-num_tokens // BLOCK_SIZE)]]
        slots = blocks.transpose(0, 2, 1, 3, 4).reshape(LAYERS, HEADS, -1, WORDS)
        return slots[:, :, :num_tokens]


def layer_name(layer: int) -> str:
    """vLLM's name of a layer."""
    return f"model.layers.{layer}.self_attn.attn"


@dataclass
class Device:
    """Work that was launched and may not have run: what a stream is to a GPU."""

    queue: list[Callable[[], None]] = field(default_factory=list)
    done: int = 0

    def run_to(self, place: int) -> None:
        while self.done < place:
            work = self.queue[self.done]
            self.done += 1
            work()

    def synchronize(self) -> None:
        self.run_to(len(self.queue))

    # DeviceOrder

    def mark(self) -> DeviceMark:
        return DeviceMark(self, len(self.queue))


@dataclass(frozen=True)
class DeviceMark:
    device: Device
    place: int

    @contextmanager
    def behind(self) -> Iterator[None]:
        self.device.run_to(self.place)
        yield


@dataclass(frozen=True)
class Doubt:
    """A forward read wrong KV: a fault, unless the engine learns in the same step that it must not
    use what came of it."""

    request_id: str
    blocks: frozenset[int]
    """That it read."""
    message: str


class ModelRunner:
    """Runs the forward of a step on a ``Device``; wrong KV makes wrong KV, as in a model."""

    def __init__(self, oracle: Oracle, cache: PagedCache, device: Device, rank: int) -> None:
        self._oracle = oracle
        self._rank = rank
        self._cache = cache
        self._device = device
        self._tokens: dict[str, list[int]] = {}
        self._doubts: list[Doubt] = []

    @property
    def doubted(self) -> set[str]:
        """Requests that read wrong KV since doubts were last settled."""
        return {doubt.request_id for doubt in self._doubts}

    def settle(self, invalid_block_ids: set[int]) -> None:
        """Wrong KV may have been read only where one of these blocks was."""
        doubts, self._doubts = self._doubts, []
        for doubt in doubts:
            if doubt.blocks.isdisjoint(invalid_block_ids):
                raise WrongBytes(doubt.message)

    def forward(
        self,
        output: SchedulerOutput,
        requests: dict[str, Request],
        table_of: Callable[[str], list[int]],
    ) -> dict[str, list[int]]:
        """Launch a step; returns what each scheduled request samples in it."""
        cached = output.scheduled_cached_reqs
        fresh = {r.req_id for r in output.scheduled_new_reqs} | cached.resumed_req_ids
        computed = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        answered = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        sampled: dict[str, list[int]] = {}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            if request_id in fresh or request_id not in self._tokens:
                self._tokens[request_id] = list(requests[request_id].all_token_ids)
            elif request_id in answered:  # an answer that was thrown away
                del self._tokens[request_id][
                    requests[request_id].num_prompt_tokens + answered[request_id] :
                ]
            tokens = self._tokens[request_id]
            start, end = computed[request_id], computed[request_id] + num_tokens
            work = self._attend(request_id, list(tokens), start, end, table_of(request_id))
            self._device.queue.append(work)
            sampled[request_id] = []
            if end == len(tokens):
                tokens.append(self._oracle.sample(tokens))
                sampled[request_id] = tokens[-1:]
        for request_id in output.finished_req_ids:
            self._tokens.pop(request_id, None)
        return sampled

    def _attend(
        self, request_id: str, tokens: list[int], start: int, end: int, table: list[int]
    ) -> Callable[[], None]:
        def run() -> None:
            context = self._cache.read(table, start)
            expected = self._oracle.kv(tokens, 0, start, self._rank)
            kv = self._oracle.kv(tokens, start, end, self._rank)
            if not np.array_equal(context, expected):
                wrong = np.unique(np.nonzero(context != expected)[2]).tolist()
                message = (
                    f"{request_id}, rank {self._rank}: the forward of tokens [{start}, {end}) "
                    f"reads wrong KV at positions {wrong}, blocks {table}"
                )
                blocks = frozenset(table[: -(-start // BLOCK_SIZE)])
                self._doubts.append(Doubt(request_id, blocks, message))
                kv = ~kv
            for position in range(start, end):
                self._cache.write(table, position, kv[:, :, position - start])

        return run
