"""What vLLM counts for a token range beside its ids, for the chunk keys.

Taken from vLLM's own generator of extra keys, so that an input which a later vLLM adds there
counts here too. On top of it stand facts which vLLM's keys leave out, because its own cache ends
with the engine: what is in an adapter's files, and how the bytes of embeddings are to be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from maru_vllm.adapters import AdapterContents

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from maru_vllm.identity import Inputs, KeyedRequest


class VllmInputs:
    """The ``identity.InputsOf`` of an engine. Scheduler's thread only."""

    def __init__(self, adapters: AdapterContents | None = None) -> None:
        self._adapters = adapters or AdapterContents()

    def __call__(
        self, request: KeyedRequest, start: int, end: int, cursor: int
    ) -> tuple[Inputs, int]:
        """LoRA name, path and contents, images and their offsets, cache salt (first range
        only), embeddings; each a tuple that begins with its kind."""
        vllm_request = cast("Request", request)
        extra, cursor = generate_block_hash_extra_keys(vllm_request, start, end, cursor)
        if vllm_request.lora_request is not None:
            content = self._adapters.fingerprint(vllm_request.lora_request, begins=start == 0)
            extra = (*(extra or ()), ("lora_content", content))
        if vllm_request.prompt_embeds is not None:
            extra = (*(extra or ()), *_embeds_facts(vllm_request, start, end))
        return extra, cursor


def _embeds_facts(request: Request, start: int, end: int) -> tuple[tuple[object, ...], ...]:
    """vLLM hashes the embeddings' bytes only. The same bytes are other numbers in another dtype,
    and a mixed prompt has rows that are not read because a token id stands there."""
    embeds = request.prompt_embeds
    assert embeds is not None
    facts: list[tuple[object, ...]] = [
        ("prompt_embeds_dtype", str(embeds.dtype), tuple(embeds.shape[1:]))
    ]
    if request.prompt_is_token_ids is not None:
        is_token = request.prompt_is_token_ids[start:end]
        facts.append(("prompt_is_token_ids", bytes(map(bool, is_token))))
    return tuple(facts)
