"""Names of chunks: a chain of digests over token ids and everything else that makes their KV.

    key[i] = SHA-256( KEY_FORMAT            16 bytes
                    | parent                32 bytes: key[i-1], for i = 0 the namespace
                    | n                     u32: tokens of the chunk
                    | token ids             n times u32
                    | inputs )              encoding.encode of the chunk's other inputs, or None

All numbers are little-endian; golden fixtures pin the bytes (tests/maru_vllm/golden). SHA-256
because it is in the standard library and no slower than the others here: a prompt of 32768
tokens in chunks of 256 took 0.83 ms, against 0.91 (BLAKE2b), 0.93 (BLAKE3) and 1.05 (BLAKE2s).

A key hangs on the namespace, the tokens and the inputs, and on nothing else: not on the engine's
block size, its own block hashes and their seed, or the Python version. An input that counts for
one chunk counts for all that follow it, because each key contains the one before.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Sequence
from typing import Final, Protocol

from maru_shm.types import KEY_BYTES, Key, Namespace
from maru_vllm.encoding import UnencodableError, encode

logger = logging.getLogger(__name__)

KEY_FORMAT: Final = b"maru-chunk-key-1"
"""Domain and version of the key encoding; 16 bytes."""

Inputs = tuple[object, ...] | None
"""What counts for a token range beside its ids: LoRA, images, salt, embeddings; None for none."""


class InputsNotYet(Exception):
    """An input of the request is still being found out in the background; ask again later."""


class KeyedRequest(Protocol):
    """The part of ``vllm.v1.request.Request`` that the chain itself reads."""

    request_id: str
    num_prompt_tokens: int
    arrival_time: float

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output tokens known so far; positions of embeddings hold 0."""


class InputsOf(Protocol):
    """Where a chunk's other inputs come from; ``extra_inputs.VllmInputs`` in an engine."""

    def __call__(
        self, request: KeyedRequest, start: int, end: int, cursor: int
    ) -> tuple[Inputs, int]:
        """The inputs of tokens ``[start, end)`` and the cursor for the range that follows.

        ``cursor`` is 0 for a range that starts at 0. Raises UnencodableError where the request
        has an input that no key can stand for, InputsNotYet where that is not known yet.
        """


def chunk_key(parent: bytes, token_ids: Sequence[int], inputs: Inputs) -> Key:
    """The key of the chunk ``token_ids`` after ``parent``.

    ``parent`` is the previous chunk's key, or the namespace for the first chunk; both are
    ``KEY_BYTES`` long. Raises UnencodableError for a token id that does not fit 32 bits or an input
    of unknown type.
    """
    if len(parent) != KEY_BYTES:
        raise ValueError(f"a parent of {len(parent)} bytes; keys have {KEY_BYTES}")
    try:
        tokens = struct.pack(f"<I{len(token_ids)}I", len(token_ids), *token_ids)
    except struct.error as error:
        raise UnencodableError(
            f"token ids that are not unsigned 32-bit numbers ({error})"
        ) from None
    return Key(hashlib.sha256(b"".join((KEY_FORMAT, parent, tokens, encode(inputs)))).digest())


class ChunkChain:
    """The chains of one engine: a namespace and how many tokens make a chunk."""

    def __init__(
        self, namespace: Namespace, chunk_tokens: int, inputs_of: InputsOf | None = None
    ) -> None:
        """``inputs_of`` defaults to vLLM's inputs, and then needs vLLM."""
        if chunk_tokens < 1:
            raise ValueError(f"chunks of {chunk_tokens} tokens")
        if inputs_of is None:
            from maru_vllm.extra_inputs import VllmInputs

            inputs_of = VllmInputs()
        self.namespace = namespace
        self.chunk_tokens = chunk_tokens
        self.inputs_of = inputs_of
        self._refusals_logged: set[str] = set()

    def follow(self, request: KeyedRequest) -> RequestKeys:
        """The keys of one request, which grow with it."""
        return RequestKeys(self, request)

    def log_refusal(self, request: KeyedRequest, reason: str) -> None:
        """Say once per reason that such requests are neither loaded nor stored."""
        if reason not in self._refusals_logged:
            self._refusals_logged.add(reason)
            logger.warning(
                "Maru leaves request %s, and others like it, alone: %s", request.request_id, reason
            )


class RequestKeys:
    """Keys of one request's full chunks. Only the scheduler's thread uses it.

    Tokens are read anew at each ``extend`` and each chunk is hashed once. Preemption and
    speculation change nothing: known tokens stay. A streaming session may take back tokens that
    were never computed when its next input comes; the chain then starts over.
    """

    __slots__ = ("_chain", "_cursor", "_keys", "_refused", "_request", "_turn")

    def __init__(self, chain: ChunkChain, request: KeyedRequest) -> None:
        self._chain = chain
        self._request = request
        self._keys: list[Key] = []
        self._cursor = 0
        self._refused = False
        self._turn = self._current_turn()

    @property
    def keys(self) -> Sequence[Key]:
        """The keys as of the last ``extend``."""
        return self._keys

    def parent(self, index: int) -> Key | None:
        """The key that chunk ``index`` continues; None for the first."""
        return self._keys[index - 1] if index else None

    def extend(self) -> Sequence[Key]:
        """Keys of all full chunks of the tokens known now, in order. Never raises for what the
        request holds: a chunk with an input that no key can stand for has no key, nor has any after
        it; while an input is still being found out, keys end before it and go on later."""
        size = self._chain.chunk_tokens
        tokens = self._request.all_token_ids
        turn = self._current_turn()
        if turn != self._turn or len(tokens) < len(self._keys) * size:
            self._keys = []
            self._cursor = 0
            self._refused = False
            self._turn = turn
        if self._refused:
            return self._keys
        try:
            for start in range(len(self._keys) * size, len(tokens) - size + 1, size):
                end = start + size
                inputs, self._cursor = self._chain.inputs_of(
                    self._request, start, end, self._cursor
                )
                parent = self._keys[-1] if self._keys else self._chain.namespace
                self._keys.append(chunk_key(parent, tokens[start:end], inputs))
        except InputsNotYet:
            pass
        except UnencodableError as refusal:
            self._refused = True
            self._chain.log_refusal(self._request, str(refusal))
        return self._keys

    def _current_turn(self) -> tuple[int, float]:
        return self._request.num_prompt_tokens, self._request.arrival_time
