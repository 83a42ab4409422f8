"""Sizes that the scheduler half reckons with: tokens, blocks and bytes of one chunk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """One chunk of the (only) KV cache group, the same for every request."""

    chunk_tokens: int
    """Tokens of one object; a multiple of ``block_size``."""
    block_size: int
    """Tokens of one manager block."""
    object_bytes: int
    """Payload bytes of one object, all parts together."""
    num_parts: int
    """Parts of one object, equal in size: one per rank, one in all where ranks hold the same KV."""
    num_ranks: int
    """Worker processes; each reports every job once, also one that had no bytes to copy."""

    def __post_init__(self) -> None:
        if self.block_size <= 0 or self.chunk_tokens % self.block_size or self.chunk_tokens <= 0:
            raise ValueError(
                f"a chunk of {self.chunk_tokens} tokens is not a whole number of blocks of "
                f"{self.block_size} tokens; set maru_kv_chunk_tokens to a multiple of it"
            )
        if self.num_parts <= 0 or self.num_ranks < self.num_parts:
            raise ValueError(f"{self.num_parts} parts cannot come from {self.num_ranks} ranks")
        if self.object_bytes <= 0 or self.object_bytes % self.num_parts:
            raise ValueError(
                f"an object of {self.object_bytes} bytes does not divide into "
                f"{self.num_parts} equal parts"
            )

    @property
    def blocks_per_chunk(self) -> int:
        """Manager blocks of one chunk."""
        return self.chunk_tokens // self.block_size

    def full_chunks(self, num_tokens: int) -> int:
        """How many chunks are full after ``num_tokens`` tokens."""
        return num_tokens // self.chunk_tokens
