"""From which run length on the copy engine is faster than the kernel, measured per device.

A copy engine moves long runs at full speed and leaves the multiprocessors to decoding; each run
costs it a fixed time, so that many small ones are faster by a kernel. Where the two cross differs
between devices and links, so the table is measured on the device, once, and kept:

    $XDG_CACHE_HOME/maru/placement/<device and driver>.json    (default ~/.cache)
    {"device": "NVIDIA H200, driver 580.65", "loads": [{"run_bytes": 1, "kernel_from_runs": 16},
     {"run_bytes": 28672, "kernel_from_runs": null}], "stores": […]}

A row counts for runs of ``run_bytes`` and longer, up to the next row: with ``kernel_from_runs``
runs or more the kernel is chosen, with fewer, or null, the copy engine. MARU_PLACEMENT_TABLE names
a file of this form that is used instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dacite

from maru_kv_ops.executors import CopyPath
from maru_kv_ops.plan import TransferDirection
from maru_vllm.cache_directory import cache_directory

OVERRIDE = "MARU_PLACEMENT_TABLE"

RUN_BYTES = (2 << 10, 8 << 10, 32 << 10, 128 << 10, 512 << 10)
"""Run lengths that a calibration measures: a token's head, a page of one layer, of all layers."""
RUNS = (4, 16, 64, 256, 1024)
MAX_BYTES = 64 << 20
"""Longest copy of a calibration, so that its memory and its time stay small."""

Measure = Callable[[CopyPath, TransferDirection, int, int], float]
"""Seconds of one copy: path, direction, bytes of a run, runs."""


class TableError(ValueError):
    """A table's file cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class PlacementRow:
    """For runs of this length and longer, up to the next row."""

    run_bytes: int
    kernel_from_runs: int | None


@dataclass(frozen=True, slots=True)
class PlacementTable:
    """Rows by rising run length, for each direction."""

    device: str
    loads: tuple[PlacementRow, ...]
    stores: tuple[PlacementRow, ...]

    def choose(self, direction: TransferDirection, run_bytes: int, runs: int) -> CopyPath:
        """The faster path for a plan of ``runs`` runs of ``run_bytes`` on average."""
        rows = self.loads if direction is TransferDirection.H2D else self.stores
        fitting = [row for row in rows if row.run_bytes <= run_bytes] or rows[:1]
        least = fitting[-1].kernel_from_runs
        return CopyPath.KERNEL if least is not None and runs >= least else CopyPath.COPY_ENGINE


def default_table() -> PlacementTable:
    """What is used until a device was measured: 28 KiB and 16 runs, measured by others on H100."""
    rows = (PlacementRow(1, 16), PlacementRow(28 << 10, None))
    return PlacementTable("default", rows, rows)


def calibrate(
    device: str, measure: Measure, clock: Callable[[], float], budget_s: float
) -> PlacementTable:
    """Measure both paths over run lengths and counts, until ``budget_s`` is spent.

    What was not reached keeps the default's rows. ``measure`` may raise; then nothing is known.
    """
    end = clock() + budget_s
    default = default_table()
    rows: dict[TransferDirection, tuple[PlacementRow, ...]] = {}
    for direction in TransferDirection:
        found: list[PlacementRow] = []
        for run_bytes in RUN_BYTES:
            if clock() >= end:
                break
            counts = [runs for runs in RUNS if runs * run_bytes <= MAX_BYTES]
            wins = [_kernel_wins(measure, direction, run_bytes, runs) for runs in counts]
            # The kernel must win from a count on, not at one of them by chance.
            lost = max((i for i, won in enumerate(wins) if not won), default=-1)
            least = counts[lost + 1] if lost + 1 < len(counts) else None
            found.append(PlacementRow(run_bytes, least))
        whole = default.loads if direction is TransferDirection.H2D else default.stores
        rows[direction] = tuple(found) if len(found) == len(RUN_BYTES) else whole
    return PlacementTable(device, rows[TransferDirection.H2D], rows[TransferDirection.D2H])


def _kernel_wins(measure: Measure, direction: TransferDirection, run_bytes: int, runs: int) -> bool:
    kernel = measure(CopyPath.KERNEL, direction, run_bytes, runs)
    return kernel < measure(CopyPath.COPY_ENGINE, direction, run_bytes, runs)


# ---------------------------------------------------------------------------- files


def table_path(device: str) -> Path:
    """Where the table of a device is kept."""
    return cache_directory() / "placement" / (re.sub(r"[^A-Za-z0-9.]+", "-", device) + ".json")


def overridden(environ: Mapping[str, str] = os.environ) -> PlacementTable | None:
    """The table that MARU_PLACEMENT_TABLE names. Raises ``TableError``: at start-up only."""
    path = environ.get(OVERRIDE)
    return None if not path else read_table(Path(path))


def kept_tables() -> list[PlacementTable]:
    """Every table that was measured and kept here; those that cannot be read are passed over."""
    tables = []
    for path in sorted(table_path("any").parent.glob("*.json")):
        with contextlib.suppress(TableError):
            tables.append(read_table(path))
    return tables


def read_table(path: Path) -> PlacementTable:
    """Read and check a table. Raises ``TableError``."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        table = dacite.from_dict(PlacementTable, found, dacite.Config(cast=[tuple], strict=True))
    except (OSError, ValueError, TypeError, AttributeError, dacite.DaciteError) as error:
        raise TableError(
            f"placement table {path}: {error}. Correct it, or unset {OVERRIDE}"
        ) from error
    for name, rows in (("loads", table.loads), ("stores", table.stores)):
        _check_rows(path, name, rows)
    return table


def _check_rows(path: Path, name: str, rows: Sequence[PlacementRow]) -> None:
    lengths = [row.run_bytes for row in rows]
    counts = [row.kernel_from_runs for row in rows if row.kernel_from_runs is not None]
    rising = lengths == sorted(set(lengths))
    if not rows or not rising or min(lengths) < 1 or min(counts, default=1) < 1:
        raise TableError(
            f"placement table {path}: {name} must be rows by rising run_bytes of 1 or more, with "
            f"kernel_from_runs of 1 or more or null; found {lengths} and {counts}. Correct it, or "
            f"unset {OVERRIDE}"
        )


def write_table(table: PlacementTable, path: Path) -> None:
    """Keep a table, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(asdict(table), indent=2) + "\n", encoding="utf-8")
    draft.replace(path)
