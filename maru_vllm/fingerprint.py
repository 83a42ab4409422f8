"""Fingerprint of a model's weights: a digest over the contents of its files.

Every byte of every file counts, so a change of one small tensor is a change of the fingerprint;
paths and times do not count, so hosts with equal files in unlike places agree. Reading it all is
slow for large models. Therefore it happens once per version of a file (digests are kept in the
user's cache directory, beside the file's size, times and inode) and behind the engine's back, in
threads of low priority: until ``FingerprintJob.poll`` has an answer, the engine only misses.

    piece digest  = XXH3-128 of at most 64 MiB of a file
    file digest   = SHA-256( "maru-file-digest" | u64 size | piece digests in order )
    fingerprint   = SHA-256( "maru-weights-f-1" | encode( (stated, ((name, size, digest), ...)) ) )

with the files in the order of their names. XXH3 finds accidents, not attacks: whoever can write
the model's files is trusted. Its pieces are independent, so that threads share a large file.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import xxhash

from maru_vllm.cache_directory import cache_directory
from maru_vllm.encoding import encode

logger = logging.getLogger(__name__)

WEIGHTS_FORMAT: Final = b"maru-weights-f-1"
"""Domain and version of the fingerprint; 16 bytes. Also names the version of cached digests."""
_FILE_DOMAIN: Final = b"maru-file-digest"

PIECE_BYTES: Final = 64 << 20
"""Part of the file digest's definition: changing it changes every fingerprint."""
_READ_BYTES: Final = 4 << 20
"""Large enough that the interpreter lock is given up during a read and its hash; small enough
that ``cancel`` is noticed within milliseconds."""
_SETTLED_NS: Final = 2_000_000_000
"""A file that changed less than this ago may change again with the same time stamp (file systems
count in jiffies, some in seconds); its digest is not kept."""
_NICENESS: Final = 10


class FingerprintError(Exception):
    """The weights have no fingerprint: a file is missing, unreadable, or changed meanwhile."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file that makes the model what it is."""

    name: str
    """Relative to the model, with ``/``; counts in the fingerprint."""
    path: Path
    """Where it lies on this host; does not count."""


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """All that a fingerprint is made of."""

    files: tuple[WeightFile, ...]
    stated: bytes = b""
    """What stands in for files: an encoding of the rule that makes dummy weights, or of the
    operator's word. Empty where files say it all."""
    loaded_since_ns: int | None = None
    """Wall clock, ns since 1970. The engine read the files at some time after this; a file that
    changed later may not be what the engine has, and there is no fingerprint. None: not known."""


@dataclass(frozen=True, slots=True)
class _Version:
    """Tells one version of a file from the next without reading it."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path) -> _Version:
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)


class DigestCache:
    """File digests from earlier starts. Any process of the user may read and write it at any
    time: entries are replaced whole, and one that cannot be used is one that is not there."""

    def __init__(self, directory: Path | None = None) -> None:
        """``directory`` defaults to ``$XDG_CACHE_HOME/maru/weights`` (``~/.cache``)."""
        self._directory = directory or cache_directory() / "weights"

    def get(self, path: Path, version: _Version) -> bytes | None:
        """The digest of exactly this version of the file, or None."""
        try:
            entry = json.loads(self._entry(path).read_text())
            if entry["format"] != WEIGHTS_FORMAT.decode() or entry["version"] != asdict(version):
                return None
            digest = bytes.fromhex(entry["digest"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return digest if len(digest) == hashlib.sha256().digest_size else None

    def put(self, path: Path, version: _Version, digest: bytes) -> None:
        """Keep the digest. A cache that cannot be written costs the next start a reading."""
        entry = {
            "format": WEIGHTS_FORMAT.decode(),
            "path": str(path),
            "version": asdict(version),
            "digest": digest.hex(),
        }
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._directory)
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(entry, file)
                os.replace(temporary, self._entry(path))
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            logger.info("digests of weight files are not kept in %s: %s", self._directory, error)

    def _entry(self, path: Path) -> Path:
        return self._directory / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"


class FingerprintJob:
    """Makes one fingerprint in threads of its own. Create, then ``poll`` from any thread."""

    def __init__(
        self, source: WeightsSource, *, cache: DigestCache | None = None, threads: int | None = None
    ) -> None:
        """Starts at once. ``threads`` defaults to half of this process's cores, at most 8."""
        self._source = source
        self._cache = cache
        self._threads = threads or max(1, min(8, len(os.sched_getaffinity(0)) // 2))
        self._cancelled = threading.Event()
        self._finished = threading.Event()
        self._fingerprint: bytes | None = None
        self._failure: str | None = None
        threading.Thread(target=self._run, name="maru-fingerprint", daemon=True).start()

    def poll(self) -> bytes | None:
        """The 32-byte fingerprint, or None as long as there is none. Never blocks or raises."""
        return self._fingerprint if self._finished.is_set() else None

    def failure(self) -> str | None:
        """Why there never will be a fingerprint, or None."""
        return self._failure if self._finished.is_set() else None

    def wait(self, timeout_s: float) -> bytes | None:
        """Like ``poll``, after waiting for the job's end; for tools and tests."""
        self._finished.wait(timeout_s)
        return self.poll()

    def cancel(self) -> None:
        """Stop reading soon; the job ends with a failure unless it has ended already."""
        self._cancelled.set()

    def _run(self) -> None:
        started = time.monotonic()
        try:
            _lower_priority()
            cache = self._cache or DigestCache()
            entries = []
            for file in sorted(self._source.files, key=lambda file: file.name):
                size, digest = self._file_digest(file, cache)
                entries.append((file.name, size, digest))
            content = encode((self._source.stated, tuple(entries)))
            self._fingerprint = hashlib.sha256(WEIGHTS_FORMAT + content).digest()
            logger.info(
                "fingerprint of %d weight files (%.2f GB) after %.1f s",
                len(entries),
                sum(size for _, size, _ in entries) / 1e9,
                time.monotonic() - started,
            )
        except FingerprintError as error:
            self._failure = str(error)
        except OSError as error:
            self._failure = f"cannot read {error.filename}: {error.strerror}"
        except Exception as error:
            logger.exception("fingerprint of the weights failed")
            self._failure = f"unexpected {type(error).__name__}: {error}"
        finally:
            self._finished.set()

    def _file_digest(self, file: WeightFile, cache: DigestCache) -> tuple[int, bytes]:
        path = file.path.resolve(strict=True)
        version = _Version.of(path)
        since = self._source.loaded_since_ns
        if since is not None and version.ctime_ns > since:
            raise FingerprintError(
                f"{path} changed while this engine was starting, so it may not be what the engine "
                f"has loaded; restart the engine"
            )
        digest = cache.get(path, version)
        if digest is None:
            digest = self._read(path, version.size)
            if _Version.of(path) != version:
                raise FingerprintError(f"{path} changed while it was read; restart the engine")
            if time.time_ns() - max(version.mtime_ns, version.ctime_ns) > _SETTLED_NS:
                cache.put(path, version, digest)
        return version.size, digest

    def _read(self, path: Path, size: int) -> bytes:
        """The file digest, with ``threads`` readers that take the pieces as they come."""
        pieces = itertools.count()
        num_pieces = -(-size // PIECE_BYTES)
        digests: list[bytes] = [b""] * num_pieces
        errors: list[Exception] = []

        def work() -> None:
            try:
                _lower_priority()
                with path.open("rb", buffering=0) as source:
                    buffer = bytearray(_READ_BYTES)
                    # next() on a count is atomic, so every piece has one reader.
                    while (piece := next(pieces)) < num_pieces and not errors:
                        digests[piece] = _piece_digest(
                            source.fileno(), piece, size, buffer, self._cancelled.is_set
                        )
            except Exception as error:
                errors.append(error)

        readers = [
            threading.Thread(target=work, name="maru-fingerprint-reader", daemon=True)
            for _ in range(min(self._threads, num_pieces) - 1)
        ]
        for reader in readers:
            reader.start()
        work()
        for reader in readers:
            reader.join()
        if errors:
            raise errors[0]
        content = _FILE_DOMAIN + struct.pack("<Q", size) + b"".join(digests)
        return hashlib.sha256(content).digest()


def _piece_digest(
    fd: int, piece: int, size: int, buffer: bytearray, cancelled: Callable[[], bool]
) -> bytes:
    state = xxhash.xxh3_128()
    view = memoryview(buffer)
    offset = piece * PIECE_BYTES
    end = min(offset + PIECE_BYTES, size)
    while offset < end:
        if cancelled():
            raise FingerprintError("cancelled")
        got = os.preadv(fd, [view[: min(len(buffer), end - offset)]], offset)
        if got == 0:
            raise FingerprintError(f"a weight file became shorter than {size} bytes while read")
        state.update(view[:got])
        offset += got
    return state.digest()


def _lower_priority() -> None:
    """The engine's own threads come first. On Linux a niceness belongs to a thread."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
