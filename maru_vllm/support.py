"""What this version of Maru serves, and what it refuses at start-up.

An engine that Maru cannot serve does not start, and says which setting is why and what to do. It
never starts and silently misses. What the KV cache itself rules out stands in ``layout.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from maru_vllm.settings import KVPayload, LoadMode, Settings, TransferMode

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class NotSupported(ValueError):
    """A setting asks for something that this version of Maru does not do."""


def check_supported(vllm_config: VllmConfig, settings: Settings) -> None:
    """Raise NotSupported with every reason why Maru cannot serve this engine."""
    reasons = [
        *_of_settings(settings),
        *_of_engine(vllm_config),
        *_of_loads(vllm_config, settings),
    ]
    if reasons:
        raise NotSupported("MaruKVConnector cannot serve this engine: " + "; ".join(reasons))


def _of_settings(settings: Settings) -> Iterator[str]:
    if not settings.async_store:
        yield (
            "maru_async_store is false, but only stores behind the step are built yet; leave it "
            "true"
        )
    if settings.kv_payload is not KVPayload.PAGES:
        yield (
            f'maru_kv_payload is "{settings.kv_payload.value}", which is not built yet; use "pages"'
        )
    if settings.transfer_mode is TransferMode.SERVER_DRIVEN:
        yield (
            'maru_transfer_mode is "server_driven", which no device supports yet; use "auto" or '
            '"engine_driven"'
        )


def _of_engine(vllm_config: VllmConfig) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    for option, size in (
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            yield f"{option} is {size}, and KV split that way is not stored yet; set it to 1"
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.uses_draft_kv_cache():
        yield (
            f"speculative decoding by {speculative.method!r} keeps KV of its own, which is not "
            "stored yet; use a method without (ngram), or none"
        )
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_role != "kv_both":
        yield (
            f"kv_role is {transfer.kv_role!r}; a cache both loads and stores: set it to 'kv_both'"
        )


def _of_loads(vllm_config: VllmConfig, settings: Settings) -> Iterator[str]:
    if settings.load_mode is LoadMode.BETWEEN_STEPS:
        return
    if vllm_config.scheduler_config.async_scheduling:
        # The next step is scheduled before this one has said that its load failed, and vLLM takes
        # that step's tokens, computed from KV that was never loaded, for good.
        yield (
            "loads into the step that uses them (maru_overlap_load_with_compute true, or "
            "maru_async_load false) cannot be taken back under async scheduling when they fail; "
            "set --no-async-scheduling, or load between steps"
        )
