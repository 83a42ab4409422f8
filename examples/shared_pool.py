"""Two processes share one pool of memory: one stores a text, the other reads it in place.

    python examples/shared_pool.py

Needs neither vLLM nor torch. The server that hands out the space is found or started by
``connect()``; it leaves by itself some minutes after its last client.
"""

import hashlib
import subprocess
import sys

from maru_shm.control.client import Client, connect
from maru_shm.control.messages import CommitItem, ReserveItem, ReserveOutcome
from maru_shm.pool import Pool, Verify, open_pool
from maru_shm.pool.checksum import part_checksum
from maru_shm.pool.reading import leased_view
from maru_shm.types import Key, Namespace

# A namespace says what the bytes mean, a key which bytes they are. Whoever computes the same
# two digests finds the same object; nothing is ever stored under them but the same bytes.
NAMESPACE = Namespace(hashlib.sha256(b"shared_pool.py, UTF-8 texts, format 1").digest())
TEXT = "Whoever comes second finds it already computed.\n" * 4


def key_of(name: str) -> Key:
    return Key(hashlib.sha256(name.encode()).digest())


def map_pool(client: Client) -> Pool:
    """The server says where the pool is; every process maps it itself."""
    info = client.wait_connected(timeout_s=5).pool
    return open_pool(info.path, info.medium, expect_uuid=info.uuid)


def store(client: Client, pool: Pool, name: str, payload: bytes) -> None:
    item = ReserveItem(key=key_of(name), parent=None, length=len(payload))
    (result,) = client.reserve(NAMESPACE, [item], timeout_s=5).results
    if result.outcome is ReserveOutcome.PRESENT:
        print(f"writer: {name!r} is there already, nothing to do")
        return
    if result.extent is None:
        raise SystemExit(f"writer: no space for {name!r}: {result.outcome.name}")

    # The space is ours and nobody sees it yet: write straight into the shared memory ...
    view = pool.payload(result.extent)
    view[:] = payload
    pool.write_back(result.extent)
    # ... and make it visible, with a checksum, in one step.
    commit = CommitItem(result.extent.generation, parts=(part_checksum(view),))
    client.commit([commit], timeout_s=5)
    print(f"writer: stored {len(payload)} bytes as {name!r} at offset {result.extent.offset}")


def read(client: Client, pool: Pool, name: str) -> None:
    grant = client.lookup_prefix(NAMESPACE, [key_of(name)], timeout_s=5)
    if grant.lease is None or grant.extents[0] is None:
        raise SystemExit(f"reader: {name!r} is a miss")

    # While the lease stands the bytes do not change; the view checks that before and after.
    with leased_view(pool, grant.extents[0], Verify.FULL) as view:
        first_line = bytes(view[: bytes(view).index(b"\n")]).decode()
        print(f"reader: found {len(view)} bytes, no copy, no server in between: {first_line!r}")
    client.release([grant.lease], timeout_s=5)


def main() -> None:
    with connect(pool_bytes=64 << 20, who="shared_pool.py") as client:
        pool = map_pool(client)
        if sys.argv[1:] == ["read"]:
            read(client, pool, "greeting")
        else:
            print(f"writer: the pool is {pool.path}, {pool.geometry.pool_bytes >> 20} MiB")
            store(client, pool, "greeting", TEXT.encode())
            sys.stdout.flush()
            subprocess.run([sys.executable, __file__, "read"], check=True)
        pool.close()


if __name__ == "__main__":
    main()
