"""Which files make the model that an engine runs.

The fingerprint must cover whatever vLLM's loader may read, so this takes all files of the kinds
that the load format can choose from, not the loader's exact choice: a file too many costs a hit
between unlike copies of a model, a file too few would serve KV of other weights.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from maru_vllm.encoding import encode
from maru_vllm.fingerprint import WeightFile, WeightsSource
from maru_vllm.settings import PREFIX, Settings

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

_FROM_SAFETENSORS_OR_TORCH: Final = (("*.safetensors",), ("*.bin", "*.pt", "*.pth"))
_KINDS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "auto": _FROM_SAFETENSORS_OR_TORCH,
    "hf": _FROM_SAFETENSORS_OR_TORCH,
    "safetensors": (("*.safetensors",),),
    "fastsafetensors": (("*.safetensors",),),
    "instanttensor": (("*.safetensors",),),
    "mistral": (("*.safetensors",),),
    "runai_streamer": (("*.safetensors",),),
    "sharded_state": (("*.safetensors",),),
    "runai_streamer_sharded": (("*.safetensors",),),
    "pt": (("*.pt",),),
    "npcache": (("*.bin",),),
}
"""Load formats that read a directory, and the kinds of files each prefers, first found first."""

_CONFIGURATION: Final = (
    "config.json",
    "params.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Small files that change what the weights compute. Tokenizers do not count: keys are made from
token ids."""

_START_SLACK_NS: Final = 100_000_000
"""The kernel gives a process's start in ticks of 10 ms; no engine reads weights this early."""


class WeightsUnknown(Exception):
    """It cannot be told from files which weights an engine has loaded."""


@dataclass(frozen=True, slots=True)
class _Model:
    role: str
    model_config: ModelConfig
    load_config: LoadConfig


def weights_source(vllm_config: VllmConfig, settings: Settings) -> WeightsSource:
    """What to fingerprint: the model, and the draft model where it is another one.

    Looks at directories but reads no file. Raises WeightsUnknown where the files are not on this
    host or not known and ``maru_model_id`` does not stand in for them.
    """
    files: list[WeightFile] = []
    stated: list[object] = []
    is_plain_directory = True
    for model in _models(vllm_config):
        if model.load_config.load_format == "dummy":
            stated.append((model.role, "dummy", *_dummy_rule(model.model_config)))
            continue
        try:
            root, from_hub = _root(model)
            found = list(_files(model, root))
        except WeightsUnknown as unknown:
            if settings.model_id is None:
                raise WeightsUnknown(
                    f"{unknown}. Set {PREFIX}model_id to a name that all engines with these very "
                    f"weights share, and change it whenever the weights change"
                ) from None
            stated.append((model.role, "model_id", settings.model_id))
            continue
        is_plain_directory = is_plain_directory and not from_hub
        files += (WeightFile(f"{model.role}/{file.name}", file.path) for file in found)
    return WeightsSource(
        files=tuple(files),
        stated=encode(stated) if stated else b"",
        loaded_since_ns=_engine_start_ns() if is_plain_directory else None,
    )


def _models(vllm_config: VllmConfig) -> Iterator[_Model]:
    model_config = vllm_config.model_config
    yield _Model("model", model_config, vllm_config.load_config)
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if speculative is not None and draft is not None and draft.model != model_config.model:
        draft_load = getattr(speculative, "draft_load_config", None)
        yield _Model("draft", draft, draft_load or vllm_config.load_config)


def _dummy_rule(model_config: ModelConfig) -> tuple[object, ...]:
    """Dummy weights are random numbers from a fixed seed; torch decides which."""
    import torch
    from vllm.platforms import current_platform

    return str(torch.__version__), str(current_platform.device_type), model_config.seed


def _root(model: _Model) -> tuple[Path, bool]:
    # model_weights is set where configuration and weights come from unlike places.
    name = getattr(model.model_config, "model_weights", "") or model.model_config.model
    return local_root(name, model.model_config.revision, model.load_config.download_dir)


def local_root(name: str, revision: str | None, download_dir: str | None) -> tuple[Path, bool]:
    """The directory or single file that ``name`` stands for on this host, and whether the hub's
    cache holds it. Entries of that cache never change once written, and the engine itself may
    just have written them. Downloads nothing. Raises WeightsUnknown."""
    if Path(name).exists():
        return Path(name), False
    if "://" in name or os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise WeightsUnknown(f"the weights of {name} are not in a local directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = snapshot_download(
            name, revision=revision, cache_dir=download_dir, local_files_only=True
        )
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise WeightsUnknown(
            f"the weights of {name} are neither a local path nor in the hub's cache ({error})"
        ) from None
    return Path(snapshot), True


def _files(model: _Model, root: Path) -> Iterator[WeightFile]:
    if root.is_file():
        yield WeightFile(root.name, root)
        return
    load_format = str(model.load_config.load_format)
    if load_format not in _KINDS:
        raise WeightsUnknown(f"load format {load_format!r} does not say which files it reads")
    for attribute in ("text_model_id", "audio_model_id"):
        other = getattr(model.model_config.hf_config, attribute, None)
        if other:
            raise WeightsUnknown(f"{root} also takes weights from {other} ({attribute})")
    for patterns in _KINDS[load_format]:
        weights = list(_below(root, patterns))
        if weights:
            break
    else:
        raise WeightsUnknown(f"{root} has no weight files for load format {load_format!r}")
    yield from weights
    names = list(_CONFIGURATION)
    if model.model_config.trust_remote_code:
        names.append("*.py")
    for pattern in names:
        for path in sorted(root.glob(pattern)):
            yield WeightFile(path.relative_to(root).as_posix(), path)


def _below(root: Path, patterns: tuple[str, ...]) -> Iterator[WeightFile]:
    """``original/`` holds a second copy in another format, which vLLM does not load."""
    for pattern in patterns:
        for path in sorted(root.rglob(pattern)):
            name = path.relative_to(root).as_posix()
            if path.is_file() and not name.startswith("original/"):
                yield WeightFile(name, path)


def _engine_start_ns() -> int | None:
    """A time before this engine read its weights, on the wall clock; None if there is none.

    Only an engine core in a process of its own began with that process; in the program's own
    process the model may have been written and loaded at any time.
    """
    if multiprocessing.parent_process() is None:
        return None
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        booted_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        start_ns = booted_ns + ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return start_ns + _START_SLACK_NS if ticks else None
