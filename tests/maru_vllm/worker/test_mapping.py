from __future__ import annotations

import fcntl
from dataclasses import replace
from pathlib import Path

import pytest
from worker_cases import Store

from maru_shm.control.session_lock import SessionLockLost, create_session_lock
from maru_shm.pool.errors import NoSuchPool, PoolReplaced
from maru_shm.types import OwnerToken
from maru_vllm.metadata import PoolRef
from maru_vllm.worker.mapping import MappedPool, PoolMapping, map_and_populate


def is_held(lock_path: Path) -> bool:
    """Whether anybody proves this session's life."""
    with lock_path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_same_pool_is_mapped_once(store: Store) -> None:
    mapping = PoolMapping(store.map_pool)
    assert mapping.get(store.ref()) is mapping.get(store.ref())
    assert len(store.mapped) == 1


def test_no_pool_is_no_mapping(store: Store) -> None:
    assert PoolMapping(store.map_pool).get(None) is None


def test_a_pool_of_another_name_is_mapped_anew_and_the_old_one_stays_for_its_jobs(
    store: Store,
) -> None:
    mapping = PoolMapping(store.map_pool)
    old = mapping.get(store.ref())
    assert old is not None
    old.begin_job()
    new = mapping.get(replace(store.ref(), lock_path="another session"))
    assert new is not None
    assert new is not old
    assert old.objects.numel() == store.pool.geometry.pool_bytes
    old.end_job()
    assert not hasattr(old, "objects")
    assert new.objects.numel() == store.pool.geometry.pool_bytes


def test_a_pool_that_cannot_be_mapped_is_tried_again_after_a_while_and_logged_once(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    tries = 0

    def refuse(ref: PoolRef) -> MappedPool:
        nonlocal tries
        tries += 1
        raise PoolReplaced("it is another one")

    clock = Clock()
    mapping = PoolMapping(refuse, clock)
    for _ in range(3):
        assert mapping.get(store.ref()) is None
    assert tries == 1
    clock.now += 10
    assert mapping.get(store.ref()) is None
    assert tries == 2
    assert caplog.text.count("it is another one") == 1


def test_a_worker_joins_the_lock_of_its_session_and_keeps_it_for_its_jobs(store: Store) -> None:
    directory = Path(store.pool.path).parent
    session = create_session_lock(directory, OwnerToken(7))
    mapping = PoolMapping(map_and_populate)
    mapped = mapping.get(replace(store.ref(), lock_path=str(session.path)))
    assert mapped is not None
    session.close()
    assert is_held(session.path)
    mapped.begin_job()
    mapping.close()
    assert is_held(session.path)
    mapped.end_job()
    assert not is_held(session.path)


def test_without_its_session_or_its_pool_a_worker_maps_nothing(store: Store) -> None:
    directory = Path(store.pool.path).parent
    with pytest.raises(SessionLockLost):
        map_and_populate(replace(store.ref(), lock_path=str(directory / "gone.lock")))
    session = create_session_lock(directory, OwnerToken(8))
    ref = replace(store.ref(), lock_path=str(session.path))
    with pytest.raises(PoolReplaced):
        map_and_populate(replace(ref, uuid=bytes(16)))
    with pytest.raises(NoSuchPool):
        map_and_populate(replace(ref, path=str(directory / "no.pool")))
    session.close()
    assert not is_held(session.path)


def test_a_mapping_is_populated_behind_the_engines_back(store: Store) -> None:
    session = create_session_lock(Path(store.pool.path).parent, OwnerToken(9))
    mapping = PoolMapping()
    mapped = mapping.get(replace(store.ref(), lock_path=str(session.path)))
    assert mapped is not None
    assert mapped.pool.mapping.wait_populated(20.0)
    assert mapping.populated_bytes == store.pool.geometry.pool_bytes
    mapping.close()
    session.close()
