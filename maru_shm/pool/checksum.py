"""Checksums of an object's parts: xxh3-64 with seed 0, over all bytes or over a sample.

The sample reads about 1/64 of a part, so that a load can be checked at little cost. It finds
what faults of memory sharing look like (a copy that never ran, another object's bytes, a page of
zeros), not a single flipped byte; the full checksum finds that.

Sampled bytes of a part of ``n`` bytes: all of it if ``n <= SAMPLE_ALL_BYTES``; else ``count =
max(16, n // 256 KiB)`` stripes of 4 KiB, the last one ending at ``n`` and
stripe ``i`` before it starting at ``i * (n - 4096) // (count - 1)`` rounded down to a multiple of
64, so that the first and the last bytes are always among them. The
digest covers the stripes in ascending order, followed by ``n`` as 8 little-endian bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from xxhash import xxh3_64, xxh3_64_intdigest

from maru_shm.types import PartChecksum

STRIPE_BYTES = 4096
"""One page: what a lost or stale mapping would show."""
SAMPLE_ALL_BYTES = 16 * STRIPE_BYTES
"""Up to here the sample is the whole part: 16 stripes would cover it anyway."""
_BYTES_PER_STRIPE = 256 * 1024
_MIN_STRIPES = 16


def part_range(length: int, num_parts: int, part: int) -> tuple[int, int]:
    """First and one-past-last payload byte of ``part`` (see ``CommitItem.parts``)."""
    return part * length // num_parts, (part + 1) * length // num_parts


def sampled_ranges(length: int) -> Iterator[tuple[int, int]]:
    """The half-open byte ranges that the sample checksum of ``length`` bytes reads."""
    if length <= SAMPLE_ALL_BYTES:
        yield 0, length
        return
    count = max(_MIN_STRIPES, length // _BYTES_PER_STRIPE)
    last = length - STRIPE_BYTES
    for i in range(count - 1):
        start = i * last // (count - 1) // 64 * 64
        yield start, start + STRIPE_BYTES
    yield last, length


def full_checksum(data: memoryview) -> int:
    """xxh3-64 over all of ``data`` (contiguous bytes)."""
    return xxh3_64_intdigest(data)


def sample_checksum(data: memoryview) -> int:
    """xxh3-64 over the sampled stripes of ``data`` (contiguous bytes) and its length."""
    digest = xxh3_64()
    for start, end in sampled_ranges(len(data)):
        digest.update(data[start:end])
    digest.update(len(data).to_bytes(8, "little"))
    return digest.intdigest()


def part_checksum(data: memoryview) -> PartChecksum:
    """Both checksums of one part (contiguous bytes, format ``B``)."""
    return PartChecksum(full=full_checksum(data), sample=sample_checksum(data))
