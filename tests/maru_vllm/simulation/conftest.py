"""Makes simulations."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from simulation import Simulation


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
