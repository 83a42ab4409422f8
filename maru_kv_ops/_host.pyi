from collections.abc import Sequence

from maru_kv_ops.plan import CopyPlan

# The same names, arguments and results; tests hold the two together.
from maru_kv_ops.torch_ops import multi_layer_block_kv_transfer as multi_layer_block_kv_transfer
from maru_kv_ops.torch_ops import multi_layer_kv_transfer as multi_layer_kv_transfer
from maru_kv_ops.torch_ops import single_layer_kv_transfer as single_layer_kv_transfer

class CopyThreads:
    def __init__(self, num_threads: int) -> None: ...

def run_plan(
    plan: CopyPlan,
    region_addresses: Sequence[int],
    object_address: int,
    threads: CopyThreads,
) -> None: ...
def build_info() -> dict[str, str]: ...
