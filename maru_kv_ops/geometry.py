"""Where the pages of a cache lie, from a format and sizes, or from a tensor's real strides.

Pure arithmetic without torch: the baseline's counterpart of ``csrc/transfers.cpp``, written from
the rows of ``formats.py``. The tests run both against an oracle that knows neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from maru_kv_ops.errors import TransferRefused
from maru_kv_ops.formats import SCALE_BYTES, Content, Entries, FormatFacts


@dataclass(frozen=True, slots=True)
class RowPart:
    """A part of every token's row that lies in one piece per head. All in bytes."""

    cache_offset: int
    object_offset: int
    heads: int
    run_bytes: int
    slot_stride: int
    head_stride: int


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """One (plane, layer) of a cache. Strides in bytes."""

    num_blocks: int
    block_tokens: int
    block_stride: int
    parts: tuple[RowPart, ...]
    plane_stride: int = 0
    """From K to V where both lie in one tensor."""
    layer_stride: int = 0
    """From one layer to the next where all lie in one tensor."""

    @property
    def num_slots(self) -> int:
        """Tokens that the cache has room for."""
        return self.num_blocks * self.block_tokens


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """A cache that lies as its format says."""

    layers: int
    num_blocks: int
    block_tokens: int
    heads: int
    run_bytes: int
    """Of one head and token; K and V together where fused; values and scale where blocked."""
    block_stride: int
    """Bytes from one block to the next; 0: no padding."""


MAX_BYTES = 2**63
"""Offsets of the native modules are signed 64-bit integers, and so are torch's."""


def pool_geometry(facts: FormatFacts, sizes: PoolSizes) -> PageGeometry:
    """Strides of a cache without padding but between blocks. Raises ``TransferRefused``."""
    extent = {"B": sizes.num_blocks, "N": sizes.block_tokens, "H": sizes.heads, "P": 2, "O": 1}
    extent |= {"L": sizes.layers, "S": sizes.num_blocks * sizes.block_tokens}
    stride: dict[str, int] = {}
    step = sizes.run_bytes
    block_stride = 0
    for letter in reversed(facts.axes[:-1]):
        if letter == "B":
            block_stride = step if sizes.block_stride == 0 else sizes.block_stride
            if block_stride < step:
                raise TransferRefused(
                    f"block stride: a block of {facts.format.name} has {step} bytes here, found "
                    f"{sizes.block_stride} bytes from one block to the next"
                )
            step = block_stride
        stride[letter] = step
        step *= extent[letter]
    if step >= MAX_BYTES:
        raise TransferRefused(f"sizes: {sizes} does not fit into 63 bits")
    row = sizes.run_bytes * sizes.heads
    if facts.blocks_are_tight:
        block_stride = row * sizes.block_tokens
        if sizes.block_stride not in (0, block_stride):
            raise TransferRefused(
                f"block stride: {facts.format.name} has no padding between blocks: expected "
                f"{block_stride} bytes, found {sizes.block_stride}"
            )
    return PageGeometry(
        num_blocks=sizes.num_blocks,
        block_tokens=sizes.block_tokens,
        block_stride=block_stride,
        parts=_parts(
            facts,
            sizes.block_tokens,
            RowPart(
                cache_offset=0,
                object_offset=0,
                heads=sizes.heads,
                run_bytes=sizes.run_bytes,
                slot_stride=sizes.run_bytes if facts.head_major else row,
                head_stride=stride["H"] if facts.head_major else sizes.run_bytes,
            ),
        ),
        plane_stride=stride.get("P", 0),
        layer_stride=stride.get("L", 0),
    )


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor's sizes and strides, in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int

    def __str__(self) -> str:
        return (
            f"shape {list(self.sizes)}, strides {list(self.strides)}, {self.element_bytes} bytes "
            "per element"
        )


def layer_geometry(facts: FormatFacts, tensor: TensorShape, width: int) -> PageGeometry:
    """One layer's tensor by its real strides; ``width``: elements of one token and plane.

    The tensor has its axes in memory order, as the format has them, or with heads and tokens the
    other way round, which is how engines hand out one order over memory of the other. Sizes cannot
    tell these apart; strides do, and ``width`` says how many heads there are.

    Raises ``TransferRefused`` with what was expected and found.
    """
    tensor = _with_fused_content(facts, tensor)
    memory_order = facts.axes.replace("L", "")
    if facts.content is Content.BLOCKED_SCALE:
        memory_order = "BNC" if len(tensor.sizes) == 3 else "BC"
    elif memory_order == "BNC" and len(tensor.sizes) == 4:
        memory_order = "BNHC"
    named = _named_axes(memory_order, tensor, width)
    if named is None:
        raise TransferRefused(
            f"vllm_key_value_cache: expected the tensor of one layer in {facts.format.name} "
            f"(memory order {memory_order}: P plane, B block, S slot, N token, H head, C content) "
            f"for tokens of {width} elements, found {tensor}"
        )
    size = dict(zip(named, tensor.sizes, strict=True))
    stride = {
        letter: step * tensor.element_bytes
        for letter, step in zip(named, tensor.strides, strict=True)
    }
    heads = size.get("H", 1)
    run = width // heads * tensor.element_bytes
    tokens = size["C"] // width if memory_order == "BC" else size.get("N", 1)
    whole = RowPart(0, 0, heads, run, stride.get("N", 0), stride.get("H", 0))
    contiguous = tokens == 1 or stride.get("N", run) == run
    if facts.content is Content.BLOCKED_SCALE and not contiguous:
        raise TransferRefused(
            f"vllm_key_value_cache: expected contiguous pages of {facts.format.name}, "
            f"found {tensor}"
        )
    blocks = "S" if "S" in named else "B"
    return PageGeometry(
        num_blocks=size[blocks],
        block_tokens=tokens,
        block_stride=stride[blocks],
        parts=_parts(facts, tokens, whole),
        plane_stride=stride.get("P", 0),
    )


def pointer_index(facts: FormatFacts, layers: int, plane: int, layer: int) -> int:
    """Which of the addresses names this plane and layer."""
    if facts.entries is Entries.ONE_TENSOR:
        return 0
    return layer + (layers * plane if facts.entries is Entries.PER_PLANE_AND_LAYER else 0)


def check_rows(what: str, tensor: TensorShape) -> None:
    """Refuse a tensor whose last axis is not contiguous or whose entries share memory."""
    if tensor.sizes[-1] > 1 and tensor.strides[-1] != 1:
        raise TransferRefused(f"{what}: expected a contiguous last axis, found {tensor}")
    if 0 in tensor.sizes:
        return
    occupied = 1
    for step, extent in sorted(zip(tensor.strides, tensor.sizes, strict=True)):
        if extent > 1:
            if step < occupied:
                raise TransferRefused(f"{what}: its entries share memory: {tensor}")
            occupied += (extent - 1) * step


def _parts(facts: FormatFacts, block_tokens: int, whole: RowPart) -> tuple[RowPart, ...]:
    if facts.content is not Content.BLOCKED_SCALE:
        return (whole,)
    values = whole.run_bytes - SCALE_BYTES
    if values < 1:
        raise TransferRefused(
            f"a token of {facts.format.name} is values and {SCALE_BYTES} bytes of scale, found "
            f"{whole.run_bytes} bytes"
        )
    return (
        RowPart(0, 0, 1, values, values, 0),
        RowPart(block_tokens * values, values, 1, SCALE_BYTES, SCALE_BYTES, 0),
    )


def _with_fused_content(facts: FormatFacts, tensor: TensorShape) -> TensorShape:
    """K and V in an axis of their own behind the head are the same bytes as one fused axis."""
    sizes, strides = tensor.sizes, tensor.strides
    fused = facts.content is Content.FUSED_HEAD and len(sizes) == 5 and sizes[3] == 2
    if not fused or strides[3] != sizes[4]:
        return tensor
    return TensorShape((*sizes[:3], 2 * sizes[4]), (*strides[:3], strides[4]), tensor.element_bytes)


def _named_axes(memory_order: str, tensor: TensorShape, width: int) -> str | None:
    """A letter for each of the tensor's axes; None if it does not fit."""
    if len(tensor.sizes) != len(memory_order) or min(width, *tensor.sizes) < 1:
        return None
    content = tensor.sizes[-1]
    if content > 1 and tensor.strides[-1] != 1:
        return None
    of_a_page = memory_order == "BC"
    if (content % width if of_a_page else width % content) != 0:
        return None
    heads = 1 if of_a_page else width // content
    swapped = memory_order.translate(str.maketrans("HN", "NH")) if "N" in memory_order else None
    for letters in (memory_order, swapped):
        if letters is None or ("H" in memory_order) != ("H" in letters):
            continue
        size = dict(zip(letters, tensor.sizes, strict=True))
        fits = size.get("H", 1) == heads and size.get("P", 2) == 2 and size.get("O", 1) == 1
        if fits and _lies_in_order(letters, memory_order, tensor):
            return letters
    return None


def _lies_in_order(letters: str, memory_order: Sequence[str], tensor: TensorShape) -> bool:
    occupied = 1
    for letter in reversed(memory_order):
        extent, step = tensor.sizes[letters.index(letter)], tensor.strides[letters.index(letter)]
        if extent > 1:
            if step < occupied:
                return False
            occupied += (extent - 1) * step
    return True
