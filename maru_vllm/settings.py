"""The operator's settings: every ``maru_*`` key of ``kv_connector_extra_config``.

The dataclass ``Settings`` is the one list of them. What a key means, what it takes and what it
defaults to stand in its field; the table in docs/settings.md is made from the fields, and a test
compares the two. Nothing here reads the environment or imports vLLM.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any, Final, TypeVar

PREFIX: Final = "maru_"
DEFAULT_CHUNK_TOKENS: Final = 256

_E = TypeVar("_E", bound=Enum)


class SettingsError(ValueError):
    """A setting is unknown or has a value it cannot take. The engine must not start."""


@unique
class KVPayload(Enum):
    """What an object's bytes are."""

    PAGES = "pages"
    TOKENS = "tokens"


@unique
class Placement(Enum):
    """Which executor runs a copy plan."""

    AUTO = "auto"
    KERNEL = "kernel"
    COPY_ENGINE = "copy_engine"
    FALLBACK = "fallback"


@unique
class TransferMode(Enum):
    """Who copies."""

    AUTO = "auto"
    ENGINE_DRIVEN = "engine_driven"
    SERVER_DRIVEN = "server_driven"


@unique
class LoadMode(Enum):
    """When a hit is loaded, as ``async_load`` and ``overlap_load_with_compute`` say together."""

    BETWEEN_STEPS = "between steps"
    """The request waits, the engine does not."""
    LAYER_BY_LAYER = "layer by layer"
    """Into the step that uses it, each layer ahead of its forward."""
    BEFORE_FORWARD = "before the forward"
    """Into the step that uses it, all layers before it starts."""


@unique
class Verify(Enum):
    """What a load checks beside the object's header before and after the copy."""

    HEADER = "header"
    SAMPLE = "sample"
    FULL = "full"


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWER: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(value: object) -> int:
    """Bytes from an int or a string such as ``"4GiB"``, ``"512MB"`` or ``"1.5 G"``.

    ``KiB``, ``MiB``, ``GiB`` and ``TiB`` are powers of 1024, the same without the ``i`` powers of
    1000. Raises ValueError where the value is not a size of at least one byte.
    """
    size: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        number, unit, binary = match.groups()
        if unit or not binary:
            size = int(float(number) * (1024 if binary else 1000) ** _POWER[unit.lower()])
    if size is None or size < 1:
        raise ValueError('a positive number of bytes, or a string such as "4GiB" or "512MB"')
    return size


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _at_least(low: int) -> Callable[[object], int]:
    def convert(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(f"a whole number of at least {low}")
        return value

    return convert


def _milliseconds(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 60_000:
        raise ValueError("a whole number of milliseconds from 0 to below 60000")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def _name(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a string that is not empty")
    return value


def _server_url(value: object) -> str:
    if isinstance(value, str):
        if value.startswith("ipc://") and len(value) > len("ipc://"):
            return value
        if re.fullmatch(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):\d{1,5}", value):
            return value
    raise ValueError('"ipc:///path/to/socket" or "tcp://host:port"')


def _one_of(kind: type[_E]) -> Callable[[object], _E]:
    allowed = ", ".join(f'"{member.value}"' for member in kind)

    def convert(value: object) -> _E:
        for member in kind:
            if value is member or value == member.value:
                return member
        raise ValueError(f"one of {allowed}")

    return convert


@dataclass(frozen=True, slots=True)
class _Row:
    """What a field tells the parser and the documentation."""

    convert: Callable[[object], Any]
    """Raises ValueError with the words for what is allowed."""
    takes: str
    meaning: str
    default_text: str | None
    """Where the default is not a plain value: what happens without the key."""


_ROW: Final = "row"


def _row(
    convert: Callable[[object], Any], takes: str, meaning: str, default_text: str | None = None
) -> dict[str, _Row]:
    """The metadata of a field of Settings."""
    return {_ROW: _Row(convert, takes, meaning, default_text)}


def _values(kind: type[Enum]) -> str:
    return ", ".join(f"`{member.value}`" for member in kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Checked settings of one engine; both connector halves read the same."""

    server_url: str | None = field(
        default=None,
        metadata=_row(
            _server_url,
            "`ipc://...` or `tcp://host:port`",
            "the server that this engine uses; without it, this user's embedded server",
            "embedded",
        ),
    )
    pool_size: int | None = field(
        default=None,
        metadata=_row(
            parse_size,
            'bytes, or a string such as `"4GiB"`, `"512MB"`',
            "size of the pool that an embedded server makes; a pool that is there keeps its size",
            "4 GiB, or half of the free tmpfs if less",
        ),
    )
    kv_chunk_tokens: int = field(
        default=DEFAULT_CHUNK_TOKENS,
        metadata=_row(
            _at_least(1),
            "whole number",
            "tokens per object; must be a multiple of the engine's block sizes",
        ),
    )
    kv_payload: KVPayload = field(
        default=KVPayload.PAGES,
        metadata=_row(
            _one_of(KVPayload),
            _values(KVPayload),
            "what an object holds: the engine's own block pages, or tokens in an order of "
            "their own that unlike engines can share",
        ),
    )
    async_load: bool = field(
        default=True,
        metadata=_row(
            _flag,
            "true, false",
            "load between steps; if false, ahead of the step that uses it, which needs "
            "`--no-async-scheduling`",
        ),
    )
    overlap_load_with_compute: bool = field(
        default=False,
        metadata=_row(
            _flag,
            "true, false",
            "load layer by layer ahead of the forward; needs `--no-async-scheduling`",
        ),
    )
    overlap_release_after_layers: int = field(
        default=1,
        metadata=_row(
            _at_least(1),
            "whole number",
            "layers that must have landed before the forward starts, with overlapped loads",
        ),
    )
    async_store: bool = field(
        default=True, metadata=_row(_flag, "true, false", "store behind the step")
    )
    store_decode: bool = field(
        default=True,
        metadata=_row(_flag, "true, false", "also store chunks that decoding completes"),
    )
    placement: Placement = field(
        default=Placement.AUTO,
        metadata=_row(_one_of(Placement), _values(Placement), "which path copies; see below"),
    )
    transfer_mode: TransferMode = field(
        default=TransferMode.AUTO,
        metadata=_row(
            _one_of(TransferMode),
            _values(TransferMode),
            "who copies: the engine's workers or a transfer server; a forced mode that the "
            "device cannot do is an error",
        ),
    )
    cache_namespace: str = field(
        default="",
        metadata=_row(_text, "string", "extra isolation: engines with unlike values share nothing"),
    )
    model_id: str | None = field(
        default=None,
        metadata=_row(
            _name,
            "string",
            "stands for the model where its weights cannot be read from files; elsewhere it "
            "counts beside their fingerprint, so give it to all engines or to none",
            "derived",
        ),
    )
    verify: Verify = field(
        default=Verify.HEADER,
        metadata=_row(
            _one_of(Verify),
            _values(Verify),
            "what a load checks: the header only, or also a checksum over samples or all bytes",
        ),
    )
    lookup_timeout_ms: int = field(
        default=20,
        metadata=_row(_milliseconds, "milliseconds", "after this time a lookup counts as no hit"),
    )
    log_timing: bool = field(
        default=False, metadata=_row(_flag, "true, false", "per-phase timings in the log")
    )

    @property
    def load_mode(self) -> LoadMode:
        """When hits are loaded."""
        if self.overlap_load_with_compute:
            return LoadMode.LAYER_BY_LAYER
        return LoadMode.BETWEEN_STEPS if self.async_load else LoadMode.BEFORE_FORWARD

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any] | None) -> Settings:
        """Check ``kv_connector_extra_config`` and take the ``maru_*`` keys out of it.

        Keys that have nothing to do with Maru are left alone: other connectors read the same
        mapping. A key that is meant for Maru and misspelt is an error, not left alone.
        Raises SettingsError, which names the key, what was given and what is allowed.
        """
        rows = {PREFIX + f.name: f for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for key, given in (extra_config or {}).items():
            if key not in rows:
                _refuse_if_meant_for_maru(key, list(rows))
                continue
            row: _Row = rows[key].metadata[_ROW]
            if given is None and rows[key].default is None:
                continue
            try:
                values[rows[key].name] = row.convert(given)
            except ValueError as error:
                raise SettingsError(
                    f"kv_connector_extra_config: {key} is {given!r}; it takes {error}"
                ) from None
        return cls(**values)

    def check_block_size(self, block_size: int) -> None:
        """Raise SettingsError unless a chunk is a whole number of ``block_size`` tokens."""
        if self.kv_chunk_tokens % block_size:
            below = self.kv_chunk_tokens // block_size * block_size
            near = f"{below} or {below + block_size}" if below else f"{block_size}"
            raise SettingsError(
                f"{PREFIX}kv_chunk_tokens is {self.kv_chunk_tokens}, which is not a multiple of "
                f"the engine's block size of {block_size} tokens; set it to {near}, or change "
                f"--block-size"
            )


def settings_table() -> str:
    """The Markdown table of docs/settings.md, one row per setting."""
    lines = ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    for f in dataclasses.fields(Settings):
        row: _Row = f.metadata[_ROW]
        default = row.default_text or _default_text(f.default)
        lines.append(f"| `{PREFIX}{f.name}` | {row.takes} | {default} | {row.meaning} |")
    return "\n".join(lines) + "\n"


def _default_text(default: object) -> str:
    match default:
        case Enum():
            return f"`{default.value}`"
        case bool():
            return str(default).lower()
        case "":
            return '`""`'
    return str(default)


def _refuse_if_meant_for_maru(key: object, known: list[str]) -> None:
    """Raise for ``maru.pool_size``, ``Maru_pool_size``, ``maru_pol_size``, ``mru_pool_size``."""
    spelled = re.sub(r"[.\-\s]+", "_", str(key).lower())
    nearest = difflib.get_close_matches(spelled, known, n=1, cutoff=0.0)
    first_word = spelled.partition("_")[0]
    almost_maru = difflib.SequenceMatcher(None, first_word, "maru").ratio() >= 0.7
    is_typo = almost_maru and difflib.SequenceMatcher(None, spelled, nearest[0]).ratio() >= 0.8
    if spelled.startswith("maru") or is_typo:
        raise SettingsError(
            f"kv_connector_extra_config: there is no setting {key!r}; did you mean {nearest[0]!r}?"
        )
