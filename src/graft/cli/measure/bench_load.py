"""`graft bench --throughput`: an engine under load."""

from __future__ import annotations

import re
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.cli.documents import print_json
from graft.cli.load import load_llm

if TYPE_CHECKING:
    from graft.base.files import Progress
    from graft.bench.loads.spread import AskedLoad
    from graft.bench.loads.throughput import LoadRow
    from graft.engine.llm import LLM

CPU_REQUESTS = 32
Throughput = Annotated[
    str | None,
    typer.Option(
        help="Instead: under load. Tokens of prompts, new tokens and, with a colon, requests; several with commas.",
        metavar="ISL/OSL[:N]",
    ),
]
Requests = Annotated[
    int | None, typer.Option(help="Of each load. [32 on a CPU; on a GPU full batches, 300,000 new tokens or more]")
]
Rate = Annotated[
    float | None, typer.Option(help="Requests a second that arrive, instead of all at once.", metavar="R")
]
Preset = Annotated[str | None, typer.Option(help="Loads that others publish figures for: trtllm.")]


def read_loads(given: str | None, preset: str | None, requests: int | None, rate: float | None) -> list[AskedLoad]:
    from graft.base.errors import UsageError, near
    from graft.bench.loads.published import PRESETS
    from graft.bench.loads.spread import AskedLoad

    if preset is not None and preset not in PRESETS:
        raise UsageError(f"--preset: unknown name {preset!r}{near(preset, PRESETS)}")
    names = given.split(",") if given else list(PRESETS[str(preset)].tokens_per_s)
    loads = []
    for name in names:
        found = re.fullmatch(r"(\d+)/(\d+)(?::(\d+))?", name.strip(), re.ASCII)
        if found is None:
            raise UsageError(
                f"--throughput takes lengths like 128/128, or 128/128:3000 with a number of requests, with commas"
                f" between them, not {name!r}"
            )
        isl, osl, own = found.groups()
        loads.append(AskedLoad(int(isl), int(osl), requests if own is None else int(own), rate))
    return loads


def under_load(
    model: str, asked: list[AskedLoad], preset: str | None, plot: str | None, as_json: bool, **options: Any
) -> None:
    """One engine, one load after another; a line of each as soon as it is there."""
    from dataclasses import asdict, replace
    from pathlib import Path

    from graft.bench.limits.machine import facts
    from graft.bench.loads.bound import load_bound, machine_rates
    from graft.bench.loads.plot import write_load_plot
    from graft.bench.loads.published import PRESETS
    from graft.bench.plan import known_context
    from graft.bench.plot import check_plot
    from graft.bench.ranks import rank_facts
    from graft.cli.measure.bench_show import phase_lines
    from graft.cli.measure.load_show import show_loads
    from graft.cli.show import err

    if plot:
        check_plot(Path(plot))
    for one in asked:
        one.with_requests(CPU_REQUESTS).check_context(known_context(model))
    with phase_lines(True) as progress:
        llm = load_llm(model, progress, **options)
        rates, cut = None, False
        if llm.device.type == "cuda":  # a CPU multiplies quantized weights by other instructions than a large GEMM
            progress("what the machine can do", 0, 1)
            rates = machine_rates(llm)
        rows: list[LoadRow] = []
        try:
            for one in asked:
                rows.append(measure_asked(llm, one, progress))
        except KeyboardInterrupt:
            cut = True
        if rates is not None:
            rows = [replace(row, bound_tokens_per_s=load_bound(llm, row.load, rates)) for row in rows]
    published = PRESETS[preset] if preset else None
    setup = {
        "model": llm.model.name,
        "dtype": str(llm.model.module.dtype).removeprefix("torch."),
        "quantize": llm.quantized.format if llm.quantized else None,
        "kv_cache_dtype": str(llm.engine.tensors[0].dtype).removeprefix("torch."),
        "backend": llm.backend,
        **facts(llm.device),
        "command": shlex.join(["graft", *sys.argv[1:]]),
        "rates": None if rates is None else asdict(rates),
        "published": None if published is None else asdict(published),
        **rank_facts(llm),
    }
    if plot and rows:
        write_load_plot(setup, rows, published, Path(plot))
    if as_json:
        print_json("bench-load", {"setup": setup, "interrupted": cut, "rows": [asdict(row) for row in rows]})
    elif rows:
        show_loads(setup, rows, published)
    if cut:
        err.print(f"graft: interrupted; {len(rows)} of {len(asked)} loads were measured")
        raise typer.Exit(1)


def measure_asked(llm: LLM, asked: AskedLoad, progress: Progress) -> LoadRow:
    from graft.bench.loads.throughput import measure_load

    manager, seqs = llm.engine.manager, llm.engine.scheduler.max_num_seqs
    large = llm.device.type == "cuda"
    load = asked.among(seqs, manager.blocks, manager.block_size) if large else asked.with_requests(CPU_REQUESTS)
    row = measure_load(llm, load, progress)
    progress(f"{load.name} gave {row.output_tokens_per_s:.0f} tok/s", 1, 1)
    return row
