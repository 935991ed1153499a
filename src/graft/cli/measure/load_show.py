"""The table of `graft bench --throughput`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graft.cli.measure.bench_show import number, percent, plain_table
from graft.cli.show import out

if TYPE_CHECKING:
    from graft.bench.loads.published import Published
    from graft.bench.loads.spread import Spread
    from graft.bench.loads.throughput import LoadRow

LEAST_SHARE = 0.1  # percent; --json has all


def show_loads(setup: dict[str, Any], rows: Sequence[LoadRow], published: Published | None) -> None:
    """A row a load, and below the table what does not fit into one."""
    weights = f", {setup['quantize']} weights" if setup["quantize"] else ""
    cache = ", float8 cache" if setup["kv_cache_dtype"].startswith("float8") else ""
    table = plain_table(f"{setup['model']}, {setup['dtype']}{weights}{cache}, {setup['device_name']}, under load")
    table.add_column("ISL/OSL", no_wrap=True)
    columns = ["requests", "tok/s", "req/s", "TTFT p50", "p99", "ITL p50", "p99", "prompts", "batch", "cache"]
    more = [*(["bound"] if setup["rates"] else []), *(["published"] if published else [])]
    for name in (*columns, *more):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        theirs = published.tokens_per_s.get(row.load.name) if published else None
        table.add_row(
            row.load.name, str(row.load.requests), number(row.output_tokens_per_s), number(row.requests_per_s),
            *map(number, both(row.first_token)), *map(number, both(row.between_tokens)),
            percent(row.prompt_percent), f"{row.batch:.0f}/{row.max_num_seqs}", percent(row.cache_percent),
            *([share_of(row)] if setup["rates"] else []), *([] if theirs is None else [number(theirs)]),
        )  # fmt: skip
    out.print(table)
    for row in rows:
        out.print(f"{row.load.name}: {phase_text(row)}", markup=False, soft_wrap=True)
        out.print(f"{row.load.name}: {step_text(row)}", markup=False, soft_wrap=True)
        if row.preemptions or row.bucket_misses or row.behind:
            out.print(
                f"{row.load.name}: {row.preemptions} preemptions, {row.bucket_misses} decode steps without a CUDA"
                f" graph{f'; {row.behind}' if row.behind else ''}",
                markup=False, soft_wrap=True,
            )  # fmt: skip
    text = (
        "TTFT and ITL: ms until a request has its first token, and between two tokens. prompts: share of the time in"
        " steps with prompts in them. batch: requests in a step on average, of those that may run at once. cache: the"
        f" fullest it was. torch {setup['torch']}, graft on {setup['backend']}."
    )
    if rates := setup["rates"]:
        gemm, read = number(rates["matrix_flops"] / 1e12), number(rates["read_bytes"] / 1e9)
        text += (
            f" bound: share of what this machine could give with full steps, at {gemm} TFLOP/s of the weights' GEMMs"
            f" and {read} GB/s."
        )
    if published is not None:
        text += f" published: {published.source}: {published.conditions}."
    out.print(text, markup=False)


def phase_text(row: LoadRow) -> str:
    """Of the thread that steps the engine, and of the device."""
    shares = ", ".join(
        f"{name} {percent(share)}" for name, share in row.phase_percent.items() if share >= LEAST_SHARE
    )
    idle = "" if row.idle_percent is None else f"; the GPU idle for {percent(row.idle_percent)}, between steps"
    return f"time: {shares}{idle}"


def step_text(row: LoadRow) -> str:
    bins = ", ".join(f"{number(one.up_to_ms)} ms {one.decode} + {one.prompts}" for one in row.step_times)
    return f"steps up to (decode + with prompts): {bins}"


def share_of(row: LoadRow) -> str:
    return percent(100 * row.output_tokens_per_s / row.bound_tokens_per_s) if row.bound_tokens_per_s else ""


def both(spread: Spread | None) -> tuple[float | None, float | None]:
    return (None, None) if spread is None else (spread.p50, spread.p99)
