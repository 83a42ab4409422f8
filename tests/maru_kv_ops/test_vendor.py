"""The commands that check and replace the vendored unit, on small units of the test's own.

Nothing here needs torch: these guards run wherever Python does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from maru_kv_ops.vendor import (
    BEGIN,
    CSRC,
    END,
    UNIT,
    VendorError,
    differences,
    digest_of,
    hashes,
    read_record,
    refresh,
    sources_digest,
)

FILES = {
    "copy.h": b"int move(int rows);\nstruct Copy { int rows; };\n",
    "deep/kernel.cu": b"// a kernel\r\n\x00\xff no text at all",
    "old.h": b"void old();\n",
}
NO_REVISION = "0" * 40


class Checkout:
    """A git repository with a unit in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.csrc = root / UNIT
        self.csrc.mkdir(parents=True)
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "core.autocrlf=false")
        done = subprocess.run(
            ["git", "-C", self.root, *who, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def write(self, files: dict[str, bytes]) -> None:
        for path, content in files.items():
            (self.csrc / path).parent.mkdir(parents=True, exist_ok=True)
            (self.csrc / path).write_bytes(content)

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "state")
        return self.git("rev-parse", "HEAD")


class Unit:
    """A copy of the package with a unit and a record of its own, as a user would have it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.csrc = root / UNIT
        self.record = root / "VENDOR.md"
        shutil.copytree(CSRC.parent, self.csrc.parent, ignore=lambda _, names: _not_python(names))
        self.csrc.mkdir()
        self.record.write_text(f"# Before\n\n{BEGIN}\n{END}\n\nBehind.\n")

    def refresh(self, checkout: Path, revision: str) -> str:
        return refresh(checkout, revision, self.csrc, self.record)

    def files(self) -> dict[str, bytes]:
        paths = [path for path in self.csrc.rglob("*") if path.is_file()]
        return {path.relative_to(self.csrc).as_posix(): path.read_bytes() for path in paths}

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        # This unit's package, not the one that the tests run with, which refresh would change.
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
        return subprocess.run(
            [sys.executable, "-m", "maru_kv_ops.vendor", *arguments],
            cwd=self.root,
            env={**inherited, "PYTHONPATH": str(self.root), **environment},
            capture_output=True,
            text=True,
            check=False,
        )


def _not_python(names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith(".py")]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path / "checkout")
    made.write(FILES)
    return made


@pytest.fixture
def unit(tmp_path: Path, checkout: Checkout) -> Unit:
    """Refreshed to the first commit of the checkout, verified."""
    made = Unit(tmp_path / "unit")
    made.refresh(checkout.root, checkout.commit())
    assert differences(read_record(made.record), made.csrc) == []
    return made


def test_a_verified_unit_passes_and_says_where_it_is_from(unit: Unit, checkout: Checkout) -> None:
    done = unit.run("verify")
    assert (done.returncode, done.stderr) == (0, "")
    assert checkout.git("rev-parse", "HEAD") in done.stdout
    assert "3 files" in done.stdout


def _change_a_byte(unit: Unit) -> None:
    content = bytearray((unit.csrc / "copy.h").read_bytes())
    content[-1] ^= 1
    (unit.csrc / "copy.h").write_bytes(bytes(content))


def _in_record(old: str, new: str) -> Callable[[Unit], None]:
    def change(unit: Unit) -> None:
        text = unit.record.read_text()
        assert old in text
        unit.record.write_text(text.replace(old, new, 1))

    return change


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_change_a_byte, "copy.h has SHA-256"),
        (lambda unit: (unit.csrc / "old.h").unlink(), "old.h is missing"),
        (lambda unit: (unit.csrc / "new.cpp").write_text(""), "new.cpp is not recorded"),
        (lambda unit: (unit.csrc / "deep/.x").write_text(""), "deep/.x is not recorded"),
        (_in_record("Sources digest: `", "Sources digest: `0"), "recorded is 0"),
        (_in_record("Revision: `", "Revision: `0"), "is not 40 hexadecimal digits"),
        (_in_record("Revision: `", "Revision: "), "no line 'Revision: '"),
        (_in_record("deep/kernel.cu", "copy.h"), "copy.h twice"),
        (_in_record("| `maru_kv_ops/csrc/old.h` |", "| old.h |"), "old.h is not recorded"),
        (_in_record(BEGIN, ""), "do not enclose a record"),
        (lambda unit: unit.record.unlink(), "VENDOR.md"),
    ],
)
def test_verify_exits_1_and_names_the_difference(
    unit: Unit, damage: Callable[[Unit], object], named: str
) -> None:
    damage(unit)
    done = unit.run("verify")
    assert done.returncode == 1
    assert named in done.stderr


def test_the_digest_is_what_sha256sum_of_sha256sum_prints(unit: Unit) -> None:
    listing = subprocess.run(
        "find . -type f -printf '%P\\0' | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum",
        shell=True,
        cwd=unit.csrc,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert sources_digest(unit.csrc) == listing.split()[0]
    assert digest_of(dict(reversed(hashes(unit.csrc).items()))) == listing.split()[0]


def test_refresh_takes_the_bytes_of_the_revision_and_not_of_the_work_tree(
    unit: Unit, checkout: Checkout
) -> None:
    """Neither a later commit nor what git makes of a file at checkout (line ends) is copied."""
    first = checkout.git("rev-parse", "HEAD")
    checkout.write({"copy.h": b"int other();\n"})
    (checkout.root / ".gitattributes").write_text("*.h text eol=crlf\n")
    checkout.commit()
    (checkout.csrc / "old.h").unlink()
    checkout.git("checkout", "--", UNIT)
    assert (checkout.csrc / "old.h").read_bytes() == b"void old();\r\n"
    unit.refresh(checkout.root, first)
    assert unit.files() == FILES


def test_refresh_by_the_command_replaces_the_unit_its_record_and_nothing_else(
    unit: Unit, checkout: Checkout
) -> None:
    checkout.git("rm", "-q", "-r", f"{UNIT}/old.h", f"{UNIT}/deep")
    after = {"copy.h": b"int move(long rows);\nint find();\n", "more/new.h": b"void fresh();\n"}
    checkout.write(after)
    revision = checkout.commit()
    (checkout.root / "README").write_text("a change elsewhere does not matter")

    # As in a hook, git's variables name another repository.
    done = unit.run(
        "refresh", "--from", str(checkout.root), "--revision", revision, GIT_DIR="/nowhere"
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert unit.files() == after
    assert not (unit.csrc / "deep").exists()
    record = read_record(unit.record)
    assert record.revision == revision
    assert list(record.files) == ["copy.h", "more/new.h"]
    text = unit.record.read_text()
    assert text.startswith("# Before\n\n")
    assert text.endswith(f"{END}\n\nBehind.\n")
    assert done.stdout.splitlines()[:-1] == [
        f"file changed: {UNIT}/copy.h",
        f"file removed: {UNIT}/deep/kernel.cu",
        f"file added: {UNIT}/more/new.h",
        f"file removed: {UNIT}/old.h",
        "entry point removed: Copy",
        "  - struct Copy { int rows; }",
        "entry point added: find",
        "  + int find()",
        "entry point added: fresh",
        "  + void fresh()",
        "entry point changed: move",
        "  - int move(int rows)",
        "  + int move(long rows)",
        "entry point removed: old",
        "  - void old()",
    ]
    assert unit.run("verify").returncode == 0


def test_a_refresh_to_the_same_revision_changes_nothing(unit: Unit, checkout: Checkout) -> None:
    before = unit.record.read_text()
    said = unit.refresh(checkout.root, checkout.git("rev-parse", "HEAD"))
    assert said == "no file changed\nentry points: no change"
    assert unit.record.read_text() == before


def test_a_refresh_where_the_kernels_were_changed_says_what_changed_since_the_last_record(
    unit: Unit, checkout: Checkout
) -> None:
    """There the files are the new ones before the refresh."""
    checkout.write({"copy.h": b"int move(long rows);\nstruct Copy { int rows; };\n"})
    unit.csrc.joinpath("copy.h").write_bytes(checkout.csrc.joinpath("copy.h").read_bytes())
    assert unit.refresh(checkout.root, checkout.commit()).splitlines() == [
        f"file changed: {UNIT}/copy.h",
        "entry point changed: move",
        "  - int move(int rows)",
        "  + int move(long rows)",
    ]


def test_a_refresh_from_a_checkout_without_the_recorded_revision_compares_with_the_files(
    unit: Unit, tmp_path: Path
) -> None:
    other = Checkout(tmp_path / "other")
    other.write({**FILES, "old.h": b"void old(int now);\n"})
    assert unit.refresh(other.root, other.commit()).splitlines()[0] == f"file changed: {UNIT}/old.h"


def _with_changes(checkout: Checkout) -> tuple[Path, str]:
    checkout.write({"copy.h": b"not committed"})
    return checkout.root, checkout.git("rev-parse", "HEAD")


def _with_untracked(checkout: Checkout) -> tuple[Path, str]:
    checkout.write({"deep/new.h": b"not committed"})
    return checkout.root, checkout.git("rev-parse", "HEAD")


def _with_a_link(checkout: Checkout) -> tuple[Path, str]:
    (checkout.csrc / "link.h").symlink_to("copy.h")
    return checkout.root, checkout.commit()


def _without_unit(checkout: Checkout) -> tuple[Path, str]:
    checkout.git("rm", "-q", "-r", UNIT)
    (checkout.root / "README").write_text("no kernels here")
    return checkout.root, checkout.commit()


def _tag(checkout: Checkout) -> tuple[Path, str]:
    checkout.git("tag", "-a", "-m", "a tag", "v1")
    return checkout.root, checkout.git("rev-parse", "v1")


def _tree(checkout: Checkout) -> tuple[Path, str]:
    return checkout.root, checkout.git("rev-parse", "HEAD^{tree}")


def _no_repository(checkout: Checkout) -> tuple[Path, str]:
    revision = checkout.git("rev-parse", "HEAD")
    shutil.rmtree(checkout.root / ".git")
    return checkout.root, revision


@pytest.mark.parametrize(
    ("request_of", "named"),
    [
        (_with_changes, "not committed"),
        (_with_untracked, "deep/new.h"),
        (_with_a_link, "link.h"),
        (_without_unit, "has no files in"),
        (_tag, "is a tag, not a commit"),
        (_tree, "is a tree, not a commit"),
        (_no_repository, "not a git repository"),
        (lambda checkout: (checkout.root, NO_REVISION), "git cat-file"),
        (lambda checkout: (checkout.root, "main"), "all 40 hexadecimal digits"),
        (lambda checkout: (checkout.root, checkout.git("rev-parse", "HEAD")[:12]), "all 40"),
        (lambda checkout: (checkout.csrc, checkout.git("rev-parse", "HEAD")), "is no checkout"),
        (lambda checkout: (checkout.root / "none", NO_REVISION), "is not a folder"),
    ],
)
def test_refresh_refuses_and_leaves_everything_as_it_was(
    unit: Unit,
    checkout: Checkout,
    request_of: Callable[[Checkout], tuple[Path, str]],
    named: str,
) -> None:
    before = unit.record.read_text()
    root, revision = request_of(checkout)
    with pytest.raises(VendorError, match=named):
        unit.refresh(root, revision)
    assert unit.files() == FILES
    assert unit.record.read_text() == before


def test_a_refused_refresh_exits_1(unit: Unit, checkout: Checkout) -> None:
    done = unit.run("refresh", "--from", str(checkout.root), "--revision", NO_REVISION)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("vendor: ")
