"""Puts other KV cache projects out of reach of every Python that has this folder on PYTHONPATH.

Python imports a module of this name when it starts, so child processes are covered too. An import
of one of the names fails as if the project were not installed, whether it is or not. With
``MARU_TEST_BLOCKED_LOG`` set, each process adds its id to that file: proof that it was covered.
"""

from __future__ import annotations

import os
import sys

OTHER_CACHES = (
    "aibrix_kvcache",
    "dynamo",
    "flexkv",
    "infinistore",
    "kvbm",
    "kvblockd",
    "kvcached",
    "lmcache",
    "lmcache_ascend",
    "maru_handler",
    "maru_lmcache",
    "mooncake",
    "nixl",
    "nixl_cu12",
    "nixl_cu13",
    "nixl_ep",
    "pegaflow",
    "rixl",
    "tair",
    "ucm",
    "vllm_kvblockd",
)

for name in OTHER_CACHES:
    sys.modules[name] = None  # type: ignore[assignment]  # makes import raise ModuleNotFoundError

if "MARU_TEST_BLOCKED_LOG" in os.environ:
    with open(os.environ["MARU_TEST_BLOCKED_LOG"], "a") as log:
        log.write(f"{os.getpid()}\n")
