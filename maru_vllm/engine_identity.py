"""When an engine's identity is known: the fingerprint first, then the chain of its chunk keys."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from maru_vllm.engine_facts import Packing, fields_from_vllm, packing_from_vllm
from maru_vllm.fingerprint import DigestCache, FingerprintJob
from maru_vllm.identity import ChunkChain
from maru_vllm.namespace import NamespaceFields, namespace_digest
from maru_vllm.settings import Settings
from maru_vllm.weights import WeightsUnknown, weights_source

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from maru_vllm.layout import ChunkLayout

logger = logging.getLogger(__name__)


class EngineIdentity:
    """The identity of one engine, found out in the background. Scheduler's thread only."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        settings: Settings,
        layout: ChunkLayout,
        *,
        packing: Packing | None = None,
        cache: DigestCache | None = None,
    ) -> None:
        """Gathers all facts now, and begins to read the weights.

        ``packing`` is what a worker reported; without it, what vLLM selects here.
        Raises IdentityRefused where the engine must not start with Maru. An engine whose weights
        cannot be told starts, with one warning, and only misses.
        """
        self._chunk_tokens = settings.kv_chunk_tokens
        self._chain: ChunkChain | None = None
        self._job: FingerprintJob | None = None
        self._facts = (vllm_config, kv_cache_config, settings, layout)
        self._packing = packing or packing_from_vllm(vllm_config)
        self._fields_with(b"")
        try:
            source = weights_source(vllm_config, settings)
        except WeightsUnknown as unknown:
            logger.warning("Maru is off for this engine, every request misses: %s", unknown)
            return
        self._job = FingerprintJob(source, cache=cache)

    def chain(self) -> ChunkChain | None:
        """The chain, or None as long as (or because) the identity is not known. Never blocks."""
        if self._chain is None and self._job is not None:
            fingerprint = self._job.poll()
            if fingerprint is not None:
                namespace = namespace_digest(self._fields_with(fingerprint))
                self._chain = ChunkChain(namespace, self._chunk_tokens)
                self._job = None
            elif (failure := self._job.failure()) is not None:
                logger.warning("Maru is off for this engine, every request misses: %s", failure)
                self._job = None
        return self._chain

    def close(self) -> None:
        """Stop reading weights."""
        if self._job is not None:
            self._job.cancel()
            self._job = None

    def _fields_with(self, fingerprint: bytes) -> NamespaceFields:
        vllm_config, kv_cache_config, settings, layout = self._facts
        return fields_from_vllm(
            vllm_config, kv_cache_config, settings, fingerprint, layout, self._packing
        )
