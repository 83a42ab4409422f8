from __future__ import annotations

import hashlib
import os
import struct
import time
from pathlib import Path

import pytest
import xxhash

from maru_vllm import fingerprint as module
from maru_vllm.encoding import encode
from maru_vllm.fingerprint import DigestCache, FingerprintJob, WeightFile, WeightsSource

LONG_AGO_NS = time.time_ns() - 3600 * 10**9


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "cache")


@pytest.fixture
def everything_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files written a moment ago are kept in the cache, as if they were old."""
    monkeypatch.setattr(module, "_SETTLED_NS", -1)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(module, "_READ_BYTES", 300)


def source(root: Path, **facts: object) -> WeightsSource:
    files = sorted(path for path in root.iterdir() if path.is_file())
    return WeightsSource(tuple(WeightFile(path.name, path) for path in files), **facts)  # type: ignore[arg-type]


def made(of: WeightsSource, cache: DigestCache, threads: int = 2) -> bytes:
    job = FingerprintJob(of, cache=cache, threads=threads)
    fingerprint = job.wait(30)
    assert job.failure() is None
    assert fingerprint is not None
    return fingerprint


def model(root: Path, weights: bytes = b"w" * 3500) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "a.safetensors").write_bytes(weights)
    (root / "config.json").write_bytes(b"{}")
    return root


def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Offsets of all reads from now on."""
    offsets: list[int] = []
    preadv = os.preadv

    def recording(fd: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", recording)
    return offsets


@pytest.mark.usefixtures("small_pieces")
def test_the_fingerprint_is_the_one_of_the_document(tmp_path: Path, cache: DigestCache) -> None:
    weights = os.urandom(3500)
    root = model(tmp_path / "m", weights)

    def digest(content: bytes) -> bytes:
        pieces = [content[at : at + 1000] for at in range(0, len(content), 1000)]
        text = b"maru-file-digest" + struct.pack("<Q", len(content))
        return hashlib.sha256(text + b"".join(xxhash.xxh3_128_digest(p) for p in pieces)).digest()

    files = (("a.safetensors", 3500, digest(weights)), ("config.json", 2, digest(b"{}")))
    expected = hashlib.sha256(b"maru-weights-f-1" + encode((b"stated", files))).digest()
    assert made(source(root, stated=b"stated"), cache) == expected


@pytest.mark.usefixtures("small_pieces")
def test_equal_files_in_unlike_places_agree_with_any_number_of_threads(
    tmp_path: Path, cache: DigestCache
) -> None:
    one = source(model(tmp_path / "one"))
    other = source(model(tmp_path / "elsewhere" / "other"))
    assert len({made(one, cache, 1), made(other, cache, 1), made(other, cache, 4)}) == 1


@pytest.mark.usefixtures("small_pieces", "everything_is_settled")
@pytest.mark.parametrize("at", [0, 999, 1000, 2500, 3499])
def test_one_changed_byte_under_the_same_path_size_and_time_is_other_weights(
    tmp_path: Path, cache: DigestCache, at: int
) -> None:
    """B28: weights replaced, old KV served."""
    weights = bytearray(b"w" * 3500)
    root = model(tmp_path / "m", bytes(weights))
    before = made(source(root), cache)
    times = (root / "a.safetensors").stat()
    weights[at] ^= 1
    (root / "a.safetensors").write_bytes(weights)
    os.utime(root / "a.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (root / "a.safetensors").stat().st_mtime_ns == times.st_mtime_ns
    assert made(source(root), cache) != before


@pytest.mark.usefixtures("everything_is_settled")
def test_a_file_swapped_for_another_by_renaming_is_other_weights(
    tmp_path: Path, cache: DigestCache
) -> None:
    """B28, the way that downloads replace files."""
    root = model(tmp_path / "m")
    before = made(source(root), cache)
    model(tmp_path / "new", b"v" * 3500)
    os.replace(tmp_path / "new" / "a.safetensors", root / "a.safetensors")
    assert made(source(root), cache) != before


def test_names_and_what_is_stated_count(tmp_path: Path, cache: DigestCache) -> None:
    root = model(tmp_path / "m")
    plain = made(source(root), cache)
    assert made(source(root, stated=b"x"), cache) != plain
    (root / "a.safetensors").rename(root / "b.safetensors")
    assert made(source(root), cache) != plain


@pytest.mark.usefixtures("everything_is_settled")
def test_a_version_of_a_file_is_read_once(
    tmp_path: Path, cache: DigestCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = model(tmp_path / "m")
    offsets = reads(monkeypatch)
    first = made(source(root), cache)
    assert offsets
    offsets.clear()
    assert made(source(root), cache) == first
    assert not offsets


def test_a_file_that_changed_a_moment_ago_is_read_again(
    tmp_path: Path, cache: DigestCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next change may fall into the same tick of the file system's clock."""
    root = model(tmp_path / "m")
    made(source(root), cache)
    offsets = reads(monkeypatch)
    made(source(root), cache)
    assert offsets


@pytest.mark.usefixtures("everything_is_settled")
@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"format": 1}', "null"])
def test_a_damaged_cache_entry_is_one_that_is_not_there(
    tmp_path: Path, cache: DigestCache, damage: str
) -> None:
    root = model(tmp_path / "m")
    expected = made(source(root), cache)
    entries = list((tmp_path / "cache").glob("*.json"))
    assert len(entries) == 2
    for entry in entries:
        entry.write_text(damage)
    assert made(source(root), cache) == expected


@pytest.mark.usefixtures("everything_is_settled")
def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    root = model(tmp_path / "m")
    made(source(root), DigestCache(tmp_path / "file" / "below"))


def test_a_missing_file_is_a_failure_that_names_it(tmp_path: Path, cache: DigestCache) -> None:
    gone = WeightsSource((WeightFile("a", tmp_path / "gone.safetensors"),))
    job = FingerprintJob(gone, cache=cache)
    assert job.wait(30) is None
    assert "gone.safetensors" in str(job.failure())


def test_a_file_that_changed_since_the_engine_started_is_a_failure(
    tmp_path: Path, cache: DigestCache
) -> None:
    """The engine may have loaded what stood there before (B28)."""
    root = model(tmp_path / "m")
    job = FingerprintJob(source(root, loaded_since_ns=LONG_AGO_NS), cache=cache)
    assert job.wait(30) is None
    assert "changed while this engine was starting" in str(job.failure())
    made(source(root, loaded_since_ns=time.time_ns() + 10**9), cache)


@pytest.mark.usefixtures("small_pieces")
def test_a_file_that_changes_while_it_is_read_is_a_failure(
    tmp_path: Path, cache: DigestCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = model(tmp_path / "m")
    preadv = os.preadv

    def late_writer(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= 3000:
            with (root / "a.safetensors").open("r+b") as file:
                file.write(b"v")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", late_writer)
    job = FingerprintJob(source(root), cache=cache)
    assert job.wait(30) is None
    assert "changed while it was read" in str(job.failure())


@pytest.mark.usefixtures("small_pieces")
def test_a_cancelled_job_stops_reading(
    tmp_path: Path, cache: DigestCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = model(tmp_path / "m", b"w" * 100_000)
    preadv = os.preadv
    jobs: list[FingerprintJob] = []

    def cancelling(fd: int, buffers: list[memoryview], offset: int) -> int:
        while not jobs:
            time.sleep(0.001)
        jobs[0].cancel()
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", cancelling)
    jobs.append(FingerprintJob(source(root), cache=cache, threads=3))
    assert jobs[0].wait(30) is None
    assert jobs[0].failure() == "cancelled"
