"""The index of these tests."""

import pytest
from index_rig import Rig


@pytest.fixture
def rig() -> Rig:
    """An index over a pool of four segments of 1 MiB."""
    return Rig()
