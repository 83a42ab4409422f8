"""The physical orders of vLLM's paged KV cache, as data.

vLLM's logical cache is ``[L, B, H, N, C]``: layer, block, KV head, token, content (K and V of one
token and head, fused). ``KVLayout`` names the six orders in which those axes may lie in memory,
outermost first, spelled as vLLM spells them. Nothing else in this package knows the names: copies
are planned from real strides. The names serve to decide how an object is ordered (``object_order``)
and to build memory of a given layout (``layout_strides``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique


@unique
class ObjectOrder(Enum):
    """Which axis a stored chunk has outermost. Page bytes are in the engine's order either way."""

    LAYER_OUTERMOST = "LB"
    """``[L][B][page]``: the blocks of one layer are neighbours."""
    BLOCK_OUTERMOST = "BL"
    """``[B][L][page]``: the layers of one block are neighbours."""


@unique
class KVLayout(Enum):
    """Memory order of the logical axes, outermost first."""

    LBHNC = "LBHNC"
    LBNHC = "LBNHC"
    LHBNC = "LHBNC"
    BLHNC = "BLHNC"
    BLNHC = "BLNHC"
    BHLNC = "BHLNC"

    @property
    def object_order(self) -> ObjectOrder:
        """The order in which chunks of this layout are stored."""
        if self.value.startswith("B"):
            return ObjectOrder.BLOCK_OUTERMOST
        return ObjectOrder.LAYER_OUTERMOST


@dataclass(frozen=True, slots=True)
class CacheExtents:
    """Sizes of one paged cache."""

    layers: int
    blocks: int
    heads: int
    tokens: int
    """Tokens of one block."""
    content_bytes: int
    """Bytes of one token and head: K and V together."""


@dataclass(frozen=True, slots=True)
class CacheStrides:
    """Bytes from one index to the next along each logical axis; content is contiguous."""

    layer: int
    block: int
    head: int
    token: int
    total_bytes: int
    """Bytes of the whole cache."""


def layout_strides(layout: KVLayout, extents: CacheExtents) -> CacheStrides:
    """Strides of a cache without padding that lies in memory as ``layout`` says."""
    size = {
        "L": extents.layers,
        "B": extents.blocks,
        "H": extents.heads,
        "N": extents.tokens,
        "C": extents.content_bytes,
    }
    stride: dict[str, int] = {}
    step = 1
    for axis in reversed(layout.value):
        stride[axis] = step
        step *= size[axis]
    return CacheStrides(
        layer=stride["L"],
        block=stride["B"],
        head=stride["H"],
        token=stride["N"],
        total_bytes=step,
    )
