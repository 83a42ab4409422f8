"""Lets the tests of this folder import ``index_rig``, which stands beside them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from index_rig import Rig


@pytest.fixture
def rig() -> Rig:
    """An index over a pool of four segments of 1 MiB."""
    return Rig()
