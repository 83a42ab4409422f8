"""The kernel sources are a frozen unit: its record, the check of it, and the only way to change it.

    python -m maru_kv_ops.vendor verify
    python -m maru_kv_ops.vendor refresh --from CHECKOUT --revision SHA

The unit is every file under ``maru_kv_ops/csrc``. Its record stands in ``VENDOR.md``, between two
marker lines, so that people and this module read the same text:

    Revision: `<40 hexadecimal digits of a git commit>`

    Sources digest: `<64 hexadecimal digits>`

    | file | SHA-256 |
    | --- | --- |
    | `maru_kv_ops/csrc/<path>` | `<64 hexadecimal digits>` |

The sources digest is the SHA-256 of what ``sha256sum`` prints for the files, sorted by the bytes
of their paths below ``csrc``: one line ``<digest>  <path>`` for each. The extensions are compiled
with it, so a build says which sources it was made from.

Needs neither torch nor anything else outside the standard library; ``refresh`` needs git. Both
commands exit with 0, or with 1 after saying what is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from maru_kv_ops.header_interface import changes

UNIT = "maru_kv_ops/csrc"
CSRC = Path(__file__).with_name("csrc")
RECORD_NAME = "VENDOR.md"
BEGIN = "<!-- record: written by `python -m maru_kv_ops.vendor refresh`, never by hand -->"
END = "<!-- end of the record -->"

_REVISION = re.compile(r"^Revision: `([^`]*)`$", re.MULTILINE)
_DIGEST = re.compile(r"^Sources digest: `([^`]*)`$", re.MULTILINE)
_ROW = re.compile(r"^\| `([^`]*)` \| `([^`]*)` \|$", re.MULTILINE)
_FULL_REVISION = re.compile(r"[0-9a-f]{40}")
_HEADER_SUFFIXES = (".h", ".cuh")
_REGULAR_FILE = "100"  # how the mode of a regular file begins in a git tree


class VendorError(Exception):
    """The record or a checkout cannot be used as asked; nothing was written."""


@dataclass(frozen=True, slots=True)
class VendorRecord:
    """What VENDOR.md says about the unit, unchecked."""

    revision: str
    digest: str
    files: Mapping[str, str]
    """Path below ``csrc`` -> SHA-256 in hexadecimal."""


def hashes(csrc: Path = CSRC) -> dict[str, str]:
    """SHA-256 of every file below ``csrc``, by its path there, sorted."""
    found = {
        path.relative_to(csrc).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in csrc.rglob("*")
        if not path.is_dir()
    }
    return dict(sorted(found.items()))


def digest_of(files: Mapping[str, str]) -> str:
    """The sources digest of files with these SHA-256."""
    lines = "".join(f"{sha}  {path}\n" for path, sha in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def sources_digest(csrc: Path = CSRC) -> str:
    """The sources digest of the files as they are, recorded or not."""
    return digest_of(hashes(csrc))


def record_path() -> Path:
    """The checkout's VENDOR.md, or the one among the installed distribution's license files.

    Raises ``VendorError`` if there is neither.
    """
    in_checkout = CSRC.parent.parent / RECORD_NAME
    if in_checkout.is_file():
        return in_checkout
    try:
        installed = files("maru") or []
    except PackageNotFoundError:
        installed = []
    for path in installed:
        if path.name == RECORD_NAME:
            return Path(str(path.locate()))
    raise VendorError(
        f"{RECORD_NAME} is neither at {in_checkout} nor among the files of an installed "
        f"distribution maru: install the package again"
    )


def read_record(path: Path | None = None) -> VendorRecord:
    """The record of ``path``, by default of ``record_path()``. ``VendorError`` if it is not one."""
    path = path or record_path()
    text = _split(path)[1]
    revision, digest = _REVISION.search(text), _DIGEST.search(text)
    if revision is None or digest is None:
        raise VendorError(f"{path}: the record has no line 'Revision: ' or 'Sources digest: '")
    rows: dict[str, str] = {}
    for file, sha in _ROW.findall(text):
        if file in rows or not file.startswith(f"{UNIT}/"):
            raise VendorError(f"{path}: the record lists {file} twice, or it is not in {UNIT}")
        rows[file] = sha
    if not rows:
        raise VendorError(f"{path}: the record lists no file")
    unit = {file.removeprefix(f"{UNIT}/"): sha for file, sha in rows.items()}
    return VendorRecord(revision.group(1), digest.group(1), unit)


def kernel_revision() -> str:
    """The revision that the kernel sources were taken from, as recorded. Raises ``VendorError``."""
    return read_record().revision


def differences(record: VendorRecord, csrc: Path = CSRC) -> list[str]:
    """Every way in which the files are not what the record says, one line each; none: verified."""
    found = hashes(csrc)
    wrong = []
    if _FULL_REVISION.fullmatch(record.revision) is None:
        wrong.append(f"the revision '{record.revision}' is not 40 hexadecimal digits")
    for file in sorted(record.files.keys() | found.keys()):
        recorded, actual = record.files.get(file), found.get(file)
        if actual is None:
            wrong.append(f"{UNIT}/{file} is missing")
        elif recorded is None:
            wrong.append(f"{UNIT}/{file} is not recorded")
        elif recorded != actual:
            wrong.append(f"{UNIT}/{file} has SHA-256 {actual}, recorded is {recorded}")
    digest = digest_of(record.files)
    if digest != record.digest:
        wrong.append(f"the recorded files have the digest {digest}, recorded is {record.digest}")
    return wrong


def refresh(checkout: Path, revision: str, csrc: Path, record: Path) -> str:
    """Make the unit what ``revision`` of ``checkout`` holds, byte for byte, and record it.

    Bytes come from git's object store, never from the work tree. Files that the revision does not
    have are removed. Returns what changed since the last record, for people. Raises ``VendorError``
    before anything is written; if writing itself fails half-way, ``verify`` fails until a refresh
    succeeds.
    """
    before, _, after = _split(record)
    _check_checkout(checkout, revision)
    unit = _unit_at(checkout, revision)
    present = hashes(csrc)
    old = _recorded_unit(checkout, record)
    if old is None:
        old = {path: (csrc / path).read_bytes() for path in present}

    for path in present.keys() - unit.keys():
        (csrc / path).unlink()
    for path, content in unit.items():
        (csrc / path).parent.mkdir(parents=True, exist_ok=True)
        (csrc / path).write_bytes(content)
    for folder in sorted(csrc.rglob("*"), reverse=True):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()

    sums = hashes(csrc)
    rows = "\n".join(f"| `{UNIT}/{path}` | `{sha}` |" for path, sha in sums.items())
    record.write_text(
        f"{before}{BEGIN}\n\nRevision: `{revision}`\n\nSources digest: `{digest_of(sums)}`\n\n"
        f"| file | SHA-256 |\n| --- | --- |\n{rows}\n\n{END}{after}"
    )
    return _report(old, unit)


def _split(record: Path) -> tuple[str, str, str]:
    """The text before, in and behind the markers."""
    text = record.read_text()
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not begin or not end:
        raise VendorError(f"{record}: the lines '{BEGIN}' and '{END}' do not enclose a record")
    return before, inside, after


def _check_checkout(checkout: Path, revision: str) -> None:
    """That there is such a revision, and nothing in the work tree that it might be taken for."""
    if _FULL_REVISION.fullmatch(revision) is None:
        raise VendorError(f"revision '{revision}': give all 40 hexadecimal digits of a commit")
    if not checkout.is_dir():
        raise VendorError(f"{checkout} is not a folder")
    root = Path(os.fsdecode(_git(checkout, "rev-parse", "--show-toplevel").rstrip(b"\n")))
    if root.resolve() != checkout.resolve():
        raise VendorError(f"{checkout} is no checkout, only a folder in one: give {root}")
    kind = _git(checkout, "cat-file", "-t", revision).decode().strip()
    if kind != "commit":
        raise VendorError(f"revision {revision} in {checkout} is a {kind}, not a commit")
    changed = _git(checkout, "status", "--porcelain", "--untracked-files=all", "--", UNIT)
    if changed:
        raise VendorError(
            f"{checkout} has changes in {UNIT} that are not committed:\n"
            f"{os.fsdecode(changed).rstrip()}\nCommit them and name that revision, or drop them"
        )


def _recorded_unit(checkout: Path, record: Path) -> dict[str, bytes] | None:
    """The unit that the record speaks of, if this checkout knows it.

    In the checkout where the kernels were changed the files are the new ones already.
    """
    try:
        recorded = read_record(record)
        unit = _unit_at(checkout, recorded.revision)
    except VendorError:
        return None
    found = {path: hashlib.sha256(content).hexdigest() for path, content in unit.items()}
    return unit if found == recorded.files else None


def _unit_at(checkout: Path, revision: str) -> dict[str, bytes]:
    """The unit's files at a revision, by path below ``csrc``."""
    unit = {}
    for entry in _git(checkout, "ls-tree", "-r", "-z", revision, "--", f"{UNIT}/").split(b"\0"):
        if not entry:
            continue
        facts, _, path = entry.partition(b"\t")
        mode, _, blob = facts.decode().split(" ")
        name = os.fsdecode(path)
        if not mode.startswith(_REGULAR_FILE):
            raise VendorError(f"{name} at {revision} is not a regular file (mode {mode})")
        unit[name.removeprefix(f"{UNIT}/")] = _git(checkout, "cat-file", "blob", blob)
    if not unit:
        raise VendorError(f"revision {revision} of {checkout} has no files in {UNIT}")
    return unit


def _git(checkout: Path, *arguments: str) -> bytes:
    # Variables of an outer git (a hook, a rebase) would name another repository, and a replaced
    # object would not be the revision's.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment["GIT_NO_REPLACE_OBJECTS"] = "1"
    try:
        done = subprocess.run(
            ["git", "-C", os.fspath(checkout), *arguments],
            capture_output=True,
            check=False,
            env=environment,
        )
    except FileNotFoundError:
        raise VendorError("git is not installed") from None
    if done.returncode != 0:
        said = os.fsdecode(done.stderr).strip()
        raise VendorError(f"{checkout}: git {' '.join(arguments)}: {said}")
    return done.stdout


def _report(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> str:
    lines = []
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) == new.get(path):
            continue
        verb = "added" if path not in old else "removed" if path not in new else "changed"
        lines.append(f"file {verb}: {UNIT}/{path}")
    if not lines:
        lines.append("no file changed")
    entry_points = changes(_headers(old), _headers(new))
    if not entry_points:
        lines.append("entry points: no change")
    for change in entry_points:
        lines.append(f"entry point {change.kind.value}: {change.name}")
        lines += [f"  - {text}" for text in change.before if text not in change.after]
        lines += [f"  + {text}" for text in change.after if text not in change.before]
    return "\n".join(lines)


def _headers(unit: Mapping[str, bytes]) -> dict[str, str]:
    return {
        path: content.decode(errors="replace")
        for path, content in unit.items()
        if path.endswith(_HEADER_SUFFIXES)
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m maru_kv_ops.vendor",
        description="Check or replace the vendored kernel sources.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("verify", help="compare the kernel sources with VENDOR.md")
    refreshing = commands.add_parser(
        "refresh", help="copy the kernel sources from a revision of a git checkout and record them"
    )
    refreshing.add_argument("--from", dest="checkout", type=Path, required=True, metavar="CHECKOUT")
    refreshing.add_argument("--revision", required=True, metavar="SHA", help="40 digits")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "refresh":
            print(refresh(chosen.checkout, chosen.revision, CSRC, record_path()))
        path = record_path()
        record = read_record(path)
        wrong = differences(record)
    except (VendorError, OSError) as error:
        print(f"vendor: {error}", file=sys.stderr)
        return 1
    for line in wrong:
        print(f"vendor: {line}", file=sys.stderr)
    if wrong:
        print(
            f"vendor: {CSRC} is not what {path} records. Take the recorded bytes from git, or "
            f"follow 'How it changes' there",
            file=sys.stderr,
        )
        return 1
    print(
        f"vendor: {len(record.files)} files are those of revision {record.revision}, digest "
        f"{record.digest}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
