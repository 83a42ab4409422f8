"""What the copy layer refuses, always before a byte has moved.

CopyError
├── ViewError            a tensor or an axis description cannot be a paged view
├── BlockOutOfRange      a block id, or a position in the chunk, does not exist
├── DuplicateBlock       a load names one block twice: it would be written twice
├── ObjectTooSmall       the object's bytes cannot hold a chunk of this layout
├── MemoryMismatch       the memory given to an executor is not the memory of the plan
├── TransferRefused      the arguments of a copy operation do not belong together (a ValueError)
└── ExecutorMissing      the native code that an executor needs was not built

All but the last are faults of the caller. After any of them source and destination are unchanged.
"""

from __future__ import annotations


class CopyError(Exception):
    """Base of all refusals of this package."""


class ViewError(CopyError):
    """A tensor, or a set of axes, cannot be described as paged memory."""


class BlockOutOfRange(CopyError):
    """A block id or a chunk position lies outside what the views describe."""


class DuplicateBlock(CopyError):
    """One load names the same block twice."""


class ObjectTooSmall(CopyError):
    """The object has fewer bytes than one chunk of its layout needs."""


class MemoryMismatch(CopyError):
    """An executor was given fewer, smaller or other memories than its plan addresses."""


class TransferRefused(CopyError, ValueError):
    """Arguments of one of the three copy operations that do not belong together."""


class ExecutorMissing(CopyError):
    """An executor's native code is not there; the message says why and what to run."""
