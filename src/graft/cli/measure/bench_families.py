"""`graft bench --families`: how near every family comes to its bandwidth bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.cli.documents import print_json
from graft.cli.options import DEFAULT_MODEL, read_numbers

if TYPE_CHECKING:
    from graft.bench.families import FamilyPlan, FamilyRow, FamilyTable

Families = Annotated[
    bool,
    typer.Option(
        "--families",
        help="Instead: a table over families, or those named in place of the model, with commas between them.",
    ),
]
SideBySide = Annotated[
    int | None,
    typer.Option(
        help="With --families: models that are built at once, each in its process; then each is measured alone. All"
        " must fit into memory together. [1]",
        metavar="N",
        show_default=False,
    ),
]
USED = {"model", "batch", "prompt", "new", "repeats", "threads", "dtype", "device", "backend", "quantize"}
USED |= {"time_limit", "as_json", "families", "traceback", "side_by_side", "sets"}
PROMPT = {"cuda": "128", "cpu": "16"}  # a prompt is not what is measured, and takes a CPU seconds


def bench_families(ctx: typer.Context, as_json: bool) -> None:
    from graft.bench.families import measure_families
    from graft.cli.measure.bench_show import phase_lines

    plan = read_plan(ctx)
    with phase_lines(True) as progress:
        table = measure_families(plan, progress)
    if as_json:
        print_json("bench-families", table.to_data())
    else:
        show_families(table, plan)
    if table.interrupted or any(row.failed and row.begun for row in table.rows):
        raise typer.Exit(1)


def read_plan(ctx: typer.Context) -> FamilyPlan:
    from graft.backends.select import check_name
    from graft.base.errors import UsageError
    from graft.bench.families import CPU_WEIGHTS, FamilyPlan, models_of
    from graft.bench.plan import BenchPlan
    from graft.bench.threads import checked_threads
    from graft.models import places
    from graft.passes.config import load_config

    given = {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    if idle := sorted(given - USED):
        raise UsageError(f"--{idle[0].replace('_', '-')} says nothing about --families, which compares families")
    asked: dict[str, Any] = ctx.params
    target = places.resolve_device(asked["device"])
    places.resolve_dtype(asked["dtype"], target, places.DTYPES["float32"])
    check_name(asked["backend"])
    load_config(sets=asked["sets"] or ())
    if asked["side_by_side"] is not None and asked["side_by_side"] < 1:
        raise UsageError(f"--side-by-side must be at least 1, but is {asked['side_by_side']}")
    named = asked["model"].split(",") if "model" in given or asked["model"] != DEFAULT_MODEL else ()
    prompt = asked["prompt"] if "prompt" in given else PROMPT.get(target.type, PROMPT["cpu"])
    on_gpu = target.type == "cuda"
    bench = BenchPlan(
        read_numbers("batch", asked["batch"] or "1,32"), read_numbers("prompt", prompt), asked["new"] or 32,
        asked["repeats"], (), asked["time_limit"], checked_threads(asked["threads"], target),
    )  # fmt: skip
    return FamilyPlan(
        models_of(named, all_sizes=on_gpu), bench, asked["dtype"], asked["device"], asked["backend"],
        asked["quantize"], None if on_gpu else CPU_WEIGHTS, asked["time_limit"], asked["side_by_side"] or 1,
        tuple(asked["sets"] or ()),
    )  # fmt: skip


def show_families(table: FamilyTable, plan: FamilyPlan) -> None:
    from graft.cli.measure.bench_show import number, plain_table
    from graft.cli.show import err, out

    setup = table.setup
    where = f", {setup['dtype']}, {setup['device_name']}" if setup else ""
    shown = plain_table(f"Decode steps and their bandwidth bound{where}")
    for name in ("family", "model"):
        shown.add_column(name, no_wrap=True)
    for name in ("layers", "batch", "ms/step", "tok/s", "bound", "built s"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in table.rows:
        share = "" if row.share is None else f"{row.share:.2f}"
        built = "" if row.built_s is None else f"{row.built_s:.1f}"
        step = ("failed" if row.begun else "not run") if row.failed else number(row.token_ms)
        shown.add_row(
            row.family, row.model, layers_text(row), str(row.batch), step, number(row.tokens_per_s), share, built
        )
    out.print(shown)
    told = dict.fromkeys((row.model, row.failed) for row in table.rows if row.failed)
    for model, why in told:
        out.print(f"{model}: {why}", markup=False, soft_wrap=True)
    if setup:
        out.print(legend(setup, plan), markup=False)
    if table.interrupted:
        err.print(f"graft: interrupted; {len({row.model for row in table.rows})} of {len(plan.models)} were measured")


def layers_text(row: FamilyRow) -> str:
    if row.layers is None:
        return ""
    return str(row.layers) if row.layers == row.layers_of else f"{row.layers} of {row.layers_of}"


def legend(setup: Any, plan: FamilyPlan) -> str:
    from graft.cli.measure.bench_show import number

    text = (
        "bound: share of the tokens that the bytes of a step, weights and cached keys and values, allow at the"
        f" bandwidth measured in the same process ({number(setup['roofline']['read_gb_per_s'])} GB/s in the first)."
        " built s: from a loaded model until the first calls were through, with empty caches. Random weights; torch"
        f" {setup['torch']}, graft on {setup['backend']}."
    )
    if plan.side_by_side > 1:
        text += f" Built {plan.side_by_side} at once, which takes each of them longer."
    if plan.weights is not None:
        text += f" Models of more than {plan.weights / 1e9:.1f} GB have fewer layers, of their real widths."
    return text
