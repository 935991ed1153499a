"""`graft bench --start`: how long it takes from a command to the first token."""

from __future__ import annotations

import typer

from graft.cli.documents import print_json

USED = {"model", "dtype", "device", "quantize", "repeats", "as_json", "start", "plugins", "strict", "traceback"}


def bench_start(
    ctx: typer.Context, model: str, dtype: str, device: str, quantize: str | None, repeats: int, as_json: bool
) -> None:
    from graft.base.errors import UsageError
    from graft.bench.start import measure_starts
    from graft.cli.show import headed_table, out, progress_bar

    given = {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    if idle := sorted(given - USED):
        raise UsageError(f"--{idle[0].replace('_', '-')} says nothing about a start, which --start measures")
    if repeats < 1:
        raise UsageError(f"--repeats {repeats}: at least one")
    with progress_bar() as progress:
        found = measure_starts(
            model, dtype=dtype, device=device, quantize=quantize, repeats=repeats, progress=progress
        )
    if as_json:
        print_json("bench-start", found.to_data())
        return
    title = f"From a new process to the first token: {model} ({found.about['backend']}, {found.about['device']})"
    table = headed_table("start", "seconds >", "x imports >", "phases", title=title)
    table.add_row("import torch, transformers", f"{found.imports:.2f}", "1.00", "")
    for one in found.starts:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in one.phases.items() if seconds >= 0.005)
        table.add_row(one.kind, f"{one.median:.2f}", f"{one.median / found.imports:.2f}", phases)
    out.print(table)
