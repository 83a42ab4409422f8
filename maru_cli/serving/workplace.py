"""A temporary folder for servers under test, with a Maru runtime dir that disturbs nobody."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from maru_cli.failures import CommandFailed
from maru_cli.looking import Looker, looking

STOP_DEADLINE_S = 10.0
STORE_DEADLINE_S = 60.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where one demo or benchmark works."""

    folder: Path

    @property
    def model(self) -> Path:
        """The model's folder."""
        return self.folder / "model"

    @property
    def runtime_dir(self) -> Path:
        """For ``MARU_RUNTIME_DIR``."""
        return self.folder / "run"

    @contextmanager
    def looker(self) -> Iterator[Looker]:
        """Look at the Maru server that the engines started. Raises NothingThere."""
        with looking(None, self.runtime_dir) as looker:
            yield looker

    def wait_for_objects(self, count: int) -> None:
        """Wait until ``count`` objects are sealed and none is being written."""
        deadline = time.monotonic() + STORE_DEADLINE_S
        with self.looker() as looker:
            while True:
                stats = looker.stats()
                if stats.objects >= count and not stats.reservations:
                    return
                if time.monotonic() > deadline:
                    raise CommandFailed(
                        f"after {STORE_DEADLINE_S:.0f} s the pool holds {stats.objects} objects,"
                        f" {stats.reservations} are being written; {count} were expected"
                    )
                time.sleep(_POLL_S)  # a server has no call that waits for stores


@contextmanager
def workplace(purpose: str) -> Iterator[Workplace]:
    """Make the folder; at the end stop the Maru server in it and take the folder away.

    When the work fails, the logs stay, and the error names them.
    """
    place = Workplace(Path(tempfile.mkdtemp(prefix=f"maru-{purpose}-")))
    place.model.mkdir()
    place.runtime_dir.mkdir(mode=0o700)
    try:
        try:
            yield place
        finally:
            _stop_maru_server(place)
    except Exception:  # the logs stay, and it goes on to whoever asked
        shutil.rmtree(place.model, ignore_errors=True)
        raise
    except BaseException:  # Ctrl-C or SIGTERM: nobody asked for the logs.
        shutil.rmtree(place.folder, ignore_errors=True)
        raise
    shutil.rmtree(place.folder)


def _stop_maru_server(place: Workplace) -> None:
    """The embedded server is nobody's child: it is found by asking it, and ended by its pid."""
    with contextlib.suppress(CommandFailed, ProcessLookupError):
        with place.looker() as looker:
            life = os.pidfd_open(looker.stats().server_pid)
        try:
            signal.pidfd_send_signal(life, signal.SIGTERM)
            if not select.select([life], [], [], STOP_DEADLINE_S)[0]:
                signal.pidfd_send_signal(life, signal.SIGKILL)
        finally:
            os.close(life)
