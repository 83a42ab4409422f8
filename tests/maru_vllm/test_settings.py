from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from maru_vllm.settings import (
    KVPayload,
    Placement,
    Settings,
    SettingsError,
    TransferMode,
    Verify,
    parse_size,
    settings_table,
)

DOCS = Path(__file__).parents[2] / "docs"


def test_no_configuration_gives_the_defaults() -> None:
    assert Settings.from_extra_config(None) == Settings.from_extra_config({}) == Settings()
    assert Settings().kv_chunk_tokens == 256
    assert Settings().verify is Verify.HEADER


def test_every_key_is_read_and_converted() -> None:
    given: dict[str, Any] = {
        "maru_server_url": "tcp://10.0.0.7:5555",
        "maru_pool_size": "2GiB",
        "maru_kv_chunk_tokens": 512,
        "maru_kv_payload": "tokens",
        "maru_async_load": False,
        "maru_overlap_load_with_compute": True,
        "maru_overlap_release_after_layers": 4,
        "maru_async_store": False,
        "maru_store_decode": False,
        "maru_placement": "copy_engine",
        "maru_transfer_mode": "engine_driven",
        "maru_cache_namespace": "team-a",
        "maru_model_id": "llama",
        "maru_verify": "full",
        "maru_lookup_timeout_ms": 5,
        "maru_log_timing": True,
    }
    assert set(given) == {"maru_" + f.name for f in dataclasses.fields(Settings)}
    settings = Settings.from_extra_config(given)
    assert settings == Settings(
        server_url="tcp://10.0.0.7:5555",
        pool_size=2 << 30,
        kv_chunk_tokens=512,
        kv_payload=KVPayload.TOKENS,
        async_load=False,
        overlap_load_with_compute=True,
        overlap_release_after_layers=4,
        async_store=False,
        store_decode=False,
        placement=Placement.COPY_ENGINE,
        transfer_mode=TransferMode.ENGINE_DRIVEN,
        cache_namespace="team-a",
        model_id="llama",
        verify=Verify.FULL,
        lookup_timeout_ms=5,
        log_timing=True,
    )
    for f in dataclasses.fields(Settings):
        assert getattr(settings, f.name) != getattr(Settings(), f.name), f.name


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("maru_pol_size", "maru_pool_size"),
        ("maru_chunk_tokens", "maru_kv_chunk_tokens"),
        ("maru.verify", "maru_verify"),
        ("MARU_VERIFY", "maru_verify"),
        ("maru-log-timing", "maru_log_timing"),
        ("mru_pool_size", "maru_pool_size"),
        ("amru_store_decode", "maru_store_decode"),
        ("maru_something_else_entirely", "maru_"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest_one(key: str, nearest: str) -> None:
    with pytest.raises(SettingsError) as error:
        Settings.from_extra_config({key: 1})
    assert repr(key) in str(error.value)
    assert f"did you mean '{nearest}" in str(error.value)


@pytest.mark.parametrize(
    "key",
    ["lmcache.chunk_size", "backends", "spec_name", "block_size", "pool_size", "cpu_bytes_to_use"],
)
def test_keys_of_other_connectors_are_left_alone(key: str) -> None:
    assert Settings.from_extra_config({key: object()}) == Settings()


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("maru_kv_payload", "page", '"pages", "tokens"'),
        ("maru_placement", "gpu", '"fallback"'),
        ("maru_transfer_mode", None, '"server_driven"'),
        ("maru_verify", True, '"header", "sample", "full"'),
        ("maru_async_load", "yes", "true or false"),
        ("maru_async_store", 1, "true or false"),
        ("maru_kv_chunk_tokens", 0, "at least 1"),
        ("maru_kv_chunk_tokens", "256", "whole number"),
        ("maru_kv_chunk_tokens", True, "whole number"),
        ("maru_overlap_release_after_layers", 1.5, "whole number"),
        ("maru_pool_size", "4 gigs", '"4GiB"'),
        ("maru_pool_size", 0, "positive"),
        ("maru_pool_size", True, "positive"),
        ("maru_lookup_timeout_ms", -1, "milliseconds"),
        ("maru_lookup_timeout_ms", 1.5, "milliseconds"),
        ("maru_cache_namespace", 7, "a string"),
        ("maru_model_id", " ", "not empty"),
        ("maru_server_url", "http://host:1", "tcp://host:port"),
        ("maru_server_url", "tcp://host", "tcp://host:port"),
    ],
)
def test_a_wrong_value_is_an_error_with_what_was_given_and_what_is_allowed(
    key: str, value: object, allowed: str
) -> None:
    with pytest.raises(SettingsError) as error:
        Settings.from_extra_config({key: value})
    assert key in str(error.value)
    assert repr(value) in str(error.value)
    assert allowed in str(error.value)


@pytest.mark.parametrize("key", ["maru_server_url", "maru_pool_size", "maru_model_id"])
def test_null_means_automatic_where_the_default_is_automatic(key: str) -> None:
    assert Settings.from_extra_config({key: None}) == Settings()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("4GiB", 4 << 30),
        ("512MB", 512_000_000),
        ("512 mib", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("2T", 2 * 10**12),
        ("8k", 8000),
    ],
)
def test_sizes_are_bytes_or_a_number_with_its_unit(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "4 iB", "4XB", "0.1", "1e9", None, 1.5, b"4"])
def test_what_is_not_a_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="positive number of bytes"):
        parse_size(text)


def test_a_chunk_must_be_a_whole_number_of_blocks() -> None:
    Settings(kv_chunk_tokens=256).check_block_size(32)
    with pytest.raises(SettingsError, match=r"is 256, .* block size of 48 .* set it to 240 or 288"):
        Settings(kv_chunk_tokens=256).check_block_size(48)
    with pytest.raises(SettingsError, match="set it to 512,"):
        Settings(kv_chunk_tokens=256).check_block_size(512)


def test_the_documented_table_is_the_one_made_from_the_fields() -> None:
    assert settings_table() in (DOCS / "settings.md").read_text()


def test_the_design_names_exactly_these_keys() -> None:
    rows = [
        line.split("|")[1].strip().strip("`")
        for line in (DOCS / "design.md").read_text().splitlines()
        if line.startswith("| `maru_") and line.count("|") == 4
    ]
    assert rows == ["maru_" + f.name for f in dataclasses.fields(Settings)]
