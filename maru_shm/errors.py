"""The root of Maru's errors. Each part has its own tree under it, in its own ``errors.py``."""

from __future__ import annotations


class MaruError(Exception):
    """Base of every error that Maru raises on purpose."""
