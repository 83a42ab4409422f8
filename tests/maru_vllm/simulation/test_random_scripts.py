"""Random scripts: anything an engine, its clients, its copy thread and the server may do, in any
order, on block pools too small for it. The oracle watches every byte; at the end nothing is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any

import pytest
from copies import Pace, ScriptedCopies
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sim_engine import EngineOptions, SimWorker
from simulation import Simulation
from vllm.v1.request import RequestStatus

from maru_shm.control.local import Delivery, Fate
from maru_vllm.settings import LoadMode
from maru_vllm.stats import Counter
from maru_vllm.worker.copy_runner import CopyTask


@dataclass(frozen=True)
class Arrive:
    """A request whose prompt begins like others'."""

    engine: int
    prefix: int
    shared_tokens: int
    own_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class Steps:
    count: int


@dataclass(frozen=True)
class Abort:
    which: int


@dataclass(frozen=True)
class AbortInStep:
    """As ``Abort``, while the engine's next step runs."""

    which: int


@dataclass(frozen=True)
class Copies:
    """One copy ends, of those under way."""

    worker: int
    which: int


@dataclass(frozen=True)
class SetPace:
    worker: int
    pace: Pace


@dataclass(frozen=True)
class FailCopies:
    """From now on every n-th copy fails; 0: none."""

    worker: int
    every: int


@dataclass(frozen=True)
class Network:
    """How the server is reached from now on."""

    engine: int
    delivery: Delivery


@dataclass(frozen=True)
class KillServer:
    pass


@dataclass(frozen=True)
class StartServer:
    pass


@dataclass(frozen=True)
class Pressure:
    """Another user of the pool fills it, so that everything without a lease is evicted."""

    objects: int


@dataclass(frozen=True)
class Hog:
    """Another user of the pool reserves so much and does not let go until the next of these."""

    objects: int


@dataclass(frozen=True)
class Wait:
    """Time passes without a step: leases grow old."""

    seconds: float


@dataclass(frozen=True)
class ResetRunning:
    """vLLM's cache reset that preempts everything that runs."""

    engine: int


Action = (
    Arrive
    | Steps
    | Abort
    | AbortInStep
    | Copies
    | SetPace
    | FailCopies
    | Network
    | KillServer
    | StartServer
    | Pressure
    | Hog
    | Wait
    | ResetRunning
)

NUM_ENGINES = 2
engines = st.integers(0, NUM_ENGINES - 1)
workers = st.integers(0, 2 * NUM_ENGINES - 1)
"""Taken modulo the workers that there are."""
arrivals = st.builds(
    Arrive,
    engine=engines,
    prefix=st.sampled_from([0, 0, 0, 1]),
    shared_tokens=st.sampled_from([8, 16, 17, 20, 24, 24]),
    own_tokens=st.integers(0, 9),
    max_tokens=st.integers(1, 12),
)
deliveries = st.builds(
    Delivery,
    fate=st.sampled_from([Fate.DELIVERED, Fate.DELIVERED, Fate.DELIVERED, Fate.LOST]),
    request_ticks=st.sampled_from([0, 0, 1, 3]),
    reply_ticks=st.sampled_from([0, 0, 1, 3, 25, 25]),
)
WEIGHTED: list[tuple[int, st.SearchStrategy[Action]]] = [
    (8, arrivals),
    (4, st.builds(Steps, st.integers(1, 3))),
    (6, st.builds(Steps, st.integers(6, 16))),
    (2, st.builds(Abort, st.integers(0, 7))),
    (1, st.builds(AbortInStep, st.integers(0, 7))),
    (2, st.builds(Copies, workers, st.integers(0, 5))),
    (2, st.builds(SetPace, workers, st.sampled_from(list(Pace)))),
    (3, st.builds(FailCopies, workers, st.sampled_from([0, 1, 1, 2]))),
    (3, st.builds(Network, engines, deliveries)),
    (1, st.just(KillServer())),
    (2, st.just(StartServer())),
    (2, st.builds(Pressure, st.integers(20, 200))),
    (2, st.builds(Hog, st.sampled_from([0, 1000]))),
    (1, st.builds(Wait, st.sampled_from([0.1, 12.0, 31.0]))),
    (1, st.builds(ResetRunning, engines)),
]
actions: st.SearchStrategy[Action] = st.sampled_from(
    [strategy for weight, strategy in WEIGHTED for _ in range(weight)]
).flatmap(lambda strategy: strategy)


def _engines(**chosen: st.SearchStrategy[Any]) -> st.SearchStrategy[EngineOptions]:
    return st.builds(
        EngineOptions,
        num_blocks=st.sampled_from([12, 14, 20, 64]),
        tokens_per_step=st.sampled_from([5, 8, 13, 64]),
        prefix_caching=st.booleans(),
        load_failure_policy=st.sampled_from(["recompute", "fail"]),
        store_decode=st.booleans(),
        num_ranks=st.sampled_from([1, 1, 2]),
        **chosen,
    )


options = _engines(async_scheduling=st.booleans())
within_step = _engines(
    load_mode=st.sampled_from([LoadMode.LAYER_BY_LAYER, LoadMode.BEFORE_FORWARD])
)


class Player:
    """Plays a script."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._names: list[str] = []
        self._filler = 0

    def play(self, action: Action) -> None:
        sim = self._sim
        match action:
            case Arrive():
                start = 100 * action.prefix
                prompt = [*range(start, start + action.shared_tokens)]
                own = 1000 + 50 * len(self._names)
                prompt += range(own, own + action.own_tokens)
                self._names.append(f"r{len(self._names)}")
                sim.arrive(self._names[-1], prompt, action.max_tokens, action.engine)
            case Steps():
                sim.step(action.count)
            case Abort():
                living = [name for name in self._names if _may_be_aborted(sim, name)]
                if living:
                    sim.abort(living[action.which % len(living)])
            case AbortInStep():
                living = [name for name in self._names if _may_be_aborted(sim, name)]
                if living:
                    sim.abort_in_step(living[action.which % len(living)])
            case Copies():
                copies = self._copies(action.worker)
                if copies.under_way:
                    copies.finish(copies.under_way[action.which % len(copies.under_way)])
            case SetPace():
                self._copies(action.worker).pace = action.pace
            case FailCopies():
                self._copies(action.worker).failing = _every(action.every)
                self._worker(action.worker).fail_loads_within_step(action.every)
            case Network():
                delivery = action.delivery
                sim.messages_lost |= delivery.fate is Fate.LOST
                sim.planes[action.engine].deliver = lambda _: delivery
            case KillServer():
                sim.kill_server()
            case StartServer():
                sim.start_server()
            case Pressure():
                sim.fill(action.objects)
            case Hog():
                sim.hog(action.objects)
            case Wait():
                sim.clock.now += action.seconds
            case ResetRunning():
                engine = sim.engines[action.engine]
                engine.drain()
                # vLLM raises after preempting if a load or a store keeps blocks: also an event.
                with contextlib.suppress(RuntimeError):
                    engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    def _worker(self, number: int) -> SimWorker:
        workers = [worker for engine in self._sim.engines for worker in engine.workers]
        return workers[number % len(workers)]

    def _copies(self, worker: int) -> ScriptedCopies:
        return self._worker(worker).copies

    def end(self) -> None:
        """Whatever the script did to the world is over; then all must come to an end."""
        for engine, plane in zip(self._sim.engines, self._sim.planes, strict=True):
            engine.set_pace(Pace.NEXT_STEP)
            plane.deliver = lambda _: Delivery()
        self._sim.start_server()
        self._sim.hog(0)
        self._sim.finish()


def _every(n: int) -> Callable[[CopyTask], bool]:
    return lambda task: n > 0 and task.job_id % n == 0


def _may_be_aborted(sim: Simulation, name: str) -> bool:
    status = sim.engine_of(name).status(name)
    return status is not None and not RequestStatus.is_finished(status)


@unique
class Reached(Enum):
    """What random scripts must have brought about, or they prove nothing."""

    LOAD = "a load"
    FAILED_LOAD = "a load that failed"
    LATE_LOOKUP = "a lookup without an answer in time"
    STORE = "a store"
    FAILED_STORE = "a store that failed"
    LOST_STORE = "a store whose reservation was lost"
    NO_SPACE = "a store without space"
    PREEMPTION = "a preemption"
    EVICTION = "an eviction"


_COUNTED = {
    Reached.LOAD: Counter.LOADED_TOKENS,
    Reached.FAILED_LOAD: Counter.LOADS_FAILED,
    Reached.LATE_LOOKUP: Counter.LOOKUPS_LATE,
    Reached.STORE: Counter.STORED_CHUNKS,
    Reached.FAILED_STORE: Counter.STORES_FAILED,
    Reached.LOST_STORE: Counter.STORES_LOST,
    Reached.NO_SPACE: Counter.STORES_NO_SPACE,
}


def play(chosen: EngineOptions, late_forward: bool, script: list[Action]) -> set[Reached]:
    """Play a script to its end; what it brought about."""
    sim = Simulation(chosen, num_engines=NUM_ENGINES, pool_bytes=1 << 17)
    try:
        for engine in sim.engines:
            engine.late_forward = late_forward
        player = Player(sim)
        for action in script:
            player.play(action)
        player.end()
        return _reached(sim)
    finally:
        sim.close()


def _reached(sim: Simulation) -> set[Reached]:
    reached = {
        what
        for what, counter in _COUNTED.items()
        if any(engine.counts.value(counter) for engine in sim.engines)
    }
    if any(engine.preemptions for engine in sim.engines):
        reached.add(Reached.PREEMPTION)
    if sim.server.service is not None and sim.server.service.index.counts().evicted_total:
        reached.add(Reached.EVICTION)
    return reached


@pytest.mark.parametrize(
    ("engines", "examples"),
    [(options, 150), (within_step, 100)],
    ids=["loads between steps", "loads within their step"],
)
def test_random_scripts_end_with_nothing_left_and_no_wrong_byte(
    engines: st.SearchStrategy[EngineOptions], examples: int
) -> None:
    reached: set[Reached] = set()

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )
    @given(engines, st.booleans(), st.lists(actions, min_size=12, max_size=32))
    def every_script_ends_well(
        chosen: EngineOptions, late_forward: bool, script: list[Action]
    ) -> None:
        reached.update(play(chosen, late_forward, script))

    every_script_ends_well()
    missing = set(Reached) - reached
    assert not missing, f"no script brought about {[what.value for what in missing]}"


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=4000, deadline=None, suppress_health_check=list(HealthCheck))
@given(options | within_step, st.booleans(), st.lists(actions, min_size=8, max_size=60))
def test_many_long_random_scripts_end_the_same_way(
    chosen: EngineOptions, late_forward: bool, script: list[Action]
) -> None:
    play(chosen, late_forward, script)
