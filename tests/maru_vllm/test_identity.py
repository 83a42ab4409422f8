"""The chain of chunk keys on plain values; test_identity_vllm.py has vLLM's requests."""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maru_shm.types import Namespace
from maru_vllm.encoding import UnencodableError, encode
from maru_vllm.identity import KEY_FORMAT, ChunkChain, Inputs, KeyedRequest, chunk_key

GOLDEN = Path(__file__).parent / "golden"
NAMESPACE = Namespace(bytes(range(32)))


@dataclass
class PlainRequest:
    all_token_ids: list[int]
    request_id: str = "r"
    num_prompt_tokens: int = 0
    arrival_time: float = 0.0
    inputs: dict[int, Inputs] = field(default_factory=dict)
    """By the first token of the range."""


@dataclass
class RecordingInputs:
    ranges: list[tuple[int, int]] = field(default_factory=list)
    cursors: list[int] = field(default_factory=list)

    def __call__(
        self, request: KeyedRequest, start: int, end: int, cursor: int
    ) -> tuple[Inputs, int]:
        assert isinstance(request, PlainRequest)
        self.ranges.append((start, end))
        self.cursors.append(cursor)
        return request.inputs.get(start), cursor + 1


def chain(chunk_tokens: int = 4, namespace: Namespace = NAMESPACE) -> ChunkChain:
    return ChunkChain(namespace, chunk_tokens, RecordingInputs())


def keys_of(tokens: Sequence[int], chunk_tokens: int = 4, **inputs: Inputs) -> list[bytes]:
    request = PlainRequest(list(tokens), inputs={int(k[1:]): v for k, v in inputs.items()})
    return list(chain(chunk_tokens).follow(request).extend())


def test_the_bytes_of_a_key_are_those_of_the_document() -> None:
    inputs = (("lora", "a", "/p"), ("mm", "f00", -3), ("cache_salt", "s"), ("prompt_embeds", b"x"))
    text = KEY_FORMAT + NAMESPACE + struct.pack("<5I", 4, 1, 2, 3, 2**32 - 1) + encode(inputs)
    assert chunk_key(NAMESPACE, [1, 2, 3, 2**32 - 1], inputs) == hashlib.sha256(text).digest()
    assert len(KEY_FORMAT) == 16


@pytest.mark.parametrize("case", json.loads((GOLDEN / "chunk_keys.json").read_text()))
def test_keys_are_those_that_were_recorded(case: dict[str, object]) -> None:
    """Fails when the encoding changes, which needs another KEY_FORMAT."""
    tokens, recorded = case["token_ids"], case["keys"]
    assert isinstance(tokens, list)
    assert isinstance(recorded, list)
    inputs = {int(start): _from_json(value) for start, value in dict(case["inputs"]).items()}  # type: ignore[call-overload]
    request = PlainRequest(tokens, inputs=inputs)
    keys = chain(4, Namespace(bytes.fromhex(str(case["namespace"])))).follow(request).extend()
    assert [key.hex() for key in keys] == recorded


def _from_json(value: object) -> Inputs:
    """Inputs as the golden file writes them: bytes as {"hex": ...}."""

    def convert(entry: object) -> object:
        if isinstance(entry, dict):
            return bytes.fromhex(entry["hex"])
        return tuple(map(convert, entry)) if isinstance(entry, list) else entry

    assert isinstance(value, list)
    return tuple(map(convert, value))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9), st.data())
def test_growing_token_by_token_gives_the_keys_of_the_whole(
    tokens: list[int], chunk_tokens: int, data: st.DataObject
) -> None:
    whole = keys_of(tokens, chunk_tokens)
    assert len(whole) == len(tokens) // chunk_tokens
    request = PlainRequest([])
    growing = chain(chunk_tokens).follow(request)
    while len(request.all_token_ids) < len(tokens):
        step = data.draw(st.integers(1, 7))
        known = len(request.all_token_ids)
        request.all_token_ids += tokens[known : known + step]
        seen = list(growing.extend())
        assert seen == whole[: len(seen)]
    assert list(growing.extend()) == whole


@given(st.lists(st.integers(0, 9), min_size=8, max_size=24), st.data())
def test_a_key_changes_with_any_token_before_its_end_and_with_none_after(
    tokens: list[int], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[at] += 1
    for index, (one, other) in enumerate(zip(keys_of(tokens), keys_of(changed), strict=True)):
        assert (one != other) == (at < (index + 1) * 4)


def test_each_chunk_is_hashed_once_and_the_cursor_is_handed_on() -> None:
    inputs_of = RecordingInputs()
    request = PlainRequest(list(range(8)))
    keys = ChunkChain(NAMESPACE, 4, inputs_of).follow(request)
    keys.extend()
    request.all_token_ids += range(8, 13)
    keys.extend()
    keys.extend()
    assert inputs_of.ranges == [(0, 4), (4, 8), (8, 12)]
    assert inputs_of.cursors == [0, 1, 2]


def test_an_input_of_one_chunk_counts_for_all_that_follow_and_none_before() -> None:
    plain = keys_of(range(12))
    salted = keys_of(range(12), _4=(("cache_salt", "s"),))
    assert [one == other for one, other in zip(plain, salted, strict=True)] == [True, False, False]


def test_the_namespace_and_the_chunk_size_are_in_every_key() -> None:
    request = PlainRequest(list(range(12)))
    here = chain().follow(request).extend()
    there = chain(namespace=Namespace(bytes(32))).follow(request).extend()
    assert not set(here) & set(there)
    assert not set(keys_of([7] * 12, 4)) & set(keys_of([7] * 12, 6))


def test_the_parent_of_a_chunk_is_the_key_before_it() -> None:
    keys = chain().follow(PlainRequest(list(range(12))))
    found = keys.extend()
    assert [keys.parent(index) for index in range(3)] == [None, found[0], found[1]]


def test_a_session_that_takes_tokens_back_starts_its_chain_over() -> None:
    request = PlainRequest([1, 2, 3, 4, 5, 6, 7, 8], num_prompt_tokens=6)
    keys = chain().follow(request)
    assert list(keys.extend()) == keys_of(range(1, 9))
    # The next input of a streaming session replaces the token that was not yet computed.
    request.all_token_ids[7:] = [9, 10]
    request.num_prompt_tokens = 9
    assert list(keys.extend()) == keys_of([1, 2, 3, 4, 5, 6, 7, 9, 10])
    del request.all_token_ids[3:]
    assert list(keys.extend()) == []
    request.all_token_ids += [-1] * 9
    assert list(keys.extend()) == []
    request.all_token_ids[:] = [5] * 8
    request.arrival_time = 1.0
    assert list(keys.extend()) == keys_of([5] * 8)


@pytest.mark.parametrize(
    ("token", "inputs"), [(-1, None), (2**32, None), (0, (object(),)), (0, (("mm", {1}),))]
)
def test_chunks_from_an_input_on_that_no_key_can_stand_for_have_none_and_it_is_logged_once(
    token: int, inputs: Inputs, caplog: pytest.LogCaptureFixture
) -> None:
    shared = chain()
    request = PlainRequest([1] * 7 + [token], inputs={4: inputs})
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            keys = shared.follow(request)
            assert list(keys.extend()) == keys_of([1] * 4)
            request.all_token_ids += [1] * 4
            assert list(keys.extend()) == keys_of([1] * 4)
    assert len(caplog.records) == 1
    assert "request r" in caplog.text
    with pytest.raises(UnencodableError):
        chunk_key(NAMESPACE, [token], inputs)


def test_a_parent_of_the_wrong_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="31 bytes"):
        chunk_key(bytes(31), [1], None)
