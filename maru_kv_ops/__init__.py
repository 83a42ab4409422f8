"""Move KV bytes between an engine's paged caches and stored chunks.

``views`` says where bytes lie, ``plan`` what to move (pure arithmetic), ``executors`` who moves it.
``layouts`` holds the engine layouts as data. This package knows neither vLLM nor the store.

    caches = paged_caches([CacheTensor(tensor, "BHNC") for tensor in by_layer_name], num_blocks)
    chunk = object_view_for(caches.views, blocks_per_chunk, KVLayout("LBHNC").object_order)
    planner = PagePlanner(caches.views, chunk)          # once
    plan = planner.plan(chunk.at(offset, length), 0, block_ids, TransferDirection.D2H)
    TorchExecutor().run(plan, CopyMemory(caches.regions, pool_bytes))

The compiled operations are an optional extension, ``maru_kv_ops._C``. Its names
(``extension.PUBLIC_NAMES``) are attributes of this package; where it is missing, using one raises
an ``AttributeError`` with the reason and what to run. ``maru_kv_ops.torch_ops`` has the same
operations in torch. Importing this package imports neither the extension nor torch, and nothing
here initialises CUDA.
"""

from __future__ import annotations

from maru_kv_ops.extension import BuildInfo, build_info, import_error, is_available

__all__ = ["BuildInfo", "build_info", "import_error", "is_available"]


def __getattr__(name: str) -> object:
    from maru_kv_ops.extension import attribute  # not a name of this package's face

    return attribute(name)
