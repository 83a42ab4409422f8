"""How the compiled operations are loaded, and what is said when they cannot be.

``maru_kv_ops._C`` is optional. It is looked for once per process, at the first question, and the
answer is kept, a failure too: an import that failed once is not tried again for every copy. torch
is imported before it, because its symbols and libraries come from there. Loading needs no GPU and
does not initialise CUDA.

Every function may be called from any thread.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sysconfig
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType

from maru_kv_ops import build_record
from maru_kv_ops.build_record import BUILD_STEP, BuildState, ExtensionRecord

NAME = "_C"
MODULE = f"maru_kv_ops.{NAME}"
PUBLIC_NAMES = (
    "CopyPath",
    "EngineKVFormat",
    "PageBufferShapeDesc",
    "TransferDirection",
    "multi_layer_block_kv_transfer",
    "multi_layer_kv_transfer",
    "run_plan",
    "single_layer_kv_transfer",
)
"""What ``maru_kv_ops`` shows of the extension (its ``build_info`` comes as a ``BuildInfo``)."""

_FOLDER = Path(__file__).parent
# CPython's guess about a module that is not ready. It sends readers after an import cycle of ours
# where there is none.
_PYTHONS_GUESS = re.compile(r" \(most likely due to a circular import\)")


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """What the loaded extension says that it was made from."""

    kernel_revision: str
    """Revision of the kernel sources, as VENDOR.md recorded it."""
    sources_digest: str
    """``maru_kv_ops.vendor.sources_digest()`` of the sources that were compiled."""
    cuda: str
    torch: str
    arch_list: str


@dataclass(frozen=True, slots=True)
class _Loaded:
    module: ModuleType
    info: BuildInfo


@dataclass(frozen=True, slots=True)
class _Missing:
    error: str


_lock = threading.RLock()  # re-entrant: what torch imports may ask again
_outcome: _Loaded | _Missing | None = None


def is_available() -> bool:
    """Whether the compiled operations can be called. They may still find no GPU to run on."""
    return isinstance(_load(), _Loaded)


def import_error() -> str | None:
    """Why they cannot, in full, and what to run; None when they can."""
    outcome = _load()
    return outcome.error if isinstance(outcome, _Missing) else None


def build_info() -> BuildInfo | None:
    """What the loaded extension was made from; None when there is none (see ``import_error``)."""
    outcome = _load()
    return outcome.info if isinstance(outcome, _Loaded) else None


def module() -> ModuleType | None:
    """The extension itself; None when it is not available."""
    outcome = _load()
    return outcome.module if isinstance(outcome, _Loaded) else None


def attribute(name: str) -> object:
    """``maru_kv_ops.<name>`` for names that the package itself does not have."""
    if name != NAME and name not in PUBLIC_NAMES:
        raise AttributeError(f"module 'maru_kv_ops' has no attribute '{name}'")
    outcome = _load()
    if isinstance(outcome, _Missing):
        raise AttributeError(f"maru_kv_ops.{name} is not available: {outcome.error}")
    return outcome.module if name == NAME else getattr(outcome.module, name)


def _load() -> _Loaded | _Missing:
    global _outcome
    with _lock:
        if _outcome is None:
            _outcome = _try_to_load()
        return _outcome


def _try_to_load() -> _Loaded | _Missing:
    record = build_record.read().get(NAME)
    if importlib.util.find_spec(MODULE) is None:
        return _missing(_why_not_there(record))
    try:
        import torch
    except Exception as error:  # a broken torch raises anything, from inside its libraries
        return _missing(f"needs torch, which cannot be imported here: {_said(error)}")
    here = f"torch {torch.__version__} is installed here"
    try:
        found = importlib.import_module(MODULE)
        facts = found.build_info()
        info = BuildInfo(**{field.name: str(facts[field.name]) for field in fields(BuildInfo)})
    except Exception as error:  # as above; whatever it is, it is the answer that is kept
        if "undefined symbol" not in str(error):
            return _missing(f"cannot be loaded: {_said(error)}")
        built_for = "another torch" if record is None else f"torch {record.torch}"
        return _missing(f"was built for {built_for}, {here}: {_said(error)}")
    if info.torch != torch.__version__:
        # It loads, but torch promises nothing between versions about what its headers inlined.
        return _missing(f"was built for torch {info.torch}, {here}")
    return _Loaded(found, info)


def _why_not_there(record: ExtensionRecord | None) -> str:
    """Why there is no file that this Python would import."""
    others = sorted(path.name for path in _FOLDER.glob(f"{NAME}.*.so"))
    if others:
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        return f"is there as {', '.join(others)}, this Python imports {NAME}{suffix}"
    if record is None:
        return f"is not in {_FOLDER}, and no build was recorded there"
    if record.state is BuildState.BUILT:
        return f"was built, but its file is no longer in {_FOLDER}"
    return f"was not built: {record.reason}"


def _missing(cause: str) -> _Missing:
    error = f"{MODULE} {cause}"
    if BUILD_STEP in error:
        return _Missing(error)
    return _Missing(f"{error.rstrip('.')}. To build it: {BUILD_STEP}")


def _said(error: Exception) -> str:
    text = _PYTHONS_GUESS.sub("", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"
