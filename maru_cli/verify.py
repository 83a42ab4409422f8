"""``maru verify``: compare every header and payload of a pool with its checksums."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from maru_cli.failures import ExitStatus
from maru_cli.looking import PoolPlace, running_pool
from maru_cli.options import JsonFlag, RuntimeDir, ServerUrl, output_format
from maru_cli.output import Screen, Unit, size_text
from maru_shm.pool import Verify, open_pool
from maru_shm.pool.mapping import Access
from maru_shm.pool.medium import medium_for
from maru_shm.pool.walk import DAMAGE, Finding, WalkVerdict, walk

MEANING = {
    WalkVerdict.OK: "whole, and as its checksums say",
    WalkVerdict.NO_CHECKSUM: "whole, stored without checksums",
    WalkVerdict.WRITING: "being written",
    WalkVerdict.CHANGED_WHILE_READ: "replaced while it was read",
    WalkVerdict.TORN_HEADER: "damaged header",
    WalkVerdict.TORN_SEGMENT: "damaged segment",
    WalkVerdict.BAD_CHECKSUM: "damaged payload",
}
DAMAGE_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged place."""

    offset: int
    """Bytes from the pool's start to the slot, or to the segment."""
    generation: int
    verdict: WalkVerdict
    key: str
    """Hex; empty where no header could be read."""


@dataclass(frozen=True, slots=True)
class Result:
    """The JSON object of ``maru verify``."""

    path: str
    uuid: str
    epoch: int
    objects: int
    """Slots in use."""
    payload_bytes: int
    verdicts: dict[str, int]
    damaged: int
    damage: tuple[Damage, ...]


def run(
    path: Annotated[
        Path | None, typer.Argument(help="The pool. Default: the one of the running server.")
    ] = None,
    level: Annotated[
        Verify, typer.Option("--level", help="How much of each payload is compared.")
    ] = Verify.FULL,
    server_url: ServerUrl = None,
    runtime_dir: RuntimeDir = None,
    json: JsonFlag = False,
) -> None:
    """Check every header and payload of a pool, live or dead; changes nothing.

    Exit status 1 when damage was found, 2 when there is no pool.
    """
    screen = Screen(output_format(json))
    place = running_pool(server_url, runtime_dir) if path is None else _named(path)
    result = check(place, level, screen)
    screen.say(
        f"{result.path}: {result.objects} objects, {size_text(result.payload_bytes)},"
        f" epoch {result.epoch}"
    )
    screen.table(
        "Objects",
        ("verdict", "count"),
        [
            (MEANING[verdict], str(result.verdicts[verdict.value]))
            for verdict in WalkVerdict
            if verdict.value in result.verdicts
        ],
    )
    if result.damage:
        screen.table(
            f"Damage (the first {len(result.damage[:DAMAGE_SHOWN])} of {result.damaged})",
            ("what", "offset", "generation", "key"),
            [
                (MEANING[d.verdict], str(d.offset), f"{d.generation:#x}", d.key[:16])
                for d in result.damage[:DAMAGE_SHOWN]
            ],
        )
        screen.say("A damaged object is never served: a load that finds it reports and misses it.")
    screen.result(result)
    if result.damaged:
        raise typer.Exit(ExitStatus.FAILED)


def check(place: PoolPlace, level: Verify, screen: Screen) -> Result:
    """Walk the pool. Raises NoSuchPool, NotAPool and the other errors of ``open_pool``."""
    pool = open_pool(place.path, place.medium, access=Access.READ)
    try:
        verdicts: Counter[str] = Counter()
        damage: list[Damage] = []
        payload_bytes = 0
        with screen.progress("verifying", Unit.BYTES) as on_progress:
            for finding in walk(pool, level, on_progress):
                verdicts[finding.verdict.value] += 1
                payload_bytes += finding.extent.length if finding.extent else 0
                if finding.verdict in DAMAGE:
                    damage.append(_damage(finding))
        return Result(
            path=pool.path,
            uuid=pool.uuid.hex(),
            epoch=pool.epoch,
            objects=verdicts.total(),
            payload_bytes=payload_bytes,
            verdicts=dict(verdicts),
            damaged=len(damage),
            damage=tuple(damage),
        )
    finally:
        pool.close()


def _damage(finding: Finding) -> Damage:
    key = finding.header.key.hex() if finding.header else ""
    return Damage(finding.offset, finding.generation, finding.verdict, key)


def _named(path: Path) -> PoolPlace:
    return PoolPlace(str(path), medium_for(str(path)))
