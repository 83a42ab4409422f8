"""A hit where no other KV cache project can be imported, by the engine or by its server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_engine import CHUNK_TOKENS, Engine, EngineSettings
from e2e_prompts import assert_identical, prompt_of, reference_hit
from e2e_store import Store

BLOCKER = Path(__file__).parent.parent / "no_other_cache"


def test_an_engine_hits_where_no_other_kv_cache_project_can_be_imported(
    reference: Engine,
    start_engine: Callable[[str, EngineSettings], Engine],
    make_runtime_dir: Callable[[], Path],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime_dir, covered = make_runtime_dir(), tmp_path / "covered"
    monkeypatch.setenv("PYTHONPATH", str(BLOCKER))
    monkeypatch.setenv("MARU_TEST_BLOCKED_LOG", str(covered))
    engine = start_engine("no-other-cache", EngineSettings(model, runtime_dir))
    prompt = prompt_of(6, seed=701)
    assert engine.ask(prompt).cached == 0
    hit = engine.ask(prompt)
    assert hit.cached == 6 * CHUNK_TOKENS
    assert_identical(hit, reference_hit(reference, prompt))
    processes = {engine.pid, Store(runtime_dir).stats().server_pid}
    engine.close()
    assert processes <= {int(pid) for pid in covered.read_text().split()}
