"""The kernel sources are the recorded ones, here and in git.

Nothing here needs torch: these guards run wherever Python does.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
from pathlib import Path

import pytest

import maru_kv_ops
from maru_kv_ops.vendor import UNIT, differences, read_record, sources_digest

ROOT = Path(__file__).parents[2]


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, check=False)


def _needs_the_recorded_commit() -> str:
    """The recorded revision; skips where git cannot know it."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: the recorded revision cannot be looked at")
    revision = read_record().revision
    if _git("rev-parse", "--is-shallow-repository").stdout == b"true\n" and (
        _git("cat-file", "-e", f"{revision}^{{commit}}").returncode != 0
    ):
        pytest.skip(f"a shallow clone without revision {revision}")
    return revision


def test_the_recorded_bytes_are_those_of_the_recorded_revision() -> None:
    revision = _needs_the_recorded_commit()
    listed = _git("ls-tree", "-r", "--name-only", "-z", revision, "--", f"{UNIT}/")
    assert listed.returncode == 0, listed.stderr.decode()
    record = read_record()
    paths = [path.decode() for path in listed.stdout.split(b"\0") if path]
    assert paths == [f"{UNIT}/{file}" for file in record.files]
    for path in paths:
        blob = _git("cat-file", "blob", f"{revision}:{path}").stdout
        done = subprocess.run(["sha256sum"], input=blob, capture_output=True, check=True)
        assert done.stdout.split()[0].decode() == record.files[path.removeprefix(f"{UNIT}/")]


def test_the_tree_is_what_the_record_says() -> None:
    """A changed byte with an unchanged record fails here: see "How it changes" in VENDOR.md."""
    assert differences(read_record()) == []


def test_the_host_extension_was_compiled_from_these_sources() -> None:
    """An old build would be tested, and served from, in the place of the sources that are there."""
    if importlib.util.find_spec("maru_kv_ops._host") is None:
        pytest.skip("maru_kv_ops._host is not built here")
    host = importlib.import_module("maru_kv_ops._host")
    assert host.build_info()["sources_digest"] == sources_digest(), "build again: ./install.sh"


@pytest.mark.cuda_build
def test_the_cuda_extension_was_compiled_from_these_sources() -> None:
    info = maru_kv_ops.build_info()
    assert info is not None, maru_kv_ops.import_error()
    assert info.sources_digest == sources_digest(), "build again: ./install.sh"
    assert info.kernel_revision == read_record().revision
