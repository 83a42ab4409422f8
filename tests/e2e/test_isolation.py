"""Engines that share a pool and must not share an object."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_engine import CHUNK_TOKENS, Engine, EngineSettings
from e2e_prompts import prompt_of


@pytest.fixture(scope="module")
def other(
    start_engine: Callable[[str, EngineSettings], Engine], shared_dir: Path, other_model: Path
) -> Engine:
    return start_engine("other-model", EngineSettings(other_model, shared_dir))


def test_two_models_on_one_pool_never_see_each_others_objects(first: Engine, other: Engine) -> None:
    prompt = prompt_of(3, seed=401)
    first.ask(prompt)
    assert other.wait_ready().ask(prompt).cached == 0
    assert other.ask(prompt).cached == 3 * CHUNK_TOKENS
    assert first.ask(prompt).cached == 3 * CHUNK_TOKENS


def test_replaced_weights_under_the_same_path_miss(
    start_engine: Callable[[str, EngineSettings], Engine],
    shared_dir: Path,
    model: Path,
    other_model: Path,
    tmp_path: Path,
) -> None:
    """B28: the files decide, not the path; and the same files elsewhere hit."""
    path = tmp_path / "served"
    shutil.copytree(model, path)
    settings = EngineSettings(path, shared_dir)
    prompt = prompt_of(3, seed=402)
    before = start_engine("before", settings).wait_ready()
    before.ask(prompt)
    before.close()
    shutil.copyfile(other_model / "model.safetensors", path / "model.safetensors")
    replaced = start_engine("replaced", settings)
    copied = start_engine("copied", replace(settings, model=model))
    assert replaced.wait_ready().ask(prompt).cached == 0
    assert copied.wait_ready().ask(prompt).cached == 3 * CHUNK_TOKENS
    replaced.close()
    copied.close()
