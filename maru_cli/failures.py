"""How a command ends that cannot do what it was asked to: one message and an exit status.

    CommandFailed     status 1: it was tried and did not work, or what was checked is not right
    NothingThere      status 2: no server, no such pool, not a Maru pool

``maru_cli.app.main`` turns both, and every ``MaruError``, into a line on standard error.
"""

from __future__ import annotations

from enum import IntEnum, unique


@unique
class ExitStatus(IntEnum):
    """Exit statuses of every subcommand."""

    OK = 0
    FAILED = 1
    NOTHING_THERE = 2


class CommandFailed(Exception):
    """The command was understood and did not work out; the message says what and what next."""

    status = ExitStatus.FAILED


class NothingThere(CommandFailed):
    """What the command should look at does not exist, or is not Maru's."""

    status = ExitStatus.NOTHING_THERE
