"""Cache tensors become views by their real strides, or are refused."""

from __future__ import annotations

import pytest
import torch

from maru_kv_ops.cache_tensors import CacheTensor, paged_caches
from maru_kv_ops.errors import ViewError
from maru_kv_ops.views import ONE, Axis


def test_a_head_major_cache_behind_a_token_major_shape_is_described_by_its_strides() -> None:
    heads, tokens = 8, 16
    head_major = torch.zeros(64, heads, tokens, 32, dtype=torch.float32)
    handed_out = head_major.transpose(1, 2)  # shape says [block, token, head, content]

    (view,) = paged_caches([CacheTensor(handed_out, "BNHC")], 64).views

    assert view.head == Axis(heads, tokens * 32 * 4)
    assert view.token == Axis(tokens, 32 * 4)


def test_layers_in_one_storage_share_a_region_and_others_do_not() -> None:
    storage = torch.zeros(2, 6, 1, 4, 8)
    alone = torch.zeros(6, 1, 4, 8)

    caches = paged_caches(
        [CacheTensor(tensor, "BHNC") for tensor in (storage[1], alone, storage[0])], 6
    )

    assert [view.region for view in caches.views] == [0, 1, 0]
    assert caches.views[0].base_offset == 6 * 4 * 8 * 4
    assert [region.numel() for region in caches.regions] == [2 * 6 * 4 * 8 * 4, 6 * 4 * 8 * 4]


def test_kernel_blocks_finer_than_manager_blocks_become_pieces() -> None:
    cache = torch.zeros(12, 2, 4, 8, dtype=torch.bfloat16)

    (view,) = paged_caches([CacheTensor(cache, "BHNC")], num_blocks=4).views

    assert view.num_blocks == 4
    assert view.piece == Axis(3, 2 * 4 * 8 * 2)
    assert view.page_bytes == view.block_stride == 3 * 2 * 4 * 8 * 2
    assert view.plane == ONE


@pytest.mark.parametrize(
    ("shape", "axes", "num_blocks"),
    [
        ((4, 2, 8), "BHNC", 4),
        ((4, 2, 8), "BHN", 4),
        ((4, 2, 8), "HNC", 4),
        ((4, 2, 8), "BBC", 4),
        ((4, 2, 8), "BXC", 4),
        ((4, 2, 8), "BNC", 3),
        ((4, 2, 8), "BNC", 0),
        ((4, 0, 8), "BNC", 4),
    ],
)
def test_a_tensor_that_does_not_fit_its_axes_is_refused_with_what_was_found(
    shape: tuple[int, ...], axes: str, num_blocks: int
) -> None:
    with pytest.raises(ViewError, match=r"expected .* found shape \(4, "):
        paged_caches([CacheTensor(torch.zeros(shape), axes)], num_blocks)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 8, 2).transpose(1, 2),  # content is not contiguous
        torch.zeros(4, 1, 8).expand(4, 2, 8),  # two tokens share their bytes
        torch.zeros(64).as_strided((4, 2, 8), (10, 8, 1)),  # blocks overlap
    ],
)
def test_memory_that_cannot_be_pages_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ViewError):
        paged_caches([CacheTensor(tensor, "BNC")], 4)


def test_tensors_of_two_devices_are_refused() -> None:
    tensors = [torch.zeros(4, 2, 8), torch.zeros(4, 2, 8, device="meta")]

    with pytest.raises(ViewError, match="meta"):
        paged_caches([CacheTensor(tensor, "BNC") for tensor in tensors], 4)
