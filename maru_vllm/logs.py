"""Makes Maru's log lines appear where vLLM's do.

vLLM gives handlers to its own loggers only, so lines of other packages below WARNING are lost.
"""

from __future__ import annotations

import logging

_PACKAGES = ("maru_vllm", "maru_shm", "maru_kv_ops")


def follow_vllm() -> None:
    """Let our loggers write through vLLM's handlers, at its level.

    Does nothing where the program has configured logging itself: a handler at the root sees our
    lines anyway, and a logger of ours that has handlers is left alone.
    """
    engine = logging.getLogger("vllm")
    if logging.getLogger().handlers:
        return
    for name in _PACKAGES:
        ours = logging.getLogger(name)
        if not ours.handlers:
            ours.setLevel(engine.getEffectiveLevel())
            for handler in engine.handlers:
                ours.addHandler(handler)
