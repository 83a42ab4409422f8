"""Nothing that Maru does may raise into the engine, and no fault may fill its log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class OncePerKind:
    """Swallows what a hook raises and logs the first of each kind. Thread: one."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._seen: set[tuple[str, str]] = set()

    @contextmanager
    def guard(self, hook: str) -> Iterator[None]:
        """Run a hook's body; an exception ends it, is logged with its trace, and stops here."""
        try:
            yield
        except Exception as error:
            if self._is_new(hook, type(error).__name__):
                self._logger.exception(
                    "Maru: %s failed; the engine goes on without it. Later faults of this kind are "
                    "not logged",
                    hook,
                )

    def warn(self, kind: str, message: str, *args: object) -> None:
        """Log a warning, the first of its kind and wording only."""
        if self._is_new(kind, message % args if args else message):
            self._logger.warning(message, *args)

    def say(self, kind: str, message: str, *args: object) -> None:
        """Log what is no fault, the first time."""
        if self._is_new(kind, message):
            self._logger.info(message, *args)

    def _is_new(self, hook: str, kind: str) -> bool:
        if (hook, kind) in self._seen:
            return False
        self._seen.add((hook, kind))
        return True
