"""Build the copy kernels for the GPU that is here, check them, and measure every copy path.

    python benchmarks/gpu_check.py                 # builds, checks, measures: under 5 minutes
    python benchmarks/gpu_check.py --check-only    # builds and checks

Checks every format, direction and copy unit of the three operations, and plans of vLLM's six
layouts by kernel and by copy engine, byte for byte against the torch baseline. Then measures the
copy engine, the kernel and the per-layer fallback over run length and number of runs; loads, stores
and both at once; over a plain pinned copy of the same traffic in the same run. Prints a table,
writes ``gpu_check.json`` and ``gpu_check.png``.

Exit status: 0 all right, 1 a check failed or the kernels could not be built, 2 no GPU here.
Needs torch for CUDA, nvcc, and for the plot matplotlib (``pip install .[bench]``).
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":  # what is built and checked is this checkout, whatever is installed
    sys.path.insert(0, str(ROOT))
try:
    import torch
except ImportError as error:
    print(f"gpu_check: no torch here ({error}); nothing was built or checked", file=sys.stderr)
    raise SystemExit(2) from None

from gpu_bandwidth import PATHS, CudaDevice, Plain, Point, Traffic, grid, measure  # noqa: E402
from gpu_correctness import Verdict, num_checks, run_checks  # noqa: E402

MEASURE_BUDGET_S = 150.0
"""Together with a build (under 2 minutes) and the checks (seconds) this stays under 5 minutes."""

console = Console(stderr=True)


@dataclass(frozen=True)
class Report:
    """The JSON file."""

    device: str
    build: dict[str, str]
    checks: Verdict
    plain: Plain | None
    points: tuple[Point, ...]


def main(
    check_only: Annotated[bool, typer.Option("--check-only", help="Do not measure.")] = False,
    output: Annotated[
        Path, typer.Option("--output", help="Where the JSON file and the plot go.")
    ] = Path(),
    json_out: Annotated[bool, typer.Option("--json", help="Print the JSON file too.")] = False,
) -> None:
    """Build, check and measure on one GPU."""
    if not torch.cuda.is_available():
        console.print(
            f"gpu_check: no GPU here that torch {torch.__version__} can use; nothing was built, "
            "checked or measured",
            soft_wrap=True,
        )
        raise typer.Exit(2)
    if not check_only and not can_plot():
        console.print("gpu_check: matplotlib is missing: pip install '.[bench]', or --check-only")
        raise typer.Exit(1)
    device = torch.device("cuda", torch.cuda.current_device())
    build(torch.cuda.get_device_capability(device))
    report = examine(device, check_only)
    write(report, output)
    if json_out:
        print(json.dumps(asdict(report)))
    for failure in report.checks.failures:
        console.print(f"FAILED: {failure}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{report.checks.checked - len(report.checks.failures)} of {report.checks.checked} checks "
        f"passed; written to {output.resolve()}/gpu_check.json"
    )
    if report.checks.failures:
        raise typer.Exit(1)


def can_plot() -> bool:
    """Whether matplotlib is there."""
    try:
        import matplotlib  # noqa: F401 # only whether it is there
    except ImportError:
        return False
    return True


def build(capability: tuple[int, int]) -> None:
    """Build the extensions in this checkout for the device's architecture."""
    arch = f"{capability[0]}.{capability[1]}"
    console.print(f"building maru_kv_ops._C for {arch} …")
    environment = {**os.environ, "TORCH_CUDA_ARCH_LIST": arch, "MARU_REQUIRE_KV_OPS": "1"}
    done = subprocess.run(
        # --force: what an earlier build left for another architecture would pass for this one.
        [sys.executable, "setup.py", "build_py", "build_ext", "--inplace", "--force"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        reason = said[-1] if said else "no output"
        console.print(f"gpu_check: the build failed: {reason}", markup=False, soft_wrap=True)
        raise typer.Exit(1)
    importlib.invalidate_caches()  # the files are newer than this process


def examine(device: torch.device, check_only: bool) -> Report:
    """Check, then measure."""
    import maru_kv_ops
    from maru_kv_ops import extension, torch_ops
    from maru_kv_ops.device_executors import CopyEngineExecutor, KernelExecutor

    error = maru_kv_ops.import_error()
    if error is not None:
        console.print(f"gpu_check: {error}")
        raise typer.Exit(1)
    operations, info = extension.module(), maru_kv_ops.build_info()
    assert operations is not None
    assert info is not None
    with Progress(console=console) as progress:
        task = progress.add_task("checking", total=num_checks(2))
        verdict = run_checks(
            operations,
            torch_ops,
            [KernelExecutor(), CopyEngineExecutor()],
            device,
            lambda: progress.advance(task),
        )
        plain, points = None, []
        if not check_only and not verdict.failures:
            total = sum(1 for _ in grid()) * len(Traffic) * len(PATHS)
            task = progress.add_task("measuring", total=total)
            cuda = CudaDevice(device)
            plain = cuda.plain()
            points = measure(cuda, plain, MEASURE_BUDGET_S, lambda: progress.advance(task))
    return Report(
        device=torch.cuda.get_device_name(device),
        build={name: str(value) for name, value in asdict(info).items()},
        checks=verdict,
        plain=plain,
        points=tuple(points),
    )


# ---------------------------------------------------------------------------- report


def write(report: Report, output: Path) -> None:
    """The JSON file; where something was measured, the table and the plot."""
    output.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(report), indent=2)
    (output / "gpu_check.json").write_text(text + "\n", encoding="utf-8")
    if report.points:
        console.print(table_of(report))
        plot(report, output / "gpu_check.png")


def table_of(report: Report) -> Table:
    """Gigabytes per second, and in brackets the ratio over a plain pinned copy."""
    plain = report.plain
    assert plain is not None
    table = Table(
        title=(
            f"{report.device}: plain load {plain.load_gbps:.1f}, store {plain.store_gbps:.1f}, "
            f"both {plain.both_gbps:.1f}, inside the device {plain.device_gbps:.0f} GB/s"
        )
    )
    for heading in ("run", "runs", "traffic", *PATHS):
        table.add_column(str(heading), justify="right")
    cells = {(p.run_bytes, p.runs, p.traffic, p.path): p for p in report.points}
    for run_bytes, runs in grid():
        for traffic in Traffic:
            row = [cells.get((run_bytes, runs, traffic, path)) for path in PATHS]
            if any(row):
                table.add_row(
                    f"{run_bytes / 1024:g} KiB",
                    str(runs),
                    traffic,
                    *("-" if p is None else f"{p.gbps:.1f} ({p.ratio:.2f})" for p in row),
                )
    return table


def plot(report: Report, path: Path) -> None:
    """A panel for each traffic: ratio over run length, a line for each path and number of runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(Traffic), figsize=(15, 5), sharey=True)
    for panel, traffic in zip(panels, Traffic, strict=True):
        for style, copy_path in zip(("-", "--", ":"), PATHS, strict=True):
            for runs in sorted({p.runs for p in report.points}):
                line = [
                    p
                    for p in report.points
                    if (p.path, p.traffic, p.runs) == (copy_path, traffic, runs)
                ]
                panel.plot(
                    [p.run_bytes for p in line],
                    [p.ratio for p in line],
                    style,
                    marker=".",
                    label=f"{copy_path}, {runs} runs",
                )
        panel.set_xscale("log", base=2)
        panel.axhline(1.0, color="grey", linewidth=0.8)
        panel.set_title(f"{traffic} on {report.device}")
        panel.set_xlabel("bytes of a run")
    panels[0].set_ylabel("bandwidth over a plain pinned copy")
    panels[-1].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    typer.run(main)
