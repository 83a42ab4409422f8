"""One pool: made or opened, mapped, and - by its server only - changed.

The server maps the pool and alone writes superblock, segment table and headers: it calls
``begin_epoch`` once, then ``scan``, then ``apply``, all from one thread. Every other process is a
member: it maps the pool too, and writes nothing but payloads of reservations that it was
granted (``payload``, then ``write_back``). docs/format.md has the order of writes.
"""

from __future__ import annotations

import logging
import os
import uuid as uuids
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from maru_shm.index.effects import Effect
from maru_shm.index.found import FoundSegment
from maru_shm.pool import format as fmt
from maru_shm.pool import geometry as geo
from maru_shm.pool.errors import NotAPool, PoolError, PoolExists, PoolFormatError, PoolReplaced
from maru_shm.pool.flush import CacheLines, cache_lines
from maru_shm.pool.format import Superblock
from maru_shm.pool.mapping import Access, SharedMapping
from maru_shm.pool.medium import Blocks, Medium, Persistence, open_medium
from maru_shm.pool.reserving import BlockReserver
from maru_shm.pool.slots import SlotTable
from maru_shm.pool.writer import PoolWriter
from maru_shm.types import Extent, PoolGeometry

_log = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_HEAD_BYTES = fmt.TABLE_OFFSET
"""Both copies of the superblock."""


class Pool:
    """A mapped pool. Made by ``create_pool`` and ``open_pool``.

    Thread: reading and ``payload`` from any; the server's calls from one thread.
    """

    def __init__(
        self,
        path: str,
        medium: Medium,
        mapping: SharedMapping,
        lines: CacheLines,
        copies: SuperblockCopies,
    ) -> None:
        self.path = path
        """Absolute."""
        self.medium = medium
        self.mapping = mapping
        self.lines = lines
        self._block = copies.newest
        self._copies = copies
        self.table = SlotTable(
            mapping.buffer, fmt.pool_seed(self.uuid), self._block.geometry, lines
        )
        self._reserver: BlockReserver | None = None
        self._writer: PoolWriter | None = None

    @property
    def uuid(self) -> bytes:
        """16 bytes that no other pool has."""
        return self._block.uuid

    @property
    def geometry(self) -> PoolGeometry:
        """Sizes, fixed when the pool was made."""
        return self._block.geometry

    @property
    def epoch(self) -> int:
        """The server's incarnation when this process opened the pool; 0 in a new one."""
        return self._block.epoch

    def payload(self, extent: Extent) -> memoryview:
        """The extent's bytes in the mapping (writable if the mapping is), format ``B``.

        Raises PoolError if the extent does not lie inside one segment. Says nothing about who
        may read or write there now: see ``maru_shm.pool.reading``.
        """
        first = geo.segment_of(self.geometry, extent.offset)
        last = geo.segment_of(self.geometry, extent.offset + max(extent.length, 1) - 1)
        if first is None or first != last or extent.length < 0:
            raise PoolError(
                f"{self.path}: bytes {extent.offset} to {extent.offset + extent.length} do not "
                f"lie in one of its segments"
            )
        return self.mapping.buffer[extent.offset : extent.offset + extent.length]

    def write_back(self, extent: Extent) -> None:
        """Make this process's stores to the payload visible to all. Call before the commit."""
        self.lines.write_back(self.mapping.buffer, extent.offset, extent.length)
        self.lines.fence()

    def start_populate(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Populate this process's mapping in the background (``SharedMapping``)."""
        self.mapping.start_populate(self.medium.populate, on_progress)

    def close(self) -> None:
        """Unmap (see ``SharedMapping.close`` for views still in use). Idempotent."""
        if self._reserver is not None:
            self._reserver.close()
        self._writer = None
        self.mapping.close()

    # ------------------------------------------------------------------ the server's calls

    def begin_epoch(self) -> int:
        """Start a new incarnation: persist and return its number. Once, before all else.

        Forgets every object if a reboot since may have lost or reordered writes. Starts to
        reserve the file's blocks in the background. Raises PoolError if the pool has used up
        all its epochs.
        """
        # With one copy damaged, that one may have held the epoch after this: leave it out, for
        # generations of one epoch must not be given out twice.
        epoch = self._block.epoch + (1 if self._copies.both_whole else 2)
        if epoch > fmt.MAX_EPOCH:
            raise PoolError(f"{self.path}: epoch {fmt.MAX_EPOCH} was its last; make a new pool")
        if self._reserver is None and self.medium.blocks is Blocks.ON_DEMAND:
            self._reserver = BlockReserver(
                self.path, self.mapping.fileno(), self.geometry.pool_bytes
            )
            self._reserver.start()
        writer = PoolWriter(
            self.path, self.mapping.buffer, self.lines, self.table, self._reserver, epoch
        )
        boot_id = _boot_id(self.medium)
        if self._block.epoch and self._block.boot_id != boot_id:
            _log.warning("%s: the host was started anew since; its objects are void", self.path)
            writer.forget_all()
        block = replace(self._block, epoch=epoch, boot_id=boot_id)
        copy = 1 - self._copies.newest_copy
        writer.write_superblock(copy, block)
        self._block, self._writer = block, writer
        self._copies = SuperblockCopies(newest=block, newest_copy=copy, both_whole=True)
        return epoch

    def scan(self) -> Iterator[FoundSegment]:
        """What every bound segment holds; see ``PoolWriter.scan``. After ``begin_epoch``."""
        return self._server().scan()

    def apply(self, effects: Iterable[Effect]) -> None:
        """Carry the index's effects out; see ``PoolWriter.apply``. After ``scan``."""
        self._server().apply(effects)

    def _server(self) -> PoolWriter:
        if self._writer is None:
            raise PoolError(f"{self.path}: only the server changes a pool, after begin_epoch()")
        return self._writer


def create_pool(
    path: str | Path,
    medium: Medium | str,
    pool_bytes: int | None,
    nominal_segment_bytes: int | None = None,
) -> Pool:
    """Make an empty pool at ``path`` and map it.

    ``pool_bytes``: what a file is to hold; it is some 0.4 % larger (``plan_file``). Of a DAX
    device, how much to use; None: all of it.
    ``nominal_segment_bytes``: a power of two; by default about 1/16 of the pool
    (``default_nominal_bytes``). No object can be larger.
    The file appears at ``path`` only when it is a whole pool, with mode 0600.

    Raises NotEnoughSpace, PoolExists, MediumUnavailable, PoolError: nothing was left behind.
    """
    path = Path(path).absolute()
    medium = open_medium(medium) if isinstance(medium, str) else medium
    lines = cache_lines(medium.coherence, str(path))
    geometry = _plan(path, medium, pool_bytes, nominal_segment_bytes)
    medium.check_space(path, geometry.pool_bytes)
    block = Superblock(uuids.uuid4().bytes, geometry, epoch=0, boot_id=_boot_id(medium))
    fd, unfinished = medium.begin(path, geometry.pool_bytes, geometry.first_segment_offset)
    try:
        mapping = SharedMapping(fd, geometry.pool_bytes, Access.READ_WRITE)
        try:
            _refuse_content(path, mapping.buffer, lines)
            _write_empty(mapping.buffer, block, lines)
            medium.finish(unfinished, path)
        except BaseException:
            mapping.close()
            raise
    except BaseException:
        medium.discard(unfinished)
        raise
    finally:
        os.close(fd)
    copies = SuperblockCopies(newest=block, newest_copy=0, both_whole=True)
    return Pool(str(path), medium, mapping, lines, copies)


def _plan(
    path: Path, medium: Medium, pool_bytes: int | None, nominal_segment_bytes: int | None
) -> PoolGeometry:
    alignment = medium.alignment(path)
    if medium.blocks is Blocks.FIXED:
        device_bytes = pool_bytes if pool_bytes is not None else medium.size_bytes(path, -1)
        return geo.divide_device(device_bytes // alignment * alignment, nominal_segment_bytes)
    if pool_bytes is None:
        raise PoolError(f"{path}: say how large the pool is to be")
    return geo.plan_file(pool_bytes, alignment, nominal_segment_bytes)


def open_pool(
    path: str | Path,
    medium: Medium | str,
    *,
    access: Access = Access.READ_WRITE,
    expect_uuid: bytes | None = None,
) -> Pool:
    """Map the pool at ``path``. Changes nothing.

    ``expect_uuid``: the pool that the caller was told of; another one raises PoolReplaced.
    Raises NoSuchPool, NotAPool, PoolFormatError, MediumUnavailable.
    """
    path = Path(path).absolute()
    medium = open_medium(medium) if isinstance(medium, str) else medium
    lines = cache_lines(medium.coherence, str(path))
    with _opened(medium, path, access) as fd:
        size = medium.size_bytes(path, fd)
        copies = _read_copies(path, medium, fd, size, lines)
        block = copies.newest
        if block.geometry.pool_bytes > size:
            raise PoolFormatError(
                f"{path}: truncated: {size} of {block.geometry.pool_bytes} bytes are there. "
                f"Nothing was mapped; remove it and start the server again"
            )
        if expect_uuid is not None and block.uuid != expect_uuid:
            raise PoolReplaced(
                f"{path}: is pool {block.uuid.hex()}, not {expect_uuid.hex()}; ask the server again"
            )
        mapping = SharedMapping(fd, block.geometry.pool_bytes, access)
    return Pool(str(path), medium, mapping, lines, copies)


def remove_pool(path: str | Path, medium: Medium | str) -> None:
    """Take away what is at ``path``, a pool or not: a file is unlinked, a device's head zeroed.

    Processes that have it mapped keep what they mapped. Does nothing if nothing is there.
    """
    path = Path(path).absolute()
    medium = open_medium(medium) if isinstance(medium, str) else medium
    if medium.blocks is Blocks.FIXED:
        lines = cache_lines(medium.coherence, str(path))
        with _opened(medium, path, Access.READ_WRITE) as fd:
            head = SharedMapping(fd, _head_bytes(medium, path), Access.READ_WRITE)
            try:
                head.buffer[:_HEAD_BYTES] = bytes(_HEAD_BYTES)
                lines.write_back(head.buffer, 0, _HEAD_BYTES)
                lines.fence()
            finally:
                head.close()
    medium.remove(path)


# ---------------------------------------------------------------------------- superblock copies


@dataclass(frozen=True, slots=True)
class SuperblockCopies:
    """What the two copies of a superblock say together."""

    newest: Superblock
    newest_copy: int
    """0 or 1; the other copy is the one to write next."""
    both_whole: bool


def choose_copy(path: str, head: fmt.Buffer) -> SuperblockCopies:
    """The newer whole copy in ``head``, the pool's first two pages.

    Raises NotAPool if neither copy is Maru's, PoolFormatError if none can be used.
    """
    whole: list[tuple[int, int, Superblock]] = []
    damage: list[str] = []
    for copy, offset in enumerate(fmt.SUPERBLOCK_OFFSETS):
        try:
            block = fmt.unpack_superblock(head[offset : offset + fmt.PAGE_BYTES])
        except NotAPool:
            continue
        except PoolFormatError as error:
            damage.append(str(error))
            continue
        whole.append((block.epoch, -copy, block))
    if not whole:
        if damage:
            raise PoolFormatError(
                f"{path}: {'; '.join(dict.fromkeys(damage))}. Nothing was mapped; use the build "
                f"that made it, or remove it"
            )
        raise NotAPool(f"{path}: not a Maru pool")
    _, negative_copy, newest = max(whole, key=lambda found: found[:2])
    return SuperblockCopies(newest=newest, newest_copy=-negative_copy, both_whole=len(whole) == 2)


def _read_copies(
    path: Path, medium: Medium, fd: int, size: int, lines: CacheLines
) -> SuperblockCopies:
    head_bytes = _head_bytes(medium, path)
    if size < head_bytes:
        raise NotAPool(f"{path}: not a Maru pool ({size} bytes are too few for one)")
    mapping = SharedMapping(fd, head_bytes, Access.READ)
    try:
        lines.invalidate(mapping.buffer, 0, _HEAD_BYTES)
        lines.fence()
        return choose_copy(str(path), bytes(mapping.buffer[:_HEAD_BYTES]))
    finally:
        mapping.close()


def _head_bytes(medium: Medium, path: Path) -> int:
    return geo.round_up(_HEAD_BYTES, medium.alignment(path))


def _refuse_content(path: Path, buffer: memoryview, lines: CacheLines) -> None:
    """A device may hold something already; a new file never does."""
    lines.invalidate(buffer, 0, _HEAD_BYTES)
    lines.fence()
    head = bytes(buffer[:_HEAD_BYTES])
    try:
        choose_copy(str(path), head)
    except NotAPool:
        if any(head):
            raise PoolExists(
                f"{path}: holds data that is not Maru's; nothing was written. If it is of no use, "
                f"zero its first {_HEAD_BYTES} bytes"
            ) from None
        return
    except PoolFormatError:
        pass
    raise PoolExists(f"{path}: holds a Maru pool already; open it, or remove it first")


def _write_empty(buffer: memoryview, block: Superblock, lines: CacheLines) -> None:
    """Table first: whoever sees a superblock sees an empty table behind it."""
    table_end = block.geometry.first_segment_offset
    buffer[fmt.TABLE_OFFSET : table_end] = bytes(table_end - fmt.TABLE_OFFSET)
    lines.write_back(buffer, fmt.TABLE_OFFSET, table_end - fmt.TABLE_OFFSET)
    lines.fence()
    packed = fmt.pack_superblock(block)
    for offset in fmt.SUPERBLOCK_OFFSETS:
        buffer[offset : offset + len(packed)] = packed
        lines.write_back(buffer, offset, len(packed))
        lines.fence()


def _boot_id(medium: Medium) -> bytes:
    """This boot's id; zeros where a boot changes nothing, or the kernel does not say."""
    if medium.persistence is Persistence.FLUSHED:
        return bytes(fmt.UUID_BYTES)
    try:
        return uuids.UUID(_BOOT_ID.read_text().strip()).bytes
    except (OSError, ValueError):
        return bytes(fmt.UUID_BYTES)


@contextmanager
def _opened(medium: Medium, path: Path, access: Access) -> Iterator[int]:
    fd = medium.open(path, access)
    try:
        yield fd
    finally:
        os.close(fd)
