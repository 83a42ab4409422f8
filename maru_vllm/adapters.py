"""What is in a LoRA adapter's files, so that keys do not trust its name and path alone.

The pool outlives the engine and is shared between hosts: the same name and path may stand for
other weights tomorrow, or on the next host. An adapter is fingerprinted in the background when its
first request comes; until then such requests miss. An adapter whose files change while the engine
has it loaded, or that is replaced in place, is left alone from then on: what the engine computes
with is then not what the files say. (vLLM gives an adapter that is unloaded and loaded again
another number, and that one starts anew.)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from maru_vllm.encoding import UnencodableError
from maru_vllm.fingerprint import DigestCache, FingerprintJob, WeightFile, WeightsSource
from maru_vllm.identity import InputsNotYet
from maru_vllm.weights import WeightsUnknown, local_root

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_PATTERNS = ("adapter_config.json", "*.safetensors", "*.bin", "*.pt")

_Identity = tuple[str, str, int]
_Versions = tuple[tuple[str, int, int, int, int], ...]


@dataclass(slots=True)
class _Adapter:
    root: Path | None = None
    versions: _Versions = ()
    """Of its files when the first request came."""
    job: FingerprintJob | None = None
    refusal: str | None = None
    """Why requests with it have no keys; stays once it is set."""


class AdapterContents:
    """Fingerprints of the adapters that this engine has seen. Scheduler's thread only."""

    def __init__(self, cache: DigestCache | None = None) -> None:
        self._cache = cache
        self._adapters: dict[_Identity, _Adapter] = {}

    def fingerprint(self, lora: LoRARequest, *, begins: bool) -> bytes:
        """32 bytes over the adapter's files. ``begins``: a request's first range, where it is
        looked whether the files are still those that the fingerprint is of (some 10 us a file).

        Raises InputsNotYet while they are read, UnencodableError where the adapter cannot be told.
        """
        identity = (lora.lora_name, lora.lora_path, lora.lora_int_id)
        adapter = self._adapters.get(identity)
        if adapter is None:
            adapter = self._adapters[identity] = self._begin(lora)
        if adapter.refusal is None and begins:
            adapter.refusal = _refusal(adapter, lora)
        if adapter.refusal is None and adapter.job is not None:
            if (fingerprint := adapter.job.poll()) is not None:
                return fingerprint
            adapter.refusal = adapter.job.failure()
        if adapter.refusal is None:
            raise InputsNotYet
        raise UnencodableError(f"LoRA adapter {lora.lora_name}: {adapter.refusal}")

    def _begin(self, lora: LoRARequest) -> _Adapter:
        try:
            root, _ = local_root(os.path.expanduser(lora.lora_path), None, None)
            versions = _versions(root)
            files = tuple(WeightFile(name, root / name) for name, *_ in versions)
        except (WeightsUnknown, OSError) as error:
            return _Adapter(refusal=str(error))
        if not files:
            return _Adapter(refusal=f"{root} has no adapter files")
        job = FingerprintJob(WeightsSource(files), cache=self._cache, threads=1)
        return _Adapter(root, versions, job)


def _refusal(adapter: _Adapter, lora: LoRARequest) -> str | None:
    if lora.load_inplace:
        return "it is replaced in place, so its files do not say what the engine has loaded"
    try:
        unchanged = adapter.root is not None and _versions(adapter.root) == adapter.versions
    except OSError:
        unchanged = False
    if not unchanged:
        return f"files in {adapter.root} changed while it was in use; unload it and load it again"
    return None


def _versions(root: Path) -> _Versions:
    """Name, size, times and inode of each file, in the order of their names."""
    paths = sorted({path for pattern in _PATTERNS for path in root.glob(pattern)})
    return tuple(
        (path.name, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
        for path in paths
        for found in (path.stat(),)
    )
