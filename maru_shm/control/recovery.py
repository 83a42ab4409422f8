"""Opening a pool as its server: a new epoch, and the index rebuilt from the headers.

Everything sealed comes back. What an earlier incarnation had reserved is freed if its writer is
dead, and kept out of use while the writer lives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from maru_shm.control.messages import PoolInfo
from maru_shm.control.service import Clock, Service
from maru_shm.control.sessions import Owners
from maru_shm.index.effects import Effect
from maru_shm.index.index import Index
from maru_shm.pool.pool import Pool

log = logging.getLogger(__name__)

LEASE_TERM_S = 30.0
"""Default term of a lease: far longer than any load, short enough that a hung reader's objects
become evictable again within a minute."""


class ServedPool:
    """A pool as the service sees it; see ``service.Medium``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._info = PoolInfo(pool.path, pool.medium.name, pool.uuid, pool.geometry)

    def info(self) -> PoolInfo:
        """See ``Medium``."""
        return self._info

    def populated_bytes(self) -> int:
        """See ``Medium``."""
        return self._pool.mapping.populated_bytes

    def apply(self, effects: Sequence[Effect]) -> None:
        """See ``Medium``."""
        self._pool.apply(effects)


def recover(
    pool: Pool,
    owners: Owners,
    clock: Clock,
    *,
    lease_term_s: float = LEASE_TERM_S,
    policy: str = "lru",
) -> Service:
    """Begin a new epoch on ``pool`` and serve what is in it.

    The caller is the only server of this pool (``pool_lock``). Raises PoolError.
    """
    began = time.perf_counter()
    epoch = pool.begin_epoch()
    index = Index(pool.geometry, epoch, clock, lease_term_s=lease_term_s, policy=policy)
    pool.apply(index.restore(pool.scan(), lambda owner: not owners.reap(owner)))
    counts = index.counts()
    log.info(
        "pool %s, epoch %d: %d objects found, %d reservations kept for living writers (%.0f ms)",
        pool.path,
        epoch,
        counts.objects,
        counts.quarantined,
        1e3 * (time.perf_counter() - began),
    )
    return Service(index, ServedPool(pool), owners, clock, epoch=epoch, lease_term_s=lease_term_s)
