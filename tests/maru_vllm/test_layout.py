from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from maru_kv_ops.layouts import KVLayout
from maru_vllm.layout import ChunkLayout, LayoutRefused, RankShare, chunk_layout

FULL = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
MLA = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
SLIDING = SlidingWindowSpec(
    block_size=32, num_kv_heads=4, head_size=64, dtype=torch.bfloat16, sliding_window=128
)
NAMES = ["layers.0.attn", "layers.1.attn"]


def config(*specs: KVCacheSpec, replicas: int = 1) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=100,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=NAMES, kv_cache_spec=s) for s in specs],
        kv_tp_replicas=replicas,
    )


def described(
    kv_cache_config: KVCacheConfig, name: str = "LBHNC", chunk_tokens: int = 256, tp: int = 1
) -> ChunkLayout:
    return chunk_layout(kv_cache_config, name, chunk_tokens, tp)


def test_sizes_follow_from_vllms_own_page_size() -> None:
    layout = described(config(FULL))
    assert layout.pages.block_bytes == FULL.page_size_bytes * len(NAMES)
    assert layout.blocks_per_chunk == 8
    assert layout.part_bytes == layout.object_bytes == FULL.page_size_bytes * len(NAMES) * 8
    assert layout.pages.layout is KVLayout.LBHNC
    assert [layer.name for layer in layout.pages.layers] == NAMES


def test_padding_of_pages_is_not_part_of_an_object() -> None:
    padded = replace(FULL, page_size_padded=FULL.page_size_bytes + 4096)
    assert described(config(padded)).object_bytes == described(config(FULL)).object_bytes


def test_each_rank_has_a_part_unless_ranks_hold_the_same_kv() -> None:
    apart = described(config(FULL), tp=4)
    assert (apart.num_ranks, apart.num_parts) == (4, 4)
    assert apart.object_bytes == 4 * apart.part_bytes
    assert [apart.share_of(r) for r in range(4)] == [RankShare(r, True) for r in range(4)]
    pairs = described(config(FULL, replicas=2), tp=4)
    assert [pairs.share_of(r) for r in range(4)] == [
        RankShare(0, True),
        RankShare(0, False),
        RankShare(1, True),
        RankShare(1, False),
    ]
    latent = described(config(MLA, replicas=4), tp=4)
    assert (latent.num_parts, latent.object_bytes) == (1, latent.part_bytes)


def test_layers_of_unlike_pages_in_one_group_are_described_each() -> None:
    other = replace(MLA, head_size=128)
    mixed = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={NAMES[0]: MLA, NAMES[1]: other})
    layout = described(config(mixed))
    assert [layer.page_bytes for layer in layout.pages.layers] == [
        MLA.page_size_bytes,
        other.page_size_bytes,
    ]


@pytest.mark.parametrize(
    ("kv_cache_config", "reason"),
    [
        (config(FULL, SLIDING), "2 KV cache groups .FullAttentionSpec, SlidingWindowSpec."),
        (config(), "0 KV cache groups"),
        (config(SLIDING), "--disable-hybrid-kv-cache-manager"),
    ],
)
def test_what_is_not_stored_is_refused_with_what_to_do(
    kv_cache_config: KVCacheConfig, reason: str
) -> None:
    with pytest.raises(LayoutRefused, match=reason):
        described(kv_cache_config)


def test_a_subclass_of_a_known_specification_is_not_taken_for_it() -> None:
    class WithSomethingMore(FullAttentionSpec):
        pass

    special = WithSomethingMore(block_size=32, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
    with pytest.raises(LayoutRefused, match="WithSomethingMore"):
        described(config(special))


def test_an_unknown_layout_and_a_chunk_of_partial_blocks_are_refused() -> None:
    with pytest.raises(LayoutRefused, match="'HND' is not known"):
        described(config(FULL), name="HND")
    with pytest.raises(LayoutRefused, match="maru_kv_chunk_tokens"):
        described(config(FULL), chunk_tokens=100)
