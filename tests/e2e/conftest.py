"""Engines that many tests share: starting one costs more than most tests.

``reference`` runs without Maru; ``first`` and ``second`` share the pool of one embedded server,
which the first of them started by itself. Tests use prompts of their own (another seed), so
that sharing the pool never lets one see another's objects.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_engine import Engine, EngineSettings
from e2e_store import Store

from maru_cli.serving.model import ModelShape, make_model

TINY = ModelShape(layers=4, hidden=128, intermediate=256, heads=4, kv_heads=2, max_tokens=4096)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, TINY, seed=1)
    return folder


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Same shape, other weights."""
    folder = tmp_path_factory.mktemp("other-model")
    make_model(folder, TINY, seed=2)
    return folder


@pytest.fixture(scope="session")
def make_runtime_dir() -> Iterator[Callable[[], Path]]:
    """Runtime dirs with short paths (a socket's path is limited); every server in them is
    stopped and every pool removed at the end."""
    made: list[Path] = []

    def make() -> Path:
        made.append(Path(tempfile.mkdtemp(prefix="maru-e2e-")))
        return made[-1]

    yield make
    for path in made:
        Store(path).stop()
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_dir(make_runtime_dir: Callable[[], Path]) -> Path:
    return make_runtime_dir()


@pytest.fixture(scope="session")
def start_engine(
    tmp_path_factory: pytest.TempPathFactory, make_runtime_dir: Callable[[], Path]
) -> Iterator[Callable[[str, EngineSettings], Engine]]:
    """Starts engines without waiting for them; stops all that still run at the session's end.

    Depends on ``make_runtime_dir`` so that engines stop before their servers.
    """
    logs = tmp_path_factory.mktemp("engine-logs")
    engines: list[Engine] = []

    def start(name: str, settings: EngineSettings) -> Engine:
        engine = Engine(settings, logs / f"{len(engines)}-{name}.log")
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.ask_to_stop()
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def shared_engines(
    start_engine: Callable[[str, EngineSettings], Engine], shared_dir: Path, model: Path
) -> dict[str, Engine]:
    with_maru = EngineSettings(model, shared_dir)
    without = replace(with_maru, maru=None, prefix_caching=True)
    return {
        "reference": start_engine("reference", without),
        "first": start_engine("first", with_maru),
        "second": start_engine("second", with_maru),
    }


@pytest.fixture
def reference(shared_engines: dict[str, Engine]) -> Engine:
    return shared_engines["reference"].wait_ready()


@pytest.fixture
def first(shared_engines: dict[str, Engine]) -> Engine:
    return shared_engines["first"].wait_ready()


@pytest.fixture
def second(shared_engines: dict[str, Engine]) -> Engine:
    return shared_engines["second"].wait_ready()


@pytest.fixture
def store(shared_dir: Path) -> Store:
    return Store(shared_dir)
