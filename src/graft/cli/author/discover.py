"""`graft discover`: what a model repeats without a kernel of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.documents import print_json
from graft.cli.options import ConfigFile, DType, Json, Plugins, Sets, TrustRemoteCode

if TYPE_CHECKING:
    from graft.workbench.discover import Candidate, Discovery


def discover(
    model: Annotated[str, typer.Argument(help="Registry name, model folder, .gguf file, or folder of dumps.")],
    top: Annotated[int, typer.Option(help="How many candidates to show.", min=1)] = 10,
    tokens: Annotated[str, typer.Option(help="Tokens in a step; orders by the first.", metavar="N,N")] = "1,512",
    step: Annotated[str, typer.Option(help="Of dumps: the graph after this transform.", metavar="TRANSFORM")] = "",
    bandwidth: Annotated[float | None, typer.Option(help="GB/s, where you measured it.", min=1.0)] = None,
    launch_us: Annotated[float | None, typer.Option(help="µs that a launch costs, where you measured it.")] = None,
    measure_on: Annotated[
        str,
        typer.Option("--measure", help="Time candidates: auto (a GPU if any), cuda, cpu, none.", metavar="DEVICE"),
    ] = "auto",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    dtype: DType = "auto",
    config: ConfigFile = None,
    sets: Sets = None,
    plugins: Plugins = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """List fusion candidates by estimated saving: what repeats, what it moves, which kernel exists, what to do."""
    from graft.base.errors import UsageError
    from graft.cli.show import out, progress_bar
    from graft.passes.config import load_config
    from graft.workbench.discover.measure import device_to_measure_on, measure
    from graft.workbench.discover.savings import machine_of
    from graft.workbench.discover.sources import discover_model, discover_run, is_run, read_tokens

    counts, machine = read_tokens(tokens), machine_of(bandwidth, launch_us)
    device = device_to_measure_on(measure_on)
    dumps = is_run(model)
    if step and not dumps:
        raise UsageError(
            f"--step {step} is for a folder of dumps; {model} is a model (use --set to switch fusions off)"
        )
    if dumps and (config or sets):
        raise UsageError(
            f"{model} is a folder of dumps, which --config and --set cannot change; dump the model again"
        )
    settings = load_config(config, sets=sets or (), plugins=tuple(plugins or ()))
    with progress_bar() as progress:
        if dumps:
            found = discover_run(model, step, tokens=counts, machine=machine, progress=progress)
        else:
            found = discover_model(
                model, settings, dtype, tokens=counts, machine=machine, progress=progress,
                trust_remote_code=trust_remote_code,
            )  # fmt: skip
        if device is not None:
            found = measure(found, device, progress)
    if as_json:
        print_json("discover", found.to_dict())
    elif markdown:
        from graft.workbench.discover.markdown import markdown_of

        print(markdown_of(found, top))
    else:
        show(found, top)
        out.print(f"{found.seconds:.1f} s after capture", style="dim")


def show(found: Discovery, top: int) -> None:
    from graft.cli.show import out
    from graft.workbench.discover.markdown import assumptions

    out.print(f"Fusion candidates of {found.model}", style="bold", markup=False, soft_wrap=True)
    for line in assumptions(found):
        out.print(line, style="dim", markup=False, soft_wrap=True)
    if found.nothing_left():
        out.print(found.nothing_left(), style="green", markup=False, soft_wrap=True)
    chosen = (found.worthwhile or found.candidates)[:top]
    for candidate in chosen:
        show_one(candidate)
    others = len(found.candidates) - len(chosen)
    if others:
        out.print(f"{others} more: --top {len(found.candidates)}, --json", markup=False)


def show_one(candidate: Candidate) -> None:
    from graft.cli.show import out
    from graft.workbench.discover.markdown import details, heading

    style = {"use_existing_kernel": "cyan", "needs_triton_fallback": "yellow"}.get(candidate.recommendation, "dim")
    out.print(f"\n{heading(candidate)}", style=style, markup=False, soft_wrap=True)
    for name, lines in details(candidate):
        for index, line in enumerate(lines):
            out.print(f"  {name if not index else '':<12} {line}", markup=False, soft_wrap=True)
