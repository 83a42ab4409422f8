"""B12: hooks change between vLLM's minors; ours must accept what each of them passes."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from maru_vllm import compat
from maru_vllm.connector import MaruKVConnector

TABLES: dict[str, dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("hook_tables.json").read_text()
)
MINORS = sorted(TABLES)


def overridden() -> dict[str, Any]:
    """Public attributes that our class defines itself, with how they are bound."""
    return {
        name: value
        for name, value in vars(MaruKVConnector).items()
        if name == "__init__" or not name.startswith("_")
    }


def binding_of(value: object) -> str:
    if isinstance(value, classmethod):
        return "classmethod"
    return "property" if isinstance(value, property) else "instance"


def our_signature(name: str) -> inspect.Signature:
    value = overridden()[name]
    function = value.__func__ if isinstance(value, classmethod) else value
    signature = inspect.signature(function)
    _self, *rest = signature.parameters.values()
    return signature.replace(parameters=rest)


@pytest.mark.parametrize("minor", MINORS)
def test_every_override_accepts_what_the_minor_passes(minor: str) -> None:
    checked = 0
    for name, value in overridden().items():
        hook = TABLES[minor].get(name)
        if hook is None:
            continue
        assert binding_of(value) == hook["binding"], name
        if hook["binding"] == "property":
            continue
        parameters, ours = hook["parameters"], our_signature(name)
        extra = {"an_argument_of_tomorrow": 0} if hook["keywords"] else {}
        # vLLM passes by position in some places and by name in others.
        ours.bind(*parameters, **extra)
        ours.bind(**dict.fromkeys(parameters, 0), **extra)
        ours.bind(*parameters[: hook["required"]])
        assert list(ours.parameters)[: len(parameters)] == parameters, name
        checked += 1
    assert checked > 15


@pytest.mark.parametrize("minor", MINORS)
def test_every_abstract_hook_of_the_minor_is_there(minor: str) -> None:
    abstract = {name for name, hook in TABLES[minor].items() if hook["abstract"]}
    assert abstract
    assert abstract <= overridden().keys()


def test_every_override_is_a_hook_of_some_minor() -> None:
    """A hook that vLLM drops or renames would otherwise never be called, silently."""
    known = {name for table in TABLES.values() for name in table}
    assert overridden().keys() <= known


@pytest.mark.parametrize(
    "hook", ["get_transfer_results", "build_connector_worker_meta", "has_pending_push_work"]
)
@pytest.mark.parametrize("minor", MINORS)
def test_the_hooks_that_the_design_stands_on_exist_in_every_minor(minor: str, hook: str) -> None:
    assert hook in TABLES[minor]


def test_the_installed_vllm_is_the_one_that_was_recorded() -> None:
    """The table is a copy; this compares it with the original, where that is installed."""
    import vllm

    minor = ".".join(vllm.__version__.split("+")[0].split(".")[:2])
    if minor not in TABLES:
        pytest.fail(f"vLLM {minor} is installed and not recorded: run record_hooks.py on its wheel")
    for name, hook in TABLES[minor].items():
        found = getattr(base.KVConnectorBase_V1, name, None) or getattr(base.SupportsHMA, name)
        if hook["binding"] == "instance":
            names = list(inspect.signature(found).parameters)[1:]
            assert names[: len(hook["parameters"])] == hook["parameters"], name


def test_replicas_come_from_vllm_where_it_says_and_from_mla_where_it_does_not() -> None:
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float16)
    mla = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
    new, old = SimpleNamespace(kv_tp_replicas=2), SimpleNamespace()
    assert compat.kv_replicas(new, full, 8) == 2  # type: ignore[arg-type]
    assert compat.kv_replicas(old, full, 8) == 1  # type: ignore[arg-type]
    assert compat.kv_replicas(old, mla, 8) == 8  # type: ignore[arg-type]


def test_a_layout_that_is_not_resolved_is_an_error() -> None:
    unresolved = SimpleNamespace(kv_cache_layout=None)
    config = SimpleNamespace(cache_config=unresolved)
    with pytest.raises(ValueError, match="not resolved"):
        compat.kv_layout_name(config, unresolved)  # type: ignore[arg-type]
    resolved = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout="LBHNC"))
    assert compat.kv_layout_name(resolved, unresolved) == "LBHNC"  # type: ignore[arg-type]
