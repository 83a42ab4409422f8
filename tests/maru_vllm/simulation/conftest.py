"""Makes simulations, and keeps the long scripts for ``--long``."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from simulation import Simulation


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--long``, where no folder above has it already."""
    with contextlib.suppress(ValueError):
        parser.addoption("--long", action="store_true", help="run the long random scripts too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long scripts run only when asked for."""
    if config.getoption("--long", default=False):
        return
    skip = pytest.mark.skip(reason="only with --long")
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(skip)


@pytest.fixture
def simulate() -> Iterator[Callable[..., Simulation]]:
    """Makes simulations; each is closed, whatever the test did."""
    made: list[Simulation] = []

    def make(*arguments: Any, **options: Any) -> Simulation:
        made.append(Simulation(*arguments, **options))
        return made[-1]

    yield make
    for simulation in made:
        simulation.close()
