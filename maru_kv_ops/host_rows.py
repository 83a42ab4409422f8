"""Rows between host memories, through numpy.

numpy's ``take`` and ``put`` over a void type as wide as the row are one ``memmove`` per row in C,
with the interpreter lock given up, whatever the row's length and alignment. torch's operators are
slower here (its scatter by 2.1 to 2.5 x on bf16) and would run on the OpenMP threads that the
engine has bound to its cores.

Rows whose destination is not aligned to 64 bytes move at a third of the speed on EPYC 7003
(``rep movsb``). Slots in the pool and torch's allocations are aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from maru_kv_ops.plan import Run, TransferDirection
from maru_kv_ops.rows import RowCopy

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[Any]


def move_rows(
    copy: RowCopy, direction: TransferDirection, regions: Sequence[Bytes], objects: Bytes
) -> None:
    """Move one ``RowCopy``; both memories flat uint8, large enough (checked by the caller)."""
    cache_rows = _rows_of(regions[copy.region], copy.residue, copy.unit)
    object_end = copy.object_offset + copy.num_bytes
    object_rows = _rows_of(objects[:object_end], copy.object_offset, copy.unit)
    # mode="clip": with "raise" numpy stages the whole result in a copy of its own. The indices lie
    # inside the region: the plan checked the block ids and the executor the region's size.
    if direction is TransferDirection.D2H:
        np.take(cache_rows, copy.rows, out=object_rows, mode="clip")
    else:
        np.put(cache_rows, copy.rows, object_rows, mode="clip")


def move_run(
    run: Run, direction: TransferDirection, regions: Sequence[Bytes], objects: Bytes
) -> None:
    """Move one contiguous run."""
    cache = regions[run.region][run.cache_offset : run.cache_offset + run.width]
    stored = objects[run.object_offset : run.object_offset + run.width]
    if direction is TransferDirection.D2H:
        np.copyto(stored, cache)
    else:
        np.copyto(cache, stored)


def _rows_of(memory: Bytes, start: int, unit: int) -> Rows:
    count = (memory.size - start) // unit
    return memory[start : start + count * unit].view(np.dtype((np.void, unit)))
