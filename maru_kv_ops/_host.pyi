from collections.abc import Sequence

import torch

from maru_kv_ops.plan import CopyPlan

class CopyThreads:
    def __init__(self, num_threads: int) -> None: ...

def run_plan(
    plan: CopyPlan,
    region_addresses: Sequence[int],
    object_address: int,
    threads: CopyThreads,
) -> None: ...
def build_info() -> dict[str, str]: ...
def multi_layer_kv_transfer(
    key_value: torch.Tensor,
    key_value_ptrs: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_memory_device: torch.device | str,
    page_buffer_size: int,
    direction: int,
    engine_kv_format: int,
    block_size: int = 0,
    head_size: int = 0,
    skip_prefix_n_tokens: int = 0,
    block_stride_elems: int = 0,
) -> None: ...
def single_layer_kv_transfer(
    lmc_key_value_cache: torch.Tensor,
    vllm_key_value_cache: torch.Tensor | Sequence[torch.Tensor],
    slot_mapping: torch.Tensor,
    direction: int,
    engine_kv_format: int,
    token_major: bool = False,
) -> None: ...
def multi_layer_block_kv_transfer(
    paged_buffer_ptrs_tensor: torch.Tensor,
    object_ptrs: Sequence[int],
    block_ids: torch.Tensor,
    device: torch.device | str,
    direction: int,
    shape_desc: object,
    chunk_tokens: int,
    engine_kv_format: int,
    skip_prefix_n_blocks: int,
) -> None: ...
