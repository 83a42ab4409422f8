"""Move KV bytes between an engine's paged caches and stored chunks.

``views`` says where bytes lie, ``plan`` what to move (pure arithmetic), ``executors`` who moves it.
``layouts`` holds the engine layouts as data. Only ``executors``, ``host_rows`` and ``torch_ops``
import numpy or torch; this package knows neither vLLM nor the store.

    caches = paged_caches([CacheTensor(tensor, "BHNC") for tensor in by_layer_name], num_blocks)
    chunk = object_view_for(caches.views, blocks_per_chunk, KVLayout("LBHNC").object_order)
    planner = PagePlanner(caches.views, chunk)          # once
    plan = planner.plan(chunk.at(offset, length), 0, block_ids, TransferDirection.D2H)
    TorchExecutor().run(plan, CopyMemory(caches.regions, pool_bytes))
"""
