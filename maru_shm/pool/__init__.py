"""The bytes of the store: media, on-media format, mapping, cache-line flushes.

    format, geometry      pure: what the bytes mean, and where they lie
    medium, filesystem    where they live; reserving: real blocks before the first store
    mapping, flush        how a process sees them
    slots                 reading table entries and headers
    pool, writer          one pool; the server's hand on it
    reading, walk         checked reads; the walk of ``maru verify``

Everyone maps the pool; the server alone writes what is not payload. See docs/format.md.
"""

from maru_shm.pool.pool import Pool, create_pool, open_pool, remove_pool
from maru_shm.pool.reading import Verdict, Verify

__all__ = ["Pool", "Verdict", "Verify", "create_pool", "open_pool", "remove_pool"]
