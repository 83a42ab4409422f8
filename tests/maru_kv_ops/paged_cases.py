"""Random paged caches, and an oracle that knows the address of every byte by counting.

The oracle shares nothing with the code under test: it walks logical indices in nested loops, finds
the cache's byte by multiplying strides, and the object's byte by counting bytes in the order that
``maru_kv_ops.views`` documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from hypothesis import strategies as st

from maru_kv_ops.cache_tensors import CacheTensor, paged_caches
from maru_kv_ops.executors import CopyMemory
from maru_kv_ops.layouts import KVLayout, ObjectOrder
from maru_kv_ops.plan import CopyPlan, PagePlanner, TransferDirection
from maru_kv_ops.views import ONE, Axis, PagedView, object_view_for

PAGE_LETTERS = "KPHN"  # kernel block, plane, head, token


def small_copy(direction: TransferDirection) -> tuple[CopyPlan, CopyMemory]:
    """Two blocks of 16 bytes, for what a test asks of any executor: caches 0, objects 7."""
    caches = paged_caches([CacheTensor(torch.zeros(4, 2, 8, dtype=torch.uint8), "BNC")], 4)
    chunk = object_view_for(caches.views, 2, ObjectOrder.LAYER_OUTERMOST)
    plan = PagePlanner(caches.views, chunk).plan(chunk, 0, [3, 1], direction)
    return plan, CopyMemory(caches.regions, torch.full((32,), 7, dtype=torch.uint8))


@dataclass(frozen=True)
class Layer:
    """One layer's cache: extents and byte strides by letter (B, K, P, H, N), and its start."""

    region: int
    base: int
    extents: dict[str, int]
    strides: dict[str, int]
    run: int
    element: int

    def address(self, index: dict[str, int]) -> int:
        return self.base + sum(index[axis] * self.strides[axis] for axis in index)

    def page_indices_in_memory_order(self) -> Iterator[dict[str, int]]:
        axes = [axis for axis in PAGE_LETTERS if self.extents[axis] > 1]
        axes.sort(key=lambda axis: -self.strides[axis])
        for values in product(*(range(self.extents[axis]) for axis in axes)):
            yield dict(zip(axes, values, strict=True))

    def view(self) -> PagedView:
        def axis(letter: str) -> Axis:
            if letter in "PHN" and letter not in self.tensor_axes():
                return ONE
            return Axis(self.extents[letter], self.strides[letter])

        return PagedView(
            region=self.region,
            base_offset=self.base,
            element_bytes=self.element,
            num_blocks=self.extents["B"],
            block_stride=self.strides["B"],
            piece=axis("K"),
            plane=axis("P"),
            head=axis("H"),
            token=axis("N"),
            run_bytes=self.run,
        )

    def tensor_axes(self) -> str:
        return "BPHNC" if self.extents["P"] > 1 else "BHNC"

    def tensor(self, storage: torch.Tensor, dtype: torch.dtype) -> CacheTensor:
        """This layer as an engine would hand it out: kernel blocks in dimension 0."""
        axes = self.tensor_axes()
        sizes = {**self.extents, "B": self.extents["B"] * self.extents["K"], "C": 0}
        sizes["C"] = self.run // self.element
        strides = {axis: stride // self.element for axis, stride in self.strides.items()}
        strides |= {"B": strides["K"], "C": 1}
        tensor = torch.as_strided(
            storage.view(dtype),
            [sizes[axis] for axis in axes],
            [strides[axis] for axis in axes],
            self.base // self.element,
        )
        return CacheTensor(tensor, axes)


@dataclass(frozen=True)
class Case:
    layers: tuple[Layer, ...]
    region_bytes: tuple[int, ...]
    order: ObjectOrder
    blocks_per_chunk: int
    first_block: int
    block_ids: tuple[int, ...]
    object_base: int

    def chunk_bytes(self) -> int:
        return sum(
            layer.run * sum(1 for _ in layer.page_indices_in_memory_order())
            for layer in self.layers
        ) * (self.blocks_per_chunk)

    def pairs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (region, cache byte, object byte) of everything that moves, byte by byte."""
        numbers = range(len(self.layers))
        blocks = range(self.blocks_per_chunk)
        if self.order is ObjectOrder.LAYER_OUTERMOST:
            pages = [(layer, block) for layer in numbers for block in blocks]
        else:
            pages = [(layer, block) for block in blocks for layer in numbers]
        stored = self.object_base
        for number, block in pages:
            layer = self.layers[number]
            position = block - self.first_block
            wanted = 0 <= position < len(self.block_ids) and self.block_ids[position] >= 0
            for index in layer.page_indices_in_memory_order():
                for byte in range(layer.run):
                    if wanted:
                        block_id = self.block_ids[position]
                        yield (
                            layer.region,
                            layer.address({**index, "B": block_id}) + byte,
                            stored,
                        )
                    stored += 1

    def expected(
        self, regions: list[bytes], objects: bytes, direction: TransferDirection
    ) -> tuple[list[bytearray], bytearray]:
        """Both memories after the copy."""
        regions_after = [bytearray(region) for region in regions]
        objects_after = bytearray(objects)
        for region, cache_byte, object_byte in self.pairs():
            if direction is TransferDirection.D2H:
                objects_after[object_byte] = regions[region][cache_byte]
            else:
                regions_after[region][cache_byte] = objects[object_byte]
        return regions_after, objects_after


@st.composite
def families(draw: st.DrawFn, region: int, start: int, blocks: int, unit: int) -> list[Layer]:
    """Layers of one shape and one of the six layouts in one region, with holes anywhere."""
    order = draw(st.sampled_from(KVLayout)).value
    sizes = {
        "L": draw(st.integers(1, 3)),
        "B": blocks,
        "K": 1,
        "P": draw(st.sampled_from([1, 1, 2])),
        "H": draw(st.integers(1, 3)),
        "N": draw(st.integers(1, 3)),
    }
    run = draw(st.integers(1, 4)) * unit
    # A second plane and kernel blocks where engines have them: K/V outside the heads, kernel
    # blocks as equal steps of the block dimension.
    memory_order = order.replace("H", "PH", 1)[:-1]
    if ("BHN" in order or "BNH" in order) and sizes["P"] == 1:
        sizes["K"] = draw(st.sampled_from([1, 1, 2]))
    if sizes["K"] > 1:
        memory_order = memory_order.replace("B", "BK")
    strides: dict[str, int] = {}
    step = run
    for letter in reversed(memory_order):
        if letter != "B" or sizes["K"] == 1:
            step += draw(st.sampled_from([0, 0, 0, 1, 2])) * unit
        strides[letter] = step
        step *= sizes[letter]
    extents = {letter: sizes[letter] for letter in "BKPHN"}
    strides.setdefault("K", strides["B"])
    return [
        Layer(
            region=region,
            base=start + layer * strides["L"],
            extents=extents,
            strides={letter: strides[letter] for letter in "BKPHN"},
            run=run,
            element=unit,
        )
        for layer in range(sizes["L"])
    ]


@st.composite
def cases(draw: st.DrawFn, direction: TransferDirection, unit: int = 1) -> Case:
    """One chunk's copy: one or two families of layers, in one or two regions, in any order."""
    blocks = draw(st.integers(1, 5))
    start = draw(st.integers(0, 3)) * unit
    layers = draw(families(region=0, start=start, blocks=blocks, unit=unit))
    region_bytes = [max(layer.view().end_offset for layer in layers)]
    for _ in range(draw(st.integers(0, 1))):
        region = draw(st.integers(0, 1))
        start = draw(st.integers(0, 3)) * unit + (region_bytes[0] if region == 0 else 0)
        more = draw(families(region=region, start=start, blocks=blocks, unit=unit))
        end = max(layer.view().end_offset for layer in more)
        region_bytes[region:] = [end]
        layers += more
    layers = draw(st.permutations(layers))
    if layers[0].region == 1:  # regions are numbered in order of appearance
        region_bytes.reverse()
        layers = [
            Layer(1 - old.region, old.base, old.extents, old.strides, old.run, old.element)
            for old in layers
        ]
    # Slack behind the last view must stay untouched; regions hold whole elements of 8 bytes.
    region_bytes = [(end + 15) // 8 * 8 for end in region_bytes]
    blocks_per_chunk = draw(st.integers(1, 4))
    first_block = draw(st.integers(0, blocks_per_chunk - 1))
    most = blocks_per_chunk - first_block
    ids = st.integers(-2, blocks - 1)
    if direction is TransferDirection.H2D:
        block_ids = draw(
            st.lists(ids, max_size=most, unique_by=lambda i: i if i >= 0 else object())
        )
    else:
        block_ids = draw(st.lists(ids, max_size=most))
    return Case(
        layers=tuple(layers),
        region_bytes=tuple(region_bytes),
        order=draw(st.sampled_from(ObjectOrder)),
        blocks_per_chunk=blocks_per_chunk,
        first_block=first_block,
        block_ids=tuple(block_ids),
        object_base=draw(st.integers(0, 9)),
    )
