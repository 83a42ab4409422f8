"""Where this user's cached files lie: what can be made again, and costs time to make."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/maru``; without that variable, or a relative one, ``~/.cache/maru``."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return home / "maru"
