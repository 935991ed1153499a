"""`graft bench --throughput`: an engine under load."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.cli.documents import print_json
from graft.cli.load import load_llm

if TYPE_CHECKING:
    from graft.bench.load import Load

DEFAULT_REQUESTS = {"cuda": 1000, "cpu": 32, "meta": 32}
Throughput = Annotated[
    str | None,
    typer.Option(
        help="Instead: under load. Tokens of prompts and new tokens, several with commas between them.",
        metavar="ISL/OSL",
    ),
]
Requests = Annotated[int | None, typer.Option(help="Of each load. [1000 on a GPU, 32 on a CPU]")]
Rate = Annotated[
    float | None, typer.Option(help="Requests a second that arrive, instead of all at once.", metavar="R")
]
Preset = Annotated[str | None, typer.Option(help="Loads that others publish figures for: trtllm.")]


def read_loads(given: str | None, preset: str | None, requests: int, rate: float | None) -> list[Load]:
    from graft.base.errors import UsageError, near
    from graft.bench.load import Load
    from graft.bench.published import PRESETS

    if preset is not None and preset not in PRESETS:
        raise UsageError(f"--preset: unknown name {preset!r}{near(preset, PRESETS)}")
    names = given.split(",") if given else list(PRESETS[str(preset)].tokens_per_s)
    loads = []
    for name in names:
        isl, _, osl = name.partition("/")
        if not (isl.isdecimal() and osl.isdecimal()):
            raise UsageError(f"--throughput takes lengths like 128/128, with commas between them, not {name!r}")
        loads.append(Load(int(isl), int(osl), requests, rate))
    return loads


def under_load(model: str, loads: list[Load], preset: str | None, as_json: bool, **options: Any) -> None:
    """One engine, one load after another; a row as soon as it is there."""
    from dataclasses import asdict, replace

    from graft.bench.load_bound import load_bound, machine_rates
    from graft.bench.machine import facts
    from graft.bench.plan import known_context
    from graft.bench.published import PRESETS
    from graft.bench.throughput import measure_load
    from graft.cli.measure.bench_show import phase_lines, show_loads

    for load in loads:
        load.check_context(known_context(model))
    with phase_lines(True) as progress:
        llm = load_llm(model, progress, **options)
        rows = [measure_load(llm, load, progress) for load in loads]
        rates = None
        if llm.device.type == "cuda":  # a CPU multiplies quantized weights by other instructions than a large GEMM
            progress("what the machine can do", 0, 1)
            rates = machine_rates(llm)
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
    }
    if as_json:
        print_json("bench-load", {"setup": setup, "rows": [asdict(row) for row in rows]})
    else:
        show_loads(setup, rows, published)
