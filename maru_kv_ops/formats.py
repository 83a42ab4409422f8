"""The paged KV formats of the field, as data.

Shapes are physical, outermost axis first; ``_X_`` in a name is a list boundary. Letters of
``FormatFacts.axes``:

    L layer    B block    P plane (K, V)    N token of a block    H head    S slot (B and N in one)
    O an axis of one entry    C content: what one token (of one head) has, contiguous

The native twin is ``csrc/formats.h``; a test holds the two together. Engines of vLLM 0.26 and later
produce 12, 13 and, for MLA, 3; the others come from older versions and other engines. 10 and 11 are
the same bytes as 12 and 13 with K and V shown as an axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum, unique


@unique
class EngineKVFormat(IntEnum):
    """Names and numbers that the field's copy operations share."""

    NB_NL_TWO_BS_NH_HS = 0
    NL_X_TWO_NB_BS_NH_HS = 1
    NL_X_NB_TWO_BS_NH_HS = 2
    NL_X_NB_BS_HS = 3
    TWO_X_NL_X_NBBS_NH_HS = 4
    NL_X_NBBS_ONE_HS = 5
    NL_X_TWO_NB_NH_BS_HS = 6
    NL_X_NB_TWO_NH_BS_HS = 7
    NB_NL_TWO_NH_BS_HS = 8
    TWO_X_NL_X_NB_BS_NH_HS = 9
    NL_X_NB_NH_BS_TWO_HS = 10
    NL_X_NB_BS_NH_TWO_HS = 11
    NL_X_NB_NH_BS_CS = 12
    NL_X_NB_BS_NH_CS = 13
    NL_X_NB_BSV_BSS = 14


@unique
class Entries(Enum):
    """How the tensors of a cache are listed."""

    ONE_TENSOR = "one tensor"
    PER_LAYER = "one per layer"
    PER_PLANE_AND_LAYER = "the K tensors of all layers, then their V tensors"


@unique
class Content(Enum):
    """What C is."""

    HEAD = "one head of K or of V, or an MLA latent"
    FUSED_HEAD = "K and V of one head"
    BLOCKED_SCALE = "the values of all tokens of a page, then four bytes of scale for each"


SCALE_BYTES = 4
"""``NL_X_NB_BSV_BSS``: one float32 for each token."""


@dataclass(frozen=True, slots=True)
class FormatFacts:
    """One row of the table."""

    format: EngineKVFormat
    entries: Entries
    axes: str
    """Of one entry, in memory order. For blocked scales the C of a token is not contiguous."""
    content: Content

    @property
    def kv_size(self) -> int:
        """Planes of an object of this format: 2, or 1 for MLA and fused formats."""
        own = self.entries is Entries.PER_PLANE_AND_LAYER
        return 2 if own or "P" in self.axes else 1

    @property
    def head_major(self) -> bool:
        """Whether a page has its heads outside its tokens."""
        return "HN" in self.axes

    @property
    def blocks_are_tight(self) -> bool:
        """Whether blocks and tokens are one axis, so that no block is padded."""
        return "S" in self.axes

    @property
    def needs_block_size(self) -> bool:
        """Whether a slot's place depends on the block size even without padding."""
        return not (self.blocks_are_tight or self.format is EngineKVFormat.NL_X_NB_BS_HS)

    def num_pointers(self, layers: int) -> int:
        """How many addresses name the cache of ``layers`` layers."""
        if self.entries is Entries.ONE_TENSOR:
            return 1
        return layers * (2 if self.entries is Entries.PER_PLANE_AND_LAYER else 1)


def _rows() -> dict[EngineKVFormat, FormatFacts]:
    one, layer, plane = Entries
    head, fused, blocked = Content
    table = (
        (EngineKVFormat.NB_NL_TWO_BS_NH_HS, one, "BLPNHC", head),
        (EngineKVFormat.NL_X_TWO_NB_BS_NH_HS, layer, "PBNHC", head),
        (EngineKVFormat.NL_X_NB_TWO_BS_NH_HS, layer, "BPNHC", head),
        (EngineKVFormat.NL_X_NB_BS_HS, layer, "BNC", head),
        (EngineKVFormat.TWO_X_NL_X_NBBS_NH_HS, plane, "SHC", head),
        (EngineKVFormat.NL_X_NBBS_ONE_HS, layer, "SOC", head),
        (EngineKVFormat.NL_X_TWO_NB_NH_BS_HS, layer, "PBHNC", head),
        (EngineKVFormat.NL_X_NB_TWO_NH_BS_HS, layer, "BPHNC", head),
        (EngineKVFormat.NB_NL_TWO_NH_BS_HS, one, "BLPHNC", head),
        (EngineKVFormat.TWO_X_NL_X_NB_BS_NH_HS, plane, "BNHC", head),
        (EngineKVFormat.NL_X_NB_NH_BS_TWO_HS, layer, "BHNC", fused),
        (EngineKVFormat.NL_X_NB_BS_NH_TWO_HS, layer, "BNHC", fused),
        (EngineKVFormat.NL_X_NB_NH_BS_CS, layer, "BHNC", fused),
        (EngineKVFormat.NL_X_NB_BS_NH_CS, layer, "BNHC", fused),
        (EngineKVFormat.NL_X_NB_BSV_BSS, layer, "BNC", blocked),
    )
    return {row[0]: FormatFacts(*row) for row in table}


FORMATS = _rows()
"""The row of every format."""


@dataclass(slots=True)
class PageBufferShapeDesc:
    """Sizes of a paged cache for the block operation, under the field's names.

    Not frozen: callers of the field make an empty one and set its attributes.
    """

    kv_size: int = 0
    """Planes: 2, or 1 for MLA and fused formats."""
    nl: int = 0
    """Layers."""
    nb: int = 0
    """Blocks."""
    bs: int = 0
    """Tokens of a block."""
    nh: int = 0
    """Heads."""
    hs: int = 0
    """Elements of one head and token; K and V together where they are fused."""
    element_size: int = 0
    """Bytes."""
    block_stride_elems: int = 0
    """Elements from one block to the next; 0: no padding."""
