"""The oracle: which bytes every slot, block and object must hold.

The KV of a token is a function of all tokens up to it, of its rank, layer and head, and nothing
else. Every 8-byte word of a cache is different, so a byte in the wrong place, from the wrong
request or from the wrong moment shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

LAYERS = 2
HEADS = 2
WORDS = 2
"""8-byte words of one token in one head of one layer."""
BLOCK_SIZE = 4
CHUNK_TOKENS = 8
BLOCK_BYTES = LAYERS * HEADS * BLOCK_SIZE * WORDS * 8
PART_BYTES = BLOCK_BYTES * (CHUNK_TOKENS // BLOCK_SIZE)
"""Bytes of one rank's part of an object."""

_SEED = b"maru simulation!"


class WrongBytes(AssertionError):
    """Something holds other bytes than it must."""


class Oracle:
    """Pure; remembers what it has computed."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}

    def _code(self, before: int, token: int) -> int:
        known = self._next.get((before, token))
        if known is None:
            text = before.to_bytes(8, "little") + token.to_bytes(4, "little")
            digest = hashlib.blake2b(text, key=_SEED, digest_size=8).digest()
            known = self._next[before, token] = int.from_bytes(digest, "little")
        return known

    def codes(self, tokens: Sequence[int]) -> list[int]:
        """One number per token, of all tokens up to it."""
        codes: list[int] = []
        code = 0
        for token in tokens:
            code = self._code(code, token)
            codes.append(code)
        return codes

    def kv(self, tokens: Sequence[int], start: int, end: int, rank: int) -> Words:
        """``[layer, head, token, word]`` of the tokens ``[start, end)`` on one rank."""
        codes = np.array(self.codes(tokens[:end])[start:], dtype=np.uint64)
        first = rank * LAYERS * HEADS * WORDS
        place = np.arange(first, first + LAYERS * HEADS * WORDS, dtype=np.uint64)
        place *= np.uint64(0x9E3779B97F4A7C15)
        words = codes[:, None] + place[None, :]
        return words.reshape(-1, LAYERS, HEADS, WORDS).transpose(1, 2, 0, 3)

    def chunk(self, tokens: Sequence[int], chunk: int, num_ranks: int) -> bytes:
        """The payload of the object that holds chunk number ``chunk``: rank by rank, each
        ``[layer, block, page]``."""
        start = chunk * CHUNK_TOKENS
        parts: list[bytes] = []
        for rank in range(num_ranks):
            kv = self.kv(tokens, start, start + CHUNK_TOKENS, rank)
            pages = kv.reshape(LAYERS, HEADS, -1, BLOCK_SIZE, WORDS).transpose(0, 2, 1, 3, 4)
            parts.append(np.ascontiguousarray(pages).tobytes())
        return b"".join(parts)

    def sample(self, tokens: Sequence[int]) -> int:
        """The token that the model puts after ``tokens``."""
        return 3 + self.codes(tokens)[-1] % 61

    def continuation(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What a request with this prompt must answer."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(self.sample(tokens))
        return tokens[len(prompt) :]
