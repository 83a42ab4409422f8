"""Making, opening, changing and scanning a pool; what restarts and damage leave of it."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool_cases import NOMINAL_BYTES, OWNER, POOL_BYTES, SHAPE, reserve, seal, slot_offset, store

from maru_shm.index.effects import BindSegment, UnbindSegment, WriteFree, WriteReserved, WriteSealed
from maru_shm.index.found import FoundSegment
from maru_shm.pool import format as fmt
from maru_shm.pool import pool as pool_module
from maru_shm.pool.errors import (
    NoSuchPool,
    NotAPool,
    PoolError,
    PoolExists,
    PoolFormatError,
    PoolReplaced,
)
from maru_shm.pool.mapping import Access
from maru_shm.pool.pool import Pool, create_pool, open_pool, remove_pool
from maru_shm.pool.reading import Verdict, check, read
from maru_shm.types import Extent, Generation, Key, Namespace, PartChecksum, SlotShape


def reopened(pool: Pool) -> tuple[Pool, list[FoundSegment]]:
    """The pool as a server finds it that starts after this one was killed."""
    pool.close()
    again = open_pool(pool.path, pool.medium)
    again.begin_epoch()
    return again, list(again.scan())


def test_a_new_pool_is_empty_private_and_of_the_size_asked_for(shm_dir: Path) -> None:
    pool = create_pool(shm_dir / "a.pool", "tmpfs", POOL_BYTES, NOMINAL_BYTES)
    assert os.stat(pool.path).st_mode & 0o777 == 0o600
    assert os.stat(pool.path).st_size == pool.geometry.pool_bytes
    assert pool.geometry.num_segments * NOMINAL_BYTES == POOL_BYTES
    assert os.listdir(shm_dir) == ["a.pool"]
    assert pool.begin_epoch() == 1
    assert list(pool.scan()) == []
    pool.close()


def test_two_pools_never_have_the_same_uuid(shm_dir: Path) -> None:
    made = [create_pool(shm_dir / name, "tmpfs", POOL_BYTES) for name in ("a", "b")]
    assert made[0].uuid != made[1].uuid
    for pool in made:
        pool.close()


def test_what_exists_is_never_overwritten(pool: Pool, shm_dir: Path) -> None:
    with pytest.raises(PoolExists):
        create_pool(pool.path, "tmpfs", POOL_BYTES)
    (shm_dir / "letter").write_text("dear")
    with pytest.raises(PoolExists):
        create_pool(shm_dir / "letter", "tmpfs", POOL_BYTES)
    assert (shm_dir / "letter").read_text() == "dear"


def test_of_two_makers_at_once_one_wins_and_nothing_is_left_over(shm_dir: Path) -> None:
    path = shm_dir / "a.pool"
    real = pool_module._write_empty

    def other_first(*args: object) -> None:
        with patch.object(pool_module, "_write_empty", real):
            create_pool(path, "tmpfs", POOL_BYTES).close()
        real(*args)  # type: ignore[arg-type]

    with (
        patch.object(pool_module, "_write_empty", other_first),
        pytest.raises(PoolExists, match="same time"),
    ):
        create_pool(path, "tmpfs", POOL_BYTES)
    assert os.listdir(shm_dir) == ["a.pool"]
    open_pool(path, "tmpfs").close()


def test_b21_what_a_killed_maker_left_behind_is_swept_by_the_next(shm_dir: Path) -> None:
    leftover = shm_dir / ".a.pool.0123.new"
    leftover.write_bytes(bytes(5000))
    create_pool(shm_dir / "a.pool", "tmpfs", POOL_BYTES).close()
    assert os.listdir(shm_dir) == ["a.pool"]


def test_a_member_sees_what_the_server_publishes_and_the_server_what_it_wrote(pool: Pool) -> None:
    member = open_pool(pool.path, "tmpfs", expect_uuid=pool.uuid)
    extent = reserve(pool, slot=1, length=4096)
    assert check(member, extent) is Verdict.STALE
    member.payload(extent)[:] = b"m" * 4096
    member.write_back(extent)
    seal(pool, extent, bytes(pool.payload(extent)))
    assert read(member, extent) == b"m" * 4096
    member.close()


def test_only_a_server_may_change_a_pool(pool: Pool) -> None:
    member = open_pool(pool.path, "tmpfs")
    with pytest.raises(PoolError, match="only the server"):
        member.apply([UnbindSegment(0)])
    with pytest.raises(PoolError, match="only the server"):
        member.scan()
    member.close()


def test_a_read_only_mapping_cannot_be_written(pool: Pool) -> None:
    extent = store(pool, b"x" * 100)
    reader = open_pool(pool.path, "tmpfs", access=Access.READ)
    assert read(reader, extent) == b"x" * 100
    with pytest.raises(TypeError):
        reader.payload(extent)[0] = 1
    reader.close()


def test_b24_a_restarted_server_finds_sealed_and_reserved_objects(pool: Pool) -> None:
    sealed = [store(pool, bytes([slot]) * (100 + slot), slot) for slot in range(3)]
    writing = reserve(pool, slot=3, length=77)
    again, found = reopened(pool)
    assert again.epoch == 2
    assert [(f.segment, f.shape) for f in found] == [(0, SHAPE)]
    assert [o.generation for o in found[0].sealed] == [e.generation for e in sealed]
    assert [o.length for o in found[0].sealed] == [100, 101, 102]
    assert [o.parent for o in found[0].sealed] == [None, b"p" * 32, None]
    assert [o.key for o in found[0].sealed] == [i.to_bytes(32, "big") for i in range(3)]
    (reserved,) = found[0].writing
    assert (reserved.generation, reserved.owner) == (writing.generation, OWNER)
    assert reserved.slot_offset + SHAPE.payload_offset == writing.offset
    assert all(read(again, e) == bytes([i]) * (100 + i) for i, e in enumerate(sealed))
    again.close()


def test_a_freed_object_is_not_found_again_and_not_readable(pool: Pool) -> None:
    extent = store(pool, b"x" * 10)
    pool.apply([WriteFree(slot_offset(pool, 0))])
    assert check(pool, extent) is Verdict.STALE
    again, found = reopened(pool)
    assert found == [FoundSegment(0, SHAPE, (), ())]
    again.close()


def test_an_unbound_segment_is_not_found_and_its_headers_are_void(pool: Pool) -> None:
    extent = store(pool, b"x" * 10)
    pool.apply([UnbindSegment(0)])
    assert check(pool, extent) is Verdict.STALE
    again, found = reopened(pool)
    assert found == []
    again.close()


def test_headers_of_an_earlier_binding_never_come_back(pool: Pool) -> None:
    """Bound to one shape, to another, and back: an old header survives in a hole."""
    extent = store(pool, b"x" * 10, slot=2)
    large = SlotShape(slot_bytes=65536, payload_offset=4096)
    pool.apply([UnbindSegment(0), BindSegment(0, large), UnbindSegment(0), BindSegment(0, SHAPE)])
    assert pool.table.word(slot_offset(pool, 2)) != 0, "the hole is what this test is about"
    assert check(pool, extent) is not Verdict.OK
    again, found = reopened(pool)
    assert found == [FoundSegment(0, SHAPE, (), ())]
    again.close()


def test_every_epoch_is_greater_than_all_before_whichever_copy_is_torn(shm_dir: Path) -> None:
    create_pool(shm_dir / "a.pool", "tmpfs", POOL_BYTES).close()
    last = 0
    for round_number in range(8):
        pool = open_pool(shm_dir / "a.pool", "tmpfs")
        epoch = pool.begin_epoch()
        assert epoch > last
        last = epoch
        torn = fmt.SUPERBLOCK_OFFSETS[round_number % 2]
        pool.mapping.buffer[torn + 60] ^= 0xFF
        pool.close()


def test_a_pool_out_of_epochs_says_so(pool: Pool) -> None:
    block = fmt.Superblock(pool.uuid, pool.geometry, fmt.MAX_EPOCH, bytes(16))
    for offset in fmt.SUPERBLOCK_OFFSETS:
        pool.mapping.buffer[offset : offset + fmt.SUPERBLOCK_BYTES] = fmt.pack_superblock(block)
    pool.close()
    again = open_pool(pool.path, "tmpfs")
    with pytest.raises(PoolError, match="make a new pool"):
        again.begin_epoch()
    again.close()


def test_after_a_reboot_a_pool_on_a_disk_is_empty_and_usable(pool: Pool) -> None:
    extent = store(pool, b"x" * 10)
    pool.close()
    with patch.object(pool_module, "_boot_id", lambda medium: b"another boot 1234"[:16]):
        again = open_pool(pool.path, "tmpfs")
        again.begin_epoch()
        assert check(again, extent) is Verdict.STALE
        assert list(again.scan()) == []
        again.apply([BindSegment(0, SHAPE)])
        assert read(again, store(again, b"y" * 5)) == b"y" * 5
        again.close()


def test_b21_garbage_missing_truncated_and_other_versions_are_told_apart(
    pool: Pool, shm_dir: Path
) -> None:
    with pytest.raises(NoSuchPool):
        open_pool(shm_dir / "none", "tmpfs")
    with pytest.raises(NoSuchPool):
        open_pool(Path(pool.path) / "below-a-file", "tmpfs")
    for content in (b"", b"short", os.urandom(100_000)):
        (shm_dir / "garbage").write_bytes(content)
        with pytest.raises(NotAPool):
            open_pool(shm_dir / "garbage", "tmpfs")
    with pytest.raises(PoolReplaced, match="ask the server"):
        open_pool(pool.path, "tmpfs", expect_uuid=bytes(16))
    pool.close()
    os.truncate(pool.path, pool.geometry.pool_bytes - 1)
    with pytest.raises(PoolFormatError, match="truncated"):
        open_pool(pool.path, "tmpfs")
    remove_pool(pool.path, "tmpfs")
    assert not os.path.exists(pool.path)
    remove_pool(pool.path, "tmpfs")


@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_pool_damaged_anywhere_in_its_head_opens_or_raises_a_typed_error(
    shm_dir: Path, data: st.DataObject
) -> None:
    path = shm_dir / "damaged.pool"
    remove_pool(path, "tmpfs")
    pool = create_pool(path, "tmpfs", POOL_BYTES, NOMINAL_BYTES)
    pool.begin_epoch()
    list(pool.scan())
    pool.apply([BindSegment(0, SHAPE)])
    payload = data.draw(st.binary(min_size=1, max_size=64))
    extents = [store(pool, payload, slot) for slot in range(4)]
    pool.close()
    raw = bytearray(path.read_bytes())
    regions = [range(0, 100), range(4096, 4200), range(8192, 8224)]
    regions += [range(slot_offset(pool, i), slot_offset(pool, i) + 144) for i in range(4)]
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.sampled_from(data.draw(st.sampled_from(regions))))
        junk = data.draw(st.binary(min_size=1, max_size=40))
        raw[at : at + len(junk)] = junk
    path.write_bytes(bytes(raw))
    try:
        again = open_pool(path, "tmpfs")
    except (PoolFormatError, NotAPool):
        return
    again.begin_epoch()
    for segment in again.scan():
        assert segment.shape == SHAPE
        assert segment.writing == ()
        for found in segment.sealed:
            at = [i for i in range(4) if slot_offset(pool, i) == found.slot_offset]
            extent = extents[at[0]]
            assert (found.generation, found.length) == (extent.generation, extent.length)
            assert read(again, extent) == payload
    again.apply([BindSegment(1, SHAPE)])
    again.close()


def test_torn_headers_are_cleared_so_that_their_space_is_free(pool: Pool) -> None:
    store(pool, b"x" * 10, slot=0)
    kept = store(pool, b"y" * 10, slot=1)
    pool.mapping.buffer[slot_offset(pool, 0) + 40] ^= 1
    again, found = reopened(pool)
    assert [o.generation for o in found[0].sealed] == [kept.generation]
    assert again.table.word(slot_offset(pool, 0)) == 0
    again.close()


def test_a_header_of_an_epoch_that_never_was_is_cleared(pool: Pool) -> None:
    reserve(pool, slot=0, counter=9 << 40 | 1)
    again, found = reopened(pool)
    assert found == [FoundSegment(0, SHAPE, (), ())]
    again.close()


def test_a_header_damaged_before_its_seal_is_not_blessed(pool: Pool) -> None:
    extent = reserve(pool, slot=0, length=10)
    pool.mapping.buffer[slot_offset(pool, 0) + 70] ^= 1
    pool.apply([WriteSealed(slot_offset(pool, 0), extent.generation, ())])
    assert check(pool, extent) is Verdict.TORN


def test_a_server_killed_between_any_two_stores_leaves_no_wrong_object(shm_dir: Path) -> None:
    """Stops after every single store of reserve, seal and free, then restarts."""

    class Killed(Exception):
        pass

    for survive in range(40):
        path = shm_dir / f"{survive}.pool"
        pool = create_pool(path, "tmpfs", POOL_BYTES, NOMINAL_BYTES)
        pool.begin_epoch()
        list(pool.scan())
        left = survive

        class Counting:
            def write_back(self, buffer: memoryview, offset: int, length: int) -> None:
                nonlocal left
                if left == 0:
                    raise Killed
                left -= 1

            def invalidate(self, buffer: memoryview, offset: int, length: int) -> None: ...
            def fence(self) -> None: ...

        pool._server()._lines = Counting()
        Extent(0, 0, Generation(1))
        try:
            pool.apply([BindSegment(0, SHAPE)])
            store(pool, b"x" * 10)
            pool.apply([WriteFree(slot_offset(pool, 0))])
            survived_all = True
        except Killed:
            survived_all = False
        again, found = reopened(pool)
        objects = [o for f in found for o in (*f.sealed, *f.writing)]
        assert len(objects) <= 1
        for f in found:
            for o in f.sealed:
                payload_at = o.slot_offset + SHAPE.payload_offset
                assert read(again, Extent(payload_at, o.length, o.generation)) == b"x" * 10
        again.close()
        remove_pool(path, "tmpfs")
        if survived_all:
            assert objects == []
            break
    assert 8 < survive < 39


@pytest.mark.parametrize(
    "effect",
    [
        WriteFree(12345),
        WriteFree(-4096),
        WriteFree(1 << 50),
        BindSegment(99, SHAPE),
        BindSegment(-1, SHAPE),
        UnbindSegment(16),
        BindSegment(1, SlotShape(1 << 30, 4096)),
        BindSegment(1, SlotShape(8192, 8192)),
        BindSegment(1, SlotShape(8190, 4096)),
    ],
)
def test_effects_that_no_sound_index_asks_for_are_refused(pool: Pool, effect: object) -> None:
    before = bytes(pool.mapping.buffer)
    with pytest.raises(PoolError):
        pool.apply([effect])  # type: ignore[list-item]
    assert bytes(pool.mapping.buffer) == before


def test_objects_that_do_not_fit_their_slot_are_refused(pool: Pool) -> None:
    with pytest.raises(PoolError, match="capacity of 4096"):
        reserve(pool, slot=0, length=4097)
    extent = reserve(pool, slot=0, length=10)
    parts = (PartChecksum(1, 2),) * 249
    with pytest.raises(PoolError, match="249 parts"):
        pool.apply([WriteSealed(slot_offset(pool, 0), extent.generation, parts)])
    offset = slot_offset(pool, 1)
    name, key, generation = Namespace(b"n" * 32), Key(b"k" * 32), Generation(1)
    with pytest.raises(PoolError, match="has its payload at"):
        pool.apply([WriteReserved(offset, offset + 256, generation, name, key, None, 1, OWNER)])


def test_a_payload_outside_the_segments_is_refused(pool: Pool) -> None:
    end = pool.geometry.first_segment_offset + pool.geometry.segment_bytes
    for offset, length in [(0, 10), (end - 5, 10), (pool.geometry.pool_bytes, 1), (end, -1)]:
        with pytest.raises(PoolError, match="do not lie in one"):
            pool.payload(Extent(offset, length, Generation(1)))
    assert len(pool.payload(Extent(end - 5, 5, Generation(1)))) == 5
