"""Lets the tests of this folder import ``scripted_engine``, which stands beside them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from scripted_engine import Engine


@pytest.fixture
def engine() -> Engine:
    return Engine()
