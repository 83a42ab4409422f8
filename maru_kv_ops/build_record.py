"""What became of the native extensions when this package was built.

``setup.py`` writes the record, ``maru_kv_ops`` reads it at run time: that is how the reason why an
extension is missing reaches whoever misses it. ``maru_kv_ops/_build.json``, UTF-8:

    {
      "_C":    {"state": "skipped", "reason": "…", "torch": null, "cuda": null,
                "arch_list": null, "compiler": null},
      "_host": {"state": "built", "reason": "", …}
    }

with every key of ``ExtensionRecord`` present, and an extension left out that the build did not
know. Needs neither torch nor the extensions; never touches CUDA.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path

BUILD_STEP = (
    "./install.sh in Maru's checkout, in an environment with torch for CUDA "
    "(or there: pip install --no-build-isolation .)"
)
"""What messages say has to be run to get the extensions."""

RECORD = Path(__file__).with_name("_build.json")


class BuildState(StrEnum):
    """How the build of one extension ended."""

    BUILT = "built"
    SKIPPED = "skipped"
    """Refused before it was tried."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ExtensionRecord:
    """One extension. Facts are those of the build's environment, None where they don't apply."""

    state: BuildState
    reason: str = ""
    """One complete line, with what to run; empty when built."""
    torch: str | None = None
    """``torch.__version__``, local part included."""
    cuda: str | None = None
    """``torch.version.cuda``."""
    arch_list: str | None = None
    """As in TORCH_CUDA_ARCH_LIST."""
    compiler: str | None = None


def write(records: Mapping[str, ExtensionRecord], path: Path = RECORD) -> None:
    """Write the record of a build; extension names without the package: "_C"."""
    text = json.dumps({name: asdict(record) for name, record in records.items()}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def read(path: Path = RECORD) -> dict[str, ExtensionRecord]:
    """The record of the build that made this package; empty if none is there or it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        names = [field.name for field in fields(ExtensionRecord) if field.name != "state"]
        return {
            str(extension): ExtensionRecord(
                BuildState(row["state"]), **{name: row[name] for name in names}
            )
            for extension, row in found.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
