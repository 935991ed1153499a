"""The tables of `graft bench`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.table import Table

from graft.base.progress import phase_of
from graft.cli.show import err, out, progress_bar

if TYPE_CHECKING:
    from graft.bench.kernels.kernel_times import StepTimes
    from graft.bench.rows import Bench, Row

# twelve columns in 80 characters, so that a narrow terminal or a pipe cuts no number
COLUMNS = ("first", "TF/s", "peak", "ms/tok", "tok/s", "GB/s", "roof", "ratio", "build", "same")
KERNEL_COLUMNS = ("calls", "us", "each", "adds", "share", "MB", "GB/s")
NAME_WIDTH, MOST_KERNELS = 36, 30  # eight columns in 80 characters as well


@contextmanager
def phase_lines(long: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar; for runs of minutes whose standard error is no terminal a line for each phase instead."""
    began, last = time.perf_counter(), ""
    with progress_bar() as bar:

        def report(what: str, done: int, total: int) -> None:
            nonlocal last
            bar(what, done, total)
            phase = phase_of(what)
            if long and not err.is_terminal and phase != last:
                err.print(f"[{time.perf_counter() - began:6.1f} s] {phase}", markup=False, soft_wrap=True)
            last = phase

        yield report


def show(result: Bench) -> None:
    """The table, and below it what does not fit into one."""
    from graft.bench.plot import headline

    several = len(result.setup["prompts"]) > 1
    table = plain_table(headline(result))
    table.add_column("b×prompt" if several else "batch", justify="right", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in result.rows:
        cell = f"{row.batch}×{row.prompt}" if several else str(row.batch)
        table.add_row(cell, row.engine.replace("hugging face", "HF"), *values(result, row))
    out.print(table)
    for row in result.rows:
        if row.failed:
            where = f"batch {row.batch}, prompt {row.prompt}" if several else f"batch {row.batch}"
            what = row.failed if was_left_out(row) else f"failed: {row.failed}"
            out.print(f"{where}, {row.engine} {what}", markup=False, soft_wrap=True)
    out.print(legend(result), markup=False)


def values(result: Bench, row: Row) -> list[str]:
    ratio = result.ratio(row) if row.engine != "graft" else None
    return [
        number(row.first_token_ms),
        number(row.prefill_tflops),
        percent(row.prefill_percent),
        number(row.token_ms) if not row.failed else "not run" if was_left_out(row) else "failed",
        number(row.decode_tokens_per_s),
        number(row.gb_per_s),
        percent(row.roofline_percent),
        f"{ratio:.2f}x" if ratio else "",
        f"{row.build_seconds:.1f}",
        f"{row.same_tokens:.0%}" if row.same_tokens is not None and row.engine != "graft" else "",
    ]


def was_left_out(row: Row) -> bool:
    """An engine that is not installed or has no file for this model, which is no failure."""
    return row.failed.startswith("not run:")


def legend(result: Bench) -> str:
    s = result.setup
    text = (
        f"Greedy, the same prompts for all, medians of {s['repeats']} in turns; torch {s['torch']}, graft on"
        f" {s['backend']}, built in {s['graft_build_seconds']} s. first: ms until the whole batch has its first"
        " token; TF/s: TFLOP/s of the prompts until then. GB/s: weights and cached keys and values that a step reads."
        " ratio: graft's decode speed over this one's. build: s from a loaded model until the first calls were"
        " through, compilation included, in no other column. same: of the first calls' tokens, those that are"
        " graft's."
    )
    roof = s.get("roofline")
    if roof:
        text += (
            f" peak and roof: percent of what was measured here, {number(roof['matrix_tflops'])} TFLOP/s"
            f" ({roof['matrix_how']}) and {number(roof['read_gb_per_s'])} GB/s read ({roof['read_how']})."
        )
    return text


def show_kernels(step: StepTimes, model: str) -> None:
    """One decode step, the longest first."""
    table = plain_table(
        f"{model}, a decode step of batch {step.batch} after {step.context} tokens, {step.device_name}"
    )
    table.add_column("kernel" if step.on_gpu else "op", no_wrap=True, max_width=NAME_WIDTH, overflow="ellipsis")
    for name in KERNEL_COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in step.rows[:MOST_KERNELS]:
        table.add_row(
            f"{row.name} {row.grid}".strip(),
            number(row.calls),
            number(row.us),
            number(row.us_each),
            number(row.added_us),
            percent(row.percent),
            "" if row.bytes is None else number(row.bytes / 1e6),
            number(row.gb_per_s),
        )
    out.print(table)
    rest = step.rows[MOST_KERNELS:]
    if rest:
        out.print(f"{len(rest)} more: {number(sum(row.us for row in rest))} us; --json has them all", markup=False)
    out.print(
        f"A step takes {number(step.wall_us)} us (without the profiler); its {number(step.calls)} calls sum up to"
        f" {number(step.sum_us)} us and keep the device busy for {number(step.busy_us)} us, so gaps are"
        f" {number(step.gap_us)} us and overlap is {number(step.sum_us - step.busy_us)} us. It reads"
        f" {number(step.step_bytes / 1e6)} MB, which take {number(step.floor_us)} us at the measured bandwidth:"
        f" {percent(100 * step.floor_us / step.wall_us)} of the step. adds: by how much a kernel moves the"
        " end of the step, beyond what those before it cover; share: that of the step's time.",
        markup=False,
    )


def plain_table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}%" if value >= 1 else f"{value:.1f}%"


def number(value: float | None) -> str:
    """Three digits, no exponent, and no more than three places."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 0.1 else f"{value:.3f}"
