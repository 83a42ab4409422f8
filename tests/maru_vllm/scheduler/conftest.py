"""The engine of the scheduler half's tests."""

import pytest
from scripted_engine import Engine


@pytest.fixture
def engine() -> Engine:
    return Engine()
