"""A plan's runs as indexed rows: the form that array libraries copy fastest.

Gathering is ``object_rows = cache_rows[index]`` and scattering is ``cache_rows[index] =
object_rows``, in one library call for hundreds of pages. For that the runs of a plan that lie in
one region are cut into rows of one length (``unit``), such that every row starts at a multiple of
the unit (plus one ``residue``) on the cache's side and the rows of one ``RowCopy`` follow each
other without a gap on the object's side.

Few long calls matter beyond the calls' own cost: each of them gives the interpreter lock up once
and takes it back once, and on a busy engine that can cost up to the switch interval (5 ms).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from maru_kv_ops.plan import Run, StridedCopy

Int64Array = npt.NDArray[np.int64]

MIN_JOINED_UNIT = 1024
"""Copies of unlike widths become rows of one unit only if it keeps this many bytes. Measured on
EPYC 7003 with numpy 2.3: rows of 2 KiB reach half of memcpy's rate, rows of 16 KiB 95 %. Measure
again with ``maru bench copy`` on another kind of machine."""

MAX_ROWS_PER_RUN = 64
"""Runs that would be cut finer than this, because their strides share little with their width, are
copied one by one: at 10 ns per row and 0.6 us per call, a call for each is cheaper then."""


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Rows of one length: scattered in one cache region, contiguous in the object."""

    region: int
    unit: int
    """Bytes of one row."""
    residue: int
    """Row ``r`` of the cache starts ``residue + r * unit`` bytes into the region."""
    rows: Int64Array
    """Cache row for each object row, shape ``[n]``."""
    object_offset: int
    """Bytes from the object memory's start to the first object row."""

    @property
    def num_bytes(self) -> int:
        """Bytes that move."""
        return self.unit * int(self.rows.size)

    def part(self, first: int, last: int) -> RowCopy:
        """Return rows ``[first, last)`` as a copy of their own."""
        return RowCopy(
            region=self.region,
            unit=self.unit,
            residue=self.residue,
            rows=self.rows[first:last],
            object_offset=self.object_offset + first * self.unit,
        )


def rows_and_runs(copies: Sequence[StridedCopy]) -> tuple[list[RowCopy], list[Run]]:
    """Turn a plan's copies into rows, and into single runs where rows would be too fine."""
    row_copies: list[RowCopy] = []
    single_runs: list[Run] = []
    for group, unit in _joinable(copies):
        too_fine = unit < MIN_JOINED_UNIT and group[0].width > MAX_ROWS_PER_RUN * unit
        if too_fine:
            for copy in group:
                single_runs.extend(copy.runs())
        else:
            row_copies.extend(_as_rows(group, unit))
    return row_copies, single_runs


def _joinable(copies: Sequence[StridedCopy]) -> Iterator[tuple[list[StridedCopy], int]]:
    """Yield neighbouring copies of one region that are multiples of a common unit, and the unit."""
    group: list[StridedCopy] = []
    unit = 0
    for copy in copies:
        own = _unit(copy)
        if group and copy.region == group[0].region:
            joined = math.gcd(unit, own, copy.cache_starts[0] - group[0].cache_starts[0])
            if joined >= MIN_JOINED_UNIT or joined == unit == own:
                group.append(copy)
                unit = joined
                continue
        if group:
            yield group, unit
        group, unit = [copy], own
    if group:
        yield group, unit


def _unit(copy: StridedCopy) -> int:
    first = copy.cache_starts[0]
    return math.gcd(
        copy.width,
        *(repeat.cache_stride for repeat in copy.repeats),
        *(start - first for start in copy.cache_starts),
    )


def _as_rows(group: Sequence[StridedCopy], unit: int) -> Iterator[RowCopy]:
    residue = group[0].cache_starts[0] % unit
    pieces = [_offsets(copy, unit) for copy in group]
    cache, objects = pieces[0]
    if len(pieces) > 1:
        cache = np.concatenate([piece[0] for piece in pieces])
        objects = np.concatenate([piece[1] for piece in pieces])
    gaps = objects[1:] - objects[:-1]
    if (gaps < 0).any():
        order = objects.argsort()
        cache, objects = cache[order], objects[order]
        gaps = objects[1:] - objects[:-1]
    rows = (cache - residue) // unit
    bounds = [0, *((gaps != unit).nonzero()[0] + 1).tolist(), int(rows.size)]
    for first, last in pairwise(bounds):
        yield RowCopy(
            region=group[0].region,
            unit=unit,
            residue=residue,
            rows=rows[first:last],
            object_offset=int(objects[first]),
        )


def _offsets(copy: StridedCopy, unit: int) -> tuple[Int64Array, Int64Array]:
    """Offsets of every row of ``copy`` on both sides, each of shape ``[rows]``."""
    cache = np.array(copy.cache_starts, dtype=np.int64)
    objects = np.array(copy.object_starts, dtype=np.int64)
    if copy.width > unit:
        inside = np.arange(0, copy.width, unit, dtype=np.int64)
        cache = (cache[:, None] + inside).reshape(-1)
        objects = (objects[:, None] + inside).reshape(-1)
    for repeat in reversed(copy.repeats):
        steps = np.arange(repeat.count, dtype=np.int64)[:, None]
        cache = (steps * repeat.cache_stride + cache).reshape(-1)
        objects = (steps * repeat.object_stride + objects).reshape(-1)
    return cache, objects
