"""What all tests share: the option ``--long``, and short runtime directories."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from maru_shm.control.runtime_dir import RuntimeDir

# No test fails because the machine is busy: an example may take as long as it takes.
hypothesis.settings.register_profile("maru", deadline=None)
hypothesis.settings.load_profile("maru")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked long too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "cuda_build" not in config.option.markexpr:
        # They belong to another environment: .ci/run makes it and runs them there.
        theirs = [item for item in items if item.get_closest_marker("cuda_build") is not None]
        items[:] = [item for item in items if item not in theirs]
        config.hook.pytest_deselected(items=theirs)
    if config.getoption("--long"):
        return
    skip = pytest.mark.skip(reason="only with --long")
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(skip)


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A private runtime directory with a path short enough for a socket; its pool goes with it."""
    path = Path(tempfile.mkdtemp(prefix="maru-t-", dir="/tmp"))
    yield path
    pool = RuntimeDir(path).pool
    for left in pool.parent.glob(f"{pool.name}*"):
        left.unlink()
    shutil.rmtree(path)
