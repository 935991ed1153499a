"""`graft bench`: how fast a model answers, beside Hugging Face on the same work."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.load import load_llm
from graft.cli.options import (
    DEFAULT_MODEL,
    Backend,
    CacheMemory,
    ConfigFile,
    Device,
    DType,
    Json,
    Model,
    Plugins,
    Quantize,
    Sets,
)

if TYPE_CHECKING:
    from graft.workbench.bench import Bench


def bench(
    model: Model = DEFAULT_MODEL,
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas between them.")] = "1,8,32",
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    new: Annotated[int, typer.Option(help="Decode steps: new tokens after the first.")] = 32,
    repeats: Annotated[int, typer.Option(help="Repeats in turns; medians are shown.")] = 3,
    against: Annotated[
        str, typer.Option(help="Rivals: eager, compile, both with a comma, or none.")
    ] = "eager,compile",
    dtype: DType = "auto",
    device: Device = "auto",
    backend: Backend = "auto",
    config: ConfigFile = None,
    sets: Sets = None,
    plugins: Plugins = None,
    quantize: Quantize = None,
    kv_cache_memory: CacheMemory = None,
    plot: Annotated[str | None, typer.Option(help="Also draw it: .png, .svg or .pdf.", metavar="FILE")] = None,
    as_json: Json = False,
) -> None:
    """Measure latency and throughput over batch sizes, beside Hugging Face eager and torch.compile."""
    from graft.backends.select import BACKENDS
    from graft.cli.show import progress_bar
    from graft.errors import UnknownBackend
    from graft.models.load import DTYPES, resolve_device, resolve_dtype
    from graft.workbench.bench import Plan, known_context
    from graft.workbench.bench import bench as measure
    from graft.workbench.plot import check_plot, write_plot

    rivals = () if against == "none" else tuple(dict.fromkeys(against.split(",")))
    plan = Plan(read_batches(batch), prompt, new, repeats, rivals)
    plan.check_context(known_context(model))
    if plot:
        check_plot(Path(plot))
    if backend not in BACKENDS:
        raise UnknownBackend(backend, BACKENDS)
    resolve_dtype(dtype, resolve_device(device), DTYPES["float32"])
    with progress_bar() as progress:
        started = time.perf_counter()
        llm = load_llm(
            model, progress, dtype=dtype, device=device, config=config, sets=sets, plugins=plugins, backend=backend,
            quantize=quantize, keep_weights=bool(rivals), kv_cache_memory=kv_cache_memory,
            max_num_seqs=max(256, *plan.batches),
        )  # fmt: skip
        result = measure(llm, plan, time.perf_counter() - started, progress)
    if as_json:
        print(result.to_json())
    else:
        show(result)
    if plot and result.rows:
        write_plot(result, Path(plot))
    finish(result)


def read_batches(text: str) -> tuple[int, ...]:
    from graft.errors import UsageError

    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"--batch takes numbers with commas between them, not {text!r}") from None


def show(result: Bench) -> None:
    """The table, and below it what does not fit into one."""
    from rich.table import Table

    from graft.cli.show import out
    from graft.workbench.plot import headline

    # ten columns in 80 characters, so that a narrow terminal or a pipe cuts no number
    table = Table(title=headline(result), title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    for name in ("first ms", "prompt/s", "ms/tok", "tok/s", "GB/s", "speedup", "setup s", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result.rows:
        ratio = result.ratio(row) if row.engine != "graft" else None
        table.add_row(
            str(row.batch),
            row.engine.replace("hugging face", "HF"),
            number(row.first_token_ms),
            number(row.prefill_tokens_per_s),
            number(row.token_ms) if not row.failed else "failed",
            number(row.decode_tokens_per_s),
            number(row.gb_per_s),
            f"{ratio:.2f}x" if ratio else "",
            f"{row.setup_seconds:.1f}",
            f"{row.same_tokens:.0%}" if row.same_tokens is not None and row.engine != "graft" else "",
        )
    out.print(table)
    for row in result.rows:
        if row.failed:
            out.print(f"batch {row.batch}, {row.engine} failed: {row.failed}", markup=False, soft_wrap=True)
    s = result.setup
    out.print(
        f"Greedy, the same prompts for all, medians of {s['repeats']} in turns; torch {s['torch']}, graft on"
        f" {s['backend']}, loaded and built in {s['graft_build_seconds']} s. first ms: until the whole batch has its"
        " first token; prompt/s: prompt tokens a second until then. speedup: of graft's decode. setup s: the first"
        " calls, compilation included, in no other column. same: of the first calls' tokens, those that are graft's."
        " GB/s: weights and cached keys and values that a step reads.",
        markup=False,
    )


def number(value: float | None) -> str:
    """Three digits, no exponent."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def finish(result: Bench) -> None:
    """Exit code 1 where the run was cut short or graft itself failed; rivals may fail."""
    from graft.cli.show import err

    if result.interrupted:
        done = len({row.batch for row in result.rows})
        err.print(f"graft: interrupted; {done} of {len(result.setup['batches'])} batch sizes were measured")
    if result.interrupted or any(row.failed and row.engine == "graft" for row in result.rows):
        raise typer.Exit(1)
