"""The walk of ``maru verify`` over dead pools, live pools and damaged ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool_cases import SHAPE, reserve, slot_offset, store

from maru_shm.index.effects import BindSegment, WriteFree, WriteSealed
from maru_shm.pool import format as fmt
from maru_shm.pool import walk as walk_module
from maru_shm.pool.mapping import Access
from maru_shm.pool.pool import Pool, open_pool
from maru_shm.pool.reading import Verdict, Verify
from maru_shm.pool.walk import DAMAGE, Finding, WalkVerdict, walk
from maru_shm.types import Extent


@pytest.fixture
def reader(pool: Pool) -> Iterator[Pool]:
    opened = open_pool(pool.path, "tmpfs", access=Access.READ)
    yield opened
    opened.close()


def verdicts(findings: list[Finding]) -> list[WalkVerdict]:
    return [finding.verdict for finding in findings]


def test_an_empty_pool_has_no_findings_and_full_progress(reader: Pool) -> None:
    seen: list[tuple[int, int]] = []
    assert list(walk(reader, on_progress=lambda done, total: seen.append((done, total)))) == []
    assert (
        seen[-1][0] == seen[-1][1] == reader.geometry.num_segments * (reader.geometry.segment_bytes)
    )
    assert seen == sorted(seen)


def test_whole_objects_are_ok_with_their_extents(pool: Pool, reader: Pool) -> None:
    extents = [store(pool, bytes([slot]) * 2000, slot, num_parts=2) for slot in range(3)]
    findings = list(walk(reader))
    assert verdicts(findings) == [WalkVerdict.OK] * 3
    assert [finding.extent for finding in findings] == extents
    assert [finding.offset for finding in findings] == [slot_offset(pool, i) for i in range(3)]


def test_every_kind_of_damage_is_told_apart(pool: Pool, reader: Pool) -> None:
    flipped, torn = store(pool, b"f" * 2000, 0), store(pool, b"t" * 2000, 1)
    reserve(pool, 2)
    unsummed = reserve(pool, 3, length=100)
    pool.apply([WriteSealed(slot_offset(pool, 3), unsummed.generation, ())])
    store(pool, b"o" * 2000, 4)
    pool.apply([BindSegment(1, SHAPE)])
    pool.mapping.buffer[flipped.offset + 999] ^= 1
    pool.mapping.buffer[slot_offset(pool, 1) + 50] ^= 1
    pool.mapping.buffer[fmt.entry_offset(1) + 9] ^= 1
    findings = list(walk(reader))
    assert verdicts(findings) == [
        WalkVerdict.BAD_CHECKSUM,
        WalkVerdict.TORN_HEADER,
        WalkVerdict.WRITING,
        WalkVerdict.NO_CHECKSUM,
        WalkVerdict.OK,
        WalkVerdict.TORN_SEGMENT,
    ]
    assert findings[0].generation == flipped.generation
    assert findings[1].extent is None
    assert torn.offset - SHAPE.payload_offset == findings[1].offset
    assert {f.verdict for f in findings if f.verdict in DAMAGE} == set(DAMAGE)
    by_header = verdicts(list(walk(reader, Verify.HEADER)))
    assert by_header[0] is WalkVerdict.OK
    assert by_header[3] is WalkVerdict.OK


def test_an_object_evicted_under_the_walk_is_not_called_damaged(
    pool: Pool, reader: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(pool, b"x" * 2000)
    real = walk_module.begin_read

    def then_evicted(reader: Pool, extent: Extent) -> Verdict:
        verdict = real(reader, extent)
        pool.payload(extent)[:] = b"y" * 2000
        pool.apply([WriteFree(slot_offset(pool, 0))])
        return verdict

    monkeypatch.setattr(walk_module, "begin_read", then_evicted)
    assert verdicts(list(walk(reader))) == [WalkVerdict.CHANGED_WHILE_READ]


def test_a_walk_changes_nothing(pool: Pool, reader: Pool) -> None:
    store(pool, b"x" * 2000)
    pool.mapping.buffer[slot_offset(pool, 1)] = 7
    before = bytes(pool.mapping.buffer)
    assert verdicts(list(walk(reader))) == [WalkVerdict.OK, WalkVerdict.TORN_HEADER]
    assert bytes(pool.mapping.buffer) == before
