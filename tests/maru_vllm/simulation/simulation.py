"""A request's life in a few lines of script.

    sim = Simulation()
    sim.arrive("a", tokens=range(20))
    sim.run()
    sim.arrive("b", tokens=range(20), engine=1)
    sim.run()
    sim.expect_hit("b", 16)
    sim.finish()                       # everything empty, every byte right

One server over one small real pool, and as many engines as are named. The oracle watches every
forward, every object that is sealed and every answer.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from copies import ScriptedCopies
from oracle import CHUNK_TOKENS, PART_BYTES, Oracle, WrongBytes
from sim_engine import NAMESPACE, EngineOptions, SimEngine

from maru_shm.control.local import LocalPlane, LocalServer, ScriptedOwners
from maru_shm.control.messages import (
    CommitItem,
    ListObjects,
    ObjectRow,
    ObjectRows,
    ObjectState,
    ReserveItem,
)
from maru_shm.control.recovery import LEASE_TERM_S, recover
from maru_shm.pool.pool import create_pool
from maru_shm.types import Extent, Generation, Key, Namespace, OwnerToken
from maru_vllm.identity import chunk_key

FILLER = Namespace(b"another user of the same pool...")

STEP_S = 0.005
"""How far the clock goes on in a step."""

MAX_REPLY_TICKS = 60
"""Scripts delay no message by more than this."""

MAX_STEPS = 400
"""A script that needs more is stuck."""


class Clock:
    """Seconds that pass when the script says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Simulation:
    """See the module."""

    def __init__(
        self,
        options: EngineOptions | None = None,
        *,
        num_engines: int = 1,
        pool_bytes: int = 1 << 20,
    ) -> None:
        self.oracle = Oracle()
        self.clock = Clock()
        self.owners = ScriptedOwners()
        self._folder = Path(tempfile.mkdtemp(prefix="maru-sim-", dir="/dev/shm"))
        self.pool = create_pool(self._folder / "p.pool", "tmpfs", pool_bytes, 1 << 16)
        self.server = LocalServer(lambda: recover(self.pool, self.owners, self.clock))
        self._owners = [OwnerToken(i + 1) for i in range(num_engines)]
        self.planes = [LocalPlane(self.server, owner, clock=self.clock) for owner in self._owners]
        self.engines = [
            SimEngine(f"engine {i}", plane, self.oracle, self.clock, options or EngineOptions())
            for i, plane in enumerate(self.planes)
        ]
        self._num_ranks = self.engine.options.num_ranks
        self._object_bytes = PART_BYTES * self._num_ranks
        self._prompts: dict[str, tuple[tuple[int, ...], int]] = {}
        self._engine_of: dict[str, SimEngine] = {}
        self._tokens_of: dict[Key, tuple[tuple[int, ...], int]] = {}
        self._sealed_seen: dict[Generation, Key] = {}
        self._aborted: set[str] = set()
        self._kills = 0
        self.messages_lost = False
        """Set by scripts that lose requests while the server lives."""
        self._fillers = 0
        self._hog: LocalPlane | None = None
        self._hog_owner = OwnerToken(1 << 41)
        self._commits_seen = (-1, -1)

    def close(self) -> None:
        """Remove the pool; idempotent."""
        for engine in self.engines:
            for worker in engine.workers:
                worker.connector.shutdown()
        self.pool.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def engine(self) -> SimEngine:
        """The first engine."""
        return self.engines[0]

    @property
    def copies(self) -> ScriptedCopies:
        """The first engine's copies."""
        return self.engine.copies

    # ------------------------------------------------------------------ script

    def arrive(
        self, name: str, tokens: Sequence[int], max_tokens: int = 1, engine: int = 0
    ) -> None:
        """A request with this prompt."""
        prompt = tuple(tokens)
        target = self.engines[engine]
        self._prompts[name] = (prompt, max_tokens)
        self._engine_of[name] = target
        self._learn(prompt + tuple(self.oracle.continuation(prompt, max_tokens)))
        target.add(name, prompt, max_tokens)

    def abort(self, name: str) -> None:
        """Its client goes away."""
        self._aborted.add(name)
        self._engine_of[name].abort(name)

    def abort_in_step(self, name: str) -> None:
        """Its client goes away while its engine's next step runs."""
        self._aborted.add(name)
        self._engine_of[name].aborted_in_step = name

    def step(self, times: int = 1) -> None:
        """Every engine makes a step; then every object in the pool is looked at."""
        for _ in range(times):
            self.clock.now += STEP_S
            for engine in self.engines:
                engine.step()
            if self.server.service is not None:
                self.server.service.tend()
            self.check_pool()

    def run(self) -> None:
        """Step until no engine has work."""
        for _ in range(MAX_STEPS):
            if not any(engine.has_work for engine in self.engines):
                return
            self.step()
        left = {name: engine.status(name) for name, engine in self._engine_of.items()}
        raise AssertionError(f"still at work after {MAX_STEPS} steps: {left}")

    def run_until(self, name: str, status: object) -> None:
        """Step until the request has this status."""
        for _ in range(MAX_STEPS):
            if self._engine_of[name].status(name) == status:
                return
            self.step()
        raise AssertionError(f"{name} never became {status}")

    def kill_server(self) -> None:
        """SIGKILL."""
        self._kills += 1
        self.server.kill()

    def start_server(self) -> None:
        """Start it again over the same pool, and give clients time to find it."""
        self.server.start()
        self.clock.now += 5.0

    def fill(self, num_objects: int) -> None:
        """Another user of the pool stores so many objects of its own."""
        if self.server.service is None:
            return
        other = LocalPlane(self.server, OwnerToken(1 << 40), clock=self.clock)
        extents = self._reserve_filler(other, num_objects)
        for extent in extents:
            self.pool.payload(extent)[:] = bytes([0xEE]) * extent.length
        other.commit([CommitItem(extent.generation, ()) for extent in extents], timeout_s=1.0)
        other.close()

    def hog(self, num_objects: int) -> None:
        """Another user reserves so many objects and keeps them until the next ``hog``."""
        if self._hog is not None:
            self._hog.close()
            self._hog = None
            self.owners.dead.add(self._hog_owner)
            if self.server.service is not None:
                self.server.service.tend()
        if self.server.service is not None and num_objects:
            self._hog_owner = OwnerToken(self._hog_owner + 1)
            self._hog = LocalPlane(self.server, self._hog_owner, clock=self.clock)
            self._reserve_filler(self._hog, num_objects)

    def _reserve_filler(self, plane: LocalPlane, num_objects: int) -> list[Extent]:
        first = self._fillers
        self._fillers += num_objects
        items = [
            ReserveItem(Key(i.to_bytes(32, "little")), None, self._object_bytes)
            for i in range(first, first + num_objects)
        ]
        reply = plane.reserve(FILLER, items, timeout_s=1.0)
        return [result.extent for result in reply.results if result.extent is not None]

    def engine_of(self, name: str) -> SimEngine:
        """Where a request was sent."""
        return self._engine_of[name]

    # ------------------------------------------------------------------ what is there

    def objects(self) -> list[ObjectRow]:
        """What the server lists."""
        assert self.server.service is not None
        reply = self.server.service.handle(ListObjects(Generation(0), 4096))
        assert isinstance(reply, ObjectRows)
        return list(reply.rows)

    def sealed_chunks(self, tokens: Sequence[int]) -> list[int]:
        """Which chunks of this text the pool holds."""
        sealed = {row.key for row in self.objects() if row.state is ObjectState.SEALED}
        return [i for i, key in enumerate(_keys(tuple(tokens))) if key in sealed]

    def payload(self, tokens: Sequence[int], chunk: int) -> memoryview:
        """The bytes of a sealed chunk, writable: for scripts that damage them."""
        key = _keys(tuple(tokens))[chunk]
        (row,) = [row for row in self.objects() if row.key == key]
        return self.pool.payload(row.extent)

    # ------------------------------------------------------------------ expectations

    def expect_hit(self, name: str, num_tokens: int) -> None:
        """So many tokens were loaded from the pool for this request."""
        found = self._engine_of[name].hits.get(name, 0)
        assert found == num_tokens, f"{name}: {found} tokens were loaded, not {num_tokens}"

    def expect_answer(self, name: str) -> None:
        """The request answered what its prompt must lead to."""
        prompt, max_tokens = self._prompts[name]
        answer = self._engine_of[name].answers[name]
        expected = self.oracle.continuation(prompt, max_tokens)
        if answer != expected:
            raise WrongBytes(f"{name} answered {answer}, not {expected}")

    def check_pool(self) -> None:
        """Every newly sealed object holds what its key stands for."""
        service = self.server.service
        if service is None:
            return
        commits = (service.epoch, service.index.counts().committed_total)
        if commits == self._commits_seen:
            return
        self._commits_seen = commits
        for row in self.objects():
            if row.namespace == FILLER:
                continue
            if row.state is not ObjectState.SEALED or row.extent.generation in self._sealed_seen:
                continue
            self._sealed_seen[row.extent.generation] = row.key
            self._check_object(row.key, row.extent)

    def _check_object(self, key: Key, extent: Extent) -> None:
        if key not in self._tokens_of:
            raise WrongBytes(f"the pool holds {key.hex()}, which no request has")
        tokens, chunk = self._tokens_of[key]
        expected = self.oracle.chunk(tokens, chunk, self._num_ranks)
        found = bytes(self.pool.payload(extent))
        if found != expected:
            wrong = sum(a != b for a, b in zip(found, expected, strict=True))
            raise WrongBytes(
                f"chunk {chunk} of {tokens} was sealed with {wrong} of {len(found)} bytes wrong"
            )

    def finish(self) -> None:
        """Let everything end, and check that nothing is left and nothing is wrong."""
        if self.server.service is None:
            self.start_server()
        self.run()
        for plane in self.planes:
            for _ in range(MAX_REPLY_TICKS):  # answers that came too late for anybody to wait
                plane.poll()
        for _ in range(4):  # what waited for the server to come back
            self.step()
        self.run()
        for name, engine in self._engine_of.items():
            ended_well = engine.finish_reasons.get(name) == "length"
            if name not in self._aborted and ended_well:
                self.expect_answer(name)
        for engine in self.engines:
            engine.check_empty()
        assert self.server.service is not None
        self.server.service.index.check_invariants()
        if self.messages_lost:
            # A release that got lost is made good by the lease's term, and by nothing else.
            self.clock.now += LEASE_TERM_S + 1
            self.server.service.tend()
        counts = self.server.service.index.counts()
        assert counts.leases == 0, f"{counts.leases} leases left"
        assert counts.reservations == 0, f"{counts.reservations} reservations left"
        self._check_quarantine()

    def _check_quarantine(self) -> None:
        """Only space whose grant was lost with a server may be out of use, and not beyond the
        engine's life."""
        assert self.server.service is not None
        written = set().union(*(engine.written_to for engine in self.engines))
        left = {found.generation for each in self.pool.scan() for found in each.writing}
        assert not left & written, "a store was never settled"
        assert not left or self._kills, "a reservation was lost although no server was"
        for plane, owner in zip(self.planes, self._owners, strict=True):
            plane.close()
            self.owners.dead.add(owner)
        self.server.service.tend()
        assert self.server.service.index.counts().quarantined == 0

    def _learn(self, tokens: tuple[int, ...]) -> None:
        for chunk, key in enumerate(_keys(tokens)):
            self._tokens_of[key] = (tokens, chunk)


def _keys(tokens: tuple[int, ...]) -> list[Key]:
    keys: list[Key] = []
    parent: bytes = NAMESPACE
    for start in range(0, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        key = chunk_key(parent, tokens[start : start + CHUNK_TOKENS], None)
        keys.append(key)
        parent = key
    return keys
