"""The CUDA kernel's body, run on the host for every (block, thread) of its launches.

``replay/`` compiles the headers that nvcc compiles, with a memory that takes down every access:
each byte of the destination is written exactly once, no byte that is read is written, and every
access is aligned to its size. The cases and the oracle are those of the other implementations, so
nothing outside is touched and every byte is the right one. The copy engine's lists are replayed
likewise.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import random
import subprocess
import sysconfig
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pybind11
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_cases import Case as PagedCase
from paged_cases import cases as paged_cases
from transfer_calls import Memory, check
from transfer_cases import SHAPES, Call, Case, cases

from maru_kv_ops.cache_tensors import paged_caches
from maru_kv_ops.plan import PagePlanner, TransferDirection
from maru_kv_ops.views import object_view_for

HERE = Path(__file__).parent / "replay"
PACKAGE = Path(__file__).parents[2] / "maru_kv_ops"
SHARED = [PACKAGE / "csrc" / name for name in ("transfers.cpp", "copy_entries.cpp")]
OPTIONS = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]
PYTHON = [  # not optimised: compiling takes longer than running
    "-O0",
    *("-shared", "-fPIC", "-fvisibility=hidden"),
    *(f"-I{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"))),
]
SANITIZERS = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
WAYS = ("KERNEL", "OWN_NUMBERS", "BATCH", "RECTANGLES")
D2H, H2D = TransferDirection.D2H, TransferDirection.H2D


TOOLKITS = (12060, 12080, 13000)
"""Without batches, with those of 12.8 and with those of 13.0, as CUDART_VERSION."""


def fake_cuda(toolkit: int) -> list[str]:
    engine = [HERE / "copy_engine_replay.cpp", PACKAGE / "csrc" / "copy_engine.cpp"]
    options = [f"-DCUDART_VERSION={toolkit}", f"-I{HERE / 'fake_cuda'}"]
    return [*options, *map(str, engine)]


def _digest() -> str:
    digest = hashlib.sha256(" ".join([*OPTIONS, *PYTHON, *SANITIZERS]).encode())
    for folder in (HERE, PACKAGE / "csrc", PACKAGE / "binding"):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@pytest.fixture(scope="session")
def built(request: pytest.FixtureRequest) -> Path:
    """The programs, compiled once for these sources: this takes most of the time of these tests."""
    folder = request.config.cache.mkdir(f"kernel-replay-{_digest()}")
    wanted: list[tuple[Path, list[str]]] = [
        (folder / f"kernel_replay{SUFFIX}", [*PYTHON, str(HERE / "replay_module.cpp")]),
        (folder / "sanitized_replay", [*SANITIZERS, str(HERE / "sanitized_replay.cpp")]),
        *((folder / f"copy_engine_replay_{toolkit}", fake_cuda(toolkit)) for toolkit in TOOLKITS),
    ]

    def compile_one(target: Path, arguments: Iterable[str]) -> None:
        unfinished = target.with_name(f"{target.name}.unfinished")
        command = ["g++", *OPTIONS, *arguments, *map(str, SHARED), "-o", str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        unfinished.rename(target)

    with ThreadPoolExecutor() as compilers:
        missing = [one for one in wanted if not one[0].exists()]
        list(compilers.map(lambda one: compile_one(*one), missing))
    return folder


@pytest.fixture(scope="session")
def replay(built: Path) -> Any:
    """The module that offers the operations of ``_C`` and replays them."""
    name = "kernel_replay"
    spec = importlib.util.spec_from_file_location(name, built / f"{name}{SUFFIX}")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def use(replay: Any, way: str, max_blocks: int = 3) -> ModuleType:
    replay.use(getattr(replay.Way, way), max_blocks)
    replay.forget()
    module: ModuleType = replay
    return module


def bytes_that_move(case: Case) -> int:
    layers = 1 if case.call is Call.SINGLE_LAYER else case.layers
    row = case.planes * layers * case.width * case.element
    return sum(1 for _ in case.tokens()) * row


# ---------------------------------------------------------------------------- operations


@pytest.mark.parametrize("call", Call)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), way=st.sampled_from(WAYS), max_blocks=st.sampled_from([1, 2, 7, 1000]))
def test_every_byte_of_an_operation_is_written_once_and_is_the_right_one(
    replay: Any, call: Call, data: st.DataObject, way: str, max_blocks: int
) -> None:
    case = data.draw(cases(call))
    check(case, use(replay, way, max_blocks))
    assert replay.num_written() == bytes_that_move(case)


@pytest.mark.parametrize("direction", TransferDirection)
@pytest.mark.parametrize("number", SHAPES)
@pytest.mark.parametrize("call", Call)
def test_every_format_and_operation_in_both_directions(
    replay: Any, call: Call, number: int, direction: TransferDirection
) -> None:
    case = Case(
        call=call,
        format=number,
        direction=direction,
        dtype=torch.uint8 if number == 14 else torch.bfloat16,
        blocks=5,
        block_tokens=4,
        heads=1 if number in (3, 5, 14) else 3,
        layers=3,
        head_size=132 if number == 14 else 8,
        padding=0 if number in (4, 5) else 8,
        ids=(4, -1, 1, 0) if call is Call.BLOCKS else (7, -1, 19, 0, 5, 6),
        skip=0 if call is Call.SINGLE_LAYER else 1,
        objects=2 if call is Call.BLOCKS else 1,
    )
    for way in WAYS:
        check(case, use(replay, way))
        assert replay.num_written() == bytes_that_move(case) > 0


ONE_TOKEN_A_ROW = Case(
    call=Call.MULTI_LAYER,
    format=3,
    direction=D2H,
    dtype=torch.uint8,
    blocks=4,
    block_tokens=4,
    heads=1,
    layers=2,
    head_size=128,
    padding=0,
    ids=(3, 0, 14, 9),
)


@pytest.mark.parametrize("direction", TransferDirection)
@pytest.mark.parametrize("unit", [16, 8, 4, 2, 1])
def test_rows_move_in_the_widest_unit_that_their_addresses_allow(
    replay: Any, unit: int, direction: TransferDirection
) -> None:
    case = replace(ONE_TOKEN_A_ROW, direction=direction, shift=unit)
    check(case, use(replay, "KERNEL"))
    assert replay.stores_by_unit() == {unit: bytes_that_move(case) // unit}


def test_what_is_left_behind_the_last_unit_moves_in_bytes(replay: Any) -> None:
    """Rows of 132 bytes, every fourth of which begins at a multiple of 16."""
    case = replace(ONE_TOKEN_A_ROW, head_size=132, ids=(0, 4, 8, 12), layers=1, staging_padding=12)
    check(case, use(replay, "KERNEL"))
    assert replay.stores_by_unit() == {16: 4 * 8, 1: 4 * 4}
    case = replace(case, ids=(1, 3, 5, 7))
    check(case, use(replay, "KERNEL"))
    assert replay.stores_by_unit() == {4: 4 * 33}


def test_rows_longer_than_a_piece_are_shared_by_several_groups(replay: Any) -> None:
    case = replace(ONE_TOKEN_A_ROW, head_size=9001, ids=(3, -1, 9), blocks=3, layers=1)
    check(case, use(replay, "KERNEL"))
    assert replay.launch_of(2, 9001, 100)["pieces_per_row"] == 3


def test_numbers_that_do_not_fit_into_one_launch_travel_with_several(replay: Any) -> None:
    tokens = 2 * replay.OWN_ITEMS + 5
    slots = list(range(tokens))
    random.Random(3).shuffle(slots)
    case = replace(
        ONE_TOKEN_A_ROW, head_size=3, ids=tuple(slots), blocks=tokens, block_tokens=1, layers=1
    )
    check(case, use(replay, "OWN_NUMBERS"))
    assert replay.num_written() == 3 * tokens
    check(replace(case, skip=replay.OWN_ITEMS + 1), use(replay, "OWN_NUMBERS"))
    assert replay.num_written() == 3 * (replay.OWN_ITEMS + 4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ids", [(), (-1, -2)])
def test_nothing_to_do_writes_nothing(replay: Any, ids: tuple[int, ...], way: str) -> None:
    check(replace(ONE_TOKEN_A_ROW, ids=ids), use(replay, way))
    assert replay.num_written() == 0


# ---------------------------------------------------------------------------- plans


def flat_bytes(memory: torch.Tensor) -> bytes:
    return memory.numpy().tobytes()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("direction", TransferDirection)
def test_every_byte_of_a_plan_is_written_once_and_is_the_right_one(
    replay: Any, direction: TransferDirection, way: str
) -> None:
    @settings(max_examples=30, deadline=None)
    @given(paged_cases(direction, unit=1), st.integers(0, 2**32))
    def run(case: PagedCase, seed: int) -> None:
        rng = random.Random(seed)

        def filled(size: int) -> torch.Tensor:
            return torch.frombuffer(bytearray(rng.randbytes(size)), dtype=torch.uint8).clone()

        storages = [filled(size) for size in case.region_bytes]
        objects = filled(case.object_base + case.chunk_bytes() + 7)
        before = [flat_bytes(storage) for storage in storages], flat_bytes(objects)
        expected = case.expected(*before, direction)
        tensors = [layer.tensor(storages[layer.region], torch.uint8) for layer in case.layers]
        caches = paged_caches(tensors, num_blocks=case.layers[0].extents["B"])
        chunk = object_view_for(caches.views, case.blocks_per_chunk, case.order)
        plan = PagePlanner(caches.views, chunk).plan(
            chunk.at(case.object_base, chunk.chunk_bytes),
            case.first_block,
            case.block_ids,
            direction,
        )
        use(replay, way)
        regions = [region.data_ptr() for region in caches.regions]
        replay.run_plan(plan, regions, objects.data_ptr())
        assert replay.num_written() == plan.num_bytes
        assert [flat_bytes(storage) for storage in storages] == [bytes(r) for r in expected[0]]
        assert flat_bytes(objects) == bytes(expected[1])

    run()


def test_pieces_that_continue_each_other_are_one_and_equal_distances_one_call(replay: Any) -> None:
    def calls(cache: list[int], stored: list[int], row_bytes: int = 8) -> tuple[int, int]:
        pieces, single_calls = replay.engine_calls(cache, stored, row_bytes)
        return pieces, single_calls

    assert calls([], []) == (0, 0)
    assert calls([0, 8, 16], [0, 8, 16]) == (1, 1)
    assert calls([0, 8, 16], [0, 9, 18]) == (3, 1)  # contiguous on one side alone
    assert calls([0, 32, 64, 200], [0, 8, 16, 24]) == (4, 2)
    assert calls([64, 32, 0], [0, 8, 16]) == (3, 3)  # a pitch is never negative
    assert calls([0, -1, 32], [0, 8, 16]) == (2, 1)  # a skipped item leaves equal distances
    pitch = 2**31 - 1
    assert calls([0, pitch, 2 * pitch], [0, 8, 16]) == (3, 1)
    assert calls([0, pitch + 1, 2 * pitch + 2], [0, 8, 16]) == (3, 3)  # more than CUDA takes
    assert calls([0, 8, 32, 40], [0, 8, 32, 40]) == (2, 1)  # joined first, then alike


def test_debug_checks_refuse_ids_that_are_not_there_and_loads_that_name_one_twice(
    replay: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(replay, "KERNEL")
    twice = replace(ONE_TOKEN_A_ROW, ids=(3, -1, 9, 3, -1), direction=H2D)
    beyond = replace(ONE_TOKEN_A_ROW, ids=(3, 16))

    with pytest.raises(RuntimeError, match="written twice"):  # by this replay, not by the checks
        Memory(twice).call(replay)
    monkeypatch.setenv("MARU_DEBUG_CHECKS", "1")
    with pytest.raises(ValueError, match="slot 3 is named twice"):
        Memory(twice).call(replay)
    with pytest.raises(ValueError, match="slot 16 at position 1"):
        Memory(beyond).call(replay)
    check(replace(twice, direction=D2H), replay)  # read twice
    check(replace(twice, skip=1), replay)  # what is left out is not named


# ---------------------------------------------------------------------------- copy engines

PLAIN = ["rectangle of 3 x 8", "copy of 8"]
IN_ANY_ORDER, IN_STREAM_ORDER = ["batch of 4, order 3, flags 1"], ["batch of 4, order 1, flags 1"]


@pytest.fixture(scope="session")
def engine(built: Path) -> Callable[..., list[str]]:
    """Run four pieces through copy_engine.cpp; what the runtime was called for."""

    def run(
        toolkit: int = 13000,
        runtime: int = 13000,
        driver: int = 13000,
        stream: int = 7,
        host: str = "pinned",
        way: str = "load",
        sources: Iterable[int] = (0, 100, 200, 50),
    ) -> list[str]:
        program = built / f"copy_engine_replay_{toolkit}"
        asked = [runtime, driver, stream, host, way, *sources]
        done = subprocess.run(
            [program, *map(str, asked)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return run


@pytest.mark.parametrize("toolkit", [12080, 13000])
def test_loads_may_read_objects_at_any_time_and_stores_read_pages_in_stream_order(
    engine: Callable[..., list[str]], toolkit: int
) -> None:
    assert engine(toolkit=toolkit, way="load") == IN_ANY_ORDER
    assert engine(toolkit=toolkit, way="store") == IN_STREAM_ORDER


@pytest.mark.parametrize(
    "lacking",
    [
        {"toolkit": 12060},
        {"runtime": 12060},
        {"driver": 12060},
        {"stream": 0},
        {"stream": 1},
        {"host": "pageable"},
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["load", "store"])
def test_where_batches_cannot_be_had_the_same_bytes_move_in_single_calls(
    engine: Callable[..., list[str]], lacking: dict[str, int | str], way: str
) -> None:
    assert engine(way=way, **lacking) == PLAIN


def test_one_piece_is_no_batch_and_nothing_is_no_call(engine: Callable[..., list[str]]) -> None:
    assert engine(sources=[16, 24, 32]) == ["copy of 24"]
    assert engine(sources=[]) == []


# ---------------------------------------------------------------------------- launches


@given(
    rows=st.integers(1, 2**40),
    row_bytes=st.integers(1, 2**40 // 2**17),
    max_blocks=st.integers(1, 10_000),
)
def test_a_launch_covers_all_rows_and_stays_within_its_limit(
    replay: Any, rows: int, row_bytes: int, max_blocks: int
) -> None:
    launch = replay.launch_of(rows, row_bytes, max_blocks)
    assert 1 <= launch["blocks"] <= max_blocks
    assert launch["threads"] % launch["lanes"] == 0
    assert launch["num_pieces"] == rows * launch["pieces_per_row"]
    pieces, size = launch["pieces_per_row"], launch["piece_bytes"]
    assert (pieces - 1) * size < row_bytes <= pieces * size
    assert pieces == 1 or size % 16 == 0
    # No block without a piece.
    assert (launch["blocks"] - 1) * (launch["threads"] // launch["lanes"]) < launch["num_pieces"]


@pytest.mark.parametrize(("rows", "row_bytes"), [(0, 64), (0, 0), (5, 0)])
def test_nothing_to_do_is_no_launch(replay: Any, rows: int, row_bytes: int) -> None:
    assert replay.launch_of(rows, row_bytes, 8)["blocks"] == 0


def test_few_long_rows_fill_a_launch_as_many_short_ones_do(replay: Any) -> None:
    assert replay.launch_of(1, 2**20, 32)["blocks"] == 32
    assert replay.launch_of(2**14, 64, 32)["blocks"] == 32


@given(st.integers(1, 300))
def test_a_copy_with_host_memory_leaves_most_multiprocessors_to_the_engine(
    replay: Any, multiprocessors: int
) -> None:
    blocks = replay.max_blocks_of_a_launch(multiprocessors, host=True)
    assert 1 <= blocks <= min(32, max(1, multiprocessors // 4))
    assert replay.max_blocks_of_a_launch(multiprocessors, host=False) >= multiprocessors


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(-1, 2**20), min_size=1, max_size=6, unique_by=lambda i: i or object()),
    layers=st.integers(1, 3),
    row_bytes=st.sampled_from([1, 16, 132, 4096, 4097, 10_000]),
    start=st.integers(0, 17),
    max_blocks=st.sampled_from([1, 2, 100]),
)
def test_every_piece_is_visited_once_at_addresses_beyond_32_bits(
    replay: Any, ids: list[int], layers: int, row_bytes: int, start: int, max_blocks: int
) -> None:
    """Only numbers: a cache of 2**20 blocks of 8 MiB for each layer, 2**43 bytes and more."""
    ids = list(dict.fromkeys(ids))
    stride, layer_stride = 2**23, 2**44
    cache, stored = 2**46 + start, 2**35 + start
    reads, writes = replay.touched(
        ids, layers, row_bytes, cache, stride, layer_stride, stored, max_blocks
    )
    expected_writes, expected_reads = [], []
    for layer in range(layers):
        for place, block in enumerate(ids):
            if block < 0:
                continue
            first = cache + layer * layer_stride + block * stride
            expected_writes.append((first, first + row_bytes))
            first = stored + (layer * len(ids) + place) * row_bytes
            expected_reads.append((first, first + row_bytes))
    assert writes == sorted(expected_writes)
    assert reads == joined(expected_reads)


def joined(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for first, end in sorted(intervals):
        if result and result[-1][1] == first:
            result[-1] = (result[-1][0], end)
        else:
            result.append((first, end))
    return result


# ---------------------------------------------------------------------------- sanitizers


def test_every_format_way_and_unit_is_clean_under_address_and_undefined_behaviour_checks(
    built: Path,
) -> None:
    done = subprocess.run([built / "sanitized_replay"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    cases_run, units = done.stdout.split(";")
    assert int(cases_run.split()[0]) == len(SHAPES) * len(Call) * len(WAYS) * (3 * 5 + 1)
    assert {unit.split(":")[0] for unit in units.split()[3:]} == {"1", "2", "4", "8", "16"}
