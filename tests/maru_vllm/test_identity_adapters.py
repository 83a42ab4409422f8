"""LoRA adapters are known by their files, not by name and path alone."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from maru_shm.types import Namespace
from maru_vllm.adapters import AdapterContents
from maru_vllm.extra_inputs import VllmInputs
from maru_vllm.fingerprint import DigestCache
from maru_vllm.identity import ChunkChain


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    root = tmp_path / "sql"
    root.mkdir()
    (root / "adapter_config.json").write_text("{}")
    (root / "adapter_model.safetensors").write_bytes(b"low rank")
    return root


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "cache")


def engine(cache: DigestCache) -> ChunkChain:
    return ChunkChain(Namespace(bytes(32)), 8, VllmInputs(AdapterContents(cache)))


def request(path: Path | str, number: int = 1, load_inplace: bool = False) -> Request:
    lora = LoRARequest("sql", number, str(path), load_inplace=load_inplace)
    return Request("r", list(range(24)), SamplingParams(max_tokens=4), None, lora_request=lora)


def keys(chain: ChunkChain, of: Request) -> list[bytes]:
    """The keys once the adapter's files are read."""
    follower = chain.follow(of)
    deadline = time.monotonic() + 30
    while not (found := list(follower.extend())):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def test_an_adapter_replaced_under_its_name_and_path_shares_nothing_with_the_old_one(
    adapter: Path, cache: DigestCache
) -> None:
    """B15 and B28: the next engine, or another host, has other weights there."""
    before = keys(engine(cache), request(adapter))
    assert keys(engine(cache), request(adapter)) == before
    (adapter / "adapter_model.safetensors").write_bytes(b"Low rank")
    assert not set(keys(engine(cache), request(adapter))) & set(before)


def test_requests_have_no_keys_until_the_adapter_is_read_and_then_all_of_them(
    adapter: Path, cache: DigestCache, caplog: pytest.LogCaptureFixture
) -> None:
    chain = engine(cache)
    first = chain.follow(request(adapter))
    assert len(first.extend()) in (0, 3)
    expected = keys(chain, request(adapter))
    assert list(first.extend()) == expected
    assert len(expected) == 3
    assert not caplog.records


def test_an_adapter_whose_files_change_in_use_is_left_alone_until_it_is_loaded_again(
    adapter: Path, cache: DigestCache, caplog: pytest.LogCaptureFixture
) -> None:
    chain = engine(cache)
    before = keys(chain, request(adapter))
    running = chain.follow(request(adapter))
    assert list(running.extend()) == before
    (adapter / "adapter_model.safetensors").write_bytes(b"Low rank")
    with caplog.at_level(logging.WARNING, "maru_vllm"):
        for _ in range(2):
            assert list(chain.follow(request(adapter)).extend()) == []
    assert len(caplog.records) == 1
    assert "changed while it was in use" in caplog.text
    assert list(running.extend()) == before
    again = keys(chain, request(adapter, number=2))
    assert not set(again) & set(before)


def test_an_adapter_that_is_replaced_in_place_is_left_alone(
    adapter: Path, cache: DigestCache, caplog: pytest.LogCaptureFixture
) -> None:
    chain = engine(cache)
    keys(chain, request(adapter))
    assert list(chain.follow(request(adapter, load_inplace=True)).extend()) == []
    assert list(chain.follow(request(adapter)).extend()) == []
    assert "replaced in place" in caplog.text


@pytest.mark.parametrize("path", ["/no/such/adapter", "s3://bucket/adapter", "org/absent", ""])
def test_an_adapter_that_is_not_in_local_files_is_left_alone(
    path: str, cache: DigestCache, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert list(engine(cache).follow(request(path or empty)).extend()) == []
    assert "LoRA adapter sql" in caplog.text
